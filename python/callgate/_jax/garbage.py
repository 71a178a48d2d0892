# SPDX-License-Identifier: Apache-2.0
"""JAX's part in Python's garbage collection."""

from __future__ import annotations

import gc
from typing import Any

from jax._src.lib import _jax as _jaxlib  # pyright: ignore[reportPrivateImportUsage, reportPrivateUsage]
from jax._src.lib import _xla_gc_callback  # pyright: ignore[reportPrivateUsage]

from callgate import _callgate


def start() -> None:
  """Has no signal's handler run within the collection, where what it raises would be lost.

  JAX's function there is one in Python, which runs handlers as it begins (0.10 to 0.12).
  """
  collect: Any = _callgate.without_signals(_jaxlib.collect_garbage)
  gc.callbacks[:] = [collect if one is _xla_gc_callback else one for one in gc.callbacks]
