# SPDX-License-Identifier: Apache-2.0
"""`Gate.start` and tickets: a program starts a call, and waits for its result later.

A ticket is the handle of a `Job` and the call's arguments, which give its result the call's
derivatives. Starting makes an object (`hold`), waiting uses it. A wait takes the tickets of all
earlier starts of the same trace as operands, so that XLA runs these first.
"""

from __future__ import annotations

import functools
import threading
import weakref
from typing import Any, NamedTuple, Self

import jax
import numpy as np

from callgate._call import derivatives, jax_engine, shapes
from callgate._call.attached import with_derivative
from callgate._call.primitive import with_shardings
from callgate._call.site import SHARED, CallSite
from callgate._core import encoding, exact, split
from callgate._core.errors import GateDefinitionError
from callgate._core.failures import raise_deferred
from callgate._core.pickling import Stays
from callgate._core.public import core
from callgate._core.where import where
from callgate._futures.job import CallQueue, Job
from callgate._gate.callee import GateCallee
from callgate._gate.options import GateOptions
from callgate._jax import tracing
from callgate._objects.handle import TYPE, Handle
from callgate._objects.hold import HoldCallee, holding
from callgate._objects.resolve import resolved
from callgate._objects.use import Use
from callgate._places import objects
from callgate._places.threads import ThreadPlace
from callgate._runtime import config


class _StartedCall(NamedTuple):
  """The properties of a started call that are fixed when it is traced."""

  gate: Any  # the gate's core
  static: Any
  results: tuple[Any, ...]
  out_tree: Any


class Ticket(Stays):
  """A call that a program has started; made by `callgate.Gate.start`.

  A ticket is a pytree: loops carry it, branches and programs return it. Under `jax.vmap` each lane
  starts a call. You can wait for a call once, by `ticket.result()` or `gate.result(ticket)`.
  Outside of the `vmap` a ticket stands for the calls of all lanes.
  """

  __slots__ = ("_among", "_args", "_call", "_handle")
  _stays = (
    "its call runs in this process; pass the value of result(), or start the call in the "
    "other process"
  )

  def __init__(self, call: _StartedCall, handle: Handle, args: Any) -> None:
    self._call, self._handle, self._args = call, handle, args
    self._among = _started(core(handle).words)

  def result(self) -> Any:
    """Waits for the call, inside or outside compiled code, and returns its result.

    Raises:
      GateError: (fails the program) the program has already waited for this call; the error names
        both places.
      GateTimeoutError: (fails the program) the call ran longer than the gate's timeout.
      BaseException: (fails the program) the call raised it.
    """
    return split.joined(_wait(self, _all_started()))

  @classmethod
  def _of(cls, call: Any, children: Any) -> Self:
    made = object.__new__(cls)
    made._call, made._among = call, None
    made._handle, made._args = children
    return made

  def __repr__(self) -> str:
    return f"<ticket of {self._call.gate.label}>"


jax.tree_util.register_pytree_node(
  Ticket,
  lambda ticket: ((ticket._handle, ticket._args), ticket._call),  # pyright: ignore[reportPrivateUsage]
  Ticket._of,  # pyright: ignore[reportPrivateUsage]
)


# Static keywords: the place of a start or wait, and the call itself for a call elsewhere.
_PLACE, _CALL = "callgate_place", "callgate_call"


# -- start -----------------------------------------------------------------------------------------
def start(gate: GateCallee, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Ticket:
  """Starts a call of a gate; see `Gate.start`."""
  _check(gate)
  raise_deferred()
  place, given = {_PLACE: str(where())}, (args, kwargs)
  args, kwargs, static = gate.given(args, kwargs)
  leaves, in_tree = jax.tree.flatten((args, kwargs))
  leaves = [shapes.as_array(gate, leaf, i, in_tree) for i, leaf in enumerate(leaves)]
  structs = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in leaves]
  results, out_tree = shapes.result_types(gate, in_tree, structs, static)
  begin = _member(gate, "start")
  if gate.remote is None:
    begin.owners = gate.owners  # a method's object is its first argument, too
    handle = begin(*given[0], **given[1], **place)
  else:
    site = CallSite(in_tree, out_tree, static, results, config.engine() == "jax", gate.casts())
    gate.check_call(site, structs)
    types = tuple((shape, np.dtype(dtype).name) for shape, dtype in results)
    trees = exact.exact_tree(in_tree), exact.exact_tree(out_tree)
    more: dict[str, Any] = {**place, _CALL: (*trees, static, site.cast, types)}
    handle = begin(*leaves, **more)
  args, kwargs = jax.tree.unflatten(in_tree, leaves)
  return Ticket(_StartedCall(gate, static, results, out_tree), handle, (args, kwargs))


def _check(gate: GateCallee) -> None:
  if gate.traits.handles:
    raise GateDefinitionError(
      f"{gate.label}: start(): expected a gate, whose results are arrays, got a hold; call the "
      "hold, or start a gate"
    )
  if gate.style != "return":
    raise GateDefinitionError(
      f"{gate.label}: start() needs style='return', got style={gate.style!r}, which writes into "
      "XLA's memory; a started call has none"
    )
  if gate.effect == "ordered":
    raise GateDefinitionError(
      f"{gate.label}: start() needs effect='pure' or 'io', got 'ordered': started calls run "
      "concurrently"
    )


def _member(gate: GateCallee, suffix: str) -> Any:
  member = gate.member(suffix)
  assert member is not None
  return member


def member(gate: GateCallee, suffix: str, name: str) -> GateCallee:
  """Makes the gate that starts calls of a gate, "start", or that waits for them, "result"."""
  if suffix == "result":
    return _taker(gate, name)
  made = _begin(gate, name) if gate.remote is None else _begin_remote(gate, name)
  made.binds = None  # it takes callgate's own keywords; `start` has checked the user's arguments
  return made


def _begin(gate: GateCallee, name: str) -> GateCallee:
  function, label, timeout = gate.called, gate.label, gate.timeout
  arrays: Any = gate.arrays
  queue = gate.place if isinstance(gate.place, ThreadPlace) else None

  def begin(*args: Any, **kwargs: Any) -> Job:
    job = Job(label, kwargs.pop(_PLACE), timeout)
    job.start(functools.partial(function, *args, **kwargs), queue)
    return job

  functools.update_wrapper(begin, function)
  # The wrapper of an async function isn't a coroutine function.
  begin.__dict__.pop("__wrapped__", None)
  options = GateOptions(out=(), name=name, effect=gate.effect, arrays=arrays, copy=True)
  return holding(begin, options, kind=_Begin)


class _Begin(HoldCallee):
  kind = "gate"  # in messages, since the user has no hold


class _BeginElsewhere(_Begin):
  """Starts calls elsewhere; with JAX's own callbacks, here."""

  def on_host(self, *args: Any, **kwargs: Any) -> Any:
    _by_jax.on = True
    try:
      return super().on_host(*args, **kwargs)
    finally:
      _by_jax.on = False


class _BeginByLane(_BeginElsewhere):
  traits = _BeginElsewhere.traits.but(by_lane=True)


_by_jax = threading.local()


def _begin_remote(gate: GateCallee, name: str) -> GateCallee:
  """Starts calls that a thread here waits for without the GIL; each is a separate lane."""
  assert gate.remote is not None
  run, queue = gate.remote.runner(gate.callee), CallQueue(gate.remote.most)
  function, label, by_lane = gate.function, gate.label, gate.traits.by_lane
  convert = functools.partial(jax_engine.host_converter, gate.arrays)

  def begin(*operands: Any, **kwargs: Any) -> Job:
    job = Job(label, kwargs[_PLACE], 0)  # elsewhere the time is measured there
    lane = objects.current_lane() if by_lane else 0
    ins, outs, static, cast, types = kwargs[_CALL]

    def call_there() -> Any:
      spec = encoding.encode(ins.value, outs.value, static)
      flat = run(spec, cast, operands, types, lane, job.interrupts)
      return jax.tree.unflatten(outs.value, flat)

    def call_here() -> Any:
      args, kwargs = split.unflattener(ins.value, keys=gate.arrays == "jax")(
        map(convert(), operands)
      )
      return objects.on_lane(lane, lambda: function(*args, **kwargs, **dict(static)))

    job.start(call_here if getattr(_by_jax, "on", False) else call_there, queue)
    return job

  functools.update_wrapper(begin, gate.function, updated=())
  begin.__dict__.pop("__wrapped__", None)
  options = GateOptions(out=(), name=name, effect=gate.effect, copy=True)
  return holding(begin, options, kind=_BeginByLane if by_lane else _BeginElsewhere)


def result(gate: GateCallee, ticket: Any) -> Any:
  """See `Gate.result`."""
  if not isinstance(ticket, Ticket) or ticket._call.gate is not gate:  # pyright: ignore[reportPrivateUsage]
    raise GateDefinitionError(
      f"{gate.label}: result(): expected a ticket of this gate, got {ticket!r}"
    )
  return ticket.result()


# -- result ----------------------------------------------------------------------------------------
def _wait(ticket: Ticket, started: list[Any]) -> Any:
  """Returns the result of a ticket, after all calls in `started`."""
  call: _StartedCall = ticket._call  # pyright: ignore[reportPrivateUsage]
  handle, args = ticket._handle, ticket._args  # pyright: ignore[reportPrivateUsage]
  if core(handle).words.ndim > len(TYPE.shape):  # several lanes, outside of their vmap
    return jax.vmap(lambda ticket: _wait(ticket, started))(ticket)
  earlier = [words for words in started if words is not core(handle).words]
  raise_deferred()
  waits = functools.partial(_member(call.gate, "result").take, call, str(where()))
  again = functools.partial(_call_again, call)

  def wait(handle: Handle, args: Any, earlier: Any) -> Any:
    return _resharded(call, args, waits(handle, earlier))

  if call.gate.vjp_rules is None:
    return with_derivative(again, wait(handle, args, earlier), args)

  def backward(residuals: Any, cotangent: Any) -> Any:
    handle, args, earlier, results = residuals
    (of_args,) = jax.vjp(functools.partial(again, results), args)[1](cotangent)
    return jax.tree.map(_zero_of, handle), of_args, jax.tree.map(_zero_of, earlier)

  def forward(handle: Handle, args: Any, earlier: Any) -> Any:
    results = with_rule(handle, args, earlier)
    return results, (handle, args, earlier, results)

  derivatives.name_backward(call.gate, backward)
  with_rule = jax.custom_vjp(wait)
  with_rule.defvjp(forward, backward)
  return with_rule(handle, args, earlier)


def _resharded(call: _StartedCall, args: Any, results: Any) -> Any:
  """Gives the results the explicit shardings that the call itself would have given them."""
  leaves, in_tree = jax.tree.flatten(args)
  values, out_tree = jax.tree.flatten(results)
  site = CallSite(in_tree, out_tree, call.static, call.results)
  avals, types = map(jax.typeof, leaves), map(jax.typeof, values)
  types = with_shardings(call.gate, site, list(avals), list(types))
  return out_tree.unflatten(map(tracing.reshard_as, types, values))


def _call_again(call: _StartedCall, results: Any, given: Any) -> Any:
  """Applies the call's derivative rule; the call's results are known."""
  args, kwargs = given
  return derivatives.apply(call.gate, args, kwargs, call.static, results)


def _zero_of(value: Any) -> Any:
  if jax.numpy.issubdtype(value.dtype, jax.numpy.inexact):
    return jax.numpy.zeros_like(value)
  return np.zeros(value.shape, jax.dtypes.float0)


def _taker(gate: GateCallee, name: str) -> GateCallee:
  label = gate.label

  def wait(handle: Handle, earlier: Any, **static: Any) -> Any:
    del earlier
    job: Job = resolved(label, handle)
    return job.take(static[_PLACE], shared=SHARED in static)

  options = GateOptions(out=(), name=name, effect=gate.effect, run_on="own", cast=gate.cast)
  return _Taker(wait, options)


class _Taker(Use):
  kind = "gate"
  traits = Use.traits.but(handles="takes")
  waits = True  # waits for another gate's call, which recordings count

  def take(self, call: _StartedCall, place: str, handle: Handle, earlier: list[Any]) -> Any:
    """Returns the results of a started call, in a call of this gate at `place`."""
    leaves, in_tree = jax.tree.flatten(((handle, earlier), {}))
    return self.bind(CallSite(in_tree, call.out_tree, ((_PLACE, place),), call.results), leaves)


# -- earlier starts of a trace ---------------------------------------------------------------------
class _Among(list[Any]):
  """The words of the calls that a trace has started; lives as long as one of their tickets."""

  __slots__ = ("__weakref__",)


# Atomic: single steps, and a trace is of one thread.
_traced: weakref.WeakValueDictionary[int, _Among] = weakref.WeakValueDictionary()


def _started(words: Any) -> _Among | None:
  trace = tracing.current_trace()
  if trace is None:
    return None
  among = _traced.setdefault(id(trace), _Among())  # its tracers keep the trace alive
  among.append(words)
  return among


def _all_started() -> list[Any]:
  trace = tracing.current_trace()
  return list(_traced.get(id(trace), ())) if trace is not None else []
