"""`callgate.cfunc`: kernels from C functions of libraries that are there already."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

import numpy as np

from callgate._call.operation import Effect, Vmap
from callgate._core import options, registry
from callgate._core.errors import GateDefinitionError
from callgate._core.registry import caller_module
from callgate._kernel.c import arguments, functions
from callgate._kernel.c.arguments import Array
from callgate._kernel.c.functions import CFunction
from callgate._kernel.c.glue import Glue
from callgate._kernel.c.kernel import CKernel
from callgate._kernel.kernel import Kernel

Order = Literal["C", "F"]
Errors = str | Mapping[int | str, str]


def cfunc(
  function: Any,
  signature: str | None = None,
  *,
  args: str | None = None,
  out: Any = None,
  like: Callable[..., Any] | None = None,
  name: str | None = None,
  loop: bool | None = None,
  order: Order | Mapping[str, Order] = "C",
  cast: bool = False,
  errors: Errors | None = None,
  pointers: Mapping[str, Any] | None = None,
  effect: Effect = "pure",
  aliases: Mapping[int, int] | None = None,
  vmap: Vmap | Callable[..., Any] | None = None,
  sharding: Any = None,
  linear: bool | int | Sequence[int] = False,
  gradient: Literal["finite-difference"] | None = None,
  thread_safe: bool = False,
) -> Kernel:
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
    args: what C's arguments are, see above. Left out for functions of single numbers.
    out: the results, as for `callgate.gate`; needed where `args` doesn't tell their extents.
    like: a JAX-traceable reference of the same signature, as for `callgate.gate`.
    name: what programs call the kernel by. Default: the calling module and the function's name.
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
    effect: "pure", "io" or "ordered", as for `callgate.gate`.
    aliases: flat input position to flat output position: both are one memory. `inout` needs none.
    vmap: "each", "whole", "broadcast" or a rule, as for `callgate.gate`. Default: "each"; all lanes
      in one call for a loop.
    sharding: which dimensions may stay split over devices: None or "gather" (none), "shard", a rule
      such as "i [j] -> i" or a function, as for `callgate.gate`.
    linear: True, a position or positions of arguments in which the kernel is linear.
    gradient: "finite-difference": derivatives by central differences.
    thread_safe: the function may run on several threads at once: for calls on several devices and
      in several programs, for lanes and for elements. By default calls take turns, with those of
      all other kernels of the same shared library that are not thread-safe.

  Returns:
    A `Kernel`.

  Raises:
    CompileError: there is no C++ compiler.
    GateDefinitionError: the function's type is not known, or an option is wrong.
  """
  name = options.name("cfunc", name)
  options.optional_texts("cfunc", signature=signature, args=args)
  options.or_none(options.boolean, "cfunc", "loop", loop)
  options.booleans("cfunc", cast=cast, thread_safe=thread_safe)
  found = functions.resolve(function, signature)
  short = found.declaration.name or "cfunc"
  if name is None:
    name = registry.free_name(f"{caller_module()}.{short}")
  label = f"kernel '{name}'"
  is_loop = _is_loop(found, args) if loop is None else loop
  if args is None:
    if not is_loop:
      raise GateDefinitionError(
        f"{label}: expected args=, an item for each argument of '{found.declaration}', such as "
        "args='n, x[n], out y[n]'; or loop=True for a function of single elements"
      )
    args = arguments.default_text(found.declaration)
  given = options.named(label, "pointers", pointers)
  addresses = [functions.address_of(label, key, value) for key, value in given.items()]
  binding = arguments.read(label, args, found.declaration, loop=is_loop, pointers=given)
  if is_loop and not binding.results:
    raise GateDefinitionError(f"{label}: args: expected a result, 'out x' or '-> out x', got none")
  glue = Glue(
    function=found.declaration.name,
    declaration=found.declaration,
    binding=binding,
    loop=is_loop,
    columns_first=_columns_first(label, order, binding.arrays),
    errors=_messages(label, errors),
    pointers=tuple(given),
    parallel=thread_safe and is_loop,
  )
  return CKernel(
    name,
    found,
    glue,
    addresses=addresses,
    keep=tuple(given.values()),
    cast=cast,
    vmap=vmap,
    out=out,
    like=like,
    effect=effect,
    aliases=aliases,
    sharding=sharding,
    linear=linear,
    gradient=gradient,
    thread_safe=thread_safe,
  )


def _is_loop(function: CFunction, args: str | None) -> bool:
  """Whether it takes numbers by value and returns one."""
  declaration = function.declaration
  if args is not None or not declaration.parameters or declaration.result.dtype is None:
    return False
  return not declaration.result.pointer and not any(p.type.pointer for p in declaration.parameters)


def _columns_first(label: str, order: Any, arrays: Mapping[str, Array]) -> frozenset[str]:
  if isinstance(order, Mapping):
    orders = options.named(label, "order", order)
  else:
    orders = dict.fromkeys(arrays, order)
  for key, value in orders.items():
    if not isinstance(value, str) or value not in ("C", "F") or key not in arrays:
      raise GateDefinitionError(
        f"{label}: order: expected 'C' or 'F', or these by names of {', '.join(arrays)}; got "
        f"{order!r}"
      )
  return frozenset(key for key, value in orders.items() if value == "F")


def _messages(label: str, errors: Errors | None) -> tuple[tuple[int | str, str], ...]:
  """By number first, then by sign, then for all."""
  if errors is None:
    return ()
  if not isinstance(errors, (str, Mapping)):  # pyright: ignore[reportUnnecessaryIsInstance]
    options.refuse(label, "errors", "a text, or texts by numbers, '>0' and '<0'", errors)
  table: dict[Any, Any] = {"else": errors} if isinstance(errors, str) else dict(errors)
  for key, text in table.items():
    is_number = isinstance(key, (int, np.integer))
    known = is_number or key in (">0", "<0") or isinstance(errors, str)
    if not known or not isinstance(text, str):
      raise GateDefinitionError(
        f"{label}: errors: expected a text, or texts by numbers, '>0' and '<0'; got {errors!r}"
      )
  return tuple(sorted(table.items(), key=lambda item: isinstance(item[0], str)))
