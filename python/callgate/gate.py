"""Gates: Python callables that compiled JAX programs call.

`gate` makes one, `call` uses a callable once. What a gate is at run time lives in C++
(src/bindings/gate.cc); here is what a user sees: options, shapes, rules.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, overload

import jax
import jax.numpy as jnp
import numpy as np

from callgate import _adapt, _callgate, _compat, _config, _derivatives, _names, _runtime
from callgate._lowering import Level, is_packed
from callgate._primitive import CallSite, batch_whole, gate_p, lanes
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
    self.effect: Effect = _choice(self.name, "effect", effect, ("pure", "io", "ordered"))
    self.style: Style = _choice(self.name, "style", style, _adapt.STYLES)
    self.arrays: Arrays = _choice(self.name, "arrays", arrays, _adapt.ARRAY_KINDS)
    self.thread: Thread = _choice(self.name, "thread", thread, ("xla", "own"))
    self.vmap_rule: Callable[..., Any] | None = vmap if callable(vmap) else None
    self.vmap: Vmap = "each" if callable(vmap) else _vmap_method(self.name, vmap)
    self.sharding = _sharding(self.name, sharding)
    self.timeout = _timeout(self.name, timeout)
    self.cast = cast
    self.like = like
    self._out = out
    self._linear = linear
    self._aliases = dict(aliases or {})
    self._rules = _derivatives.Rules(gradient=_gradient(self.name, gradient, effect))
    if not callable(function):
      raise GateDefinitionError(f"gate '{self.name}': expected a callable, got {function!r}")
    if out is None and like is None:
      raise GateDefinitionError(
        f"gate '{self.name}': the results' shapes are not known; expected out= (a pytree of "
        "ShapeDtypeStructs, or a function from the arguments' ShapeDtypeStructs to one) or like= "
        "(a JAX function of the same signature)"
      )
    self.parameters = _names.parameters_of(function, _LEADING_PARAMETERS[style])
    self._callee = _callgate.Callee(
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
    arrays, static = _split_static(self.name, kwargs)
    if arrays and (self._rules.defined or self.like is not None):
      args, arrays = self._to_positional(args, arrays)
    return _derivatives.apply(self, self._rules, args, arrays, static)

  def apply_raw(
    self, args: tuple[Any, ...], kwargs: dict[str, Any], static: tuple[tuple[str, Any], ...]
  ) -> Any:
    """Binds the call, without derivative rules of its own."""
    leaves, in_tree = jax.tree.flatten((args, kwargs))
    leaves = [self._as_array(leaf, i) for i, leaf in enumerate(leaves)]
    structs = [jax.ShapeDtypeStruct(jnp.shape(x), x.dtype) for x in leaves]
    results, out_tree = self._result_types(in_tree, structs, static)
    site = CallSite(in_tree, out_tree, static, results)
    self._check_call(site, structs)
    if _config.engine() == "jax":
      flat = self._bind_jax(site, leaves)
    else:
      flat = gate_p.bind(*leaves, gate=self, site=site, levels=(), whole=None)
    return jax.tree.unflatten(out_tree, flat)

  def _as_array(self, leaf: Any, index: int) -> Any:
    if isinstance(leaf, jax.Array):
      if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
        return jax.random.key_data(leaf)
      return leaf
    try:
      return jnp.asarray(leaf)
    except (TypeError, ValueError) as error:
      raise GateDefinitionError(
        f"gate '{self.name}': argument {index}: expected an array or a pytree of arrays, got "
        f"{type(leaf).__name__}; pass anything else as a keyword argument, which is static"
      ) from error

  def _result_types(
    self, in_tree: Any, structs: list[Any], static: tuple[tuple[str, Any], ...]
  ) -> tuple[tuple[Any, ...], Any]:
    args, kwargs = jax.tree.unflatten(in_tree, structs)
    declared = self._out
    if declared is None:
      assert self.like is not None
      declared = jax.eval_shape(
        functools.partial(self.like, **_accepted(self.like, dict(static))), *args, **kwargs
      )
    elif callable(declared) and not _is_type(declared):
      rule = declared
      declared = rule(*args, **_accepted(rule, {**kwargs, **dict(static)}))
    leaves, out_tree = jax.tree.flatten(declared, is_leaf=_is_type)
    return tuple(self._result_type(leaf, i) for i, leaf in enumerate(leaves)), out_tree

  def _result_type(self, leaf: Any, index: int) -> Any:
    if not _is_type(leaf):
      raise GateDefinitionError(
        f"gate '{self.name}': out: result {index}: expected a value with .shape and .dtype, got "
        f"{leaf!r}"
      )
    dtype = np.dtype(leaf.dtype)
    if _compat.canonical_dtype(dtype) != dtype:
      raise GateDefinitionError(
        f"gate '{self.name}': out: result {index}: {dtype.name} needs jax_enable_x64; expected "
        f"{_compat.canonical_dtype(dtype).name} without it"
      )
    shape = tuple(leaf.shape)
    if not all(isinstance(extent, (int, np.integer)) for extent in shape):
      raise GateDefinitionError(
        f"gate '{self.name}': out: result {index}: expected known extents, got {shape}"
      )
    return tuple(int(extent) for extent in shape), dtype

  def _check_call(self, site: CallSite, structs: Sequence[Any]) -> None:
    if self.arrays == "numpy":
      for index, struct in enumerate(structs):
        if is_packed(struct.dtype):
          self._refuse_packed(f"argument {self.argument_name(site.spec, index)}", struct.dtype)
      for index, (_, dtype) in enumerate(site.results):
        if is_packed(dtype):
          self._refuse_packed(f"result {index}", dtype)
    for i, o in self._aliases.items():
      self._check_alias(i, o, structs, site.results)

  def _refuse_packed(self, what: str, dtype: Any) -> None:
    raise GateDefinitionError(
      f"gate '{self.name}': {what}: {np.dtype(dtype).name} has several elements in a byte, so there "
      "is no zero-copy NumPy view of it; use arrays='buffer' with Buffer.unpack() and Buffer.pack(), "
      "or convert to int8 before the call"
    )

  def _check_alias(self, i: int, o: int, structs: Sequence[Any], results: Sequence[Any]) -> None:
    if not 0 <= i < len(structs):
      raise GateDefinitionError(
        f"gate '{self.name}': aliases: input {i} is outside the range [0, {len(structs)})"
      )
    if not 0 <= o < len(results):
      raise GateDefinitionError(
        f"gate '{self.name}': aliases: output {o} is outside the range [0, {len(results)})"
      )
    have, want = (structs[i].shape, structs[i].dtype), results[o]
    if have != (want[0], want[1]):
      raise GateDefinitionError(
        f"gate '{self.name}': aliases: input {i} is {have[1]}{list(have[0])} but output {o} is "
        f"{want[1]}{list(want[0])}; expected the same shape and dtype"
      )

  def _bind_jax(
    self, site: CallSite, leaves: Sequence[Any], whole: Level | None = None
  ) -> Sequence[Any]:
    """Binds the call to JAX's own callbacks, batched as this gate is batched."""
    lead = () if whole is None else (whole[0],)
    types = [jax.ShapeDtypeStruct((*lead, *shape), dtype) for shape, dtype in site.results]
    function = self.host_function(site, (), whole, types)

    def call(*args: Any) -> Sequence[Any]:
      if self.effect == "pure":
        return jax.pure_callback(function, types, *args, vmap_method="sequential")
      return jax.experimental.io_callback(function, types, *args, ordered=self.effect == "ordered")

    if self.vmap_rule is None and self.vmap == "each":
      return call(*leaves)
    with_rule = jax.custom_batching.custom_vmap(call)

    @with_rule.def_vmap
    def _(size: int, batched: Sequence[bool], *args: Any) -> Any:
      if self.vmap_rule is not None:
        results, flags = self.apply_vmap_rule(site, size, tuple(batched), args)
        return list(results), list(flags)
      bind = functools.partial(self._bind_jax, site)
      results = batch_whole(bind, self.vmap, (size, tuple(batched)), args, whole)
      return list(results), [True] * len(results)

    return with_rule(*leaves)

  def host_function(
    self, site: CallSite, levels: tuple[Level, ...], whole: Level | None, results: Sequence[Any]
  ) -> Callable[..., tuple[Any, ...]]:
    """What JAX's own callbacks call for this gate: flat arrays in, a tuple of arrays out."""
    del whole
    function, style, arrays, name = self.function, self.style, self.arrays, self.name
    types = [(tuple(r.shape), r.dtype) for r in results]

    def call(*inputs: Any) -> tuple[Any, ...]:
      return _adapt.run_on_host(
        function, style, arrays, name, site, types, [np.asarray(x) for x in inputs], self.cast
      )

    if not levels:
      return call

    def loop(*inputs: Any) -> tuple[Any, ...]:
      core = [(shape[len(levels) :], dtype) for shape, dtype in types]
      arrays_in = [np.asarray(x) for x in inputs]
      rows = [
        _adapt.run_on_host(
          function, style, arrays, name, site, core,
          [x[i] for x, i in zip(arrays_in, index, strict=True)], self.cast,
        )
        for index in lanes(levels, len(inputs))
      ]
      return tuple(
        np.stack([row[k] for row in rows]).reshape(shape) if rows else np.empty(shape, dtype)
        for k, (shape, dtype) in enumerate(types)
      )

    return loop

  def _to_positional(
    self, args: tuple[Any, ...], arrays: dict[str, Any]
  ) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Array keywords as positional arguments, since derivative rules are positional."""
    out = list(args)
    rest = dict(arrays)
    for parameter in self.parameters[len(args) :]:
      if parameter not in rest:
        break
      out.append(rest.pop(parameter))
    if rest:
      raise GateDefinitionError(
        f"gate '{self.name}': array argument(s) {sorted(rest)} were passed by keyword, but the gate "
        "has derivative rules, which are positional; expected positional arguments"
      )
    return tuple(out), rest

  # -- rules -------------------------------------------------------------------------------------
  def defjvp(self, rule: Callable[..., Any]) -> Callable[..., Any]:
    """Defines forward-mode derivatives: `rule(primals, tangents) -> (out, tangent_out)`.

    As `jax.custom_jvp.defjvp`; the rule may call this gate. Static keyword arguments are passed on
    to a rule that has parameters for them. Returns the rule, for use as a decorator.
    """
    self._rules.set_jvp(self.name, rule)
    return rule

  def defvjp(self, fwd: Callable[..., Any], bwd: Callable[..., Any]) -> None:
    """Defines reverse-mode derivatives, as `jax.custom_vjp.defvjp`.

    Args:
      fwd: `fwd(*args) -> (out, residuals)`.
      bwd: `bwd(residuals, cotangent) -> tuple of cotangents`, one for each positional argument.
    """
    self._rules.set_vjp(self.name, fwd, bwd)

  def deftranspose(self, rule: Callable[..., Any]) -> Callable[..., Any]:
    """Defines the transpose of a gate that is linear (see `linear=`).

    Args:
      rule: `rule(cotangent, *args)`, where linear arguments are ShapeDtypeStructs and the others
        arrays; returns the cotangent of the linear argument, or a tuple of them in order.
    """
    self._rules.transpose = rule
    if self._linear is False:
      self._linear = True
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
      raise GateDefinitionError(f"gate '{self.name}': check() needs like=, the reference to compare")
    got, want = self(*args, **kwargs), self.like(*args, **kwargs)
    paths = jax.tree_util.tree_flatten_with_path(want)[0]
    for (path, reference), value in zip(paths, jax.tree.leaves(got), strict=True):
      np.testing.assert_allclose(
        np.asarray(value, np.asarray(reference).dtype), reference, rtol=rtol, atol=atol,
        err_msg=f"gate '{self.name}', result {_names.keystr(path)}",
      )

  # -- what the primitive's rules ask ------------------------------------------------------------
  def argument_name(self, spec: str, index: int) -> str:
    """The quoted name of a flat argument."""
    return _names.argument(self.name, spec, index)

  def aliases_of(self, levels: Sequence[Level], operands: int) -> dict[int, int]:
    """The aliases that hold with these batch levels: an unbatched input is shared by the lanes."""
    del operands
    return {
      i: o for i, o in self._aliases.items() if all(mask[i] for _, mask in levels)
    }

  def linear_leaves(self, in_tree: Any) -> frozenset[int]:
    """Flat positions of the arguments that the gate is declared linear in."""
    if self._linear is False:
      return frozenset()
    args, kwargs = jax.tree.unflatten(in_tree, range(in_tree.num_leaves))
    if self._linear is True:
      return frozenset(range(in_tree.num_leaves))
    positions = (self._linear,) if isinstance(self._linear, int) else tuple(self._linear)
    del kwargs
    return frozenset(i for p in positions for i in jax.tree.leaves(args[p]))

  def linear_names(self, site: CallSite) -> str:
    """Names of the linear arguments, for messages."""
    return ", ".join(
      self.argument_name(site.spec, i) for i in sorted(self.linear_leaves(site.in_tree))
    )

  def transpose_leaves(
    self, site: CallSite, cotangents: Sequence[Any], flat: Sequence[Any], linear: Sequence[int]
  ) -> list[Any]:
    """Runs the transpose rule of one lane on flat values."""
    if self._rules.transpose is None:
      raise GateDefinitionError(
        f"gate '{self.name}' is declared linear but has no transpose, which reverse-mode "
        "differentiation needs; expected a rule given with gate.deftranspose"
      )
    cotangent = jax.tree.unflatten(site.out_tree, cotangents)
    args, kwargs = jax.tree.unflatten(site.in_tree, flat)
    rule = self._rules.transpose
    grads = rule(cotangent, *args, **kwargs, **_accepted(rule, dict(site.static)))
    leaves = jax.tree.leaves(grads)
    if len(leaves) != len(linear):
      raise GateDefinitionError(
        f"gate '{self.name}': the transpose rule returned {len(leaves)} cotangents; expected one for "
        f"each of the linear arguments {self.linear_names(site)}"
      )
    return leaves

  def apply_vmap_rule(
    self, site: CallSite, size: int, mask: tuple[bool, ...], operands: Sequence[Any]
  ) -> tuple[Sequence[Any], Sequence[bool]]:
    """Runs the user's batching rule on flat values."""
    assert self.vmap_rule is not None
    args, kwargs = jax.tree.unflatten(site.in_tree, operands)
    flags, _ = jax.tree.unflatten(site.in_tree, mask)
    rule = self.vmap_rule
    out, out_batched = rule(
      size, list(flags), *args, **kwargs, **_accepted(rule, dict(site.static))
    )
    leaves, tree = jax.tree.flatten(out)
    if tree != site.out_tree:
      raise GateDefinitionError(
        f"gate '{self.name}': the vmap rule returned results of structure {tree}; expected "
        f"{site.out_tree}"
      )
    batched = _broadcast_prefix(out_batched, site.out_tree)
    for leaf, (shape, dtype), flag in zip(leaves, site.results, batched, strict=True):
      want = ((size, *shape) if flag else shape, dtype)
      if (jnp.shape(leaf), leaf.dtype) != want:
        raise GateDefinitionError(
          f"gate '{self.name}': the vmap rule returned {leaf.dtype}{list(jnp.shape(leaf))}; "
          f"expected {want[1]}{list(want[0])}"
        )
    return leaves, batched

  def no_derivative_message(self) -> str:
    """What a user without derivative rules needs to know."""
    return (
      f"gate '{self.name}' has no derivative. Define one in any of four ways: gate.defjvp(rule), "
      "gate.defvjp(fwd, bwd), like=reference (a JAX function of the same signature, whose "
      "derivative then serves), or gradient='finite-difference'. A gate that is linear takes linear= "
      "and gate.deftranspose(rule)."
    )

  def stats(self) -> dict[str, int]:
    """The runtime's counters of this gate; see `callgate.stats`."""
    return self._callee.stats()


@overload
def gate(fn: Callable[..., Any], /, **options: Any) -> Gate: ...
@overload
def gate(fn: None = None, /, **options: Any) -> Callable[[Callable[..., Any]], Gate]: ...
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
  options = dict(
    out=out, like=like, name=name, effect=effect, style=style, arrays=arrays, aliases=aliases,
    vmap=vmap, sharding=sharding, thread=thread, timeout=timeout, cast=cast, linear=linear,
    gradient=gradient,
  )
  if fn is None:
    return lambda function: Gate(function, **options)
  return Gate(fn, **options)  # pyright: ignore[reportArgumentType]


_calls: dict[Any, Gate] = {}


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
  gate_options = {key: value for key, value in options.items() if key in known}
  static = {key: value for key, value in options.items() if key not in known}
  return Gate(fn, out=out, **gate_options)(*args, **static)


# -- helpers -------------------------------------------------------------------------------------
def _is_type(value: Any) -> bool:
  return hasattr(value, "shape") and hasattr(value, "dtype")


def _is_array(leaf: Any) -> bool:
  return isinstance(leaf, (jax.Array, np.ndarray, np.generic, jax.ShapeDtypeStruct))


def _split_static(
  gate: str, kwargs: dict[str, Any]
) -> tuple[dict[str, Any], tuple[tuple[str, Any], ...]]:
  """Keyword arguments that hold arrays, and the static rest in a fixed order."""
  arrays: dict[str, Any] = {}
  static: list[tuple[str, Any]] = []
  for key, value in sorted(kwargs.items()):
    if any(map(_is_array, jax.tree.leaves(value))):
      arrays[key] = value
      continue
    try:
      hash(value)
    except TypeError as error:
      raise GateDefinitionError(
        f"gate '{gate}': keyword argument '{key}': expected an array or a hashable static value, "
        f"got {type(value).__name__}"
      ) from error
    static.append((key, value))
  return arrays, tuple(static)


def _accepted(function: Callable[..., Any], keywords: dict[str, Any]) -> dict[str, Any]:
  """Those keywords that the function has parameters for."""
  return _derivatives.accepted(function, keywords)


def _broadcast_prefix(prefix: Any, tree: Any) -> list[bool]:
  """One flag a leaf, from a flag or a pytree (prefix) of flags."""
  full = jax.tree.unflatten(tree, range(tree.num_leaves))
  flags: list[bool] = []
  jax.tree.map(
    lambda flag, part: flags.extend([bool(flag)] * len(jax.tree.leaves(part))), prefix, full
  )
  return flags


def _choice(gate: str, option: str, value: Any, allowed: Sequence[str]) -> Any:
  if value not in allowed:
    expected = ", ".join(repr(a) for a in allowed)
    raise GateDefinitionError(f"gate '{gate}': {option}: expected one of {expected}, got {value!r}")
  return value


def _vmap_method(gate: str, value: Any) -> Any:
  return _choice(gate, "vmap", value, ("each", "whole", "broadcast"))


def _sharding(gate: str, value: Any) -> Any:
  if value not in (None, "gather"):
    raise GateDefinitionError(
      f"gate '{gate}': sharding: expected None or 'gather', got {value!r}; calls on the shards are "
      "not there yet (docs/roadmap.md)"
    )
  return value


def _timeout(gate: str, value: float | None) -> float:
  if value is None:
    return 0.0
  if not value > 0:
    raise GateDefinitionError(f"gate '{gate}': timeout: expected positive seconds, got {value!r}")
  return float(value)


def _gradient(gate: str, value: Any, effect: str) -> Any:
  if value is None:
    return None
  _choice(gate, "gradient", value, ("finite-difference",))
  if effect != "pure":
    raise GateDefinitionError(
      f"gate '{gate}': gradient='finite-difference' calls the gate many times, so its effect must be "
      f"'pure', got {effect!r}"
    )
  return value
