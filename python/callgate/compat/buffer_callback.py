# SPDX-License-Identifier: Apache-2.0
"""`jax.experimental.buffer_callback` as of 2025, on callgate's engine.

The names, the semantics and the error texts are JAX's. On the CPU and on CUDA GPUs callgate's gate
runs the calls, on other platforms JAX's lowering, while JAX has it. In new code prefer
`callgate.gate(style="context", arrays="buffer")`, which has derivatives and the original
exceptions.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import jax.core
import jax.numpy as jnp
from jax.interpreters import ad, batching, mlir

from callgate._call.lowering import emit
from callgate._call.site import RUNTIME_PLATFORMS
from callgate._callgate import Buffer, Callee, Context, ExecutionStage
from callgate._core import encoding, exact, options, registry, shown
from callgate._core.effects import BufferCallbackEffect
from callgate._core.errors import GateDefinitionError
from callgate._jax import callbacks, lowering, sources, tracing
from callgate._jax.tracing import Primitive
from callgate._runtime import targets
from callgate._sharding import calls
from callgate._tap.target import shared

__all__ = ["Buffer", "ExecutionContext", "ExecutionStage", "buffer_callback"]


class ExecutionContext:
  """The first argument of a callback, which describes the running call; valid during the call.

  Example:
    >>> import jax, jax.numpy as jnp
    >>> from callgate.compat import buffer_callback as bc
    >>> stages = []
    >>> def callback(ctx, out, x):
    ...   stages.append(ctx.stage)
    >>> call = bc.buffer_callback(callback, jax.ShapeDtypeStruct((), jnp.float32))
    >>> _ = call(1.0).block_until_ready()
    >>> stages == [bc.ExecutionStage.EXECUTE]
    True
  """

  __slots__ = ("_context",)

  def __init__(self, context: Context) -> None:
    self._context = context

  @property
  def stage(self) -> ExecutionStage:
    """XLA's stage: always `ExecutionStage.EXECUTE` here."""
    return self._context.stage

  @property
  def stream(self) -> int:
    """The GPU stream for the callback's work, as an integer; raises JaxRuntimeError on the CPU."""
    if not self._context.stream:
      raise jax.errors.JaxRuntimeError("UNIMPLEMENTED: XLA FFI GPU context is not available")
    return self._context.stream


def buffer_callback(
  callback: Callable[..., None], result_shape_dtypes: Any, *, has_side_effect: bool = False,
  vmap_method: str | None = None, input_output_aliases: dict[int, int] | None = None,
  command_buffer_compatible: bool = False, sharding: str | None = None, name: str | None = None,
) -> Callable[..., Any]:  # fmt: skip
  """Makes a JAX function that runs `callback` on XLA's own memory, in place.

  Args:
    callback: a hashable function `callback(ctx, out, *args, **kwargs)`. It gets an
      ExecutionContext, a pytree of writable Buffers like `result_shape_dtypes`, and the arguments
      with a read-only Buffer for each array. It writes its results into `out` and returns None.
    result_shape_dtypes: a pytree of anything with `.shape` and `.dtype`.
    has_side_effect: True keeps the call if its results are unused.
    vmap_method: as for `jax.pure_callback`; with None `jax.vmap` raises an error.
    input_output_aliases: a dict from flat input positions to flat output positions: each pair
      shares memory.
    command_buffer_compatible: True lets XLA record the callback's work on `ctx.stream` as a CUDA
      graph and replay it. The rules of `command_buffer` in `callgate.gate` apply.
    sharding: for programs over several devices, not in JAX. None or "gather" makes one call with
      whole arrays. "shard" makes a call on each device with its part of the leading dimensions. Or
      a rule, as for `callgate.gate`.
    name: the name in programs, not in JAX. Set it if another process runs your exported programs
      (`jax.export` with `callgate.export_checks()`). That process must first make a callback of the
      same name, and keep it. Without a name the program runs in this process only.

  Returns:
    A function of pytrees of arrays that returns a pytree of jax.Arrays like `result_shape_dtypes`.
    Elements that the callback doesn't write are undefined.

  Raises:
    ValueError: another gate or callback has the name. In a call: an alias is out of range, pairs
      different shapes or dtypes, or uses an output twice; or the call is differentiated.
    GateDefinitionError: `sharding` has a wrong value, or doesn't fit the arrays.
    jax.errors.JaxRuntimeError: in the program: the callback raised or returned a value.

  Example:
    >>> import jax, jax.numpy as jnp, numpy as np
    >>> from callgate.compat.buffer_callback import buffer_callback
    >>> def add_one(ctx, out, x):
    ...   np.add(x, 1, out=np.asarray(out))
    >>> x = jnp.arange(3.0)
    >>> buffer_callback(add_one, jax.ShapeDtypeStruct.like(x))(x)
    Array([1., 2., 3.], dtype=float32)
  """
  label, graph = _label(callback), command_buffer_compatible
  if callable(options.sharding(label, "sharding", sharding)):
    raise GateDefinitionError(f"{label}: sharding: expected a str or None, got a function")
  named = None
  if (name := options.name(label, name)) is not None:  # shared by equal callbacks of one name
    key = (name, *exact.identity(callback), graph)
    named = shared(_named, key, lambda: _callee(name, callback, graph))
  results, out_tree = jax.tree.flatten(result_shape_dtypes)
  result_avals = tuple(jax.core.ShapedArray(x.shape, x.dtype) for x in results)

  def call(*args: Any, **kwargs: Any) -> Any:
    flat_args, in_tree = jax.tree.flatten((args, kwargs))
    in_avals = [jax.typeof(x) for x in flat_args]
    aliases = _checked_aliases(input_output_aliases or {}, in_avals, result_avals)
    flat_results = _bind_primitive(
      *tracing.vary_alike("buffer_callback", flat_args), callback=exact.exact_object(callback),
      result_avals=result_avals, in_tree=in_tree, out_tree=out_tree, vmap_method=vmap_method,
      has_side_effect=has_side_effect, input_output_aliases=aliases,
      command_buffer_compatible=graph, sharding=sharding, named=named,
    )  # fmt: skip
    return jax.tree.unflatten(out_tree, flat_results)

  return call


def _checked_aliases(
  aliases: dict[int, int], in_avals: Sequence[Any], out_avals: Sequence[Any]
) -> tuple[tuple[int, int], ...]:
  checked: list[tuple[int, int]] = []
  for i, o in sorted((int(i), int(o)) for i, o in aliases.items()):
    mapping = f"input_output_aliases contains the mapping '{i}:{o}' "
    for what, index, avals in (("input", i, in_avals), ("output", o, out_avals)):
      if not 0 <= index < len(avals):
        raise ValueError(f"{mapping}with {what} index {index} outside the range [0, {len(avals)}).")
    source, target = in_avals[i], out_avals[o]
    if (source.shape, source.dtype) != (target.shape, target.dtype):
      other = f"an output with a different abstract value {target}."
      raise ValueError(f"{mapping}referring to an input with abstract value {source} and {other}")
    if any(o == other for _, other in checked):
      raise ValueError(f"{mapping}referring to an output that another input has already.")
    checked.append((i, o))
  return tuple(checked)


def _label(callback: Callable[..., None]) -> str:
  return f"buffer_callback '{getattr(callback, '__name__', type(callback).__name__)}'"


_effect = BufferCallbackEffect()  # constant: it has no attributes
# Guarded by target._lock.
_named: weakref.WeakValueDictionary[Any, Callee] = weakref.WeakValueDictionary()
# Atomic: single steps; never emptied: nothing reports the end of a program's last copy.
_exported: list[Callee] = []
# vmap's error text contains the name.
buffer_callback_p = Primitive("buffer_callback")
buffer_callback_p.multiple_results = True


def _bind_primitive(*args: Any, **params: Any) -> Any:
  """Binds the primitive. A callable's pickle refers to this function and not to the primitive."""
  return buffer_callback_p.bind(*args, **params)


def _abstract_eval(
  *avals: Any, result_avals: tuple[Any, ...], has_side_effect: bool, **_params: Any
) -> tuple[tuple[Any, ...], set[Any]]:
  results = tuple(tracing.shaped_array(aval.shape, aval.dtype, avals) for aval in result_avals)
  return results, {_effect} if has_side_effect else set()


def _refuse(what: str, instead: str, *_args: Any, **_params: Any) -> Any:
  please = f"Please use `jax.{instead}` to use callbacks while taking gradients."
  raise ValueError(f"Buffer callbacks do not support {what}. {please}")


def _batch(operands: Sequence[Any], dims: Sequence[Any], **params: Any) -> Any:
  """Batches as JAX does; an operand that shares memory with a result gets memory for each lane."""
  size: int = next(x.shape[d] for x, d in zip(operands, dims, strict=True) if d is not None)
  operands, dims = list(operands), list(dims)
  for i in (i for i, _ in params["input_output_aliases"] if dims[i] is None):
    operands[i], dims[i] = jnp.broadcast_to(operands[i], (size, *operands[i].shape)), 0
  with sources.traced_here():  # it may make a loop
    return callbacks.ffi_batching_rule(buffer_callback_p, operands, dims, **params)


def _lowering(ctx: Any, *operands: Any, **params: Any) -> Sequence[Any]:
  platform, *others = lowering.platforms_of(ctx)
  if others:
    raise NotImplementedError("multi-platform lowering for buffer_callback")
  if platform not in RUNTIME_PLATFORMS:
    if (rule := callbacks.buffer_callback_lowering()) is None:
      raise ValueError(f"`buffer_callback` not supported on {platform} backend.")
    return rule(ctx, *operands, **params | {"callback": params["callback"].value})
  callback, callee = params["callback"].value, params["named"]
  graph, effect = params["command_buffer_compatible"], params["has_side_effect"]
  if callee is None:
    with registry.name_while_alive(registry.name_of(callback)) as name:
      callee = _callee(name, callback, graph)
    if lowering.is_export(ctx):
      _exported.append(callee)
  if not lowering.is_export(ctx):
    lowering.add_keepalive(ctx, callee)
  aliases, label = dict(params["input_output_aliases"]), _label(callback)
  sharded = calls.of_callback(ctx, label, params["sharding"], effect=effect, aliases=aliases)
  return emit(
    ctx, operands, ctx.avals_in, ctx.avals_out, name=callee.name,
    spec=encoding.encode(params["in_tree"], params["out_tree"], ()), has_side_effect=effect,
    aliases=aliases, sharded=sharded, on_error="return",
    target=targets.GRAPH_TARGET if graph and platform == "cuda" else targets.GATE_TARGET,
  )  # fmt: skip


def _callee(name: str, callback: Callable[..., None], graph: bool) -> Callee:
  return Callee(
    name, callback, bind=functools.partial(_bind, callback), style="context", arrays="buffer",
    flat_results=True, native=True, command_buffer=graph,
  )  # fmt: skip


def _bind(callback: Callable[..., None], spec: str) -> tuple[Callable[..., None], bool]:
  """Returns `callback` as the runtime calls it: with the context, results and flat inputs."""
  trees = None if spec in ("", "*") else encoding.signature(spec)

  def call(context: Context, outputs: tuple[Buffer, ...], *inputs: Buffer) -> None:
    out: Any = outputs if spec else outputs[0]
    args, kwargs = inputs, {}
    if trees is not None:
      out, (args, kwargs) = jax.tree.unflatten(trees.out_tree, outputs), trees.arguments(inputs)
    if callback(ExecutionContext(context), out, *args, **kwargs) is not None:
      raise ValueError("buffer_callback callback must not return any values.")

  return call, True


tracing.define_impl(buffer_callback_p)
buffer_callback_p.def_effectful_abstract_eval(_abstract_eval)
ad.primitive_jvps[buffer_callback_p] = functools.partial(_refuse, "JVP", "custom_jvp")
ad.primitive_transposes[buffer_callback_p] = functools.partial(_refuse, "transpose", "custom_vjp")
batching.primitive_batchers[buffer_callback_p] = _batch
tracing.weakly_cached.add(exact.Exact)
mlir.register_lowering(buffer_callback_p, _lowering, cacheable=False)

shown.show(*map(globals().get, __all__))
