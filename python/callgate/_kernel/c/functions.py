# SPDX-License-Identifier: Apache-2.0
"""C functions of Python libraries: their addresses and their types.

It supports ctypes' function pointers, cffi's functions, capsules of Cython modules, and addresses.
"""

from __future__ import annotations

import ctypes
import sys
from typing import Any, NamedTuple

import numpy as np

from callgate._core.errors import GateDefinitionError
from callgate._kernel.c.types import CParameter, CType, Declaration, parse
from callgate._kernel.launch import is_int

_FUNCTION_POINTER: Any = ctypes.CDLL(None)._FuncPtr.__mro__[
  1
]  # the base class of ctypes' function pointers
_POINTER: Any = ctypes.POINTER(ctypes.c_int).__mro__[1]
_NUMBER: Any = ctypes.c_int.__mro__[1]
_WITH_THE_GIL = 4  # FUNCFLAG_PYTHONAPI
_CAPSULE = type(__import__("datetime").datetime_CAPI)
_capsule_name = ctypes.PYFUNCTYPE(ctypes.c_char_p, ctypes.py_object)(
  ("PyCapsule_GetName", ctypes.pythonapi)
)
_capsule_pointer = ctypes.PYFUNCTYPE(ctypes.c_void_p, ctypes.py_object, ctypes.c_char_p)(
  ("PyCapsule_GetPointer", ctypes.pythonapi)
)
_NUMBERS = (
  {"c": "char", "b": "int8_t", "B": "uint8_t", "?": "_Bool"}
  | {"f": "float", "d": "double", "F": "float complex", "D": "double complex"}
  | dict.fromkeys("hilq", "int{}_t")
  | dict.fromkeys("HILQ", "uint{}_t")
)
_POINTERS = {"P": "void *", "z": "const char *", "O": "PyObject *", "Z": "const wchar_t *"}


class CFunction(NamedTuple):
  """A C function that can be called."""

  address: int  # its address
  declaration: Declaration  # its type
  keep: Any  # keeps the address valid


def resolve(function: Any, signature: str | None) -> CFunction:
  """Returns a C function's address and type; `signature` overrides the function's own type."""
  given = parse(signature) if signature is not None else None
  if isinstance(function, _FUNCTION_POINTER):
    declaration = _from_ctypes(function, given)
  elif isinstance(function, _CAPSULE):
    declaration = given or parse((_capsule_name(function) or b"").decode())
  elif _is_cffi(function):
    declaration = _from_cffi(function, given)
  elif given is not None and is_int(function):
    declaration = given
  elif is_int(function):
    expected = "signature=, a C declaration such as 'double norm(int n, const double *x)'"
    fault = "an address doesn't tell the function's type"
    raise GateDefinitionError(f"cfunc: {fault}; pass {expected}")
  else:
    kinds = "a C function (from ctypes or cffi, a Cython capsule, or an address with signature=)"
    raise GateDefinitionError(f"cfunc: expected {kinds}, got {type(function).__name__}")
  address = address_of("cfunc", declaration.name, function)
  if address == 0:
    raise GateDefinitionError(f"cfunc: the function '{declaration}' is a null pointer")
  return CFunction(address, declaration, function)


def address_of(label: str, name: str, value: Any) -> int:
  """Returns the address in an object of ctypes or cffi, a capsule, or an integer."""
  if value is None or is_int(value):
    return int(value or 0)
  if isinstance(value, _CAPSULE):
    return _capsule_pointer(value, _capsule_name(value)) or 0
  if _is_cffi(value):
    ffi = sys.modules["_cffi_backend"].FFI()
    if not isinstance(value, ffi.CData):  # a function of a module compiled by cffi
      value = ffi.addressof(value.__self__, value.__name__)
    return int(ffi.cast("uintptr_t", value))
  if isinstance(value, (ctypes.Structure, ctypes.Union, ctypes.Array)):
    return ctypes.addressof(value)
  try:
    if isinstance(value, (str, bytes)):
      raise TypeError
    return ctypes.cast(value, ctypes.c_void_p).value or 0
  except (ctypes.ArgumentError, TypeError):
    kinds = "an address, a pointer, array or structure of ctypes or cffi, or a capsule"
    fault = f"'{name}': expected {kinds}, got {type(value).__name__}"
    raise GateDefinitionError(f"{label}: pointers: {fault}") from None


def _from_ctypes(function: Any, given: Declaration | None) -> Declaration:
  name = str(getattr(function, "__name__", ""))
  if function._flags_ & _WITH_THE_GIL:
    raise GateDefinitionError(
      f"cfunc: '{name}' is from a ctypes.PyDLL, so it needs the GIL; make it a gate (callgate.gate)"
    )
  if given is not None:
    return given._replace(name=given.name or name)
  if function.argtypes is None:
    expected = "set its argtypes and restype, or pass signature=, a C declaration"
    raise GateDefinitionError(f"cfunc: ctypes' '{name}' doesn't declare its arguments; {expected}")
  types = [CParameter(_ctypes_type(name, kind)) for kind in function.argtypes]
  return Declaration(name, _ctypes_type(name, function.restype), tuple(types))


def _ctypes_type(name: str, kind: Any) -> CType:
  if kind is None:
    return CType("void")
  if hasattr(kind, "_ndim_") and hasattr(kind, "_dtype_"):  # numpy.ctypeslib.ndpointer
    if kind._dtype_ is None:
      return CType("void *", pointer=True)
    return CType(f"{kind._dtype_.name} *", np.dtype(kind._dtype_), pointer=True)
  code, star = getattr(kind, "_type_", None), ""
  if isinstance(kind, type) and issubclass(kind, _FUNCTION_POINTER):
    return CType(kind.__name__, pointer=True, opaque=True)
  if isinstance(kind, type) and issubclass(kind, (_POINTER, ctypes.Array)):
    kind, star = code, " *"
    code = getattr(kind, "_type_", None)
    if code in _POINTERS or not issubclass(kind, _NUMBER):
      return CType(f"{kind.__name__} *", pointer=True, opaque=True)
  known = (_NUMBERS | _POINTERS).get(code) if isinstance(code, str) else None
  if known is None:
    got = (
      f"{getattr(kind, '__name__', kind)}; declare a pointer (POINTER(...)) and pass it by "
      "pointers="
    )
    raise GateDefinitionError(f"cfunc: '{name}': expected types of array elements, got {got}")
  return _spelled(f"{known.format(8 * ctypes.sizeof(kind))}{star}")


def _spelled(text: str) -> CType:
  return parse(f"{text} (void)").result


def _is_cffi(value: Any) -> bool:
  backend = sys.modules.get("_cffi_backend")
  if backend is None:
    return False
  of = getattr(value, "__self__", None)  # a compiled module's library
  return isinstance(value, backend.FFI.CData) or isinstance(of, backend.Lib)


def _from_cffi(function: Any, given: Declaration | None) -> Declaration:
  whole = sys.modules["_cffi_backend"].FFI().typeof(function)
  kind = whole.item if whole.kind == "pointer" else whole
  if kind.kind != "function":
    raise GateDefinitionError(f"cfunc: expected a function, got cffi's '{whole.cname}'")
  name = str(getattr(function, "__name__", ""))
  name = name if name.isidentifier() else ""
  if given is not None:
    return given._replace(name=given.name or name)
  if kind.ellipsis:
    raise GateDefinitionError(
      f"cfunc: '{kind.cname}': variadic functions ('...') can't be called; call it in a C function "
      "with fixed arguments"
    )
  types = tuple(CParameter(_spelled(argument.cname)) for argument in kind.args)
  return Declaration(name, _spelled(kind.result.cname), types)
