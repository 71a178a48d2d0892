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
import jax.numpy as jnp
import numpy as np

from callgate import (
  _adapt,
  _callgate,
  _compat,
  _config,
  _derivatives,
  _jax_engine,
  _names,
  _options,
  _runtime,
  _shapes,
)
from callgate._primitive import CallSite, gate_p
from callgate.errors import GateDefinitionError, raise_deferred

Effect = Literal["pure", "io", "ordered"]
Style = Literal["return", "inplace", "context"]
Arrays = Literal["numpy", "buffer", "jax", "torch", "cupy"]
Vmap = Literal["each", "whole", "broadcast"]
Thread = Literal["xla", "own"]

_LEADING_PARAMETERS = {"return": 0, "inplace": 1, "context": 2}


class Gate:
  """A Python callable as a JAX function; made by `callgate.gate`, called like any JAX function.

  Attributes:
    name: what compiled programs call it by; unique among the live gates of the process.
    function: the user's callable.
    effect, style, arrays, vmap, thread: as given to `callgate.gate`.
  """

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
  ) -> None:
    self.name = name if name is not None else _runtime.unique_name(function)
    self.function = function
    self.effect: Effect = _options.choice(self.name, "effect", effect, ("pure", "io", "ordered"))
    self.style: Style = _options.choice(self.name, "style", style, _adapt.STYLES)
    self.arrays: Arrays = _options.choice(self.name, "arrays", arrays, _adapt.ARRAY_KINDS)
    self.thread: Thread = _options.choice(self.name, "thread", thread, ("xla", "own"))
    self.vmap_rule: Callable[..., Any] | None = vmap if callable(vmap) else None
    self.vmap: Vmap = "each" if callable(vmap) else _options.vmap_method(self.name, vmap)
    self.sharding = _options.sharding(self.name, sharding)
    self.timeout = _options.timeout(self.name, timeout)
    self.cast = cast
    self.like = like
    self.out = out
    self.linear = linear
    self.aliases = dict(aliases or {})
    self.rules = _derivatives.Rules(gradient=_options.gradient(self.name, gradient, effect))
    if not callable(function):
      raise GateDefinitionError(f"gate '{self.name}': expected a callable, got {function!r}")
    if out is None and like is None:
      raise GateDefinitionError(
        f"gate '{self.name}': the results' shapes are not known; expected out= (a pytree of "
        "ShapeDtypeStructs, or a function from the arguments' ShapeDtypeStructs to one) or like= "
        "(a JAX function of the same signature)"
      )
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

  def __repr__(self) -> str:
    return f"<gate '{self.name}'>"

  # -- calling -----------------------------------------------------------------------------------
  def __call__(self, *args: Any, **kwargs: Any) -> Any:
    """Calls the gate, inside or outside compiled code.

    Args:
      *args: pytrees of arrays (or of Python scalars, which become arrays).
      **kwargs: pytrees that hold an array are arguments too; anything else is static, must be
        hashable, and reaches the callable as it is.

    Returns:
      The pytree that `out` (or `like`) declares, of jax.Arrays.
    """
    raise_deferred()
    arrays, static = _shapes.split_static(self.name, kwargs)
    if arrays and (self.rules.defined or self.like is not None):
      args, arrays = _shapes.to_positional(self, args, arrays)
    return _derivatives.apply(self, self.rules, args, arrays, static)

  def apply_raw(
    self, args: tuple[Any, ...], kwargs: dict[str, Any], static: tuple[tuple[str, Any], ...]
  ) -> Any:
    """Binds the call, without derivative rules of its own."""
    leaves, in_tree = jax.tree.flatten((args, kwargs))
    leaves = [_shapes.as_array(self, leaf, i) for i, leaf in enumerate(leaves)]
    structs = [jax.ShapeDtypeStruct(jnp.shape(x), x.dtype) for x in leaves]
    results, out_tree = _shapes.result_types(self, in_tree, structs, static)
    site = CallSite(in_tree, out_tree, static, results)
    _shapes.check_call(self, site, structs)
    if _config.engine() == "jax":
      flat = _jax_engine.bind(self, site, leaves)
    else:
      flat = gate_p.bind(*leaves, gate=self, site=site, levels=(), whole=None)
    return jax.tree.unflatten(out_tree, flat)

  # -- rules -------------------------------------------------------------------------------------
  def defjvp(self, rule: Callable[..., Any]) -> Callable[..., Any]:
    """Defines forward-mode derivatives: `rule(primals, tangents) -> (out, tangent_out)`.

    As `jax.custom_jvp.defjvp`; the rule may call this gate. Static keyword arguments are passed on
    to a rule that has parameters for them. Returns the rule, for use as a decorator.
    """
    self.rules.set_jvp(self.name, rule)
    return rule

  def defvjp(self, fwd: Callable[..., Any], bwd: Callable[..., Any]) -> None:
    """Defines reverse-mode derivatives, as `jax.custom_vjp.defvjp`.

    Args:
      fwd: `fwd(*args) -> (out, residuals)`.
      bwd: `bwd(residuals, cotangent) -> tuple of cotangents`, one for each positional argument.
    """
    self.rules.set_vjp(self.name, fwd, bwd)

  def deftranspose(self, rule: Callable[..., Any]) -> Callable[..., Any]:
    """Defines the transpose of a gate that is linear (see `linear=`).

    Args:
      rule: `rule(cotangent, *args)`, where linear arguments are ShapeDtypeStructs and the others
        arrays; returns the cotangent of the linear argument, or a tuple of them in order.
    """
    self.rules.transpose = rule
    if self.linear is False:
      self.linear = True
    return rule

  def defvmap(self, rule: Callable[..., Any]) -> Callable[..., Any]:
    """Overrides batching: `rule(axis_size, in_batched, *args) -> (out, out_batched)`.

    As `jax.custom_batching.custom_vmap.def_vmap`: batched leaves have a leading axis;
    `in_batched` has the arguments' structure, `out_batched` the result's.
    """
    self.vmap_rule = rule
    return rule

  def check(self, *args: Any, rtol: float = 1e-5, atol: float = 1e-6, **kwargs: Any) -> None:
    """Compares the gate with its `like` reference on real values.

    Raises:
      AssertionError: a result differs; the message has NumPy's table of mismatches.
      GateDefinitionError: the gate has no `like`.
    """
    if self.like is None:
      raise GateDefinitionError(
        f"gate '{self.name}': check() needs like=, the reference to compare"
      )
    got, want = self(*args, **kwargs), self.like(*args, **kwargs)
    paths = jax.tree_util.tree_flatten_with_path(want)[0]
    for (path, reference), value in zip(paths, jax.tree.leaves(got), strict=True):
      np.testing.assert_allclose(
        np.asarray(value, np.asarray(reference).dtype),
        reference,
        rtol=rtol,
        atol=atol,
        err_msg=f"gate '{self.name}', result {_names.keystr(path)}",
      )

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
      (`fn(context, out, *args)`, with `context.stage`, `.stream`, `.device`).
    arrays: what the callable gets: "numpy" views, "buffer" (`callgate.Buffer`), "jax" or "torch"
      arrays, all zero-copy on the CPU. Torch has no read-only tensors: do not write to inputs
      (`config(check_writes=True)` finds who does).
    aliases: flat input position to flat output position: both are one memory, in place.
    vmap: "each" (one call a lane, looped over in C++, in lane order), "whole" (one call; batched
      arguments have one leading batch axis, others none), "broadcast" (one call, all arguments
      batched) or a rule as for `Gate.defvmap`. Nested vmaps reach "whole" and "broadcast" gates as
      one folded axis.
    sharding: None or "gather": in a program over several devices the call runs once, on the whole
      arrays.
    thread: "xla" (XLA's calling thread: fastest) or "own" (a thread of callgate's; XLA's is free
      meanwhile, so the callable may itself run JAX programs of any size).
    timeout: seconds after which the program fails with a report, while the callable may go on
      unheeded. Implies thread="own", and private copies of the arrays.
    cast: allow same-kind casts of results (float64 to float32, say).
    linear: True, a position or positions of arguments in which the gate is linear; see
      `Gate.deftranspose`.
    gradient: "finite-difference": derivatives by central differences, two calls for each input
      element. For small inputs.

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
