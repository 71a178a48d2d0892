# SPDX-License-Identifier: Apache-2.0
"""Rejects masked arrays (`numpy.ma`), which XLA can't represent.

`np.asarray` silently drops a mask, and with it the information which values are missing. So users'
arrays with masked elements raise an error.
"""

from __future__ import annotations

import sys
from typing import Any

import numpy as np

# The same text as in src/bindings/arrays/views.h.
ADVICE = (
  "which XLA's arrays don't support; pass its filled(value), and its mask as a separate array "
  "if you need it"
)


def is_masked(value: Any) -> bool:
  """Returns True for an array with masked elements, or a sequence that contains one."""
  if isinstance(value, (list, tuple)):
    return any(map(is_masked, value))  # pyright: ignore[reportUnknownArgumentType]
  numpy_ma = _numpy_ma(value)
  return numpy_ma is not None and bool(numpy_ma.is_masked(value))


def shown(value: Any) -> str:
  """Returns a value's type name for an error, and a hint for masked arrays."""
  name = type(value).__name__
  if isinstance(value, int) and not -(2**31) <= value < 2**31:
    return f"{name} {value}, which no integer dtype of JAX holds"
  if isinstance(value, np.ndarray) and not value.dtype.isnative:
    return (
      f"an array of dtype '{value.dtype.str}', which has the other byte order (pass "
      "x.astype(x.dtype.newbyteorder('=')))"
    )
  if isinstance(value, np.ndarray) and value.dtype.kind not in "biufc":
    return f"an array of dtype {value.dtype}"
  numpy_ma = _numpy_ma(value)
  masked = numpy_ma is not None and isinstance(value, numpy_ma.MaskedArray)
  return f"a masked array ({name}), {ADVICE}" if masked else name


def _numpy_ma(value: Any) -> Any:
  """Returns `numpy.ma` if the value may be a masked array; NumPy loads it with the first one."""
  return sys.modules.get("numpy.ma") if isinstance(value, np.ndarray) else None
