"""`callgate.numba`: kernels from Python functions that Numba compiles when a call is traced."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, TypedDict, Unpack, overload

from callgate._call.operation import Effect, Vmap
from callgate._core import options as _options
from callgate._kernel.numba.kernel import NumbaKernel, NumbaStyle


class _Options(TypedDict, total=False):
  """The options of `numba`, for the overloads' sake."""

  out: Any
  like: Callable[..., Any] | None
  name: str | None
  effect: Effect
  style: NumbaStyle | None
  aliases: Mapping[int, int] | None
  vmap: Vmap | Callable[..., Any]
  sharding: Any
  linear: bool | int | Sequence[int]
  gradient: Literal["finite-difference"] | None
  thread_safe: bool
  cast: bool
  parallel: bool
  fastmath: bool | set[str]
  boundscheck: bool
  error_model: Literal["python", "numpy"]


@overload
def numba(fn: Callable[..., Any], /, **options: Unpack[_Options]) -> NumbaKernel: ...


@overload
def numba(
  fn: None = None, /, **options: Unpack[_Options]
) -> Callable[[Callable[..., Any]], NumbaKernel]: ...


def numba(
  fn: Callable[..., Any] | None = None,
  /,
  *,
  out: Any = None,
  like: Callable[..., Any] | None = None,
  name: str | None = None,
  effect: Effect = "pure",
  style: NumbaStyle | None = None,
  aliases: Mapping[int, int] | None = None,
  vmap: Vmap | Callable[..., Any] = "each",
  sharding: Any = None,
  linear: bool | int | Sequence[int] = False,
  gradient: Literal["finite-difference"] | None = None,
  thread_safe: bool = False,
  cast: bool = False,
  parallel: bool = False,
  fastmath: bool | set[str] = False,
  boundscheck: bool = False,
  error_model: Literal["python", "numpy"] = "python",
) -> Any:
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
    out: the results: a pytree of anything with `.shape` and `.dtype`, or a function from the
      arguments' ShapeDtypeStructs to one.
    like: a JAX-traceable reference of the same signature: gives the results' shapes when `out` is
      not given, derivatives when the kernel has no rule of its own, and `check`'s truth.
    name: what programs call the kernel by; needed to call exported programs in another process.
      Default: module, qualified name and order of creation.
    effect: "pure", "io" or "ordered", as for `callgate.gate`.
    style: "inplace" (`fn(out, *args)`) or "return" (`fn(*args)`). Default: what the number of
      parameters says, and where defaults leave that open, whether the function returns a value.
    aliases: flat input position to flat output position: both are one memory.
    vmap: "each" (a loop over the lanes in C++), "whole" (batched arguments have a leading axis),
      "broadcast" (all have) or a rule, as for `callgate.gate`.
    sharding: which dimensions may stay split over devices: None or "gather" (none), "shard", a rule
      such as "i [j] -> i" or a function, as for `callgate.gate`.
    linear: True, a position or positions of arguments in which the kernel is linear.
    gradient: "finite-difference": derivatives by central differences.
    thread_safe: calls may run at once, on several devices and in several programs, and so may the
      lanes of `vmap="each"`. By default they take turns.
    cast: allow same-kind casts of what the function returns (float64 to float32, say).
    parallel: loops over `numba.prange`, and array expressions, run on Numba's threads.
    fastmath: as for `numba.njit`.
    boundscheck: an index outside an array raises IndexError.
    error_model: "python" (a division by zero raises) or "numpy" (it gives inf or nan).

  Returns:
    A `Kernel`, or a decorator that makes one.

  Raises:
    GateDefinitionError: an option is wrong; Numba is not installed; or, when a call is traced,
      Numba refuses the function for the call's types.
  """
  name = _options.name("numba", name)
  _options.booleans("numba", cast=cast, parallel=parallel, boundscheck=boundscheck)
  _options.choice("numba", "error_model", error_model, ("python", "numpy"))
  if not isinstance(fastmath, (set, frozenset)):
    _options.boolean("numba", "fastmath", fastmath)
  elif not all(isinstance(flag, str) for flag in fastmath):  # pyright: ignore[reportUnnecessaryIsInstance]
    _options.refuse("numba", "fastmath", "a bool or a set of LLVM's flags", fastmath)

  def make(function: Callable[..., Any]) -> NumbaKernel:
    return NumbaKernel(
      function,
      name,
      style=style,
      cast=cast,
      numba_options={
        "parallel": parallel or None,
        "fastmath": fastmath or None,
        "boundscheck": boundscheck or None,
        "error_model": None if error_model == "python" else error_model,
      },
      out=out,
      like=like,
      effect=effect,
      aliases=aliases,
      vmap=vmap,
      sharding=sharding,
      linear=linear,
      gradient=gradient,
      thread_safe=thread_safe,
    )

  return make if fn is None else make(fn)
