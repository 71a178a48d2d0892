# SPDX-License-Identifier: Apache-2.0
"""Functions of tvm_ffi as kernels; src/kernels/tvm_ffi.h makes the calls.

The library's version, and the addresses of four functions of its C ABI, are read once.
"""

from __future__ import annotations

import ctypes
import dataclasses
import functools
import sys
from collections.abc import Sequence
from typing import Any

import numpy as np

from callgate import _callgate
from callgate._call.site import Backend, Call, Emission
from callgate._core import options as check
from callgate._core import static_values
from callgate._core.errors import GateDefinitionError
from callgate._kernel.cpu import CpuKernel
from callgate._kernel.parameters import Kind, Parameter, Signature
from callgate._kernel.peers.options import PeerOptions
from callgate._kernel.variants import Function, Given, Static
from callgate._runtime import targets

_VERSION = (0, 1)  # the ABI of src/kernels/tvm_ffi.h
_NUMBERS = {bool: np.dtype(np.bool_), int: np.dtype(np.int64), float: np.dtype(np.float64)}
_ATTRIBUTE = "attrs."


class TvmFfiKernel(CpuKernel):
  """A tvm_ffi function; see `callgate.kernel`."""

  def __init__(self, name: str, function: Any, options: PeerOptions) -> None:
    label = f"kernel '{name}'"
    self.function, self._library = function, _library(label)
    self._spec = ("args", "rets") if options.arg_spec is None else tuple(options.arg_spec)
    names = [item.removeprefix(_ATTRIBUTE) for item in self._spec if item.startswith(_ATTRIBUTE)]
    plain = [item for item in self._spec if not item.startswith(_ATTRIBUTE)]
    identifiers = all(map(str.isidentifier, names))
    if len(set(self._spec)) < len(self._spec) or {*plain} - {"args", "rets"} or not identifiers:
      expected = "'args', 'rets' and names such as 'attrs.eps', each once"
      check.refuse(label, "arg_spec", expected, options.arg_spec)
    self._names = tuple(names)
    super().__init__(name, None, options)

  # -- arguments of a call -----------------------------------------------------------------------
  def _arguments(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Given:
    known = ", ".join(self._names) or "none"
    for name in kwargs:
      if name not in self._names:
        hint = "arrays are passed by position, and arg_spec names the other arguments"
        fault = f"got argument '{name}', which it doesn't have"
        raise GateDefinitionError(f"{self.label}: {fault}; expected {known} by keyword: {hint}")
    if missing := [name for name in self._names if name not in kwargs]:
      raise GateDefinitionError(f"{self.label}: expected argument '{missing[0]}', got none")
    return args, tuple(sorted((name, self._frozen(name, kwargs[name])) for name in kwargs))

  def _frozen(self, name: str, value: Any) -> Any:
    value = value.item() if isinstance(value, np.generic) else value
    if isinstance(value, str):
      return value
    if type(value) not in _NUMBERS:
      expected = "a bool, an int, a float or a string that is known when the program is traced"
      check.refuse(self.label, f"argument '{name}'", expected, value)
    return static_values.number(self.label, name, value, _NUMBERS[type(value)], what="argument")

  # -- variants: which of the static values are strings --------------------------------------------
  def variant_key(self, operands: Sequence[Any], results: Sequence[Any], static: Static) -> str:
    return ",".join(name for name, value in static if isinstance(value, str))

  def compile(self, key: str) -> Function:
    texts = key.split(",")

    def parameter(item: str) -> Parameter:
      if item in ("args", "rets"):
        return Parameter(item, Kind.INS if item == "args" else Kind.OUTS)
      name = item.removeprefix(_ATTRIBUTE)
      return Parameter(name, Kind.STRING if name in texts else Kind.NUMBER)

    parameters = Signature(map(parameter, self._spec))
    made = _callgate.TvmFunction(
      self.function.__chandle__(), kinds=[int(p.kind) for p in parameters], **self._library
    )
    keep = (made, self.function)
    return Function(made.address, parameters, keep, made.user_data, on_stream=True)

  # -- in programs -------------------------------------------------------------------------------
  def backend(self, platform: str) -> Backend:
    return self._on_stream if platform == "cuda" else super().backend(platform)

  def _on_stream(self, call: Call) -> Emission:
    # The function may do different work in each call, so no CUDA graph may replay it.
    return dataclasses.replace(self.emission(call), target=targets.KERNEL_SCRATCH_TARGET)


def _library(label: str) -> dict[str, int]:
  """Returns the addresses of the functions for calls; raises for another version of the ABI."""
  library = sys.modules["tvm_ffi"].LIB
  version = _version(library)
  if version[:2] != _VERSION:
    expected, got = (".".join(map(str, numbers)) for numbers in (_VERSION, version))
    fault = f"expected apache-tvm-ffi with version {expected} of its C ABI, got {got}"
    raise GateDefinitionError(f"{label}: {fault}; this version of callgate doesn't support it")
  return {
    "move_from_raised": _address(library, "TVMFFIErrorMoveFromRaised"),
    "dec_ref": _address(library, "TVMFFIObjectDecRef"),
    "from_dlpack": _address(library, "TVMFFITensorFromDLPack"),
    "set_stream": _address(library, "TVMFFIEnvSetStream"),
  }


def _version(library: ctypes.CDLL) -> Sequence[int]:
  numbers = (ctypes.c_uint32 * 3)()
  library.TVMFFIGetVersion(numbers)
  return tuple(numbers)


@functools.cache  # at most a few entries, for one library
def _address(library: ctypes.CDLL, name: str) -> int:
  return ctypes.cast(getattr(library, name), ctypes.c_void_p).value or 0
