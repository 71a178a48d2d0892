"""The types of a call, and the native functions that a kernel has for them."""

from __future__ import annotations

import ctypes
import dataclasses
from pathlib import Path
from typing import Any

import numpy as np

from callgate import _callgate
from callgate._kernel.parameters import Kind, Parameter, from_codes

Static = tuple[tuple[str, Any], ...]
Type = tuple[np.dtype[Any], int]  # dtype and rank of an array


@dataclasses.dataclass(frozen=True)
class CallTypes:
  """What a variant is compiled for: the types of a call's arrays, and its static values."""

  operands: tuple[Type, ...]
  results: tuple[Type, ...]
  static: Static


@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class Variant:
  """One compiled function of a kernel.

  Attributes:
    callee: the runtime's handle, which programs call by its name.
    parameters: of the function.
  """

  callee: _callgate.Kernel
  parameters: tuple[Parameter, ...]

  def groups(self, operands: int, results: int) -> list[int]:
    """How many arrays each variadic parameter takes."""
    sizes: list[int] = []
    for parameter in self.parameters:
      if parameter.kind is Kind.INS:
        sizes.append(operands - sum(p.is_operand for p in self.parameters) + 1)
      if parameter.kind is Kind.OUTS:
        sizes.append(results - sum(p.is_result for p in self.parameters) + 1)
    return sizes


@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class Function:
  """A native function of the form of kernel.h.

  Attributes:
    address: of the function.
    parameters: what it takes.
    keep: what keeps it loaded.
    user_data: an address that its context hands out.
  """

  address: int
  parameters: tuple[Parameter, ...]
  keep: Any = None
  user_data: int = 0

  @classmethod
  def built(cls, library: Path, loaded: ctypes.CDLL) -> Function:
    """The function that a library was compiled for: the last one, behind a source's own."""
    table = ctypes.cast(loaded.callgate_kernels, ctypes.c_void_p).value
    assert table is not None
    *_, (_, address, codes, names) = _callgate.read_library(str(library), table)
    return cls(address, tuple(from_codes(codes, names)), keep=loaded)
