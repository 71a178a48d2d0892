"""The kernels of `callgate.cfunc`: their types, their checks, the loop's own vmap."""

from __future__ import annotations

import ctypes
import dataclasses
import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import numpy as np

from callgate import _callgate
from callgate._build import toolchain
from callgate._call import shapes as _shapes
from callgate._call.options import shared
from callgate._call.site import CallSite
from callgate._core import static_values
from callgate._core.dtypes import dtype_named, is_inexact, type_text
from callgate._core.errors import GateDefinitionError
from callgate._jax.tracing import canonical_dtype
from callgate._kernel.c import functions
from callgate._kernel.c.arguments import OPERANDS, RESULTS, Array, Role
from callgate._kernel.c.expressions import Expression
from callgate._kernel.c.functions import CFunction
from callgate._kernel.c.glue import Glue, kind_of, rank, source
from callgate._kernel.c.options import COptions
from callgate._kernel.c.types import CType
from callgate._kernel.cpu import CpuKernel
from callgate._kernel.options import KernelOptions
from callgate._kernel.parameters import Kind, Parameter
from callgate._kernel.variants import CallTypes, Function, Static


class CKernel(CpuKernel):
  """A kernel that calls a C function; see `callgate.cfunc`.

  Attributes:
    declaration: of the C function, as text.
    loop: whether it is called for each element.
  """

  def __init__(
    self, name: str, function: CFunction, glue: Glue, options: COptions, pointers: dict[str, Any]
  ) -> None:
    self.declaration = str(function.declaration)
    self.loop = glue.loop
    self._glue = glue
    self._cast_scalars = options.cast
    self._binding = glue.binding
    self._operands = glue.binding.having(OPERANDS)
    self._results = glue.binding.having(RESULTS)
    self._open = [array for array in glue.binding.arrays.values() if self._is_open(array)]
    label = f"kernel '{name}'"
    addresses = [functions.address_of(label, key, value) for key, value in pointers.items()]
    self._addresses = (ctypes.c_void_p * (1 + len(addresses)))(function.address, *addresses)
    self._keep = (function.keep, tuple(pointers.values()), self._addresses)
    out = options.out
    if out is None:
      open_results = (
        a
        for a in self._results
        if a.role is not Role.INOUT and (a.dims is None or a.type.dtype is None)
      )
      unknown = None if self.loop else next(open_results, None)
      if unknown is None:
        out = self._infer
      elif options.like is None:
        raise GateDefinitionError(
          f"{label}: the type of result '{unknown.name}' ('{unknown.type.text}') is not "
          f"known; expected extents, as in 'out {unknown.name}[n]', or out= (a pytree of "
          "ShapeDtypeStructs, or a function from the arguments' ShapeDtypeStructs to one)"
        )
    own = shared(KernelOptions, options, out=out, vmap=options.vmap or "each")
    super().__init__(name, [self._parameter(n) for n in self._binding.names], own)
    if self.loop and options.vmap is None:
      self.defvmap(self._batch_loop)

  # -- parameters --------------------------------------------------------------------------------
  def _parameter(self, name: str) -> Parameter:
    kind = self._binding.statics.get(name)
    if kind is not None:
      return Parameter(name, Kind.NUMBER, kind.dtype)
    array = self._binding.arrays[name]
    dtype = None if self._is_open(array) else array.type.dtype
    return Parameter(name, kind_of(array, self.loop), dtype, rank(array, self.loop))

  def _is_open(self, array: Array) -> bool:
    """Whether the dtype is the call's matter: void *, or converted as C does."""
    by_value = self.loop or kind_of(array, self.loop) is Kind.SCALAR
    return array.type.dtype is None or (self._cast_scalars and by_value)

  # -- variants ----------------------------------------------------------------------------------
  def variant_key(self, types: CallTypes) -> str:
    sides = ((self._operands, types.operands), (self._results, types.results))
    found = {a.name: dtype.name for side in sides for a, (dtype, _) in zip(*side, strict=False)}
    return ",".join(found[array.name] for array in self._open if array.name in found)

  def types_of_key(self, key: str) -> CallTypes:
    dtypes = self._dtypes(key)
    operands, results = (
      tuple((dtypes[array.name], rank(array, self.loop)) for array in side)
      for side in (self._operands, self._results)
    )
    return CallTypes(operands, results, ())

  def _dtypes(self, key: str) -> dict[str, np.dtype[Any]]:
    """The arrays' dtypes; a variant's key has those that are the call's matter."""
    dtypes: dict[str, Any] = {name: a.type.dtype for name, a in self._binding.arrays.items()}
    names = itertools.chain(key.split(","), itertools.repeat(""))
    for array, name in zip(self._open, names, strict=False):
      try:
        dtypes[array.name] = dtype_named(name)
      except TypeError:
        raise GateDefinitionError(
          f"{self.label}: a program calls a variant for '{name}', which is no dtype"
        ) from None
    return dtypes

  def compile(self, types: CallTypes) -> Function:
    text = source(self._glue, self._dtypes(self.variant_key(types)))
    library = toolchain.build(self.label, text, flags=toolchain.DEFAULT_FLAGS)
    made = Function.built(library, toolchain.load(library))
    return dataclasses.replace(
      made, keep=(made.keep, self._keep), user_data=ctypes.addressof(self._addresses)
    )

  def turn(self, function: Function) -> _callgate.KernelTurn | None:
    # Of the C function itself, which may be of a library with others.
    return _callgate.KernelTurn.of_library(self._addresses[0] or 0) or super().turn(function)

  # -- results -----------------------------------------------------------------------------------
  def _infer(self, *args: Any, **static: Any) -> Any:
    """The results' types, from `args=` and C's types."""
    structs = dict(zip(self.parameters, jax.tree.leaves(args), strict=True))
    if self.loop:
      shape = self._broadcast([s.shape for s in structs.values()])
      dtypes = [self._loop_dtype(array.type, list(structs.values())) for array in self._results]
      results = [jax.ShapeDtypeStruct(shape, dtype) for dtype in dtypes]
    else:
      _, value = self._known(structs, static)
      results = [
        structs[array.name]
        if array.role is Role.INOUT
        else jax.ShapeDtypeStruct(tuple(map(value, array.dims or ())), array.type.dtype)
        for array in self._results
      ]
    return results[0] if len(results) == 1 else tuple(results)

  def _loop_dtype(self, kind: CType, operands: Sequence[Any]) -> np.dtype[Any]:
    """C's own; with cast=True no wider than the arguments."""
    assert kind.dtype is not None
    if not self._cast_scalars:
      return kind.dtype
    inexact = [s.dtype for s in operands if is_inexact(s.dtype)]
    own = canonical_dtype(kind.dtype)
    if not inexact or not is_inexact(own):
      return own
    widest = jax.numpy.finfo(jax.numpy.result_type(*inexact)).dtype
    if jax.numpy.finfo(own).bits <= widest.itemsize * 8:
      return own
    return np.dtype(np.complex64 if own.kind == "c" else widest)

  def _broadcast(self, shapes: Sequence[tuple[int, ...]]) -> tuple[int, ...]:
    try:
      return np.broadcast_shapes(*shapes)
    except ValueError:
      given = ", ".join(f"'{n}' {list(s)}" for n, s in zip(self.parameters, shapes, strict=True))
      raise GateDefinitionError(
        f"{self.label}: expected arguments that broadcast to one shape, got {given}"
      ) from None

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
        raise GateDefinitionError(
          f"{self.label}: args: '{expression.text}' has no value: {error.args[0]}"
        ) from None

    return numbers, value

  def check_call(self, site: CallSite, structs: Sequence[Any]) -> None:
    # Before a variant is compiled for it.
    assert self.signature is not None
    results = [jax.ShapeDtypeStruct(shape, dtype) for shape, dtype in site.results]
    self._check_types(self.signature, site, structs, results)
    super().check_call(site, structs)

  def _check_types(
    self,
    parameters: Sequence[Parameter],
    site: CallSite,
    operands: Sequence[Any],
    results: Sequence[Any],
    *,
    whole: bool = False,
  ) -> None:
    super()._check_types(parameters, site, operands, results, whole=whole)
    structs = dict(zip((a.name for a in self._operands), operands, strict=True))
    outs = dict(zip((a.name for a in self._results), results, strict=True))
    sides = (("argument", structs), ("result", outs))
    arrays = [(what, n, struct) for what, side in sides for n, struct in side.items()]
    if self._cast_scalars:
      self._check_casts(arrays)
    if self.loop:
      shape = self._broadcast([tuple(s.shape) for s in structs.values()])
      for name, struct in outs.items():
        if tuple(struct.shape) != shape:
          raise GateDefinitionError(
            f"{self.label}: result '{name}': expected the arguments' broadcast shape "
            f"{list(shape)}, got {type_text(struct.dtype, struct.shape)}"
          )
      return
    numbers, value = self._known({**outs, **structs}, dict(site.static))
    for what, name, struct in arrays:
      dims = self._binding.arrays[name].dims or ()
      if dims and tuple(map(value, dims)) != tuple(struct.shape):
        where = {s: f" from '{a}'" for s, (a, _) in self._binding.symbols.items()}
        used = dict.fromkeys(n for d in dims for n in sorted(d.names) if n in numbers)
        values = ", ".join(f"{n} = {numbers[n]}{where.get(n, '')}" for n in used)
        wanted = ", ".join(d.text for d in dims)
        raise GateDefinitionError(
          f"{self.label}: {what} '{name}': expected {struct.dtype.name}[{wanted}]"
          f"{' with ' if values else ''}{values}, got {type_text(struct.dtype, struct.shape)}"
        )
    self._check_values(value)

  def _check_values(self, value: Callable[[Expression], int]) -> None:
    pairs = zip(self._binding.arguments, self._glue.declaration.parameters, strict=True)
    for argument, parameter in pairs:
      if argument.value is None:
        continue
      where, number = f"{self.label}: args: '{argument.text}'", value(argument.value)
      if argument.role is Role.SCRATCH and number < 0:
        raise GateDefinitionError(f"{where}: expected a size of 0 or more, got {number}")
      kind = parameter.type
      if argument.role is Role.VALUE and kind.is_integer:
        limits = np.iinfo(kind.dtype)
        if not limits.min <= number <= limits.max:
          raise GateDefinitionError(f"{where} is {number}, more than C's '{kind.text}' holds")

  def _check_casts(self, arrays: Sequence[tuple[str, str, Any]]) -> None:
    """Arguments convert as C converts, but to their own kind or a wider one."""
    order = {"b": 0, "i": 1, "u": 1, "c": 3}  # floating: 2
    for what, name, struct in arrays:
      own = self._binding.arrays[name].type.dtype
      if own is None or not self._is_open(self._binding.arrays[name]):
        continue
      kinds = [order.get(dtype.kind, 2) for dtype in (struct.dtype, own)]
      if kinds[0] > kinds[1] if what == "argument" else kinds[1] > kinds[0]:
        raise GateDefinitionError(
          f"{self.label}: {what} '{name}': expected {own.name} or what C converts to it without "
          f"loss of kind, got {type_text(struct.dtype, struct.shape)}"
        )

  # -- vmap --------------------------------------------------------------------------------------
  def _batch_loop(self, size: int, batched: Sequence[Any], *args: Any, **static: Any) -> Any:
    """One call for all lanes: a loop has no use for lanes."""
    lanes = [
      jax.ShapeDtypeStruct(x.shape[flag:], x.dtype) for x, flag in zip(args, batched, strict=True)
    ]
    # The batch axis stands before all others, so operands of fewer axes get some of extent 1.
    most = max(len(lane.shape) for lane in lanes)
    moved = [
      x.reshape((size, *(1,) * (most - len(lane.shape)), *lane.shape)) if flag else x
      for x, lane, flag in zip(args, lanes, batched, strict=True)
    ]
    given = [p for p in self.signature or () if p.is_static]
    held: Static = tuple(sorted((p.name, p.freeze(self.label, static[p.name])) for p in given))
    tree = jax.tree.structure((args, {}))
    types, out_tree = _shapes.result_types(self, tree, lanes, held)
    results = tuple(((size, *shape), dtype) for shape, dtype in types)
    out = self.bind(CallSite(tree, out_tree, held, results), moved)
    return out, jax.tree.map(lambda _: True, out)
