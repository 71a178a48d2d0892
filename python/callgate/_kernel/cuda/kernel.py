# SPDX-License-Identifier: Apache-2.0
"""Kernels for CUDA devices only: the base of `callgate.cuda` and its siblings.

A subclass implements `plan`, the launches of a call, and `images` if a plan's key is sufficient for
them. The parameters of a `NamedKernel` (Numba, Triton) get their types from a call's arrays, and
from its numbers, which the program fixes. The remaining parameters receive the results.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Literal, NamedTuple

import jax
import numpy as np
from jax.core import Tracer

from callgate._core import options as check
from callgate._core import static_values
from callgate._core.dtypes import dtype_named
from callgate._core.errors import GateDefinitionError
from callgate._core.signatures import accepted, signature_of
from callgate._kernel import launch
from callgate._kernel.callee import KernelCallee
from callgate._kernel.cuda.options import CudaOptions, NamedOptions
from callgate._kernel.launch import LOWEST, CudaCall, CudaPart
from callgate._kernel.parameters import GIVEN, Kind, Parameter, by_name
from callgate._kernel.variants import Given

# The attribute with the dtypes of NumPy scalars among a program's static values.
_TYPES = "_dtypes"
NONE: Any = inspect.Parameter.empty


class CudaKernel(KernelCallee, CudaPart):
  """A kernel for CUDA devices; called like any JAX function."""

  def __init__(
    self, name: str, signature: Iterable[Parameter] | None, options: CudaOptions
  ) -> None:
    self.arch = options.capabilities(f"kernel '{name}'")
    super().__init__(name, signature, options)
    self.cuda = self

  def _arguments(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Given:
    names = [p.name for p in self.signature.of(GIVEN)]
    values = {**dict(zip(names, args, strict=False)), **kwargs}
    for name in (p.name for p in self.signature.of((Kind.NUMBER,))):
      if isinstance(value := values.get(name), Tracer):
        why = f"since the kernel takes it by value; got a traced array ({value})"
        expected = f"argument '{name}': expected a number that is known when the program is traced"
        hint = f"Declare it as `const T* {name}` to pass an array"
        raise GateDefinitionError(f"{self.label}: {expected}, {why}. {hint}")
    return super()._arguments(args, kwargs)


def evaluated(label: str, option: str, given: Any, call: CudaCall) -> Any:
  """Returns a launch option: a value, or a function's result for operand types and statics."""
  if not callable(given):
    return given
  static = accepted(given, call.static, filled=len(call.operands))
  try:
    if (signature := signature_of(given)) is not None:
      signature.bind(*call.operands, **static)
  except TypeError as error:
    expected = f"expected a function of the call's {len(call.operands)} array(s)"
    names = f", and of the static values ({', '.join(call.static)}) by name"
    told = f"{label}: {option}: {expected}{names if call.static else ''}; got one that can't"
    raise GateDefinitionError(f"{told} be called with them: {error}") from None
  return given(*call.operands, **static)


# -- named parameters ----------------------------------------------------------------------------
class Named(NamedTuple):
  name: str  # the parameter's name in the kernel's function
  constant: bool = False  # True if it takes no array
  default: Any = NONE  # a static value; `NONE` without a default


class BoundLaunch(NamedTuple):
  of: Literal["operand", "result", "static"]  # the kind of a parameter's value in a call
  position: int  # the operand's or result's index
  value: Any  # a ShapeDtypeStruct, or the static value


class NamedKernel(CudaKernel):
  """A kernel of named parameters; `constants` are the values of some."""

  def __init__(
    self, name: str, named: Iterable[Named], options: NamedOptions,
    constants: Mapping[str, Any] | None = None,
  ) -> None:  # fmt: skip
    self.named = {p.name: p for p in named}  # in order
    self.constants = dict(constants or {})
    options = check.checked(f"kernel '{name}'", options)
    self.outputs = tuple(options.outputs or ())  # default: the last unfilled parameters
    self._made: dict[tuple[str, int], Any] = {}
    super().__init__(name, None, options)
    names = f"names of parameters ({', '.join(self.named)})"
    for option, given in (("outputs", self.outputs), ("constants", self.constants)):
      for name in given:
        if name not in self.named:
          check.refuse(self.label, option, names, name)
        if option == "outputs" and (name in self.constants or self.named[name].constant):
          check.refuse(self.label, option, "parameters that take arrays, none static", name)
    taken = {*self.constants, *self.outputs}
    self.parameters = tuple(name for name in self.named if name not in taken)

  def _arguments(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Given:
    places = self.parameters
    given = by_name(self.label, places, args, kwargs, some_left_open=True)
    arrays = [name for name in places if name in given and _is_array(given[name])]
    for name in arrays:
      if self.named[name].constant:
        why = f"since the kernel is compiled for it; got an array ({given[name]})"
        expected = f"argument '{name}': expected a value that is known when the program is traced"
        raise GateDefinitionError(f"{self.label}: {expected}, {why}")
    before_last = arrays != []
    for name, parameter in self.named.items():
      before_last = before_last and name != arrays[-1]
      if name in given or name not in places or parameter.default is not NONE:
        continue
      if parameter.constant or self.outputs:
        raise GateDefinitionError(f"{self.label}: expected argument '{name}', got none")
      if before_last:
        fault = f"'{name}' is left open before '{arrays[-1]}', which got an array"
        hint = "pass it, or name the results' parameters with outputs="
        raise GateDefinitionError(f"{self.label}: parameter {fault}; {hint}")
    static = {name: value for name, value in given.items() if name not in arrays}
    types = [f"{n}={v.dtype.name}" for n, v in static.items() if isinstance(v, np.generic)]
    for name, value in static.items():
      if isinstance(value, (bool, int, float, complex, np.generic)):
        static[name] = static_values.number(self.label, name, value, None, what="argument")
      try:
        hash(value)
      except TypeError:
        check.refuse(self.label, f"argument '{name}'", "an array or a hashable value", value)
    if types:
      static[_TYPES] = ",".join(types)
    return tuple(given[name] for name in arrays), tuple(sorted(static.items()))

  def bound(self, call: CudaCall) -> dict[str, BoundLaunch]:
    """Gives each parameter its value in a call; a result in an operand's memory may need none."""
    static = {**self.constants, **call.static}
    for entry in filter(None, str(static.pop(_TYPES, "")).split(",")):
      name, _, dtype = entry.partition("=")
      static[name] = np.asarray(static[name], dtype_named(dtype))[()]
    open_ = [name for name in self.named if name not in static and name not in self.outputs]
    optional = [name for name in open_ if self.named[name].default is not NONE]
    ins, results = len(call.operands), list(range(len(call.results)))
    shared = set(self.aliases.values())
    own = [result for result in results if result not in shared]
    if shared and len(open_) + len(self.outputs) - len(optional) <= ins + len(own):
      results = own
    wanted = ins + (0 if self.outputs else len(results))
    for name in reversed(optional):
      if len(open_) > wanted:
        static[name] = self.named[name].default
        open_.remove(name)
    takers = self.outputs or tuple(open_[ins:])
    if len(open_) != wanted or len(takers) != len(results):
      more = f"({', '.join(self.outputs)}) for results" if self.outputs else "results"
      wanted = f"a parameter for each of {ins} arrays and {len(results)} results"
      got = f"({', '.join(open_)}) for arrays and {more}"
      raise GateDefinitionError(f"{self.label}: expected {wanted}, got {got}")
    found = {
      name: BoundLaunch("operand", i, call.operands[i]) for i, name in enumerate(open_[:ins])
    }
    found |= {
      n: BoundLaunch("result", r, call.results[r]) for n, r in zip(takers, results, strict=True)
    }
    found |= {name: BoundLaunch("static", -1, value) for name, value in static.items()}
    return {name: found[name] for name in self.named}

  def made_for(
    self, key: str, capabilities: tuple[int, ...], make: Callable[..., Any]
  ) -> list[Any]:
    """Returns results of `make(capability, ptx=...)` for each capability, once for a plan's key."""
    for each in capabilities or (0,):
      if (key, each) not in self._made:
        self._made[key, each] = make(each or LOWEST, ptx=each == 0)
    return [self._made[key, each] for each in capabilities or (0,)]

  def extent(self, option: str, value: Any, call: CudaCall) -> launch.Extent:
    """Returns a grid; with vmap="grid" the lanes are along a free z axis."""
    x, y, z = launch.extent(self.label, option, value)
    return x, y, call.batch if call.batch is not None and z == 1 else z


def _is_array(value: Any) -> bool:  # NumPy scalars are numbers here
  kinds = (jax.Array, np.ndarray, jax.ShapeDtypeStruct)
  return isinstance(value, kinds) or hasattr(value, "__jax_array__")


_ENTRY = re.compile(r"\.entry\s+([\w$]+)\s*(?:\(([^)]*)\))?")
_PARAM = re.compile(
  r"\.param\s+(?:\.align\s+(?P<align>\d+)\s+)?\.[a-z]+(?P<bits>\d+)\b"
  r"(?:\s+\.ptr(?:\s+\.\w+)?(?:\s+\.align\s+\d+)?)?\s+[\w$]+(?:\[(?P<count>\d+)\])?"
)


def entries(ptx: str) -> dict[str, list[tuple[int, int]]]:
  """Returns the kernels of a PTX text by name, with size and alignment of each parameter."""

  def declared(match: re.Match[str]) -> tuple[int, int]:
    size = int(match["bits"]) // 8
    return size * int(match["count"] or 1), int(match["align"] or size)

  text = re.sub(r"//[^\n]*|/\*.*?\*/", "", ptx, flags=re.DOTALL)
  found = _ENTRY.finditer(text)
  return {entry[1]: list(map(declared, _PARAM.finditer(entry[2] or ""))) for entry in found}
