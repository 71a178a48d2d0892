# SPDX-License-Identifier: Apache-2.0
"""The native functions of a kernel for its calls, and the static values in their keys."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from callgate import _callgate
from callgate._core import exact
from callgate._core.dtypes import dtype_named, dtype_of
from callgate._core.errors import GateDefinitionError
from callgate._kernel.parameters import Kind, Parameter, Signature

Static = tuple[tuple[str, Any], ...]
Given = tuple[tuple[Any, ...], Static]  # a call's operands and its static values


def to_json(value: Any, *, dtypes: bool = False) -> Any:
  """Returns a static value, or with `dtypes` a dtype, as JSON; raises TypeError for others."""
  match value:
    case np.generic() if not isinstance(value, str):
      return {value.dtype.name: to_json(value.item())}
    case complex():
      return {"complex": [value.real, value.imag]}
    case tuple() | int() | float() | str() if type(value) not in _BUILTIN:
      return {"of": [_class_name(type(value)), to_json(_base(value), dtypes=dtypes)]}
    case (*items,) if isinstance(value, tuple):
      return [to_json(item, dtypes=dtypes) for item in items]
    case None | bool() | int() | float() | str():  # JSON keeps floats exactly
      return value
    case _ if dtypes:
      return {"dtype": np.dtype(value).name}
    case _:
      raise TypeError


_BUILTIN = (tuple, bool, int, float, str)


def _base(value: Any) -> Any:
  """Returns the number, text or tuple in an object of a derived class, such as an enum member."""
  kinds: tuple[Any, ...] = (tuple, int, float, str)
  return next(kind for kind in kinds if isinstance(value, kind))(value)


def _class_name(kind: type) -> str:
  """Returns a class's name and module; raises TypeError if the module doesn't have it."""
  if (name := exact.reference(kind)) is None:
    raise TypeError
  return name


def _of_class(name: str, base: Any) -> Any:
  if (kind := exact.referred(name)) is None:
    got = f"a static value has the class {name}, which this process doesn't have"
    raise GateDefinitionError(f"a program from another process: {got}; import it first")
  return kind(*base) if hasattr(kind, "_fields") else kind(base)


def from_json(value: Any) -> Any:
  match value:
    case [*items]:
      return tuple(map(from_json, items))
    case {"of": [str(name), base]}:
      return _of_class(name, from_json(base))
    case {"complex": [real, imag]}:
      return complex(real, imag)
    case {"dtype": str(name)}:
      return dtype_named(name)
    case {**held}:
      ((kind, number),) = held.items()
      return dtype_named(kind).type(from_json(number))
    case _:
      return value


class Variant(NamedTuple):
  """One compiled function of a kernel."""

  callee: _callgate.Kernel  # the runtime's handle, which programs call by name
  parameters: Signature

  def held(self, static: Static, form: Callable[..., Any]) -> dict[str, Any]:
    """Returns the function's static values, each in a form of `static_values`."""
    dtypes = {p.name: p.dtype for p in self.parameters}
    return {name: form(value, dtypes[name]) for name, value in static if name in dtypes}


class Function(NamedTuple):
  """A native function in the form of kernel.h."""

  address: int
  parameters: Signature
  keep: Any = None  # keeps it loaded
  user_data: int = 0  # an address for its context
  on_stream: bool = False  # True if it also takes a GPU's arrays, on XLA's stream

  @classmethod
  def built(cls, library: Path, loaded: ctypes.CDLL) -> Function:
    """Returns the function that a library was compiled for: the last one, after a source's own."""
    return exported(str(library), loaded)[-1][1]


def exported(path: str, loaded: ctypes.CDLL) -> list[tuple[str, Function]]:
  """Returns the kernels in a library's export table, by name."""
  table = ctypes.cast(loaded.callgate_kernels, ctypes.c_void_p).value or 0
  found: list[tuple[str, Function]] = []
  for function, address, codes, names in _callgate.read_library(path, table):
    parameters = Signature(
      Parameter(names[i] if names else str(i), Kind(kind), dtype_of(dtype) if dtype else None, rank)
      for i, (kind, dtype, rank) in enumerate(codes)
    )
    found.append((function, Function(address, parameters, keep=loaded)))
  return found
