# SPDX-License-Identifier: Apache-2.0
"""`callgate.cfunc`: kernels from C functions of existing libraries."""

# `typing.get_type_hints` evaluates these annotations, so they must not be strings.

import ctypes
import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, NoReturn

import jax
import numpy as np

from callgate import _callgate
from callgate._build import toolchain
from callgate._call.options import Vmap, shared
from callgate._call.site import CallSite
from callgate._core import factories, static_values
from callgate._core import options as check
from callgate._core.dtypes import dtype_named, is_inexact, type_text
from callgate._core.errors import GateDefinitionError
from callgate._core.options import option
from callgate._jax.tracing import canonical_dtype
from callgate._kernel.c import arguments, functions
from callgate._kernel.c.arguments import OPERANDS, RESULTS, Array, Role
from callgate._kernel.c.expressions import Expression
from callgate._kernel.c.glue import Glue
from callgate._kernel.cpu import CpuKernel
from callgate._kernel.kernel import Kernel
from callgate._kernel.options import KernelOptions
from callgate._kernel.parameters import Kind, Parameter, check_types, is_wide
from callgate._kernel.variants import Function, Static, Variant

Order = Literal["C", "F"]
Errors = str | Mapping[int | str, str]


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class COptions(KernelOptions):
  """The options of `callgate.cfunc`.

  Attributes:
    args: the C arguments, see above. Leave it out for functions of single numbers.
    loop: True for a function of single numbers, which is called for each element of the arguments;
      these broadcast as in NumPy. Default: True for functions that take numbers by value and return
      one, without `args`.
    order: "F" for column-major arrays in C (as in Fortran libraries), for all arrays or, as a dict,
      by name. callgate transposes them on the way in and out.
    cast: True converts arguments that C takes by value, by C's rules, from a dtype of the same or a
      lesser kind. A loop's results are then no wider than its arguments.
    errors: the message for a non-zero `info` or `status`, or a dict of messages by number, with
      ">0" and "<0" for all others. `{info}` in a message becomes the number.
    pointers: a dict of addresses that `args` names: integers, objects of ctypes or cffi, capsules.
      The kernel keeps them alive.
    vmap: "each", "whole", "broadcast" or a rule, as for `callgate.gate`. Default: "each"; with
      `loop`, one call handles all lanes.
    thread_safe: True lets the function run on several threads at once, for calls of several devices
      and programs, for lanes and for elements. By default calls take turns with all other kernels
      of the same shared library that are not thread-safe.
  """

  signature: str | None = None
  args: str | None = option(None, check.text)
  vmap: Vmap | Callable[..., Any] | None = None  # pyright: ignore[reportIncompatibleVariableOverride]
  loop: bool | None = option(None, check.boolean)
  order: Order | Mapping[str, Order] = "C"
  cast: bool = option(False, check.boolean)
  errors: Errors | None = None
  pointers: Mapping[str, Any] | None = option(None, check.named)


@factories.of_two(COptions)
def cfunc(function: Any, signature: str | None = None, *, options: COptions) -> Kernel:
  """Makes a JAX function of an existing C function, which compiled programs call without Python.

  ```python
  import callgate as cg, jax.numpy as jnp, numpy as np
  from scipy.linalg import cython_blas
  from scipy.special import cython_special

  saxpy = cg.cfunc(
    cython_blas.__pyx_capi__["saxpy"], args="n, a[], x[n], 1, inout y[n], 1")
  assert saxpy(2.0, jnp.ones(3), jnp.arange(3, dtype=jnp.float32)).tolist() == [2.0, 3.0, 4.0]

  j0 = cg.cfunc(cython_special.__pyx_capi__["j0"], cast=True)  # double j0(double): elementwise
  np.testing.assert_allclose(j0(jnp.array([0.0, 2.4048])), [1.0, 0.0], atol=1e-4)
  ```

  `args` has one item for each C argument, in C's order:

  - `x`: an operand that C only reads: a pointer to its elements, or its value if C takes a value.
  - `out x`: a pointer to a result.
  - `inout x`: a pointer to an operand and a result in the same memory.
  - `copy x`: a pointer to a copy of an operand, which C may overwrite.
  - `static k`: a number fixed when the program is traced.
  - `n`, `max(1, 2 * n)`, `x.size`, `x.shape[0]`, `x.ndim`: an integer computed from shapes or
    static integers.
  - `1`, `0.5`, `'N'`: a number, text.
  - `NULL`: a null pointer. A name in `pointers`: its address.
  - `scratch(3 * n)`: memory for that many elements, until the call returns.
  - `info`, `status`: a number that C writes; every number other than 0 raises an error.

  `x[m, n]` declares an array's lengths, as names, numbers or expressions. The arrays of a call give
  these names their values, and callgate checks all lengths. If C takes a pointer to a number,
  callgate passes one. At the end, `-> out x`, `-> status` or `-> ignored` says how callgate uses
  the return value.

  Args:
    function: a function of ctypes (with argtypes and restype) or cffi, a capsule of a Cython module
      (`__pyx_capi__`), or an address.
    signature: the function's declaration in C; it overrides the function's own type.

  Returns:
    A `Kernel`.

  Raises:
    CompileError: there is no C++ compiler.
    GateDefinitionError: the function's type is unknown, or an option is wrong.
  """
  check.optional_texts("cfunc", signature=signature)
  options = check.checked(options.label("cfunc"), options)
  args, is_loop, given = options.args, options.loop, dict(options.pointers or {})
  found = functions.resolve(function, signature)
  name = options.named(found.declaration.name or "cfunc")
  label = f"kernel '{name}'"
  if is_loop is None:  # True if it takes numbers by value and returns one
    types = [found.declaration.result, *(p.type for p in found.declaration.parameters)]
    by_value = types[0].dtype is not None and not any(kind.pointer for kind in types)
    is_loop = args is None and len(types) > 1 and by_value
  if args is None and not is_loop:
    such = "args='n, x[n], out y[n]'; or loop=True for a function of single elements"
    items = f"an item for each argument of '{found.declaration}', such as {such}"
    raise GateDefinitionError(f"{label}: expected args=, {items}")
  try:
    binding = arguments.read(args, found.declaration, loop=is_loop, pointers=given)
  except ValueError as error:
    raise GateDefinitionError(f"{label}: args: {error}") from None
  columns_first = _columns_first(label, options.order, binding.arrays)
  errors, parallel = _messages(label, options.errors), options.thread_safe and is_loop
  glue = Glue(
    found.declaration, binding, is_loop, options.cast, columns_first, errors, tuple(given), parallel
  )
  vmap = "each" if options.vmap is None else options.vmap
  made = CKernel(name, found, glue, shared(KernelOptions, options, vmap=vmap), given)
  if is_loop and options.vmap is None:
    made.vmap_rule = made.batch_loop
  return Kernel(made)


def _columns_first(label: str, order: Any, arrays: Mapping[str, arguments.Array]) -> frozenset[str]:
  by_name = isinstance(order, Mapping)
  orders = check.named(label, "order", order) if by_name else dict.fromkeys(arrays, order)
  if not all(isinstance(o, str) and o in ("C", "F") and key in arrays for key, o in orders.items()):
    expected = f"'C' or 'F', or a mapping from names ({', '.join(arrays)}) to these"
    raise GateDefinitionError(f"{label}: order: expected {expected}; got {order!r}")
  return frozenset(key for key, value in orders.items() if value == "F")


def _messages(label: str, errors: Any) -> tuple[tuple[int | str, str], ...]:
  """Returns the messages by number, then by sign, then for all numbers."""
  if isinstance(errors, str):
    return (("else", errors),)
  table: Any = {} if errors is None else errors
  if not isinstance(table, Mapping) or not all(
    (isinstance(key, (int, np.integer)) or key in (">0", "<0")) and isinstance(text, str)
    for key, text in table.items()
  ):
    check.refuse(label, "errors", "a text, or texts by numbers, '>0' and '<0'", errors)
  return tuple(sorted(table.items(), key=lambda item: isinstance(item[0], str)))


class CKernel(CpuKernel):
  """A kernel that calls a C function; see `callgate.cfunc`."""

  travels = False
  why_not = "the C function's address belongs to this process"

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
    way = ", or cast=True" if self._is_by_value(array) else ""
    return Parameter(name, kind, None if self._is_open(array) else array.type.dtype, rank, way=way)

  def _is_open(self, array: Array) -> bool:
    """Returns True if the call decides the dtype: void *, or converted as in C."""
    return array.type.dtype is None or (self._cast_scalars and self._is_by_value(array))

  def _is_by_value(self, array: Array) -> bool:
    """Returns True for a number that C takes, or returns, by value."""
    returned = self._binding.returned
    if returned is not None and returned.role is Role.OUT and returned.name == array.name:
      return True
    return self.loop or not (array.type.pointer or array.role in RESULTS)

  # -- variants ----------------------------------------------------------------------------------
  def variant_key(self, operands: Sequence[Any], results: Sequence[Any], static: Static) -> str:
    sides = ((self._operands, operands), (self._results, results))
    found = {a.name: np.dtype(x.dtype).name for side in sides for a, x in zip(*side, strict=False)}
    return ",".join(found[array.name] for array in self._open if array.name in found)

  def compile(self, key: str) -> Function:
    # The key has the dtypes that the call decides.
    dtypes: dict[str, Any] = {name: a.type.dtype for name, a in self._binding.arrays.items()}
    for array, name in zip(self._open, [*key.split(","), *[""] * len(self._open)], strict=False):
      try:
        dtypes[array.name] = dtype_named(name)
      except TypeError:
        problem = f"a program calls a variant for '{name}', which is not a dtype"
        raise GateDefinitionError(f"{self.label}: {problem}") from None
    text = self._glue.source(self.signature, dtypes)
    library = toolchain.build(self.label, text, flags=toolchain.DEFAULT_FLAGS)
    made = Function.built(library, toolchain.load(library))
    address = ctypes.addressof(self._addresses)
    return made._replace(keep=(made.keep, self._keep), user_data=address)

  def turn(self, function: Function) -> _callgate.KernelTurn | None:
    # The C function's own turn, which other functions of its library share.
    return _callgate.KernelTurn.of_library(self._addresses[0] or 0) or super().turn(function)

  # -- results -----------------------------------------------------------------------------------
  def _infer(self, *args: Any, **static: Any) -> Any:
    """Returns the result types, from `args=` and the C types."""
    structs = dict(zip(self.parameters, jax.tree.leaves(args), strict=True))
    shape = self._broadcast(structs) if self.loop else ()
    inexact = [s.dtype for s in structs.values() if is_inexact(s.dtype)]
    _, value = self._known(structs, static)
    results: list[Any] = []
    for array in self._results:
      dtype: Any = array.type.dtype
      if is_wide(dtype) and not self._cast_scalars:
        way = ", or cast=True" if self._is_by_value(array) else ""
        fault = f"result '{array.name}' is C's {array.type.text}, {dtype.name}"
        raise GateDefinitionError(f"{self.label}: {fault}: expected jax_enable_x64{way}")
      if self._cast_scalars and self._is_by_value(array):  # no wider than the arguments
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
      return jax.numpy.broadcast_shapes(*(tuple(s.shape) for s in structs.values()))
    except ValueError:
      given = ", ".join(f"'{name}' {list(s.shape)}" for name, s in structs.items())
      expected = "expected arguments that broadcast to one shape"
      raise GateDefinitionError(f"{self.label}: {expected}, got {given}") from None

  # -- checks ------------------------------------------------------------------------------------
  def _known(
    self, structs: Mapping[str, Any], static: Mapping[str, Any]
  ) -> tuple[dict[str, int], Callable[[Expression], int]]:
    """Returns a call's dimensions and static integers, and an evaluator of `args=` expressions."""
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
    check_types(self, self.signature, site, operands, results)
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
          converted = f"{own.name} or a dtype that C converts to it without changing its kind"
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
        raise GateDefinitionError(f"{where} is {number}, which C's '{kind.text}' can't hold")
    return self.variant(self.variant_key(operands, results, site.static))  # compiles last
