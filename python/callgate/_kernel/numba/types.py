"""Numba's types for the parameters of a native function."""

# The inside of Numba's compiler has no types.
# pyright: reportMissingTypeStubs=false, reportAttributeAccessIssue=false, reportArgumentType=false
# pyright: reportPrivateImportUsage=false, reportPrivateUsage=false

from __future__ import annotations

from typing import Any

import numpy as np
from numba.core import errors as numba_errors
from numba.core import types
from numba.core.ccallback import CFunc
from numba.core.dispatcher import Dispatcher
from numba.np import numpy_support

from callgate._kernel.variants import Type


def element_type(dtype: np.dtype[Any]) -> Any:
  """Numba's type for elements of a dtype; None where it has none on the CPU."""
  if dtype.name == "float16":
    return None  # a type of CUDA's alone
  try:
    return numpy_support.from_dtype(dtype)
  except numba_errors.NumbaNotImplementedError:
    return None


def made_with(function: Any) -> tuple[dict[str, Any], tuple[Any, ...] | None] | None:
  """The options of an `@njit` function or a `@cfunc`, and the types of the latter's parameters."""
  if isinstance(function, CFunc):
    return dict(function._compiler.targetoptions), tuple(function._sig.args)
  if isinstance(function, Dispatcher):
    return {k: v for k, v in function.targetoptions.items() if k != "nopython"}, None
  return None


def operand_type(operand: Type) -> Any:
  """An argument: a read-only array, or a number for rank 0."""
  dtype, rank = operand
  element = element_type(dtype)
  return types.Array(element, rank, "C", readonly=True) if rank else element


def pointer_text(declared: Any, have: Type) -> str | None:
  """What a cfunc's parameter of a type takes, for a message; None if it takes this array."""
  if isinstance(declared, types.RawPointer):
    return None
  if isinstance(declared, types.CPointer):
    element = numpy_support.as_dtype(declared.dtype)
    return None if element == have[0] else f"{element.name} of any rank"
  number = numpy_support.as_dtype(declared)
  return None if (number, 0) == have else f"{number.name} of rank 0"


def result_type(result: Type) -> Any:
  return types.Array(element_type(result[0]), result[1], "C")
