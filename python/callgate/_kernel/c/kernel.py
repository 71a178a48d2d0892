"""The kernels of `callgate.cfunc`: their types, their checks, the loop's own vmap."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import numpy as np

from callgate import _callgate
from callgate._build import toolchain
from callgate._call import shapes as _shapes
from callgate._call.operation import Vmap
from callgate._call.site import CallSite
from callgate._core import static_values
from callgate._core.dtypes import dtype_named, type_text
from callgate._core.errors import GateDefinitionError
from callgate._jax.tracing import canonical_dtype
from callgate._kernel.c.arguments import OPERANDS, RESULTS, Array, Role
from callgate._kernel.c.expressions import Expression
from callgate._kernel.c.functions import CFunction
from callgate._kernel.c.glue import Glue, rank
from callgate._kernel.c.types import CType
from callgate._kernel.kernel import Kernel
from callgate._kernel.parameters import Kind, Parameter, from_codes
from callgate._kernel.variants import CallTypes, Function, Static


class CKernel(Kernel):
  """A kernel that calls a C function; see `callgate.cfunc`.

  Attributes:
    declaration: of the C function, as text.
    loop: whether it is called for each element.
  """

  def __init__(
    self,
    name: str,
    function: CFunction,
    glue: Glue,
    *,
    addresses: Sequence[int],
    keep: Any,
    cast: bool,
    vmap: Vmap | Callable[..., Any] | None,
    out: Any,
    like: Callable[..., Any] | None,
    **options: Any,
  ) -> None:
    self.declaration = str(function.declaration)
    self.loop = glue.loop
    self._glue = glue
    self._binding = glue.binding
    self._cast_scalars = cast
    self._addresses = (ctypes.c_void_p * (1 + len(addresses)))(function.address, *addresses)
    self._keep = (function.keep, keep, self._addresses)
    label = f"kernel '{name}'"
    if out is None and (like is None or self._can_infer()):
      self._check_inferable(label)
      out = self._infer
    signature = [self._parameter(n) for n in self._binding.names]
    super().__init__(
      name, signature, out=out, like=like, vmap="each" if vmap is None else vmap, **options
    )
    if self.loop and vmap is None:
      self.vmap_rule = self._batch_loop

  # -- parameters --------------------------------------------------------------------------------
  def _parameter(self, name: str) -> Parameter:
    kind = self._binding.statics.get(name)
    if kind is not None:
      return Parameter(name, Kind.NUMBER, kind.dtype)
    array = self._binding.arrays[name]
    dtype = None if self._is_open(array) else array.type.dtype
    kinds = {Role.OUT: Kind.OUT, Role.INOUT: Kind.INOUT}
    by_value = not array.type.pointer and array.role in OPERANDS and not self.loop
    default = Kind.SCALAR if by_value else Kind.IN
    return Parameter(name, kinds.get(array.role, default), dtype, rank(array, self.loop))

  def _is_open(self, array: Array) -> bool:
    """Whether the dtype is the call's matter: void *, or converted as C does."""
    by_value = self.loop or (not array.type.pointer and array.role in OPERANDS)
    return array.type.dtype is None or (self._cast_scalars and by_value)

  # -- variants ----------------------------------------------------------------------------------
  def variant_key(self, types: CallTypes) -> str:
    operands, results = iter(types.operands), iter(types.results)
    names: list[str] = []
    for array in self._mentioned():
      found = next(operands, None) if array.role in OPERANDS else None
      found = next(results, found) if array.role in RESULTS else found
      if self._is_open(array) and found is not None:
        names.append(found[0].name)
    return ",".join(names)

  def types_of_key(self, key: str) -> CallTypes:
    given = iter(key.split(","))
    operands: list[tuple[Any, int]] = []
    results: list[tuple[Any, int]] = []
    for array in self._mentioned():
      dtype = _dtype(self.label, next(given, "")) if self._is_open(array) else array.type.dtype
      if array.role in OPERANDS:
        operands.append((dtype, rank(array, self.loop)))
      if array.role in RESULTS:
        results.append((dtype, rank(array, self.loop)))
    return CallTypes(tuple(operands), tuple(results), ())

  def compile(self, types: CallTypes) -> tuple[str, Function]:
    key = self.variant_key(types)
    given = iter(key.split(","))
    dtypes: dict[str, np.dtype[Any]] = {}
    for array in self._mentioned():
      dtype = _dtype(self.label, next(given, "")) if self._is_open(array) else array.type.dtype
      assert dtype is not None
      dtypes[array.name] = dtype
    library = toolchain.build(self.label, self._glue.source(dtypes), flags=toolchain.DEFAULT_FLAGS)
    loaded = toolchain.load(library)
    table = ctypes.cast(loaded.callgate_kernels, ctypes.c_void_p).value
    assert table is not None
    ((_, address, codes, names),) = _callgate.read_library(str(library), table)
    return key, Function(
      address,
      tuple(from_codes(codes, names)),
      keep=(loaded, self._keep),
      user_data=ctypes.addressof(self._addresses),
    )

  def turn(self, function: Function) -> _callgate.KernelTurn | None:
    # Of the C function itself, which may be of a library with others.
    return _callgate.KernelTurn.of_library(self._addresses[0] or 0) or super().turn(function)

  def _mentioned(self) -> list[Array]:
    arrays = self._binding.arrays
    return [arrays[name] for name in self._binding.names if name in arrays]

  # -- results -----------------------------------------------------------------------------------
  def _can_infer(self) -> bool:
    return self.loop or all(_is_known(array) for array in self._binding.results)

  def _check_inferable(self, label: str) -> None:
    if self.loop:
      return
    for array in self._binding.results:
      if not _is_known(array):
        raise GateDefinitionError(
          f"{label}: the type of result '{array.name}' ('{array.type.text}') is not known; "
          f"expected extents, as in 'out {array.name}[n]', or out= (a pytree of "
          "ShapeDtypeStructs, or a function from the arguments' ShapeDtypeStructs to one)"
        )

  def _infer(self, *args: Any, **static: Any) -> Any:
    """The results' types, from `args=` and C's types."""
    structs = dict(zip(self.parameters, jax.tree.leaves(args), strict=True))
    if self.loop:
      shape = self._broadcast([s.shape for s in structs.values()])
      results = [
        jax.ShapeDtypeStruct(shape, self._loop_dtype(array.type, list(structs.values())))
        for array in self._binding.results
      ]
    else:
      numbers = self._numbers({n: tuple(s.shape) for n, s in structs.items()}, static)
      shapes = {n: tuple(s.shape) for n, s in structs.items()}
      results = [
        structs[array.name]
        if array.role is Role.INOUT
        else jax.ShapeDtypeStruct(
          tuple(self._evaluated(e, numbers, shapes) for e in array.dims or ()), array.type.dtype
        )
        for array in self._binding.results
      ]
    return results[0] if len(results) == 1 else tuple(results)

  def _loop_dtype(self, kind: CType, operands: Sequence[Any]) -> np.dtype[Any]:
    """C's own; with cast=True no wider than the arguments."""
    assert kind.dtype is not None
    if not self._cast_scalars:
      return kind.dtype
    inexact = [s.dtype for s in operands if jax.numpy.issubdtype(s.dtype, jax.numpy.inexact)]
    own = canonical_dtype(kind.dtype)
    if not inexact or not jax.numpy.issubdtype(own, jax.numpy.inexact):
      return own
    widest = jax.numpy.finfo(jax.numpy.result_type(*inexact)).dtype
    if jax.numpy.finfo(own).bits <= widest.itemsize * 8:
      return own
    if own.kind == "c":
      return np.dtype(np.complex64)
    return np.dtype(widest)

  def _broadcast(self, shapes: Sequence[tuple[int, ...]]) -> tuple[int, ...]:
    try:
      return np.broadcast_shapes(*shapes)
    except ValueError:
      given = ", ".join(f"'{n}' {list(s)}" for n, s in zip(self.parameters, shapes, strict=True))
      raise GateDefinitionError(
        f"{self.label}: expected arguments that broadcast to one shape, got {given}"
      ) from None

  # -- checks ------------------------------------------------------------------------------------
  def _numbers(
    self, shapes: Mapping[str, tuple[int, ...]], static: Mapping[str, Any]
  ) -> dict[str, int]:
    given = {name: static_values.thaw(static.get(name)) for name in self._binding.statics}
    numbers = {name: int(value) for name, value in given.items() if _is_number(value)}
    for symbol, (array, axis) in self._binding.symbols.items():
      if axis < len(shapes[array]):
        numbers[symbol] = shapes[array][axis]
    return numbers

  def _evaluated(
    self, expression: Expression, numbers: Mapping[str, int], shapes: Mapping[str, tuple[int, ...]]
  ) -> int:
    try:
      value = expression.evaluate(numbers, shapes)
    except (IndexError, KeyError, ZeroDivisionError) as error:
      reason = f"{error.args[0]}"
      raise GateDefinitionError(
        f"{self.label}: args: '{expression.text}' has no value: {reason}"
      ) from None
    return value

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
    arrays = self._mentioned()
    structs = dict(zip((a.name for a in arrays if a.role in OPERANDS), operands, strict=True))
    outs = dict(zip((a.name for a in arrays if a.role in RESULTS), results, strict=True))
    if self._cast_scalars:
      self._check_casts(structs, outs)
    if self.loop:
      self._check_loop(structs, outs)
      return
    shapes = {n: tuple(s.shape) for n, s in {**outs, **structs}.items()}
    numbers = self._numbers(shapes, dict(site.static))
    for name, struct in structs.items():
      self._check_extents(f"argument '{name}'", name, struct, numbers, shapes)
    for name, struct in outs.items():
      self._check_extents(f"result '{name}'", name, struct, numbers, shapes)
    self._check_values(numbers, shapes)

  def _check_extents(
    self,
    what: str,
    name: str,
    struct: Any,
    numbers: Mapping[str, int],
    shapes: Mapping[str, tuple[int, ...]],
  ) -> None:
    dims = self._binding.arrays[name].dims or ()
    wanted = tuple(self._evaluated(d, numbers, shapes) for d in dims)
    if dims and wanted != tuple(struct.shape):
      where = {s: a for s, (a, _) in self._binding.symbols.items()}
      used = dict.fromkeys(n for d in dims for n in sorted(d.names) if n in numbers)
      values = ", ".join(
        f"{n} = {numbers[n]}" + (f" from '{where[n]}'" if n in where else "") for n in used
      )
      raise GateDefinitionError(
        f"{self.label}: {what}: expected {struct.dtype.name}[{', '.join(d.text for d in dims)}]"
        f"{' with ' if values else ''}{values}, got {type_text(struct.dtype, struct.shape)}"
      )

  def _check_values(
    self, numbers: Mapping[str, int], shapes: Mapping[str, tuple[int, ...]]
  ) -> None:
    pairs = zip(self._binding.arguments, self._glue.declaration.parameters, strict=True)
    for argument, parameter in pairs:
      if argument.value is None:
        continue
      value = self._evaluated(argument.value, numbers, shapes)
      if argument.role is Role.SCRATCH and value < 0:
        raise GateDefinitionError(
          f"{self.label}: args: '{argument.text}': expected a size of 0 or more, got {value}"
        )
      dtype = parameter.type.dtype
      if argument.role is Role.VALUE and dtype is not None and dtype.kind in "iu":
        limits = np.iinfo(dtype)
        if not limits.min <= value <= limits.max:
          raise GateDefinitionError(
            f"{self.label}: args: '{argument.text}' is {value}, more than C's "
            f"'{parameter.type.text}' holds"
          )

  def _check_casts(self, structs: Mapping[str, Any], outs: Mapping[str, Any]) -> None:
    """Arguments convert as C converts, but to their own kind or a wider one."""
    for name, struct in {**structs, **outs}.items():
      array = self._binding.arrays[name]
      own = array.type.dtype
      if own is None or not self._is_open(array):
        continue
      what = "argument" if name in structs else "result"
      a, b = (struct.dtype, own) if name in structs else (own, struct.dtype)
      if _kind(a) > _kind(b):
        raise GateDefinitionError(
          f"{self.label}: {what} '{name}': expected {own.name} or what C converts to it without "
          f"loss of kind, got {type_text(struct.dtype, struct.shape)}"
        )

  def _check_loop(self, structs: Mapping[str, Any], outs: Mapping[str, Any]) -> None:
    shape = self._broadcast([tuple(s.shape) for s in structs.values()])
    for name, struct in outs.items():
      if tuple(struct.shape) != shape:
        raise GateDefinitionError(
          f"{self.label}: result '{name}': expected the arguments' broadcast shape {list(shape)}, "
          f"got {type_text(struct.dtype, struct.shape)}"
        )

  # -- vmap --------------------------------------------------------------------------------------
  def _batch_loop(self, size: int, batched: Sequence[Any], *args: Any, **static: Any) -> Any:
    """One call for all lanes: a loop has no use for lanes."""
    leaves, tree = jax.tree.flatten((args, {}))
    flags = jax.tree.leaves(list(batched))
    lanes = [
      jax.ShapeDtypeStruct(x.shape[1:] if flag else x.shape, x.dtype)
      for x, flag in zip(leaves, flags, strict=True)
    ]
    # The batch axis stands before all others, so operands of fewer axes get some of extent 1.
    most = max(len(lane.shape) for lane in lanes)
    moved = [
      x.reshape((size, *(1,) * (most - len(lane.shape)), *lane.shape)) if flag else x
      for x, lane, flag in zip(leaves, lanes, flags, strict=True)
    ]
    held: Static = tuple(
      sorted(
        (p.name, p.freeze(self.label, static[p.name])) for p in self.signature or () if p.is_static
      )
    )
    types, out_tree = _shapes.result_types(self, tree, lanes, held)
    results = tuple(((size, *shape), dtype) for shape, dtype in types)
    out = self.bind(CallSite(tree, out_tree, held, results), moved)
    return out, jax.tree.map(lambda _: True, out)


def _is_known(array: Array) -> bool:
  if array.role is Role.INOUT:
    return True
  return array.dims is not None and array.type.dtype is not None


def _is_number(value: Any) -> bool:
  return isinstance(value, (int, np.integer))


def _kind(dtype: np.dtype[Any]) -> int:
  """Bool, integer, floating, complex."""
  if dtype.kind in "biu":
    return int(dtype.kind != "b")
  return 3 if dtype.kind == "c" else 2


def _dtype(label: str, name: str) -> np.dtype[Any]:
  try:
    return dtype_named(name)
  except TypeError:
    raise GateDefinitionError(
      f"{label}: a program calls a variant for '{name}', which is no dtype"
    ) from None
