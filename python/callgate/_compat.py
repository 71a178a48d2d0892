"""Everything callgate takes from JAX's private modules, and nothing else does.

Each entry says what it stands for, in which JAX versions it was seen, and what public API would
replace it. A new JAX version that moves one of these is served here alone.
"""

from __future__ import annotations

import collections
import contextlib
import functools
import math
import os
import queue
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax._src import callback as _callback
from jax._src import config as _config
from jax._src import core as _core
from jax._src import debugging as _debugging
from jax._src import dispatch as _dispatch
from jax._src import distributed as _distributed
from jax._src import dtypes as _dtypes
from jax._src import effects as _effects
from jax._src import ffi as _ffi
from jax._src import source_info_util as _source_info
from jax._src import util as _util
from jax._src.interpreters import batching as _batching
from jax._src.interpreters import mlir as _mlir
from jax._src.interpreters import pxla as _pxla
from jax._src.lax.control_flow import loops as _loops
from jax._src.lib import (
  xla_client as _xla_client,  # pyright: ignore[reportPrivateImportUsage]
)

# -- effects -------------------------------------------------------------------------------------
# A JAX effect keeps a call alive and ordered. JAX has no public way to define one (0.10 to 0.12);
# `jax.Ref`-based effects may replace it.
Effect = _effects.Effect


def allow_effect(effect: type[Any], *, ordered: bool, kept: bool = False) -> None:
  """Lets an effect class of ours through every transformation of JAX.

  With `kept` linearization keeps a call of which nothing is used, as it does JAX's own debug
  callbacks.
  """
  allowed = [
    _effects.lowerable_effects,
    _effects.control_flow_allowed_effects,
    _effects.remat_allowed_effects,
    _effects.custom_derivatives_allowed_effects,
  ]
  if kept:
    allowed.append(_effects.partial_eval_kept_effects)
  if ordered:
    allowed += [_effects.ordered_effects, _effects.shardable_ordered_effects]
  for types in allowed:
    types.add_type(effect)


def keep_through_partial_evaluation(effect: type[Any]) -> None:
  """Keeps calls with the effect in what is evaluated later, although nothing uses them."""
  _effects.partial_eval_kept_effects.add_type(effect)


# JAX keeps the tokens of dispatched programs for each thread alone, and `jax.effects_barrier` waits
# for those of its own thread (0.10 to 0.12). No public way to wait for another thread's.
_effect_tokens: dict[Any, Any] = {}
_after_barrier: list[Callable[[], None]] = []
_local = threading.local()


def after_effects_barrier(function: Callable[[], None]) -> None:
  """Has `jax.effects_barrier()` call a function when its programs are done (0.10 to 0.12)."""
  _after_barrier.append(function)


def remember_effects() -> None:
  """Keeps the newest token of each thread, device and ordered effect where all threads see it."""
  tokens: Any = _dispatch.RuntimeTokenSet
  set_output, set_result = tokens.set_output_runtime_token, tokens.set_token_result

  def set_output_runtime_token(self: Any, device: Any, token: Any) -> None:
    _have_waiter()
    _effect_tokens[threading.get_ident(), device] = token
    set_output(self, device, token)

  def set_token_result(self: Any, effect: Any, token: Any) -> None:
    _have_waiter()
    _effect_tokens[threading.get_ident(), effect] = token
    set_result(self, effect, token)

  def block_until_ready(self: Any) -> None:
    wait(self)
    if not getattr(_local, "alone", False):
      for after in _after_barrier:
        after()

  wait = tokens.block_until_ready
  tokens.block_until_ready = block_until_ready
  tokens.set_output_runtime_token = set_output_runtime_token
  tokens.set_token_result = set_token_result


def effects_barrier_alone() -> None:
  """`jax.effects_barrier()` without what `after_effects_barrier` added to it."""
  _local.alone = True
  try:
    jax.effects_barrier()
  finally:
    _local.alone = False


def forget_effects() -> None:
  """Has neither `jax.effects_barrier` nor JAX's exit wait for what runs now (0.10 to 0.12)."""
  _effect_tokens.clear()
  _dispatch.runtime_tokens.clear()


def wait_for_effects(timeout: float | None, watch: Callable[[], None] | None = None) -> bool:
  """Waits for the programs with effects that any thread dispatched; False when the time ran out.

  Whatever they failed with is left to `jax.effects_barrier` in the thread that dispatched them.
  `watch` is called now and then meanwhile, and ends the wait by raising.
  """
  if not _effect_tokens:
    return True
  if timeout is None and watch is None:
    _wait_for_tokens()
    return True
  # Tokens have no wait with a limit, so another thread waits.
  done = threading.Event()
  try:
    _idle_waiter().put(done)
  except RuntimeError:  # too late for a thread: what came so late ran where it was dispatched
    _wait_for_tokens()
    return True
  if watch is None:
    return done.wait(timeout)
  deadline = math.inf if timeout is None else time.monotonic() + timeout
  while not done.is_set() and (left := deadline - time.monotonic()) > 0:
    done.wait(min(left, 0.1))
    watch()
  return done.is_set()


# The requests of each idle thread that waits for tokens on another's behalf. There is one from the
# first program with effects on: at the end of the process Python 3.12 makes no thread any more.
_waiters: collections.deque[queue.SimpleQueue[threading.Event]] = collections.deque()


def _have_waiter() -> None:
  if not _waiters:
    with contextlib.suppress(RuntimeError):  # at the end of the process: see above
      _waiters.append(_idle_waiter())


def _idle_waiter() -> queue.SimpleQueue[threading.Event]:
  """One that is nobody else's from now on."""
  with contextlib.suppress(IndexError):
    return _waiters.pop()
  requests: queue.SimpleQueue[threading.Event] = queue.SimpleQueue()
  name, own = "callgate barrier", (requests,)
  threading.Thread(target=_wait_on_request, args=own, name=name, daemon=True).start()
  return requests


def _wait_on_request(requests: queue.SimpleQueue[threading.Event]) -> None:
  while True:
    done = requests.get()
    _wait_for_tokens()
    _waiters.append(requests)
    done.set()


def forget_waiters() -> None:
  """In a fork's child, which has none of these threads."""
  _waiters.clear()


def _wait_for_tokens() -> None:
  for key, token in list(_effect_tokens.items()):
    with contextlib.suppress(Exception):
      token.block_until_ready()
    if _effect_tokens.get(key) is token:
      _effect_tokens.pop(key, None)


# -- configuration that is part of jit's cache key -------------------------------------------------
# `jax.config` has no public way to add an option (0.10 to 0.12).
def define_enum(name: str, values: Sequence[str], default: str, help: str) -> Any:
  """A process-wide and thread-local option; jit retraces when it changes."""
  return _config.enum_state(
    name=name,
    enum_values=list(values),
    default=default,
    help=help,
    include_in_jit_key=True,
    include_in_trace_context=True,
  )


def define_bool(name: str, default: bool, help: str) -> Any:
  """As `define_enum`, for a flag."""
  return _config.bool_state(
    name=name,
    default=default,
    help=help,
    include_in_jit_key=True,
    include_in_trace_context=True,
  )


def update_option(name: str, value: object) -> None:
  """Sets an option for the whole process."""
  _config.config.update(name, value)


# -- abstract values -------------------------------------------------------------------------------
def shaped_array(
  shape: tuple[int, ...], dtype: Any, operands: Sequence[Any], *, weak_type: bool = False
) -> Any:
  """The abstract value of a result that depends on `operands` (0.10 to 0.12).

  Carries the mesh of an explicitly sharded program, and in a `jax.shard_map` varies over each mesh
  axis that an operand varies over; `jax.core.ShapedArray` alone has no such arguments.
  """
  aval = _core.ShapedArray(shape, dtype, weak_type=weak_type)
  if aval.sharding.mesh.empty:
    aval = aval.update(sharding=_core.get_cur_mesh_sharding())
  return varying_aval(aval, varying_axes(operands))


# In a `jax.shard_map` with `check_vma=True`, its default, JAX types each value by the mesh axes
# that it varies over. Transposition adds up over the axes that a value is cast to vary over, so
# what a type says decides what a gradient is. `jax.lax.pcast` is the public cast, `jax.typeof(x)`
# shows the axes; JAX has no public way to give an abstract value its axes (0.10 to 0.12).
def varying_axes(values: Sequence[Any]) -> frozenset[Any]:
  """The manual mesh axes that one of the values, abstract or not, varies over."""
  axes: frozenset[Any] = frozenset()
  for value in values:
    axes |= _manual_type(value).varying
  return axes


def varying_aval(aval: Any, axes: frozenset[Any]) -> Any:
  """An abstract value that varies over the axes as well as over its own."""
  more = axes - aval.manual_axis_type.varying
  if not more:
    return aval
  return aval.update(
    manual_axis_type=aval.manual_axis_type.update(varying=aval.manual_axis_type.varying | more)
  )


def vary_over(axes: frozenset[Any], value: Any) -> Any:
  """The value, cast to vary over the axes as well as over its own."""
  more = axes - _manual_type(value).varying
  return _core.pvary(value, tuple(sorted(more, key=str))) if more else value


def manual_axes() -> frozenset[Any]:
  """The mesh axes of the `jax.shard_map` being traced whose check is on; none outside of one."""
  if not _config._check_vma.value:  # pyright: ignore[reportPrivateUsage]
    return frozenset()
  return frozenset(getattr(jax.sharding.get_abstract_mesh(), "manual_axes", ()))


def vary_alike(what: str, values: Sequence[Any]) -> Sequence[Any]:
  """The values, cast to vary over the same axes, as operands of JAX's own operations are.

  Raises ValueError where the user has switched such casts off (`jax_auto_pcast`) and they differ.
  """
  alike: Sequence[Any] = _core.auto_insert_reshard(*values)
  _core.standard_vma_rule(what, *map(_core.typeof, alike))
  return alike


def _manual_type(value: Any) -> Any:
  aval = value if isinstance(value, _core.AbstractValue) else _core.typeof(value)
  return getattr(aval, "manual_axis_type", _core.empty_mat)


def canonical_dtype(dtype: Any) -> Any:
  """The dtype that JAX gives an array of `dtype`: 64-bit types shrink unless x64 is enabled."""
  return _dtypes.canonicalize_dtype(dtype)


# -- running a primitive outside jit ---------------------------------------------------------------
# `jax.interpreters.xla.apply_primitive` was the public name; removed before 0.10.
def define_impl(primitive: Any) -> None:
  """Runs the primitive eagerly by compiling it alone."""
  _dispatch.simple_impl(primitive)


# -- batching --------------------------------------------------------------------------------------
def batched(
  jaxpr: Any, axis_data: Any, batched: Sequence[bool], instantiate: Any
) -> tuple[Any, list[bool]]:
  """A jaxpr with these arguments batched, on axis 0, and which results are (0.10 to 0.12).

  `instantiate`: those that are to be batched in any case, or a flag for all. What JAX's own
  batching rules of control flow use; no public name.
  """
  result, flags = _batching.batch_jaxpr(jaxpr, axis_data, batched, instantiate)
  return result, list(flags)


# -- jaxprs --------------------------------------------------------------------------------------
def subjaxprs(eqn: Any) -> list[Any]:
  """The jaxprs in an equation's parameters (0.10 to 0.12); `jax.extend` has no public walker."""
  return list(_core.jaxprs_in_params(eqn.params))


def is_saveable(saveable: Any, eqn: Any) -> bool:
  """Whether a `jax.checkpoint` policy saves what the equation gives (0.10 to 0.12)."""
  from jax._src.interpreters import partial_eval

  says = saveable(eqn.primitive, *[v.aval for v in eqn.invars], **eqn.params)
  return says is True or says is partial_eval.Saveable or isinstance(says, partial_eval.Offloadable)


def keep_results(holds: Callable[[Any], bool]) -> None:
  """Of loops, branches and inner jits for which `holds` all results are kept if one is used.

  Wraps their rules of dead code elimination, which would drop a loop's unused carry with all that
  only it needs, whether it has an effect or not (0.10 to 0.12; `while_loop` has a rule since 0.12).
  JAX has no public way to say that an equation counts where it stands.
  """
  from jax._src.interpreters import partial_eval
  from jax._src.pjit import jit_p

  rules: dict[Any, Callable[..., Any]] = partial_eval.dce_rules
  for primitive in (jax.lax.scan_p, jax.lax.while_p, jax.lax.cond_p, jit_p):
    if primitive in rules:
      rules[primitive] = _keeping_results(rules[primitive], holds)


def _keeping_results(rule: Callable[..., Any], holds: Callable[[Any], bool]) -> Callable[..., Any]:
  # 0.12 says which inputs live, too: rule(used, live, eqn).
  def keeping(used: Sequence[bool], *live_and_eqn: Any) -> Any:
    whole = any(used) and not all(used) and holds(live_and_eqn[-1])
    return rule([True] * len(used) if whole else used, *live_and_eqn)

  return keeping


# -- loops -----------------------------------------------------------------------------------------
def wrap_scan_hoisting(wrapped: Callable[[Any], Any]) -> None:
  """Puts `wrapped(original)` in the place of what hoists out of a scan (0.10 to 0.12).

  `jax._src.lax.control_flow.loops._scan_known_hoisting`; it has no public name.
  """
  from jax._src.lax.control_flow import loops

  loops._scan_known_hoisting = wrapped(loops._scan_known_hoisting)


def wrap_partial_evaluation(wrapped: Callable[[Any], Any]) -> None:
  """Puts `wrapped(original)` in the place of `partial_eval_jaxpr_nounits` (0.10 to 0.12).

  `jax._src.interpreters.partial_eval`, where JAX's own rules look it up; it has no public name.
  """
  from jax._src.interpreters import partial_eval

  partial_eval.partial_eval_jaxpr_nounits = wrapped(partial_eval.partial_eval_jaxpr_nounits)


def move_binders_to_front(jaxpr: Any, moved: Sequence[bool]) -> Any:
  """The jaxpr with some of its arguments before the others (0.10 to 0.12)."""
  from jax._src.interpreters import partial_eval

  return partial_eval.move_binders_to_front(jaxpr, moved)


# -- lowering --------------------------------------------------------------------------------------
# `jax.ffi.ffi_lowering` is public but takes no token and gives no operation to annotate.
def emit_ffi_call(
  context: Any,
  target: str,
  operands: Sequence[Any],
  operand_avals: Sequence[Any],
  result_avals: Sequence[Any],
  attributes: Mapping[str, Any],
  *,
  has_side_effect: bool,
  aliases: Mapping[int, int],
  token: Any = None,
  sharding: Any = None,
  rule: Any = None,
) -> tuple[Sequence[Any], Any]:
  """Emits a typed FFI custom call; returns its results and, given a token, the token after it."""
  offset = 0
  if token is not None:
    operands = [token, *operands]
    operand_avals = [_core.abstract_token, *operand_avals]
    result_avals = [_core.abstract_token, *result_avals]
    offset = 1
  context = context.replace(avals_in=list(operand_avals), avals_out=list(result_avals))
  operation = _ffi.build_ffi_lowering_function(
    target,
    has_side_effect=has_side_effect,
    operand_output_aliases={i + offset: o + offset for i, o in aliases.items()} or None,
  )(context, *operands, **attributes)
  if sharding is not None:
    _mlir.set_sharding(context.module_context, operation, sharding)
  if rule is not None:
    _set_sharding_rule(operation, rule)
  results = list(operation.results)
  if token is None:
    return results, None
  return results[1:], results[0]


def platforms_of(context: Any) -> tuple[str, ...]:
  """The platforms that the rule being run lowers for (0.10 to 0.12)."""
  return tuple(context.platforms or context.module_context.platforms)


def lower_each_platform(
  context: Any,
  rules: Mapping[str, Callable[..., Sequence[Any]]],
  effects: Any,
  operands: Sequence[Any],
) -> Sequence[Any]:
  """What `rules` make for each platform, of which a program for several chooses when it runs.

  JAX does so itself for rules that were registered by platform, but not uncached ones: it takes the
  context's results for a list (0.10 to 0.12).
  """
  context_of_lists = context.replace(avals_out=list(context.avals_out))
  results = _mlir.lower_per_platform(
    context_of_lists, "callgate", dict(rules), None, effects, *operands
  )
  if context_of_lists.tokens_out is not None:
    context.set_tokens_out(context_of_lists.tokens_out)
  return results


def lower_in_order(
  context: Any, function: Callable[..., Any], operands: Sequence[Any], effect: Any
) -> Sequence[Any]:
  """Lowers `function`, with one ordered callback of JAX's in it, in the order of our `effect`.

  `jax.interpreters.mlir.lower_fun` is public, tokens are not (0.10 to 0.12).
  """
  token = token_before(context, effect)
  inner = context.replace(tokens_in=_mlir.TokenSet({ordered_io_effect: token}))
  results = _mlir.lower_fun(function, multiple_results=True)(inner, *operands)
  set_token_after(context, effect, inner.tokens_out.get(ordered_io_effect))
  return results


def token_before(context: Any, effect: Any) -> Any:
  """The token that orders the call being lowered after the earlier calls with this effect."""
  return context.tokens_in.get(effect)


def set_token_after(context: Any, effect: Any, token: Any) -> None:
  """Orders later calls with this effect after the one being lowered."""
  context.set_tokens_out(context.tokens_in.update_tokens(_mlir.TokenSet({effect: token})))


def device_count(context: Any) -> int:
  """Devices that the program being lowered runs on (0.10 to 0.12: private axis contexts)."""
  axes = context.module_context.axis_context
  if hasattr(axes, "num_devices"):
    return axes.num_devices
  mesh = getattr(axes, "mesh", None)
  return mesh.size if mesh is not None else 1


def program_devices(context: Any) -> tuple[Any, ...] | None:
  """The devices of the program being lowered; None inside a manual region (0.10 to 0.12)."""
  from jax._src import sharding_impls

  axes = context.module_context.axis_context
  if not isinstance(axes, sharding_impls.ShardingContext):
    return None
  devices = axes.device_assignment
  return tuple(devices) if devices is not None else (None,) * axes.num_devices


def in_manual_region() -> bool:
  """Whether the code being traced is inside a `jax.shard_map` or `jax.pmap` (0.10 to 0.12)."""
  return bool(getattr(jax.sharding.get_abstract_mesh(), "manual_axes", ()))


def in_no_trace() -> bool:
  """Whether this thread is outside of all transformations (0.10 to 0.12); no public name."""
  return _core.trace_state_clean()


def trace_key() -> Any:
  """What JAX's own caches of traces depend on besides the arguments (0.10 to 0.12)."""
  return _config.trace_context()


def first_calls(frames: Iterable[Any]) -> list[tuple[Any, Any]]:
  """(function, jaxpr) of each jitted function whose first call executes, in a thread's `frames`.

  Other threads that call the function wait for that call to end (0.10 to 0.12). No public name.
  """
  found: list[tuple[Any, Any]] = []
  for top in frames:
    if os.path.basename(top.f_code.co_filename) != "pxla.py" or top.f_code.co_name != "__call__":
      continue
    frame, jaxpr = top, None
    while frame is not None:
      names = frame.f_code.co_varnames
      if jaxpr is None and "jaxpr" in names:
        jaxpr = frame.f_locals.get("jaxpr")
      if frame.f_code.co_name == "cache_miss" and "fun" in frame.f_code.co_freevars:
        found.append((frame.f_locals["fun"], jaxpr))
        jaxpr = None
      frame = frame.f_back
  return found


def is_jitted(value: Any) -> bool:
  """Whether a value is a function that `jax.jit` made. jaxlib's type of it is private."""
  return isinstance(value, _jitted_type())


@functools.cache
def _jitted_type() -> type[Any]:
  return type(jax.jit(_nothing))


def _nothing() -> None: ...


def keep_with_program(context: Any, value: object) -> None:
  """Keeps `value` alive as long as the module being lowered, so also a `jax.stages.Lowered`.

  JAX's own keepalive would do, but makes `jax.export` refuse the program (0.10 to 0.12).
  """
  weakref.finalize(context.module_context.module, id, value).atexit = False


def call_site(context: Any) -> tuple[str, int, str] | None:
  """(file, line, function) of the user's code that traced the operation being lowered.

  `jax.extend.source_info_util` is public but does not read a lowering's traceback (0.10 to 0.12).
  """
  traceback = getattr(context, "traceback", None)
  frame = _source_info.user_frame(traceback) if traceback is not None else None
  if frame is None:
    return None
  return frame.file_name, frame.start_line, frame.function_name


def exclude_from_tracebacks(path: str) -> None:
  """Leaves files under `path` out of JAX's notion of the user's code."""
  _source_info.register_exclusion(path)


# -- dispatch --------------------------------------------------------------------------------------
# JAX leaves its C++ dispatch path when an executable reports an effect (0.10 to 0.12). No public
# API: this is `callgate.config(fast_dispatch=True)`, design section 10.
def filter_dispatch_effects(keep: Callable[[Any], bool]) -> None:
  """Hides the unordered effects that `keep` refuses from JAX's dispatch, once for the process."""
  original = _pxla.ExecuteReplicated.__init__

  def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
    original(self, *args, **kwargs)
    if self.has_unordered_effects:
      effects = kwargs.get("unordered_effects")
      if effects is None:
        effects = args[5]  # after xla_executable, name, backend, in_handler, out_handler
      self.has_unordered_effects = any(keep(effect) for effect in effects)

  _pxla.ExecuteReplicated.__init__ = __init__


def keep_ordered_programs_off_cpp_path() -> None:
  """Makes compiled (AOT) programs with ordered effects take JAX's Python dispatch, as jit does.

  `MeshExecutable.create_cpp_call` looks at unordered effects and host callbacks, but not at ordered
  effects (0.10 to 0.12): from its second call on such a program would get no token. JAX's own
  ordered callbacks are host callbacks, so they never meet this.
  """
  original = _pxla.MeshExecutable.create_cpp_call

  def create_cpp_call(self: Any, *args: Any, **kwargs: Any) -> Any:
    if getattr(self.unsafe_call, "ordered_effects", None):
      return None
    return original(self, *args, **kwargs)

  _pxla.MeshExecutable.create_cpp_call = create_cpp_call


def ask_before_execution(kind: type[Any]) -> None:
  """Programs that keep a `kind` (`add_keepalive`) call it with their devices before each execution.

  What it raises reaches the caller. Such programs take JAX's Python dispatch and give a runtime
  token, as those with effects do (0.10 to 0.12). JAX has no public hook at execution.
  """
  init, call = _pxla.ExecuteReplicated.__init__, _pxla.ExecuteReplicated.__call__

  def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
    init(self, *args, **kwargs)
    if any(isinstance(kept, kind) for kept in self.keepalive or ()):
      self.has_unordered_effects = True

  def __call__(self: Any, *args: Any) -> Any:
    for kept in self.keepalive or ():
      if isinstance(kept, kind):
        kept(self._local_devices)  # pyright: ignore[reportCallIssue]
    return call(self, *args)

  _pxla.ExecuteReplicated.__init__ = __init__
  _pxla.ExecuteReplicated.__call__ = __call__  # pyright: ignore[reportAttributeAccessIssue]


def run_by_dispatch(context: Any) -> None:
  """Has XLA's CPU client run the program being lowered on the thread that dispatches it.

  As it runs programs with JAX's own callbacks: it only asks whether there are some (0.10 to 0.12).
  """
  context.module_context.add_host_callback(lambda: None)


def end_before_dispatch_returns(kind: type[Any]) -> None:
  """Programs that keep a `kind` have ended when their dispatch returns.

  For programs with effects, of which the dispatch is Python. What they failed with is left to those
  who wait for them. XLA's CPU client runs programs with JAX's own callbacks so (0.10 to 0.12).
  """
  call = _pxla.ExecuteReplicated.__call__

  def __call__(self: Any, *args: Any) -> Any:
    out = call(self, *args)
    if any(isinstance(kept, kind) for kept in self.keepalive or ()):
      thread = threading.get_ident()
      own = [token for (of, _), token in list(_effect_tokens.items()) if of == thread]
      for value in (*out, *own):
        with contextlib.suppress(Exception):
          value.block_until_ready()
    return out

  _pxla.ExecuteReplicated.__call__ = __call__  # pyright: ignore[reportAttributeAccessIssue]


# -- loops -----------------------------------------------------------------------------------------
# What `jax.lax.scan` is once it is lowered: a `while_loop` on whole arrays (0.10 to 0.12). Takes
# the parameters of the primitive, whatever they are called. No public name.
scan_impl: Callable[..., Any] = _loops._scan_impl  # pyright: ignore[reportPrivateUsage]


def lowering_rule(primitive: Any) -> Callable[..., Any]:
  """A primitive's lowering rule for all platforms (0.10 to 0.12); none of them is public."""
  return _mlir._lowerings[primitive].rule  # pyright: ignore[reportPrivateUsage]


# -- caches --------------------------------------------------------------------------------------
def clearable_cache(max_size: int) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
  """An LRU cache that `jax.clear_caches()` empties (0.10 to 0.12); no public API."""
  return _util.cache(max_size=max_size, trace_context_in_key=False)


# -- waiting ---------------------------------------------------------------------------------------
def live_arrays() -> Sequence[Any]:
  """All arrays of the CPU backend, or none when no backend has been started."""
  return jax.live_arrays("cpu") if has_backend() else []


def local_cpu_devices() -> list[Any]:
  """This process's devices of the CPU backend; none when no backend has been started."""
  if not has_backend():
    return []
  try:
    return jax.local_devices(backend="cpu")
  except RuntimeError:  # JAX_PLATFORMS names others alone
    return []


def has_backend() -> bool:
  """Whether JAX has started its devices (0.10 to 0.12); no public name."""
  from jax._src import xla_bridge

  return xla_bridge.backends_are_initialized()


# -- many processes --------------------------------------------------------------------------------
# The client of the coordination service that `jax.distributed.initialize` connects to: a store of
# texts by key, common to all processes. `jax.experimental.multihost_utils` is public, but needs
# collectives, which hang when another process has failed (0.10 to 0.12).
def distributed_client() -> Any:
  """The client, or None without `jax.distributed.initialize`."""
  return _distributed.global_state.client


def distributed_place() -> tuple[int, int]:
  """(index of this process, number of processes), once there is a client."""
  state = _distributed.global_state
  return int(state.process_id), int(state.num_processes or 1)


def after_distributed_start(function: Callable[[], None]) -> None:
  """Calls a function now if there is a client, and after each `jax.distributed.initialize`."""
  original = _distributed.State.initialize

  @functools.wraps(original)
  def initialize(self: Any, *args: Any, **kwargs: Any) -> None:
    original(self, *args, **kwargs)
    if self is _distributed.global_state:
      function()

  _distributed.State.initialize = initialize
  if distributed_client() is not None:
    function()


class CommonStore:
  """Texts by key that all processes see (`distributed_client`). Its calls release the GIL.

  A coordinator that does not answer is a ConnectionError.
  """

  def __init__(self, client: Any) -> None:
    self._client = client

  def put(self, key: str, text: str, *, overwrite: bool = False) -> bool:
    """Writes; False when the key is there already and may not be overwritten."""
    return self._answer("ALREADY_EXISTS", self._client.key_value_set, key, text, overwrite) != ()

  def get(self, key: str, seconds: float = 0.0) -> str | None:
    """The text, waited for; None when there was none in time."""
    if seconds <= 0:
      found = self._answer("NOT_FOUND", self._client.key_value_try_get, key)
    else:
      milliseconds = max(1, round(1000 * seconds))
      blocking = self._client.blocking_key_value_get
      found = self._answer("DEADLINE_EXCEEDED", blocking, key, milliseconds)
    return None if found == () else found

  def under(self, folder: str) -> dict[str, str]:
    """The texts whose keys begin with `folder`, which ends with "/", by the rest of their keys."""
    found = self._answer("NOT_FOUND", self._client.key_value_dir_get, folder)
    return {key.removeprefix(folder): text for key, text in found}

  def remove(self, folder: str) -> None:
    """Removes all keys that begin with `folder`."""
    self._answer("NOT_FOUND", self._client.key_value_delete, folder)

  @staticmethod
  def _answer(expected: str, call: Callable[..., Any], *arguments: Any) -> Any:
    """What the call returns; () for an error that begins with `expected`."""
    try:
      return call(*arguments)
    except jax.errors.JaxRuntimeError as error:
      if str(error).startswith(expected):
        return ()
      raise ConnectionError(f"the coordinator of jax.distributed: {error}") from error


# -- sharding --------------------------------------------------------------------------------------
# XLA's hook for custom calls under partitioning, its shardings, and Shardy's rules (0.10 to 0.12).
# `jax.experimental.custom_partitioning` is public, but holds pointers in programs, calls no target
# of ours, and takes no call with side effects alone.
def register_partitioner(
  target: str,
  propagate: Callable[..., Any],
  partition: Callable[..., Any],
  infer: Callable[..., Any],
) -> None:
  """Has XLA's partitioner ask these about custom calls of a target, on plugins too."""
  from jax._src import xla_bridge

  options: dict[str, Any] = {
    "name": target,
    "prop_user_sharding": propagate,
    "partition": partition,
    "infer_sharding_from_operands": infer,
    "can_side_effecting_have_replicated_sharding": True,
  }
  register: Any = _xla_client.register_custom_call_partitioner
  register(**options)
  xla_bridge.register_plugin_callbacks(functools.partial(register, **options))


def _set_sharding_rule(operation: Any, rule: Any) -> None:
  """Puts a `Rule` on an operation, in Shardy's form."""
  from jax._src import custom_partitioning_sharding_rule as rules

  def mappings(terms: Sequence[Sequence[int]]) -> tuple[Any, ...]:
    return tuple(rules.ArrayMapping(*(f"f{factor}" for factor in term)) for term in terms)

  used = {factor for term in (*rule.operands, *rule.results) for factor in term}
  shardy = rules.SdyShardingRule(
    mappings(rule.operands),
    mappings(rule.results),
    need_replication_factors=tuple(f"f{factor}" for factor in sorted(rule.whole & used)),
  )
  types = [[value.type for value in values] for values in (operation.operands, operation.results)]
  operation.attributes["sdy.sharding_rule"] = rules.sdy_sharding_rule_to_mlir(shardy, *types)


def shape_and_dtype(shape: Any) -> tuple[tuple[int, ...], Any]:
  """Of an `xla.Shape`; a token's dtype is None."""
  if str(shape).startswith("token"):
    return (), None
  return tuple(shape.dimensions()), shape.numpy_dtype()


def device_grid(sharding: Any, rank: int) -> Any:
  """An `HloSharding` as device numbers by [tile along each dimension..., replica, manual].

  None for one that is no tiling: of an array that each device has as a whole.
  """
  if sharding.is_replicated() or sharding.is_manual() or sharding.is_unknown():
    return None
  dims = list(sharding.tile_assignment_dimensions())
  if not dims:
    return None
  kinds = _xla_client.OpSharding.Type
  extra = list(sharding.subgroup_types())
  if not extra and sharding.replicate_on_last_tile_dim():
    extra = [kinds.REPLICATED]
  devices = np.array(sharding.tile_assignment_devices()).reshape(dims)
  copies = [rank + i for i, kind in enumerate(extra) if kind == kinds.REPLICATED]
  manual = [rank + i for i, kind in enumerate(extra) if kind != kinds.REPLICATED]
  moved = np.transpose(devices, [*range(rank), *copies, *manual])
  count = int(np.prod([dims[i] for i in copies], dtype=int))
  return moved.reshape(*dims[:rank], count, -1)


def sharding_of_grid(grid: Any, rank: int) -> Any:
  """The `HloSharding` of which `device_grid` would give the grid."""
  *tiles, copies, manual = grid.shape
  if all(count == 1 for count in tiles) and manual == 1:
    return replicated_sharding()
  kinds = _xla_client.OpSharding.Type
  proto: Any = _xla_client.OpSharding()
  proto.type = kinds.OTHER
  extra = [(copies, kinds.REPLICATED), (manual, kinds.MANUAL)]
  extra = [(count, kind) for count, kind in extra if count > 1]
  proto.tile_assignment_dimensions = [*map(int, tiles[:rank]), *(count for count, _ in extra)]
  proto.tile_assignment_devices = [int(device) for device in grid.flat]
  proto.last_tile_dims = [kind for _, kind in extra]
  return _xla_client.HloSharding.from_proto(proto)


def replicated_sharding() -> Any:
  """The `HloSharding` of an array that every device holds."""
  return _xla_client.HloSharding.replicate()


def tuple_sharding(shardings: Sequence[Any]) -> Any:
  """The `HloSharding` of a tuple."""
  proto: Any = _xla_client.OpSharding()
  proto.type = _xla_client.OpSharding.Type.TUPLE
  proto.tuple_shardings = [sharding.to_proto() for sharding in shardings]
  return _xla_client.HloSharding.from_proto(proto)


def spec_of_sharding(sharding: Any, mesh: Any) -> Any:
  """The PartitionSpec on a mesh that an `HloSharding` stands for."""
  from jax._src import sharding_impls

  return sharding_impls.parse_flatten_op_sharding(sharding, mesh)[0]


def is_automatic(context: Any) -> bool:
  """Whether XLA splits the arrays of the call being lowered, along all mesh axes or some."""
  return is_partitioned(context) or is_partly_manual(context)


def is_partly_manual(context: Any) -> bool:
  """Whether the call being lowered is in a `jax.shard_map` that leaves some mesh axes automatic."""
  manual = getattr(context.module_context.axis_context, "manual_axes", frozenset())
  mesh = getattr(context.module_context.axis_context, "mesh", None)
  return mesh is not None and 0 < len(manual) < len(mesh.axis_names)


def mesh_axes(context: Any) -> tuple[tuple[str, int], ...]:
  """Names and sizes of the mesh of the program being lowered; () where it has told none."""
  axes = context.module_context.axis_context
  for mesh in (getattr(axes, "mesh", None), getattr(axes, "abstract_mesh", None)):
    if mesh is not None and not mesh.empty:
      return tuple((str(name), int(size)) for name, size in mesh.shape.items())
  for aval in (*context.avals_in, *context.avals_out):
    mesh = getattr(getattr(aval, "sharding", None), "mesh", None)
    if mesh is not None and not mesh.empty:
      return tuple((str(name), int(size)) for name, size in mesh.shape.items())
  from jax._src import mesh as _mesh

  mesh = _mesh.thread_resources.env.physical_mesh
  return tuple((str(n), int(s)) for n, s in mesh.shape.items()) if not mesh.empty else ()


def needs_devices(primitive: Any) -> None:
  """Has JAX tell a program's mesh to the lowering of programs with this primitive."""
  _dispatch.prim_requires_devices_during_lowering.add(primitive)


def is_explicit(avals: Sequence[Any]) -> bool:
  """Whether these abstract values lie on a mesh with explicit axes (0.10 to 0.12)."""
  return any(aval.sharding.mesh._any_axis_explicit for aval in avals)


def spec_of(aval: Any) -> list[Any]:
  """The spec of an abstract value, with an entry for each dimension."""
  spec = list(aval.sharding.spec)
  return spec + [None] * (aval.ndim - len(spec))


def with_spec(aval: Any, operands: Sequence[Any], spec: Sequence[Any]) -> Any:
  """An abstract value that in an explicitly sharded program lies as `spec` says (0.10 to 0.12)."""
  mesh = next((x.sharding.mesh for x in operands if not x.sharding.mesh.empty), None)
  if mesh is None or not mesh._any_axis_explicit:
    return aval
  sharding = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec(*spec))
  return aval.update(sharding=sharding)


def annotate(context: Any, results: Sequence[Any], avals: Sequence[Any]) -> list[Any]:
  """Values with the shardings that their types have in an explicitly sharded program."""
  if not is_explicit(avals):
    return list(results)
  return [
    _mlir.lower_with_sharding_in_types(context, value, aval)
    for value, aval in zip(results, avals, strict=True)
  ]


def partition_id(context: Any) -> Any:
  """The device's position in the program, as a value of a fully manual program."""
  del context
  from jax._src.lib.mlir.dialects import hlo

  return hlo.partition_id()


# -- JAX's callbacks: callgate.compat and callgate.install -----------------------------------------
# The primitives of `pure_callback` and `io_callback` and their own lowering rules (0.10 to 0.12);
# no public name, and none in sight: `jax.extend` has no callbacks.
pure_callback_p: Any = _callback.pure_callback_p
io_callback_p: Any = _callback.io_callback_p
pure_callback_lowering: Callable[..., Any] = _callback.pure_callback_lowering
io_callback_lowering: Callable[..., Any] = _callback.io_callback_lowering
ordered_io_effect: Any = _callback._OrderedIOEffect  # pyright: ignore[reportPrivateUsage]

# The primitives of `jax.debug.callback` and `jax.debug.print` and their own lowering rules (0.10 to
# 0.12); no public name.
debug_callback_p: Any = _debugging.debug_callback_p
debug_print_p: Any = _debugging.debug_print_p
debug_callback_lowering: Callable[..., Any] = _debugging.debug_callback_lowering
debug_print_lowering: Callable[..., Any] = _debugging.debug_print_lowering_rule


def is_ordered_effect(effect: Any) -> bool:
  """Whether a JAX effect keeps program order (0.10 to 0.12)."""
  return _effects.ordered_effects.contains(effect)


def ordered_debug_effect() -> Any:
  """The effect of ordered debug prints (0.10 to 0.12)."""
  return _debugging.ordered_debug_effect


def closes_over(function: Any, kind: type[Any]) -> bool:
  """Whether a function that JAX made around a debug callback holds a value of the type."""
  cells = getattr(function, "__closure__", None) or ()
  return any(isinstance(cell.cell_contents, kind) for cell in cells)


def debug_print_callback(
  *,
  fmt: str,
  in_tree: Any,
  static_args: Any,
  np_printoptions: Any,
  has_placeholders: bool,
  logging_record: Any,
  **_: Any,
) -> Callable[..., Any]:
  """The function of flat arrays that JAX calls for a `jax.debug.print` (0.10 to 0.12)."""
  form = functools.partial(
    _debugging._format_print_callback,  # pyright: ignore[reportPrivateUsage]
    fmt,
    dict(np_printoptions),
    has_placeholders,
    logging_record,
  )
  return _debugging._make_flat_callback(  # pyright: ignore[reportPrivateUsage]
    in_tree, form, static_args
  )


# The batching rule of all of JAX's foreign calls, by `vmap_method` (0.10 to 0.12). No public name;
# `jax.ffi.ffi_call` has it built in.
ffi_batching_rule: Callable[..., Any] = _ffi.ffi_batching_rule


def callback_sharding(
  context: Any, sharding: Any, result_avals: Sequence[Any], *, token: bool
) -> Any:
  """The annotation that JAX puts on a callback's operation; None where nothing is partitioned.

  With `token` the operation's first result is one, and has the first entry. Raises JAX's errors for
  partly automatic meshes and for a `sharding` that JAX doesn't support. Stands for
  `_callback_op_sharding` and for what `emit_python_callback` adds to it (0.10 to 0.12).
  """
  from jax._src import named_sharding, sharding_impls

  axes = context.module_context.axis_context
  annotation: Any = _callback._callback_op_sharding(  # pyright: ignore[reportPrivateUsage]
    axes, sharding, result_avals
  )
  if not (token and result_avals and isinstance(annotation, sharding_impls.SdyArrayList)):
    return annotation
  shardings: Any = annotation.shardings
  of_token = named_sharding.SdyArray(
    mesh_shape=(), dim_shardings=(), logical_device_ids=shardings[0].logical_device_ids
  )
  return sharding_impls.SdyArrayList((of_token, *shardings))


def is_partitioned(context: Any) -> bool:
  """Whether XLA partitions the program being lowered over several devices (0.10 to 0.12).

  False inside a fully manual `jax.shard_map`. Stands for `axis_context`'s type; no public name.
  """
  from jax._src import sharding_impls

  axes = context.module_context.axis_context
  return isinstance(axes, sharding_impls.ShardingContext) and axes.num_devices > 1


def add_keepalive(context: Any, value: object) -> None:
  """Keeps `value` alive as long as the program being lowered (0.10 to 0.12).

  `jax.export` refuses such a program, as it refuses JAX's own callbacks. No public replacement.
  """
  context.module_context.add_keepalive(value)


def is_export(context: Any) -> bool:
  """Whether the program being lowered is for `jax.export` (0.10 to 0.12). No public name."""
  return bool(context.module_context.lowering_parameters.for_export)


def physical_aval(aval: Any) -> Any:
  """The abstract value that stands for a PRNG key's in a program (0.10 to 0.12); else `aval`."""
  return _core.physical_aval(aval)


def canonicalize_value(value: Any) -> Any:
  """A NumPy array in the dtype that JAX gives it under its `jax_enable_x64` (0.10 to 0.12).

  TypeError for what no JAX array can hold. `jax.numpy.asarray` would make a jax.Array of it.
  """
  return _dtypes.canonicalize_value(value)


def fast_device_put() -> tuple[Callable[..., Any], tuple[Any, ...]]:
  """(put, rest): `put(aval, sharding, [array], [device], *rest)` is a committed jax.Array.

  What `jax.device_put` ends in, at a tenth of its cost (jaxlib 0.10 to 0.12): to be replaced by it
  when it is quick. The array's memory is shared where it is aligned, so it must never change again.
  """
  import importlib

  jaxlib: Any = importlib.import_module("jaxlib._jax")  # has no type stubs
  committed, force_copy, keep_x64 = True, False, True
  semantics = jaxlib.HostBufferSemantics.ZERO_COPY
  return jaxlib.batched_device_put, (committed, force_copy, semantics, keep_x64)


def callback_scope(device: Any) -> tuple[Callable[[], Any], Callable[[Any], Any]]:
  """(enter, leave): the settings of its thread under which JAX runs a callback (0.10 to 0.12).

  `leave` takes what `enter` gave. The default device is `device`, for which `jax.default_device` is
  public, and five times as slow; from 0.12 on the thread's mesh is put aside, too, for which there
  is nothing public.
  """
  set_device = _config.default_device.swap_local
  restore_device = _config.default_device.set_local
  if jax.__version_info__ < (0, 12):
    return lambda: set_device(device), restore_device
  from jax._src import mesh as _mesh

  mesh: Any = _mesh  # these names are 0.12's
  concrete, abstract = mesh.device_context, mesh.abstract_mesh_context_manager
  no_mesh, no_abstract_mesh = mesh.empty_concrete_mesh, mesh.empty_abstract_mesh

  def enter() -> Any:
    return (
      set_device(device),
      concrete.swap_local(no_mesh),
      abstract.swap_local(no_abstract_mesh),
    )

  def leave(before: Any) -> None:
    restore_device(before[0])
    concrete.set_local(before[1])
    abstract.set_local(before[2])

  return enter, leave


def buffer_callback_lowering() -> Callable[..., Any] | None:
  """JAX's own rule for `jax.experimental.buffer_callback` (0.10 to 0.12), while JAX has it.

  Serves platforms other than the CPU. No public replacement.
  """
  try:
    from jax._src import buffer_callback
  except ImportError:
    return None
  return buffer_callback._buffer_callback_lowering  # pyright: ignore[reportPrivateUsage]


# -- end of: JAX's callbacks -----------------------------------------------------------------------
