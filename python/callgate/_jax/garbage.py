# SPDX-License-Identifier: Apache-2.0
"""JAX's hook in Python's garbage collection."""

from __future__ import annotations

import gc
from typing import Any

from jax._src.lib import _jax as _jaxlib  # pyright: ignore[reportPrivateImportUsage, reportPrivateUsage]
from jax._src.lib import _xla_gc_callback  # pyright: ignore[reportPrivateUsage]

from callgate import _callgate


def start() -> None:
  """Keeps signal handlers from running in a collection, where their exceptions would be lost.

  JAX's hook is a Python function, which runs handlers as it begins (0.10 to 0.12).
  """
  collect: Any = _callgate.without_signals(_jaxlib.collect_garbage)
  gc.callbacks[:] = [collect if one is _xla_gc_callback else one for one in gc.callbacks]
