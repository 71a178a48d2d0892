"""Gates: Python callables that compiled JAX programs call.

`gate` makes one, `call` uses a callable once. What a gate is at run time lives in C++
(src/bindings/gate.cc); here is what a user sees: options, shapes, rules.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, TypedDict, Unpack, overload

import jax

from callgate import _adapt, _callgate, _compat, _names, _options, _runtime, _shapes
from callgate._operation import Effect, Operation, Vmap
from callgate._primitive import CallSite
from callgate.errors import GateDefinitionError

Style = Literal["return", "inplace", "context"]
Arrays = Literal["numpy", "buffer", "jax", "torch", "cupy"]
Thread = Literal["xla", "own"]

_LEADING_PARAMETERS = {"return": 0, "inplace": 1, "context": 2}


class Gate(Operation):
  """A Python callable as a JAX function; made by `callgate.gate`, called like any JAX function.

  Attributes:
    name: what compiled programs call it by; unique among the live gates of the process.
    function: the user's callable.
    effect, style, arrays, vmap, thread: as given to `callgate.gate`.
  """

  kind = "gate"

  def __init__(
    self,
    function: Callable[..., Any],
    *,
    out: Any = None,
    like: Callable[..., Any] | None = None,
    name: str | None = None,
    effect: Effect = "pure",
    style: Style = "return",
    arrays: Arrays = "numpy",
    aliases: Mapping[int, int] | None = None,
    vmap: Vmap | Callable[..., Any] = "each",
    sharding: Any = None,
    thread: Thread = "xla",
    timeout: float | None = None,
    cast: bool = False,
    linear: bool | int | Sequence[int] = False,
    gradient: Literal["finite-difference"] | None = None,
    collective: bool = False,
  ) -> None:
    super().__init__(
      name if name is not None else _runtime.unique_name(function),
      out=out,
      like=like,
      effect=effect,
      aliases=aliases,
      vmap=vmap,
      sharding=sharding,
      linear=linear,
      gradient=gradient,
      collective=collective,
    )
    self.function = function
    self.style: Style = _options.choice(self.label, "style", style, _adapt.STYLES)
    self.arrays: Arrays = _options.choice(self.label, "arrays", arrays, _adapt.ARRAY_KINDS)
    self.thread: Thread = _options.choice(self.label, "thread", thread, ("xla", "own"))
    self.timeout = _options.timeout(self.label, timeout)
    self.cast = cast
    if not callable(function):
      raise GateDefinitionError(f"{self.label}: expected a callable, got {function!r}")
    self.parameters = _names.parameters_of(function, _LEADING_PARAMETERS[style])
    self.callee = _callgate.Callee(
      self.name,
      function,
      bind=functools.partial(_adapt.bind, function, style, arrays, self.name),
      style=style,
      arrays=_adapt.runtime_arrays(arrays),
      cast=cast,
      own_thread=thread == "own",
      timeout=self.timeout,
    )
    _names.register(self.name, self)
    functools.update_wrapper(self, function, updated=())
    signature = _names.signature_of(function, _LEADING_PARAMETERS[style])
    if signature is not None:  # what callers see has no `out` and no `context`
      self.__signature__ = signature

  def on_host(self, *args: Any, **kwargs: Any) -> Any:
    return self.function(*args, **kwargs)

  def emission(
    self, site: CallSite, avals_in: Sequence[Any], avals_out: Sequence[Any], levels: Any
  ) -> Any:
    del avals_in, avals_out, levels
    return self.callee, _runtime.GATE_TARGET, {"spec": site.spec}

  def stats(self) -> dict[str, int]:
    """The runtime's counters of this gate; see `callgate.stats`."""
    return self.callee.stats()


class _Options(TypedDict, total=False):
  """The options of `gate`, for the overloads' sake."""

  out: Any
  like: Callable[..., Any] | None
  name: str | None
  effect: Effect
  style: Style
  arrays: Arrays
  aliases: Mapping[int, int] | None
  vmap: Vmap | Callable[..., Any]
  sharding: Any
  thread: Thread
  timeout: float | None
  cast: bool
  linear: bool | int | Sequence[int]
  gradient: Literal["finite-difference"] | None
  collective: bool


@overload
def gate(fn: Callable[..., Any], /, **options: Unpack[_Options]) -> Gate: ...
@overload
def gate(
  fn: None = None, /, **options: Unpack[_Options]
) -> Callable[[Callable[..., Any]], Gate]: ...
def gate(
  fn: Callable[..., Any] | None = None,
  /,
  *,
  out: Any = None,
  like: Callable[..., Any] | None = None,
  name: str | None = None,
  effect: Effect = "pure",
  style: Style = "return",
  arrays: Arrays = "numpy",
  aliases: Mapping[int, int] | None = None,
  vmap: Vmap | Callable[..., Any] = "each",
  sharding: Any = None,
  thread: Thread = "xla",
  timeout: float | None = None,
  cast: bool = False,
  linear: bool | int | Sequence[int] = False,
  gradient: Literal["finite-difference"] | None = None,
  collective: bool = False,
) -> Any:
  """Makes a Python callable a JAX function: compiled programs call it, with XLA's memory in place.

  ```python
  import callgate as cg, jax.numpy as jnp, numpy as np

  @cg.gate(out=lambda x: x)
  def sort(x):                       # x: read-only NumPy view of XLA's own memory
    return np.sort(x)

  assert sort(jnp.array([3.0, 1.0, 2.0])).tolist() == [1.0, 2.0, 3.0]
  ```

  Args:
    fn: the callable; leave it out to use the result as a decorator.
    out: the results: a pytree of anything with `.shape` and `.dtype`, or a function from the
      arguments' ShapeDtypeStructs to one.
    like: a JAX-traceable reference of the same signature: gives the results' shapes when `out` is
      not given, derivatives when the gate has no rule of its own, and `Gate.check`'s truth.
    name: what programs call the gate by; needed to call exported programs in another process.
      Default: module, qualified name and order of creation.
    effect: "pure" (may be removed, merged, repeated), "io" (runs exactly once per execution, in no
      particular order) or "ordered" (as io, in program order, also across calls of the program).
    style: "return" (`fn(*args)` returns the results, checked strictly and copied once), "inplace"
      (`fn(out, *args)` writes into views of XLA's result memory and returns None) or "context"
      (`fn(context, out, *args)`, with `context.stage`, `.stream`, `.device`, and `.rank`,
      `.size`, `.coordinates` of the shard).
    arrays: what the callable gets: "numpy" views, "buffer" (`callgate.Buffer`), "jax" or "torch"
      arrays, all zero-copy on the CPU. Torch has no read-only tensors: do not write to inputs
      (`config(check_writes=True)` finds who does).
    aliases: flat input position to flat output position: both are one memory, in place.
    vmap: "each" (one call a lane, looped over in C++, in lane order), "whole" (one call; batched
      arguments have one leading batch axis, others none), "broadcast" (one call, all arguments
      batched) or a rule as for `Gate.defvmap`. Nested vmaps reach "whole" and "broadcast" gates as
      one folded axis.
    sharding: which dimensions of the arrays may stay split in a program over several devices. None
      or "gather": none, and one device calls for all. "shard": the leading ones that all arrays
      share; each device calls with its part. A rule, as "i k, k j -> i j": dimensions of one name
      are split alike; `[k]`, `_` and what is in no result are whole; `...` are leading dimensions.
      Or a function of the mesh and the operands' ShapeDtypeStructs (with shardings) that returns
      one of these or (PartitionSpecs of operands, of results). Lanes of a vmap are always split.
    thread: "xla" (XLA's calling thread: fastest) or "own" (a thread of callgate's; XLA's is free
      meanwhile, so the callable may itself run JAX programs of any size).
    timeout: seconds after which the program fails with a report, while the callable may go on
      unheeded. Implies thread="own", and private copies of the arrays.
    cast: allow same-kind casts of results (float64 to float32, say).
    linear: True, a position or positions of arguments in which the gate is linear; see
      `Gate.deftranspose`.
    gradient: "finite-difference": derivatives by central differences, two calls for each input
      element. For small inputs.
    collective: every device makes its call, also where several have the same shard, and a context
      knows its place: `context.rank`, `context.size`, `context.coordinates` on the mesh. For gates
      that talk to each other.

  Returns:
    A `Gate`, or a decorator that makes one.

  Raises:
    GateDefinitionError: an option is wrong, or shapes are not known.
    ValueError: the name is taken by another live gate.
  """
  options: _Options = {
    "out": out,
    "like": like,
    "name": name,
    "effect": effect,
    "style": style,
    "arrays": arrays,
    "aliases": aliases,
    "vmap": vmap,
    "sharding": sharding,
    "thread": thread,
    "timeout": timeout,
    "cast": cast,
    "linear": linear,
    "gradient": gradient,
    "collective": collective,
  }
  if fn is None:
    return lambda function: Gate(function, **options)
  return Gate(fn, **options)


def call(fn: Callable[..., Any], out: Any, /, *args: Any, **options: Any) -> Any:
  """Calls a Python callable once from (compiled) JAX code: `gate(fn, out=out, **options)(*args)`.

  ```python
  import callgate as cg, jax, jax.numpy as jnp, numpy as np

  y = jax.jit(lambda x: cg.call(np.sort, x, x))(jnp.array([2.0, 1.0]))
  assert y.tolist() == [1.0, 2.0]
  ```

  Args:
    fn: the callable.
    out: as for `gate`.
    *args: the call's arguments.
    **options: options of `gate`; the rest are static keyword arguments of the call.

  Returns:
    The results, as `Gate.__call__`.
  """
  known = set(inspect.signature(gate).parameters)
  gate_options = tuple((key, options[key]) for key in sorted(options) if key in known)
  static = {key: value for key, value in options.items() if key not in known}
  if not callable(out) or _shapes.is_type(out):
    out = jax.tree.map(
      lambda t: jax.ShapeDtypeStruct(t.shape, t.dtype), out, is_leaf=_shapes.is_type
    )
  leaves, tree = jax.tree.flatten(out)
  try:
    hash((fn, tuple(leaves), gate_options))
  except TypeError:
    return Gate(fn, out=out, **dict(gate_options))(*args, **static)
  return _gate_for(fn, tuple(leaves), tree, gate_options)(*args, **static)


# Outside compiled code the same call comes again and again: one gate serves, so that JAX's caches
# find its program. Emptied by `jax.clear_caches()`.
@_compat.clearable_cache(max_size=64)
def _gate_for(
  fn: Callable[..., Any], leaves: tuple[Any, ...], tree: Any, options: tuple[tuple[str, Any], ...]
) -> Gate:
  return Gate(fn, out=jax.tree.unflatten(tree, leaves), **dict(options))
