"""`callgate.cfunc`: kernels from C functions of libraries that are there already."""

# Annotations are evaluated here, for `typing.get_type_hints` of the function.

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any, Literal

import numpy as np

from callgate._call.options import Vmap, shared
from callgate._core import factories, registry
from callgate._core import options as check
from callgate._core.errors import GateDefinitionError
from callgate._kernel.c import arguments, functions
from callgate._kernel.c.glue import Glue
from callgate._kernel.c.kernel import CKernel
from callgate._kernel.kernel import Kernel
from callgate._kernel.options import KernelOptions

Order = Literal["C", "F"]
Errors = str | Mapping[int | str, str]


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class COptions(KernelOptions):
  """The options of `callgate.cfunc`.

  Attributes:
    signature: the function's declaration in C, where it doesn't know its own or that one is wrong.
    args: what C's arguments are, see above. Left out for functions of single numbers.
    loop: the function takes single numbers, and is called for each element of the arguments, which
      are broadcast as NumPy does. Default: True for functions that take numbers by value and return
      one, without `args`.
    order: "F" for column-major arrays in C (as Fortran's libraries have them), for all or by name;
      they are transposed on the way in and out.
    cast: arguments that C takes by value may have another dtype of the same or a lesser kind, and
      convert as in C. A loop's results then are no wider than its arguments.
    errors: the message for a non-zero `info` or `status`, or messages by number, with ">0" and "<0"
      for all others. `{info}` in it becomes the number.
    pointers: addresses that C gets by name: integers, objects of ctypes or cffi, capsules. They
      live as long as the kernel.
    vmap: "each", "whole", "broadcast" or a rule, as for `callgate.gate`. Default: "each"; all lanes
      in one call for a loop.
    thread_safe: the function may run on several threads at once: for calls on several devices and
      in several programs, for lanes and for elements. By default calls take turns, with those of
      all other kernels of the same shared library that are not thread-safe.
  """

  signature: str | None = None
  args: str | None = None
  vmap: Vmap | Callable[..., Any] | None = None  # pyright: ignore[reportIncompatibleVariableOverride]
  loop: bool | None = None
  order: Order | Mapping[str, Order] = "C"
  cast: bool = False
  errors: Errors | None = None
  pointers: Mapping[str, Any] | None = None


@factories.of_two(COptions)
def cfunc(function: Any, signature: str | None = None, *, options: COptions) -> Kernel:
  """Makes a C function a JAX function: called from compiled code, no Python at run time.

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

  `args` has one item for each argument of C, in C's order:

  - `x`: an operand, which C only reads: a pointer to its elements, or the value where C takes one.
  - `out x`, `inout x`: a result; an operand and a result in one memory.
  - `copy x`: an operand, of which C gets a copy that it may write into.
  - `x[m, n]`, in all of these: with extents, which are checked. They are names, which stand for
    what they are found to be, numbers, or expressions.
  - `static k`: a number fixed when the program is traced.
  - `n`, `max(1, 2 * n)`, `x.size`, `x.shape[0]`, `x.ndim`: integers of these.
  - `1`, `0.5`, `'N'`: numbers and text. `NULL`: a null pointer.
  - `scratch(3 * n)`: memory for so many elements, until the call returns.
  - `info`, `status`: a number that C writes; another than 0 is an error.
  - a name of `pointers`.

  `-> out x`, `-> status` or `-> ignored` at the end says what the return value is. Where C takes a
  pointer to a number, it gets one.

  Args:
    function: a function of ctypes (with argtypes and restype) or cffi, a capsule of a Cython module
      (`__pyx_capi__`), or an address.
    signature: the function's declaration in C, where it doesn't know its own or that one is wrong.

  Raises:
    CompileError: there is no C++ compiler.
    GateDefinitionError: the function's type is not known, or an option is wrong.
  """
  name = check.name("cfunc", options.name)
  check.optional_texts("cfunc", signature=signature, args=options.args)
  check.or_none(check.boolean, "cfunc", "loop", options.loop)
  check.booleans("cfunc", cast=options.cast, thread_safe=options.thread_safe)
  args = options.args
  found = functions.resolve(function, signature)
  if name is None:
    name = registry.free_name(f"{registry.caller_module()}.{found.declaration.name or 'cfunc'}")
  label = f"kernel '{name}'"
  is_loop = options.loop
  if is_loop is None:  # one that takes numbers by value and returns one
    types = [found.declaration.result, *(p.type for p in found.declaration.parameters)]
    by_value = types[0].dtype is not None and not any(kind.pointer for kind in types)
    is_loop = args is None and len(types) > 1 and by_value
  if args is None and not is_loop:
    such = "args='n, x[n], out y[n]'; or loop=True for a function of single elements"
    items = f"an item for each argument of '{found.declaration}', such as {such}"
    raise GateDefinitionError(f"{label}: expected args=, {items}")
  given = check.named(label, "pointers", options.pointers)
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
    made.defvmap(made.batch_loop)
  return made


def _columns_first(label: str, order: Any, arrays: Mapping[str, arguments.Array]) -> frozenset[str]:
  by_name = isinstance(order, Mapping)
  orders = check.named(label, "order", order) if by_name else dict.fromkeys(arrays, order)
  if not all(isinstance(o, str) and o in ("C", "F") and key in arrays for key, o in orders.items()):
    expected = f"'C' or 'F', or these by names of {', '.join(arrays)}"
    raise GateDefinitionError(f"{label}: order: expected {expected}; got {order!r}")
  return frozenset(key for key, value in orders.items() if value == "F")


def _messages(label: str, errors: Any) -> tuple[tuple[int | str, str], ...]:
  """By number first, then by sign, then for all."""
  if isinstance(errors, str):
    return (("else", errors),)
  table: Any = {} if errors is None else errors
  if not isinstance(table, Mapping) or not all(
    (isinstance(key, (int, np.integer)) or key in (">0", "<0")) and isinstance(text, str)
    for key, text in table.items()
  ):
    check.refuse(label, "errors", "a text, or texts by numbers, '>0' and '<0'", errors)
  return tuple(sorted(table.items(), key=lambda item: isinstance(item[0], str)))
