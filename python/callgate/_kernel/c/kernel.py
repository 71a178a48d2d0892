"""The kernels of `callgate.cfunc`: their types, their checks, the loop's own vmap."""

from __future__ import annotations

import ctypes
import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NoReturn

import jax
import numpy as np

from callgate import _callgate
from callgate._build import toolchain
from callgate._call.site import CallSite
from callgate._core import static_values
from callgate._core.dtypes import dtype_named, is_inexact, type_text
from callgate._core.errors import GateDefinitionError
from callgate._jax.tracing import canonical_dtype
from callgate._kernel.c import functions
from callgate._kernel.c.arguments import OPERANDS, RESULTS, Array, Role
from callgate._kernel.c.expressions import Expression
from callgate._kernel.c.glue import Glue
from callgate._kernel.cpu import CpuKernel
from callgate._kernel.options import KernelOptions
from callgate._kernel.parameters import Kind, Parameter, check_types
from callgate._kernel.variants import CallTypes, Function, Variant


class CKernel(CpuKernel):
  """A kernel that calls a C function; see `callgate.cfunc`."""

  def __init__(
    self,
    name: str,
    function: functions.CFunction,
    glue: Glue,
    options: KernelOptions,
    pointers: dict[str, Any],
  ) -> None:
    self.declaration, self.loop = str(function.declaration), glue.loop
    self._glue, self._binding, self._cast_scalars = glue, glue.binding, glue.cast
    self._operands, self._results = map(glue.binding.having, (OPERANDS, RESULTS))
    self._open = [array for array in glue.binding.arrays.values() if self._is_open(array)]
    label = f"kernel '{name}'"
    addresses = [functions.address_of(label, key, value) for key, value in pointers.items()]
    self._addresses = (ctypes.c_void_p * (1 + len(addresses)))(function.address, *addresses)
    self._keep = (function.keep, tuple(pointers.values()), self._addresses)
    if options.out is None:
      inferred = [a for a in self._results if a.role is not Role.INOUT and not self.loop]
      unknown = next((a for a in inferred if a.dims is None or a.type.dtype is None), None)
      if unknown is None:
        options = dataclasses.replace(options, out=self._infer)
      elif options.like is None:
        fault = f"the type of result '{unknown.name}' ('{unknown.type.text}') is not known"
        expected = f"extents, as in 'out {unknown.name}[n]', or out=, as for callgate.gate"
        raise GateDefinitionError(f"{label}: {fault}; expected {expected}")
    super().__init__(name, [self._parameter(n) for n in self._binding.names], options)

  def _parameter(self, name: str) -> Parameter:
    if name in self._binding.statics:
      return Parameter(name, Kind.NUMBER, self._binding.statics[name].dtype)
    array = self._binding.arrays[name]
    rank = -1 if self.loop or array.dims is None else len(array.dims)
    kind = {Role.OUT: Kind.OUT, Role.INOUT: Kind.INOUT}.get(array.role, Kind.IN)
    if not self.loop and not array.type.pointer:
      rank, kind = 0, Kind.SCALAR if kind is Kind.IN else kind
    return Parameter(name, kind, None if self._is_open(array) else array.type.dtype, rank)

  def _is_open(self, array: Array) -> bool:
    """Whether the dtype is the call's matter: void *, or converted as C does."""
    by_value = self.loop or not (array.type.pointer or array.role in RESULTS)
    return array.type.dtype is None or (self._cast_scalars and by_value)

  # -- variants ----------------------------------------------------------------------------------
  def variant_key(self, types: CallTypes) -> str:
    sides = ((self._operands, types.operands), (self._results, types.results))
    found = {a.name: dtype.name for side in sides for a, (dtype, _) in zip(*side, strict=False)}
    return ",".join(found[array.name] for array in self._open if array.name in found)

  def compile(self, types: CallTypes, key: str) -> Function:
    # The key has the dtypes that are the call's matter.
    dtypes: dict[str, Any] = {name: a.type.dtype for name, a in self._binding.arrays.items()}
    for array, name in zip(self._open, [*key.split(","), *[""] * len(self._open)], strict=False):
      try:
        dtypes[array.name] = dtype_named(name)
      except TypeError:
        problem = f"a program calls a variant for '{name}', which is no dtype"
        raise GateDefinitionError(f"{self.label}: {problem}") from None
    text = self._glue.source(self.signature or (), dtypes)
    library = toolchain.build(self.label, text, flags=toolchain.DEFAULT_FLAGS)
    made = Function.built(library, toolchain.load(library))
    address = ctypes.addressof(self._addresses)
    return made._replace(keep=(made.keep, self._keep), user_data=address)

  def turn(self, function: Function) -> _callgate.KernelTurn | None:
    # Of the C function itself, which may be of a library with others.
    return _callgate.KernelTurn.of_library(self._addresses[0] or 0) or super().turn(function)

  # -- results -----------------------------------------------------------------------------------
  def _infer(self, *args: Any, **static: Any) -> Any:
    """The results' types, from `args=` and C's types."""
    structs = dict(zip(self.parameters, jax.tree.leaves(args), strict=True))
    shape = self._broadcast(structs) if self.loop else ()
    inexact = [s.dtype for s in structs.values() if is_inexact(s.dtype)]
    _, value = self._known(structs, static)
    results: list[Any] = []
    for array in self._results:
      dtype: Any = array.type.dtype
      if self.loop and self._cast_scalars:  # no wider than the arguments
        dtype = canonical_dtype(dtype)
        if inexact and is_inexact(dtype):
          widest = jax.numpy.finfo(jax.numpy.result_type(*inexact)).dtype
          if jax.numpy.finfo(dtype).bits > widest.itemsize * 8:
            dtype = np.dtype(np.complex64) if dtype.kind == "c" else widest
      if array.role is Role.INOUT:
        results.append(structs[array.name])
      else:
        extents = shape if self.loop else tuple(map(value, array.dims or ()))
        results.append(jax.ShapeDtypeStruct(extents, dtype))
    return results[0] if len(results) == 1 else tuple(results)

  def _broadcast(self, structs: Mapping[str, Any]) -> tuple[int, ...]:
    try:
      return np.broadcast_shapes(*(tuple(s.shape) for s in structs.values()))
    except ValueError:
      given = ", ".join(f"'{name}' {list(s.shape)}" for name, s in structs.items())
      expected = "expected arguments that broadcast to one shape"
      raise GateDefinitionError(f"{self.label}: {expected}, got {given}") from None

  # -- checks ------------------------------------------------------------------------------------
  def _known(
    self, structs: Mapping[str, Any], static: Mapping[str, Any]
  ) -> tuple[dict[str, int], Callable[[Expression], int]]:
    """A call's dimensions and static integers, and what tells expressions of `args=` in it."""
    shapes = {name: tuple(struct.shape) for name, struct in structs.items()}
    given = {name: static_values.thaw(static.get(name)) for name in self._binding.statics}
    numbers = {n: int(value) for n, value in given.items() if isinstance(value, (int, np.integer))}
    for symbol, (array, axis) in self._binding.symbols.items():
      if axis < len(shapes[array]):
        numbers[symbol] = shapes[array][axis]

    def value(expression: Expression) -> int:
      try:
        return expression.evaluate(numbers, shapes)
      except (IndexError, KeyError, ZeroDivisionError) as error:
        problem = f"'{expression.text}' has no value: {error.args[0]}"
        raise GateDefinitionError(f"{self.label}: args: {problem}") from None

    return numbers, value

  def checked(self, site: CallSite, operands: Sequence[Any], results: Sequence[Any]) -> Variant:
    check_types(self, self.signature or (), site, operands, results)
    structs = dict(zip((a.name for a in self._operands), operands, strict=True))
    outs = dict(zip((a.name for a in self._results), results, strict=True))
    arrays = [("argument", *item) for item in structs.items()]
    arrays += [("result", *item) for item in outs.items()]

    def refuse(what: str, name: str, struct: Any, expected: str) -> NoReturn:
      got = type_text(struct.dtype, struct.shape)
      raise GateDefinitionError(f"{self.label}: {what} '{name}': expected {expected}, got {got}")

    order = {"b": 0, "i": 1, "u": 1, "c": 3}  # of kinds; floating: 2
    for what, name, struct in arrays if self._cast_scalars else ():
      own = self._binding.arrays[name].type.dtype
      if own is not None and self._is_open(self._binding.arrays[name]):
        kinds = [order.get(dtype.kind, 2) for dtype in (struct.dtype, own)]
        if kinds[0] > kinds[1] if what == "argument" else kinds[1] > kinds[0]:
          converted = f"{own.name} or what C converts to it without loss of kind"
          refuse(what, name, struct, converted)
    if self.loop:
      shape = self._broadcast(structs)
      for name, struct in outs.items():
        if tuple(struct.shape) != shape:
          refuse("result", name, struct, f"the arguments' broadcast shape {list(shape)}")
    numbers, value = self._known({**outs, **structs}, dict(site.static))
    for what, name, struct in arrays:
      dims = self._binding.arrays[name].dims or ()
      if dims and tuple(map(value, dims)) != tuple(struct.shape):
        where = {s: f" from '{a}'" for s, (a, _) in self._binding.symbols.items()}
        used = dict.fromkeys(n for d in dims for n in sorted(d.names) if n in numbers)
        values = ", ".join(f"{n} = {numbers[n]}{where.get(n, '')}" for n in used)
        wanted = f"{struct.dtype.name}[{', '.join(d.text for d in dims)}]"
        refuse(what, name, struct, f"{wanted} with {values}" if values else wanted)
    types = (parameter.type for parameter in self._glue.declaration.parameters)
    for argument, kind in zip(self._binding.arguments, types, strict=True):
      if argument.value is None or self.loop:
        continue
      where, number = f"{self.label}: args: '{argument.text}'", value(argument.value)
      if argument.role is Role.SCRATCH and number < 0:
        raise GateDefinitionError(f"{where}: expected a size of 0 or more, got {number}")
      limits = kind.limits if argument.role is Role.VALUE else None
      if limits is not None and not limits.min <= number <= limits.max:
        raise GateDefinitionError(f"{where} is {number}, more than C's '{kind.text}' holds")
    return self.variant(self.types_of(operands, results, site.static))  # compiled last
