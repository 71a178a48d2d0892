# SPDX-License-Identifier: Apache-2.0
"""`callgate.numba`: Python functions that Numba compiles when a call is traced."""

# `typing.get_type_hints` evaluates these annotations, so they must not be strings.

import dataclasses
import dis
import inspect
import itertools
import json
import types
from collections.abc import Callable, Collection, Sequence
from typing import Any, Concatenate, Literal, ParamSpec, Protocol, TypeVar, cast, get_args, overload

import numpy as np

from callgate._call import shapes
from callgate._call.generic import OneArray
from callgate._call.site import CallSite
from callgate._core import extras, factories, registry, signatures
from callgate._core import options as _options
from callgate._core.dtypes import dtype_named
from callgate._core.errors import GateDefinitionError
from callgate._core.options import option
from callgate._kernel.cpu import CpuKernel
from callgate._kernel.kernel import Kernel
from callgate._kernel.numba.request import CallTypes, Request, Slot, Type
from callgate._kernel.options import KernelOptions
from callgate._kernel.parameters import Kind, Parameter, Signature, leaves_of
from callgate._kernel.variants import Function, Given, Static, from_json, to_json

_DTYPES = "bool, integers of 8 to 64 bits, float32, float64, complex64, complex128"
_STATIC = "a number, a string, None or a tuple of these"
_POSITIONAL = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)


C = ParamSpec("C")
Q = ParamSpec("Q")
T = TypeVar("T", bound=OneArray | tuple[OneArray, ...])
NumbaStyle = Literal["return", "inplace"]


def _fastmath(label: str, option: str, value: Any) -> bool | set[str]:
  if not isinstance(value, (set, frozenset)):
    return _options.boolean(label, option, value)
  flags = cast("set[Any]", value)
  if not all(isinstance(flag, str) for flag in flags):
    _options.refuse(label, option, "a bool or a set of LLVM's flags", value)
  return flags


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class NumbaOptions(KernelOptions):
  """The options of `callgate.numba`.

  Attributes:
    style: "inplace" (`fn(out, *args)`) or "return" (`fn(*args)`). Default: selected by the number
      of parameters; if default values make that ambiguous, "return" for a function that returns a
      value.
    cast: True allows casts of returned values within a kind, such as float64 to float32.
    parallel: True runs loops over `numba.prange`, and array expressions, on Numba's threads.
    fastmath: as for `numba.njit`.
    boundscheck: True raises IndexError for an index outside an array.
    error_model: "python" (a division by zero raises) or "numpy" (it gives inf or nan).
  """

  style: NumbaStyle | None = option(None, _options.choice, allowed=get_args(NumbaStyle))
  cast: bool = option(False, _options.boolean)
  parallel: bool = option(False, _options.boolean)
  fastmath: bool | set[str] = option(False, _fastmath)
  boundscheck: bool = option(False, _options.boolean)
  error_model: Literal["python", "numpy"] = option(
    "python", _options.choice, allowed=("python", "numpy")
  )


class MakesKernel(Protocol):
  """A decorator; a function that returns nothing has a first parameter for its result."""

  @overload
  def __call__(self, fn: Callable[Q, T], /) -> Kernel[Q, T]: ...
  @overload
  def __call__(self, fn: Callable[Concatenate[Any, Q], None], /) -> Kernel[Q, Any]: ...


class MakesKernels(Protocol[C]):
  """The type of `numba`."""

  @overload
  def __call__(self, fn: Callable[Q, T], /, *args: C.args, **options: C.kwargs) -> Kernel[Q, T]: ...
  @overload
  def __call__(
    self, fn: Callable[Concatenate[Any, Q], None], /, *args: C.args, **options: C.kwargs
  ) -> Kernel[Q, Any]: ...
  @overload
  def __call__(self, fn: None = None, /, *args: C.args, **options: C.kwargs) -> MakesKernel: ...


def _decorator(
  declared: Callable[C, Any],
) -> Callable[[Callable[..., Any]], MakesKernels[C]]:
  return factories.decorator(declared)


@_decorator(NumbaOptions)
def numba(fn: "Callable[..., Any]", /, *, options: NumbaOptions) -> Kernel:
  """Makes a JAX function of a Python function that Numba compiles to native code.

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

  Numba compiles the function once for the dtypes and ranks of a call. callgate keeps the result on
  disk for the next process.

  Args:
    fn: a function in Numba's subset of Python, also with `@njit` or `@cfunc`; leave it out to use
      the result as a decorator. The function gets read-only arrays, and numbers for arguments of
      rank 0. It writes its result into an additional first parameter, or returns it. Several
      results are a tuple. Keyword arguments without arrays are compile-time constants.

  Returns:
    A `Kernel`, or a decorator that makes one.

  Raises:
    GateDefinitionError: an option is wrong, or Numba is not installed. When a call is traced: Numba
      rejects the function for the call's types.
  """
  return Kernel(NumbaKernel(fn, options))


class NumbaKernel(CpuKernel):
  """A kernel that Numba compiles for the types of each call; see `callgate.numba`."""

  def __init__(self, function: Callable[..., Any], options: NumbaOptions) -> None:
    extras.library("numba", "Numba", "numba", by=options.label("callgate.numba"))
    from callgate._kernel.numba import compile as compiler  # Numba may be missing

    self._compiler = compiler
    source = getattr(function, "py_func", None) or getattr(function, "__wrapped__", function)
    label = f"kernel '{options.name or getattr(source, '__qualname__', source)}'"
    options = _options.checked(label, options)
    names = ("parallel", "fastmath", "boundscheck", "error_model")
    given = {n: v for n in names if (v := getattr(options, n)) and v != "python"}  # no defaults
    made = compiler.made_with(function)
    if not isinstance(source, types.FunctionType) or (source is not function and not made):
      _options.refuse(label, "fn", "a Python function, an @njit function or a @cfunc", function)
    if made and given:
      fault = f"got {', '.join(sorted(given))} for a function with Numba's decorator"
      raise GateDefinitionError(f"{label}: {fault}; pass them to the decorator")
    self.function, self._style, self._cast = source, options.style, options.cast
    self.options, self._pointers = made or (given, None)  # options of Numba's compiler
    self._given = list(signatures.read(source).parameters.values())
    super().__init__(options.name or registry.unique_name(source), None, options)
    if self._pointers is not None and self._style == "return":
      fault = "style: expected 'inplace' for a @cfunc, which writes through pointers"
      raise GateDefinitionError(f"{self.label}: {fault}")
    if any(p.kind is p.VAR_KEYWORD for p in self._given):
      fault = "expected named parameters, got **keywords, which Numba doesn't support"
      raise GateDefinitionError(f"{self.label}: {fault}")
    # The number of leading parameters for results is unknown before the first call.
    open_ = self._pointers is None and self._style is None
    returns = _returns_value(source.__code__) if open_ else self._style == "return"
    self._guessed_lead = int(not returns)
    self.parameters = tuple(p.name for p in self._positional(())[self._guessed_lead :])

  # -- the parameters that a call fills ------------------------------------------------------------
  def _positional(self, static: Collection[str]) -> list[inspect.Parameter]:
    return [p for p in self._given if p.kind in _POSITIONAL and p.name not in static]

  def _lead(self, types: CallTypes) -> int:
    """Returns the number of leading parameters for results: 0 for a function that returns them."""
    positional, operands = self._positional(dict(types.static)), len(types.operands)
    required = sum(p.default is p.empty for p in positional)
    leads = {"return": [0], "inplace": [1], None: [0, 1]}[self._style]
    leads = leads if self._pointers is None else [len(types.results)]
    variadic = any(p.kind is p.VAR_POSITIONAL for p in self._given)
    most = operands + max(leads) if variadic else len(positional)
    possible = [lead for lead in leads if required <= operands + lead <= most]
    lead, *others = possible or leads
    lead = self._guessed_lead if others else lead
    if possible:
      return lead
    where = f"after {lead} for the results" if lead else "(it returns its results)"
    names = ", ".join(p.name for p in positional)
    wanted = f"{operands} arguments {where}; static values are passed by keyword"
    fault = f"'{self.function.__name__}' has the parameters ({names}); expected one for each of"
    raise GateDefinitionError(f"{self.label}: {fault} {wanted}")

  def _slots(self, types: CallTypes) -> tuple[Slot, ...]:
    static, slots = dict(types.static), list[Slot]()
    results, operands = list(range(self._lead(types))), list(range(len(types.operands)))
    for p in self._given:
      if p.name in static:
        slots.append(Slot("static", (), static[p.name]))
      elif p.kind is p.VAR_POSITIONAL:
        slots.append(Slot("rest", tuple(operands)))
      elif p.kind in _POSITIONAL and results:
        slots.append(Slot("out" if self._pointers is None else "result", (results.pop(0),)))
      elif p.kind in _POSITIONAL and operands:
        slots.append(Slot("operand", (operands.pop(0),)))
      elif p.default is not p.empty:
        slots.append(Slot("static", (), p.default))
      else:
        raise GateDefinitionError(f"{self.label}: expected a static value for '{p.name}', got none")
    return tuple(slots)

  def _arguments(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Given:
    kinds = {p.name: p.kind for p in self._given}
    fixed = [n for n in kwargs if kinds.get(n) is inspect.Parameter.KEYWORD_ONLY]
    constants = {n: kwargs[n] for n in fixed if isinstance(kwargs[n], np.generic)}
    others = {n: value for n, value in kwargs.items() if n not in constants}
    arrays, static = shapes.split_static(self.label, others)
    for name in kwargs:
      if name in arrays and name in fixed:
        fault = f"'{name}' is keyword-only, so static; expected {_STATIC}, got an array"
        raise GateDefinitionError(f"{self.label}: {fault}")
      if kinds.get(name, inspect.Parameter.VAR_POSITIONAL) is inspect.Parameter.VAR_POSITIONAL:
        fault = f"got argument '{name}', which it doesn't have"
        raise GateDefinitionError(f"{self.label}: {fault}; expected {', '.join(self.parameters)}")
    frozen = tuple(sorted((*static, *constants.items())))
    for name, value in frozen:
      try:
        to_json(value)
      except TypeError:
        _options.refuse(self.label, f"static value '{name}'", _STATIC, value)
    # Places arrays passed by keyword; positions count from after the results' parameters.
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
    dtypes = [*(struct.dtype for struct in structs), *(dtype for _, dtype in site.results)]
    for index, dtype in enumerate(map(np.dtype, dtypes)):
      if self._compiler.element_type(dtype) is None:
        kind = "argument" if index < len(structs) else "result"
        at = index if index < len(structs) else index - len(structs)
        what = registry.of(self.name, site.spec, kind, at)
        expected = f"expected a dtype that Numba supports on the CPU ({_DTYPES})"
        got = f"got {dtype.name}; convert it with astype"
        raise GateDefinitionError(f"{self.label}: {what}: {expected}, {got}")
    super().check_call(site, structs)

  def variant_key(self, operands: Sequence[Any], results: Sequence[Any], static: Static) -> str:
    sides = (
      ",".join(f"{np.dtype(x.dtype).name}:{len(x.shape)}" for x in side)
      for side in (operands, results)
    )
    held = {name: to_json(value) for name, value in static}
    return "->".join(sides) + (";" + json.dumps(held) if held else "")

  def types_of_key(self, key: str) -> CallTypes:
    """Returns the types and static values in a `variant_key`."""
    if "->" not in key:
      raise GateDefinitionError(
        f"{self.label}: expected a call of a Numba kernel, got a program whose kernel of this name "
        "is of another kind; define the same kind of kernel here"
      )

    def types(text: str) -> tuple[Type, ...]:  # from "float32:2,bool:0"
      pairs = (part.split(":") for part in text.split(",") if part)
      return tuple((dtype_named(dtype), int(rank)) for dtype, rank in pairs)

    arrays, _, static = key.partition(";")
    operands, _, results = arrays.partition("->")
    values: dict[str, Any] = json.loads(static or "{}")
    frozen = tuple(sorted((name, from_json(value)) for name, value in values.items()))
    return CallTypes(types(operands), types(results), frozen)

  def compile(self, key: str) -> Function:
    types = self.types_of_key(key)
    slots, pointers = self._slots(types), self._pointers
    parameters = [Parameter(f"result {i}", Kind.OUT, *t) for i, t in enumerate(types.results)]
    for i, (parameter, slot) in enumerate(zip(self._given, slots, strict=True)):
      if slot.kind in ("operand", "rest"):
        for place, operand in enumerate(slot.indices):
          name = f"{parameter.name}[{place}]" if slot.kind == "rest" else parameter.name
          parameters.append(Parameter(name, Kind.IN, *types.operands[operand]))
      if pointers is not None and slot.kind in ("operand", "result"):  # pointers, as in a cfunc
        have = (types.results if slot.kind == "result" else types.operands)[slot.indices[0]]
        expected = self._compiler.pointer_text(pointers[i], have)
        if expected is not None:
          got, what = f"{have[0].name} of rank {have[1]}", f"parameter '{parameter.name}'"
          fault = f"{what} of the @cfunc: expected {expected}, got {got}"
          raise GateDefinitionError(f"{self.label}: {fault}")
    return self._compiler.compile_function(Request(
      self.label, self.function, self.options, slots, self._cast, pointers, types,
      Signature(parameters),
    ))  # fmt: skip


def _returns_value(code: types.CodeType) -> bool:
  """Returns True if a function returns something other than None."""
  # LOAD_CONST, or in newer Pythons LOAD_COMMON_CONSTANT, whose `argval` may be a number.
  return any(
    (i.opname == "RETURN_CONST" and i.argval is not None)
    or (
      i.opname == "RETURN_VALUE" and not (before.opname in _CONSTANT and before.argrepr == "None")
    )
    for before, i in itertools.pairwise(dis.get_instructions(code))
  )


_CONSTANT = ("LOAD_CONST", "LOAD_COMMON_CONSTANT")
