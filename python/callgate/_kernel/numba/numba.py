"""`callgate.numba`: kernels from Python functions that Numba compiles when a call is traced."""

from __future__ import annotations

import dis
import inspect
import json
import types
from collections.abc import Callable, Collection, Sequence
from typing import Any, cast

import numpy as np

from callgate._call import shapes
from callgate._call.site import CallSite
from callgate._core import extras, factories, registry
from callgate._core import options as _options
from callgate._core.dtypes import dtype_named
from callgate._core.errors import GateDefinitionError
from callgate._kernel.cpu import CpuKernel
from callgate._kernel.numba.options import NumbaOptions
from callgate._kernel.numba.request import Request, Slot
from callgate._kernel.parameters import Kind, Parameter, leaves_of
from callgate._kernel.variants import CallTypes, Function, Static, Type

_DTYPES = "bool, integers of 8 to 64 bits, float32, float64, complex64, complex128"
_STATIC = "a number, a string, None or a tuple of these"
_POSITIONAL = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)


@factories.decorator(NumbaOptions)
def numba(fn: Callable[..., Any], /, *, options: NumbaOptions) -> NumbaKernel:
  """Makes a Python function a JAX function that Numba compiles: no interpreter at run time.

  ```python
  import callgate as cg, jax, jax.numpy as jnp

  @cg.numba(out=lambda x: x)
  def running_maximum(out, x):
    largest = x[0]
    for i in range(x.size):
      largest = max(largest, x[i])
      out[i] = largest

  assert jax.jit(running_maximum)(jnp.array([1.0, 3.0, 2.0])).tolist() == [1.0, 3.0, 3.0]
  ```

  It is compiled once for the dtypes and ranks of a call, and kept on disk for the next process.

  Args:
    fn: a function in Numba's subset of Python, or one that Numba's `@njit` or `@cfunc` has made;
      leave it out to use the result as a decorator. It gets read-only arrays (numbers for arguments
      of rank 0), and writes its result into a first parameter more, or returns it. Several results
      are a tuple. Keyword arguments that are no arrays are constants of the compilation.

  Returns:
    A `Kernel`, or a decorator that makes one.

  Raises:
    GateDefinitionError: an option is wrong; Numba is not installed; or, when a call is traced,
      Numba refuses the function for the call's types.
  """
  return NumbaKernel(fn, options)


class NumbaKernel(CpuKernel):
  """A kernel that Numba compiles for the types of each call; see `callgate.numba`.

  Attributes:
    function: the Python function.
    options: Numba's, of its compilation.
  """

  def __init__(self, function: Callable[..., Any], options: NumbaOptions) -> None:
    name = options.name
    extras.library("numba", "Numba", "numba", by=f"kernel '{name}'" if name else "callgate.numba")
    from callgate._kernel.numba import compile as compiler
    from callgate._kernel.numba import entry  # Numba may be missing

    self._compiler, self._entry = compiler, entry
    source = getattr(function, "py_func", None) or getattr(function, "__wrapped__", function)
    label = f"kernel '{name or getattr(source, '__qualname__', source)}'"
    made, given = compiler.made_with(function), options.of_numba()
    if not isinstance(source, types.FunctionType) or (source is not function and not made):
      raise GateDefinitionError(
        f"{label}: fn: expected a Python function, an @njit function or a @cfunc, got {function!r}"
      )
    if made and given:
      names = ", ".join(sorted(given))
      raise GateDefinitionError(
        f"{label}: got {names} for a function that Numba's decorator has made; expected them there"
      )
    self.function = source
    self.options, self._pointers = made or (given, None)
    self._style, self._cast = options.style, options.cast
    self._given = list(inspect.signature(source).parameters.values())
    super().__init__(name if name is not None else registry.unique_name(source), None, options)
    if self._style is not None:
      _options.choice(self.label, "style", self._style, ("return", "inplace"))
    if self._pointers is not None and self._style == "return":
      raise GateDefinitionError(
        f"{self.label}: style: a @cfunc writes through pointers ('inplace')"
      )
    if any(p.kind is inspect.Parameter.VAR_KEYWORD for p in self._given):
      raise GateDefinitionError(
        f"{self.label}: expected named parameters, got **keywords, which Numba doesn't have"
      )
    # How many leading parameters take results, before any call has told.
    if self._pointers is None and self._style is None:
      self._guessed_lead = int(not _returns_value(source.__code__))
    else:
      self._guessed_lead = int(self._style != "return")
    self.parameters = tuple(p.name for p in self._positional(())[self._guessed_lead :])

  # -- what a call gives which parameter ---------------------------------------------------------
  def _positional(self, static: Collection[str]) -> list[inspect.Parameter]:
    return [p for p in self._given if p.kind in _POSITIONAL and p.name not in static]

  def _lead(self, types: CallTypes) -> int:
    """How many leading parameters take results: 0 for a function that returns them."""
    positional, operands = self._positional(dict(types.static)), len(types.operands)
    required = sum(p.default is inspect.Parameter.empty for p in positional)
    leads = {"return": [0], "inplace": [1], None: [0, 1]}[self._style]
    if self._pointers is not None:
      leads = [len(types.results)]
    variadic = any(p.kind is inspect.Parameter.VAR_POSITIONAL for p in self._given)
    most = operands + max(leads) if variadic else len(positional)
    possible = [lead for lead in leads if required <= operands + lead <= most]
    if possible:
      return possible[0] if len(possible) == 1 else self._guessed_lead
    lead = leads[0] if len(leads) == 1 else self._guessed_lead
    where = f"after {lead} for the results" if lead else "for what it returns its results of"
    names = ", ".join(p.name for p in positional)
    raise GateDefinitionError(
      f"{self.label}: '{self.function.__name__}' has the parameters ({names}), not one for each of "
      f"{operands} arguments {where}; static values are given by keyword"
    )

  def _slots(self, types: CallTypes) -> tuple[Slot, ...]:
    """What each parameter of the function takes."""
    static, lead = dict(types.static), self._lead(types)
    results, operands = list(range(lead)), list(range(len(types.operands)))
    slots: list[Slot] = []
    for parameter in self._given:
      if parameter.name in static:
        slots.append(Slot("static", (), static[parameter.name]))
      elif parameter.kind is inspect.Parameter.VAR_POSITIONAL:
        slots.append(Slot("rest", tuple(operands)))
      elif parameter.kind in _POSITIONAL and results:
        slots.append(Slot("out" if self._pointers is None else "result", (results.pop(0),)))
      elif parameter.kind in _POSITIONAL and operands:
        slots.append(Slot("operand", (operands.pop(0),)))
      elif parameter.default is not inspect.Parameter.empty:
        slots.append(Slot("static", (), parameter.default))
      else:
        raise GateDefinitionError(
          f"{self.label}: expected a static value for '{parameter.name}', got none"
        )
    return tuple(slots)

  def _arguments(
    self, args: tuple[Any, ...], kwargs: dict[str, Any]
  ) -> tuple[tuple[Any, ...], Static]:
    known = {p.name: p.kind for p in self._given}
    keyword_only = [name for name in kwargs if known.get(name) is inspect.Parameter.KEYWORD_ONLY]
    constants = {
      name: kwargs[name] for name in keyword_only if isinstance(kwargs[name], np.generic)
    }
    others = {name: value for name, value in kwargs.items() if name not in constants}
    arrays, static = shapes.split_static(self.label, others)
    for name in kwargs:
      if name in arrays and name in keyword_only:
        raise GateDefinitionError(
          f"{self.label}: '{name}' is keyword-only, so static; expected {_STATIC}, got an array"
        )
      if name not in known or known[name] is inspect.Parameter.VAR_POSITIONAL:
        known = ", ".join(self.parameters)
        raise GateDefinitionError(
          f"{self.label}: got argument '{name}', which it doesn't have; expected {known}"
        )
    values = sorted((*static, *constants.items()))
    frozen = tuple((name, _frozen(self.label, name, value)) for name, value in values)
    # Arrays given by keyword, in their places, which are counted from the results' parameters on.
    names = [p.name for p in self._positional(dict(frozen))][self._guessed_lead :]
    operands = list(args)
    for name in names[len(args) :]:
      if name not in arrays:
        break
      operands.append(arrays.pop(name))
    if arrays:
      got = f"got array(s) {', '.join(sorted(arrays))} by keyword, twice or after a missing one"
      raise GateDefinitionError(f"{self.label}: {got}; expected {', '.join(names)}")
    for index, value in enumerate(operands):
      named = self.parameters[index] if index < len(self.parameters) else str(index)
      leaves_of(self.label, Parameter(named, Kind.IN), value)
    return tuple(operands), frozen

  # -- variants ----------------------------------------------------------------------------------
  def check_call(self, site: CallSite, structs: Sequence[Any]) -> None:
    named = [
      (f"argument {registry.argument(self.name, site.spec, index)}", struct.dtype)
      for index, struct in enumerate(structs)
    ]
    named += [(f"result {index}", dtype) for index, (_, dtype) in enumerate(site.results)]
    for what, dtype in named:
      if self._entry.element_type(np.dtype(dtype)) is None:
        raise GateDefinitionError(
          f"{self.label}: {what}: expected a dtype that Numba has on the CPU ({_DTYPES}), got "
          f"{np.dtype(dtype).name}; convert it with astype"
        )
    super().check_call(site, structs)

  def variant_key(self, types: CallTypes) -> str:
    sides = (",".join(f"{d.name}:{r}" for d, r in s) for s in (types.operands, types.results))
    static = {name: _to_json(value) for name, value in types.static}
    return "->".join(sides) + (";" + json.dumps(static) if static else "")

  def types_of_key(self, key: str) -> CallTypes:
    arrays, _, static = key.partition(";")
    operands, _, results = arrays.partition("->")
    values = cast("dict[str, Any]", json.loads(static)) if static else {}
    frozen = tuple(sorted((name, _from_json(value)) for name, value in values.items()))
    return CallTypes(_types(operands), _types(results), frozen)

  def compile(self, types: CallTypes, key: str) -> Function:
    slots = self._slots(types)
    parameters = [Parameter(f"result {i}", Kind.OUT, *t) for i, t in enumerate(types.results)]
    for parameter, slot in zip(self._given, slots, strict=True):
      if slot.kind in ("operand", "rest"):
        for i, operand in enumerate(slot.indices):
          name = f"{parameter.name}[{i}]" if slot.kind == "rest" else parameter.name
          parameters.append(Parameter(name, Kind.IN, *types.operands[operand]))
    # A cfunc's declared types against the call's.
    for parameter, slot, declared in zip(self._given, slots, self._pointers or (), strict=False):
      if slot.kind == "static":
        continue
      have = (types.results if slot.kind == "result" else types.operands)[slot.indices[0]]
      expected = self._compiler.pointer_text(declared, have)
      if expected is not None:
        got, what = f"{have[0].name} of rank {have[1]}", f"parameter '{parameter.name}'"
        raise GateDefinitionError(
          f"{self.label}: {what} of the @cfunc: expected {expected}, got {got}"
        )
    pointers, taken = self._pointers, tuple(parameters)
    return self._compiler.compile_function(
      Request(self.label, self.function, self.options, slots, self._cast, pointers, types, taken)
    )


def _returns_value(code: types.CodeType) -> bool:
  """Whether a function returns something other than None."""
  previous: Any = None
  for instruction in dis.get_instructions(code):
    if instruction.opname == "RETURN_CONST" and instruction.argval is not None:
      return True
    nothing = previous is not None and previous.opname == "LOAD_CONST" and previous.argval is None
    if instruction.opname == "RETURN_VALUE" and not nothing:
      return True
    previous = instruction
  return False


def _frozen(label: str, name: str, value: Any) -> Any:
  """The value, if a program can hold it."""
  try:
    _to_json(value)
  except TypeError:
    raise GateDefinitionError(
      f"{label}: static value '{name}': expected {_STATIC}, got {value!r}"
    ) from None
  return value


def _to_json(value: Any) -> Any:
  """A static value as a program's name of a variant holds it."""
  if isinstance(value, np.generic):
    kept = cast("Any", value)
    return {kept.dtype.name: _to_json(kept.item())}
  if isinstance(value, complex):
    return {"complex": [value.real, value.imag]}
  if isinstance(value, tuple):
    return list(map(_to_json, cast("tuple[Any, ...]", value)))
  if value is None or isinstance(value, (bool, int, float, str)):
    return value
  raise TypeError


def _from_json(value: Any) -> Any:
  """What `_to_json` was given."""
  if isinstance(value, dict):
    ((kind, held),) = cast("dict[str, Any]", value).items()
    return complex(*held) if kind == "complex" else np.dtype(kind).type(_from_json(held))
  return tuple(map(_from_json, cast("list[Any]", value))) if isinstance(value, list) else value


def _types(text: str) -> tuple[Type, ...]:
  """Types from "float32:2,bool:0"."""
  pairs = (part.split(":") for part in text.split(",") if part)
  return tuple((dtype_named(dtype), int(rank)) for dtype, rank in pairs)
