# SPDX-License-Identifier: Apache-2.0
"""Masked arrays (`numpy.ma`), which nothing of XLA's can hold.

`np.asarray` drops a mask without a word, and with it the knowledge which values are none. So where
a user's arrays come in, those in which something is masked are refused.
"""

from __future__ import annotations

import sys
from typing import Any

import numpy as np

# As in src/bindings/arrays/views.h.
ADVICE = (
  "whose mask XLA's arrays don't have; give its filled(value), and its mask, if it is needed, as "
  "an array of its own"
)


def is_masked(value: Any) -> bool:
  """True if it is an array with masked elements, or a sequence that one is in."""
  if isinstance(value, (list, tuple)):
    return any(map(is_masked, value))  # pyright: ignore[reportUnknownArgumentType]
  numpy_ma = _numpy_ma(value)
  return numpy_ma is not None and bool(numpy_ma.is_masked(value))


def shown(value: Any) -> str:
  """The type's name, for what came where an array was expected; and what an array of it lacks."""
  name = type(value).__name__
  if isinstance(value, int) and not -(2**31) <= value < 2**31:
    return f"{name} {value}, which JAX's integers don't hold"
  if isinstance(value, np.ndarray) and not value.dtype.isnative:
    return (
      f"an array of dtype '{value.dtype.str}', whose bytes are in the other order (give its "
      "astype(x.dtype.newbyteorder('=')))"
    )
  if isinstance(value, np.ndarray) and value.dtype.kind not in "biufc":
    return f"an array of dtype {value.dtype}"
  numpy_ma = _numpy_ma(value)
  masked = numpy_ma is not None and isinstance(value, numpy_ma.MaskedArray)
  return f"a masked array ({name}), {ADVICE}" if masked else name


def _numpy_ma(value: Any) -> Any:
  """`numpy.ma`, if the value may be an array of its; NumPy loads it with the first one."""
  return sys.modules.get("numpy.ma") if isinstance(value, np.ndarray) else None
