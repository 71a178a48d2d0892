# SPDX-License-Identifier: Apache-2.0
"""Gates' cores: the objects that programs, traces and rules refer to.

src/bindings/gate/gate.cc has the C++ side, which runs the calls.
"""

from __future__ import annotations

import dataclasses
import functools
import weakref
from collections.abc import Callable, Sequence
from typing import Any, cast

import jax

from callgate import _callgate, _part
from callgate._arrays import bind
from callgate._call.operation import Operation
from callgate._call.site import Backend, Call, CallSite, Emission
from callgate._call.traits import Traits
from callgate._core import options as _options
from callgate._core import registry, signatures, split
from callgate._core.errors import GateDefinitionError
from callgate._core.public import Public, core_of
from callgate._gate import annotations, turns
from callgate._gate.options import Arrays, GateOptions, Style, no_copy, place_of
from callgate._places import objects
from callgate._places.place import RemoteGate
from callgate._runtime import targets

STARTED = ("start", "result")  # the members of a gate that starts calls
_LEADING = {"return": 0, "inplace": 1, "context": 2}  # parameters that a call does not pass


class GateCallee(Operation):
  """The core of a gate.

  Attributes:
    function: the user's callable.
    called: the same, with calls that take turns if the gate is serial.
    style, arrays, run_on, retries, affinity, in_flight: the options of `callgate.gate`.
    place: the place that `run_on` names.
    remote: the gate's state in other processes; None if it runs in this one.
  """

  kind = "gate"
  style: Style
  arrays: Arrays
  traits = Traits(
    knows_lanes=True, one_calls_for_all=True, same_on_all_platforms=True, splits=True, taped=True
  )

  def __init__(self, function: Callable[..., Any], options: GateOptions) -> None:
    name = _options.name("gate", options.name) or registry.unique_name(function)
    label = f"{self.kind} '{name}'"
    _options.function(label, "fn", function)
    self.is_async = signatures.is_coroutine_function(function)
    annotations.refuse_generators(label, function)
    style: Any = options.style  # not checked yet
    leading = _LEADING.get(style, 0) if isinstance(style, str) else 0
    if options.out is None and options.like is None:
      declared = annotations.results(label, function, leading)
      options = dataclasses.replace(options, out=declared)
    options = options.checked(label)
    super().__init__(name, options)
    self.function = function
    self.called = turns.in_turn(function) if options.serial else function
    self.style, self.arrays, self.run_on = options.style, options.arrays, options.run_on
    self.place = place_of(self.run_on)
    self.timeout = options.timeout or 0.0
    if self.is_async and not isinstance(self.run_on, str):
      raise GateDefinitionError(
        f"{label}: run_on={self.run_on!r}: expected a function, got an async function, which "
        "runs on this process's event loop; drop run_on="
      )
    self.retries, self.affinity = options.retries, options.affinity
    self.in_flight = options.in_flight
    self.remote: RemoteGate | None = None
    self.cast, self.copy = options.cast, options.copy
    self.collective, self.command_buffer = options.collective, options.command_buffer
    self.parallel = options.parallel
    self.parameters = tuple(p.name for p in signatures.positional(function, leading))
    self.defaults = signatures.defaults(function, leading)
    self.traits = self.traits.but(
      by_lane=self.traits.by_lane or self.affinity is not None,
      of_thread=self.place.thread is not None,
      on_device=bind.is_native(self.arrays) or self.traits.native,
      runs_programs=self.arrays == "jax" or self.run_on == "own" or self.place.thread is not None,
    )
    self.members: dict[str, GateCallee] = {}
    with registry.naming(name):
      self.callee = self._named_callee()
      registry.register(name, self)
    self.wraps, self.call_signature = function, signatures.signature_of(function, leading)
    passes_on = self.traits.handles or isinstance(function, objects.MethodOf)
    users = getattr(function, "__wrapped__", function) if passes_on else function
    if not hasattr(users, "__wrapped__"):  # a decorator may change its arguments
      self.binds = self.call_signature
    outer, _, self._defined_as = str(getattr(function, "__qualname__", "")).rpartition(".")
    in_class = bool(outer) and not outer.endswith("<locals>")
    self._defined_in = (getattr(function, "__module__", None), outer) if in_class else None

  def _named_callee(self) -> Any:
    if (bound := self.bind_remote()) is not None:
      self.remote, callee = bound
      return callee
    return _callgate.Callee(
      self.name, self.called, style=self.style, timeout=self.timeout,
      bind=functools.partial(bind.bind, self.called, self.style, self.arrays, self.name),
      arrays="numpy" if self.arrays == "numpy" else "buffer",
      owned_inputs=self.copy, own_thread=self.run_on == "own",
      native=self.traits.on_device,
      default_stream=self.arrays == "numba", command_buffer=self.command_buffer,
      parallel=self.parallel and turns.is_free_threaded(),
      located=self.traits.located or self.traits.by_lane,
      taped=self.traits.taped,
      thread=self.place.thread,
    )  # fmt: skip

  def bind_remote(self) -> tuple[RemoteGate, Any] | None:
    """Returns the remote gate and the runtime's handle if the place is not this process."""
    return self.place.bind(self)

  def check_call(self, site: CallSite, structs: Sequence[Any]) -> None:
    super().check_call(site, structs)
    if self.remote is not None and not site.by_jax:
      self.remote.prepare()

  def is_of_object(self, args: Sequence[Any]) -> bool:
    if super().is_of_object(args):
      return True
    if not args or not (self.owners or self._defined_in) or isinstance(args[0], split.NUMBERS):
      return False
    first = args[0]
    is_object = jax.tree_util.all_leaves([first]) and not split.is_array(first)
    if isinstance(first, type):
      self.look_for_owner(first, is_object=is_object)
    self.look_for_owner(type(first), is_object=is_object)
    return super().is_of_object(args)

  def look_for_owner(self, kind: type, *, is_object: bool = False) -> None:
    """Finds the class that defines this method, from a class that may have inherited it.

    Python tells a gate its class. It does not tell a gate below another decorator, nor, before
    Python 3.13, a gate in a NamedTuple. If the decorator hides the gate, the class that defines the
    function counts, provided that the call's first argument `is_object`: neither array nor pytree.
    """
    for each in getattr(kind, "__mro__", ()):
      held = vars(each)
      if any(_beneath(value) is self for value in held.values()) or (
        is_object
        and (each.__module__, each.__qualname__) == self._defined_in
        and not isinstance(held.get(self._defined_as), staticmethod)
      ):
        self.add_owner(each)

  def add_owner(self, kind: type) -> None:
    """Adds a class that has this gate as a method."""
    if kind not in self.live_owners:
      self.owners = (*self.owners, weakref.ref(kind))

  def rename(self, name: str) -> None:
    self.callee.give_up_name()
    self.name = name
    self.callee = self._named_callee()
    for suffix, member in self.members.items():
      registry.rename(member, f"{name}.{suffix}")

  def member(self, suffix: str) -> GateCallee | None:
    """Returns the gate `NAME.suffix`, which lives as long as this one; None if there is none.

    "start" starts a call and "result" waits for it. The other members are a class's methods.
    """
    if suffix not in self.members and (make := self._maker_of(suffix)):
      with registry.name_while_alive(f"{self.name}.{suffix}") as name:
        if suffix not in self.members:  # another thread may have made it meanwhile
          made = make(name)
          made.users_programs = functools.partial(_programs_of, weakref.ref(self))
          self.members[suffix] = made
    return self.members.get(suffix)

  def _maker_of(self, suffix: str) -> Callable[[str], GateCallee] | None:
    """Returns the function that makes a member; None if there is no such member."""
    if suffix not in STARTED or self.traits.handles:
      return None
    return functools.partial(_part.load("futures").member, self, suffix)

  def on_host(self, *args: Any, **kwargs: Any) -> Any:
    return self.place.run(functools.partial(self.called, *args, **kwargs))

  def on_lane(self, lane: int, call: Callable[[], Any]) -> Any:
    return objects.on_lane(lane, call) if self.traits.by_lane else call()

  def backend(self, platform: str) -> Backend:
    return functools.partial(self._emission, on_cuda=platform == "cuda")

  def _emission(self, call: Call, *, on_cuda: bool) -> Emission:
    if on_cuda and self.copy and self.remote is None and bind.is_native(self.arrays):
      raise no_copy(self.label, self.arrays)
    target = targets.GRAPH_TARGET if on_cuda and self.command_buffer else targets.GATE_TARGET
    cast = {"cast": "yes"} if call.site.cast else {}
    return Emission(self.callee, target, {"spec": call.site.spec, **cast}, call)

  def apply_raw(self, args: tuple[Any, ...], kwargs: dict[str, Any], static: Any) -> Any:
    if self.is_async:
      raise GateDefinitionError(
        f"{self.label} is an async function, which a call can't wait for; use ticket = "
        "gate.start(...) and, later, ticket.result()"
      )
    return super().apply_raw(args, kwargs, static)


_MOST_DECORATORS = 8


def _beneath(value: Any) -> Any:
  """Returns the core of the gate below a class attribute's decorators; other values unchanged."""
  for _ in range(_MOST_DECORATORS):
    match value:
      case Public() | staticmethod():  # gets no object
        break
      case classmethod():
        value = cast("Any", value).__func__
      case property():
        value = value.fget
      case functools.cached_property() | functools.partialmethod():
        value = cast("Any", value).func
      case _:
        if not callable(value) or isinstance(value, type):
          break
        value = getattr(value, "__wrapped__", None)
  return core_of(value)


def _programs_of(gate: weakref.ref[GateCallee]) -> Any:
  found = gate()
  return found and found.users_programs and found.users_programs()
