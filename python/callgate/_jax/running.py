# SPDX-License-Identifier: Apache-2.0
"""A thread's dispatched programs with effects that may still run."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterable
from typing import Any

from callgate._jax import cpp_path
from callgate._jax.dispatch import _effect_tokens  # pyright: ignore[reportPrivateUsage]


def own_programs() -> list[Any]:
  """Returns the signs of this thread's programs with effects that may still run."""
  own = threading.get_ident()
  tokens = [token for (thread, _), token in list(_effect_tokens.items()) if thread == own]
  return [*tokens, *cpp_path.own_signs()]


def wait_for(programs: Iterable[Any]) -> None:
  """Waits for `own_programs` of some thread; ignores their errors."""
  for one in programs:
    with contextlib.suppress(Exception):
      one.block_until_ready()
