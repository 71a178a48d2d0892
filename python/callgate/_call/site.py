# SPDX-License-Identifier: Apache-2.0
"""Describes a call, and what it calls, to rules and lowering."""

from __future__ import annotations

import dataclasses
import functools
import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any, cast

import jax

from callgate._call.options import CallOptions, Effect, Vmap
from callgate._call.traits import Traits
from callgate._core import encoding, exact, signatures, split
from callgate._core.encoding import is_open
from callgate._core.errors import GateDefinitionError
from callgate._core.levels import Level, Numbered
from callgate._core.pickling import Identity
from callgate._core.where import Where
from callgate._sharding import rules

Static = tuple[tuple[str, Any], ...]
# The objects that calls outside of programs keep alive, of one method that is a gate.
MOST_OBJECTS = 64
# Where callgate's runtime runs gates; JAX's own callbacks do elsewhere.
RUNTIME_PLATFORMS = ("cpu", "cuda")
# The static keyword of a wait for a started call that lanes make, which may share the call.
SHARED = "callgate_shared"


@dataclasses.dataclass(frozen=True, eq=False)
class CallSite:
  """Holds what is fixed about a call when it is traced.

  It is equal to another if nothing tells apart what they hold, which `==` of trees and static
  values does not say (`_core/exact.py`).
  """

  in_tree: Any  # of (args, kwargs), arrays as leaves
  out_tree: Any
  static: Static
  results: tuple[tuple[tuple[int, ...], Any], ...]  # shape and dtype, of one lane
  by_jax: bool = False  # lowered to JAX's own callbacks
  cast: bool = False  # results that are not of its types are cast

  @functools.cached_property
  def spec(self) -> str:
    """The text that programs hold for this call."""
    return encoding.encode(self.in_tree, self.out_tree, self.static)

  @property
  def exported_spec(self) -> str:
    """The text that programs for other processes hold; GateDefinitionError if there can be none."""
    return encoding.encode(self.in_tree, self.out_tree, self.static, portable=True)

  @functools.cached_property
  def kept(self) -> tuple[exact.Exact, ...]:
    """The values that names in the spec stand for: the names last as long as this."""
    trees = exact.exact_tree(self.in_tree), exact.exact_tree(self.out_tree)
    return *trees, *(exact.exact(value) for _, value in self.static)

  @property
  def has_objects(self) -> bool:
    """True if the call has objects that identity alone tells from others."""
    return any(one.has_objects for one in self.kept)

  @functools.cached_property
  def _key(self) -> Any:
    names = tuple(name for name, _ in self.static)
    return self.kept, names, self.results, self.by_jax, self.cast

  @functools.cached_property
  def _hash(self) -> int:
    return hash(self._key)

  def __hash__(self) -> int:
    return self._hash

  def __eq__(self, other: object) -> bool:
    return self is other or (isinstance(other, CallSite) and self._key == other._key)


@dataclasses.dataclass(frozen=True)
class BoundCall:
  """The parameter of the primitive: what is called, where, and on which batch axes.

  `levels` are those that the runtime loops over, outermost first (vmap="each"). `whole` is the one
  leading batch axis that the callable gets on its batched arguments (vmap="whole" and "broadcast");
  nested vmaps are folded into it. `numbered` are the levels, outermost first, whose lanes the
  program runs one after the other: the call's last operand is then the number of its lane.
  """

  gate: Callee
  site: CallSite
  levels: tuple[Level, ...] = ()
  whole: Level | None = None
  scoped: bool = False  # in a loop whose steps free what they make (`_objects/scopes.py`)
  marked: bool = False  # its last result has no value: what takes it comes after the call
  numbered: tuple[Numbered, ...] = ()

  @property
  def axes(self) -> tuple[Level, ...]:
    """All batch axes of the call's arrays, outermost first."""
    return self.levels if self.whole is None else (*self.levels, self.whole)


def shared_by_lanes(call: BoundCall) -> BoundCall:
  """The call, if it waits for a started one, as a call of lanes."""
  if call.gate.traits.handles != "takes" or dict(call.site.static).get(SHARED):
    return call
  site = dataclasses.replace(call.site, static=(*call.site.static, (SHARED, True)))
  return dataclasses.replace(call, site=site)


def in_one_lane(call: BoundCall, size: int) -> BoundCall:
  """The call in a loop over so many lanes, of which each calls by itself.

  A gate's call takes the lane's number as another operand, the last (`levels.Numbered`).

  Raises:
    GateDefinitionError: the function has to know the number, and the program can't tell it.
  """
  if call.gate.traits.knows_lanes and not is_open(size) and not callable(call.gate.sharding):
    call = dataclasses.replace(call, numbered=((size, len(call.levels)), *call.numbered))
  elif call.gate.traits.by_lane:
    raise unknown_lane(call.gate)
  return shared_by_lanes(call)


def unknown_lane(gate: Callee) -> GateDefinitionError:
  """The error for a gate that has to know its lane, where the program can't tell it."""
  return GateDefinitionError(
    f"{gate.label}: affinity='lane', in a branch or loop that not all lanes take, or on lanes that "
    "end within a byte. Such calls run lane after lane, and this one has no number: the number of "
    "lanes is symbolic, sharding= is a function, or a primitive of neither JAX's nor callgate's is "
    "around it. Expected a call outside, whose results the branch selects from, or no affinity="
  )


@dataclasses.dataclass(frozen=True)
class TangentCall:
  """The call that computes the tangents of a call's results.

  Its operands are the call's own and then the tangents of those at `wanted`, in which it is linear.
  """

  gate: Callee
  site: CallSite
  wanted: tuple[int, ...]  # flat positions of arguments
  outputs: tuple[int, ...]  # flat positions of the results that have tangents


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class Call(BoundCall):
  """A call in a program that is being lowered, for so many devices.

  `operands` and `results` are abstract values, batch axes included.
  """

  operands: Sequence[Any]
  results: Sequence[Any]
  devices: int


@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class Emission:
  """The form in which a program holds a call."""

  callee: Any  # the runtime's, which has a name
  target: str  # the FFI target
  attributes: Mapping[str, Any]  # beside those of every call
  call: Call  # with the batch levels that the runtime loops over
  watcher: Any = None  # of its program's executions (`execution.Watcher`)


# Makes the calls of programs for one platform.
Backend = Callable[[Call], Emission]


class Callee(Identity):
  """A gate or kernel as the primitive's rules see it; `ArrayFunction` is what users call."""

  kind = "operation"
  parameters: tuple[str, ...] = ()
  arrays = "numpy"
  style = "inplace"
  cast: bool | None = False
  collective = False
  traits = Traits()
  # The signature of calls; None if it is unknown.
  call_signature: inspect.Signature | None = None
  # The same, if Python binds a call's arguments by no other.
  binds: inspect.Signature | None = None
  # The callable's parameters that have defaults, with these.
  defaults: Mapping[str, Any] = {}
  # `Emission.watcher`, for programs that JAX's own callbacks serve.
  watcher_of_jax: Any = None
  # The user's rules of differentiation; with `symbolic_zeros` that of the jvp is told which
  # tangents are zero, as by `jax.custom_jvp`.
  jvp_rule: Callable[..., Any] | None = None
  symbolic_zeros = False
  vjp_rules: tuple[Callable[..., Any], Callable[..., Any]] | None = None
  transpose_rule: Callable[..., Any] | None = None
  # For a gate that has state for each lane: all calls under vmap are those of its lanes. Makes the
  # call of one, where they run one after the other, of operands, call, number and count of lanes.
  lane_rule: Callable[..., Sequence[Any]] | None = None
  no_derivatives = ""  # what to say where it can have none, in the place of how to define one
  defined_at: Where | None = None  # where it is defined
  owners: tuple[Callable[[], type | None], ...] = ()  # the classes of which it is a method
  # The call with its rules around it, of the `Exact` of static values, that of split arguments'
  # structure, and the user's line: a cache (`tracing.clearable_cache`).
  differentiable: Any

  def programs(self, site: CallSite) -> Callable[..., Any] | None:
    """The keeper of the programs of such calls outside of programs; None for JAX's own cache."""
    del site

  def __init__(self, name: str, options: CallOptions) -> None:
    """Takes options that are checked."""
    self.name = name
    self.out = options.out
    self.like = options.like
    self.effect: Effect = options.effect
    self.vmap_rule: Callable[..., Any] | None = options.vmap if callable(options.vmap) else None
    self.vmap: Vmap = "each" if callable(options.vmap) else options.vmap
    self.sharding = options.sharding
    self.linear = cast("bool | tuple[int, ...]", options.linear)
    self.aliases = dict(options.aliases or {})
    self.gradient = options.gradient

  def rename(self, name: str) -> None:
    """Gives it another name in the programs that are lowered from here on; its own is free then."""
    raise NotImplementedError

  @property
  def has_side_effect(self) -> bool:
    """True if XLA may neither remove nor merge nor move a call.

    A call that makes an object, or takes one out, may run neither once for two nor outside of its
    loop, whatever its effect.
    """
    return self.effect != "pure" or self.traits.handles in ("makes", "takes")

  @property
  def on_each_device(self) -> bool:
    """True if each device of a program calls by itself; processes share no memory."""
    return self.traits.reads_cell and jax.process_count() == 1

  @property
  def label(self) -> str:
    """The name in messages."""
    return f"{self.kind} '{self.name}'"

  def __repr__(self) -> str:
    return f"<{self.label}>"

  @property
  def has_rule(self) -> bool:
    """True if a rule of the user's, a reference or differences give its derivatives."""
    rules = self.jvp_rule, self.vjp_rules, self.gradient, self.like
    return any(rule is not None for rule in rules)

  def is_of_object(self, args: Sequence[Any]) -> bool:
    """True if a call's first argument is the object, or the class, whose method this is."""
    if not self.owners or not args:
      return False
    first = args[0].value if isinstance(args[0], split.Static) else args[0]
    classes = self.live_owners
    return isinstance(first, classes) or (isinstance(first, type) and issubclass(first, classes))

  @property
  def live_owners(self) -> tuple[type, ...]:
    """The classes of which it is a method."""
    return tuple(filter(None, (owner() for owner in self.owners)))

  def apply_raw(self, args: tuple[Any, ...], kwargs: dict[str, Any], static: Static) -> Any:
    """Binds the call, without derivative rules of its own."""
    raise NotImplementedError

  def backend(self, platform: str) -> Backend:
    """Returns what makes the calls of programs for a platform of `RUNTIME_PLATFORMS`.

    Raises:
      GateDefinitionError: it has no code for that platform.
    """
    raise NotImplementedError

  def check_export(self) -> None:
    """Raises GateDefinitionError if other processes could never run a program that calls it."""

  def sharding_rule(
    self, site: CallSite, operands: Sequence[Any], results: Sequence[Any]
  ) -> rules.Rule:
    """Returns which dimensions of one lane's arrays, of these shapes, may be split over devices."""
    del site
    return rules.of_call(self.label, self.sharding, operands, results)

  def tangent_call(self, site: CallSite, moved: Sequence[int]) -> TangentCall:
    """The call for tangents of the arguments at `moved`; asked of operations that have it."""
    raise NotImplementedError

  def transpose_call(
    self, site: CallSite, cotangents: Sequence[Any], flat: Sequence[Any], linear: Sequence[int]
  ) -> Sequence[Any]:
    """Cotangents of a tangent call's arguments at `linear`; asked of operations that have it.

    `flat` are the arguments; ShapeDtypeStructs for those at `linear`.
    """
    raise NotImplementedError

  def batching(self, site: CallSite, mask: Sequence[bool], lanes: Sequence[Any]) -> Vmap:
    """Returns how a call is batched that the runtime does not loop over yet.

    `mask` says which flat arguments have a batch axis; `lanes` are ShapeDtypeStructs of one lane's.
    """
    del site, mask, lanes
    return self.vmap

  def batched(self, whole: Level | None) -> Callee:
    """Returns the callee for arguments with the one leading axis `whole`: itself, as a rule."""
    del whole
    return self

  def on_host(self, *args: Any, **kwargs: Any) -> Any:
    """The function on the host's arrays, without the runtime: what JAX's own callbacks call."""
    raise NotImplementedError

  def on_lane(self, lane: int, call: Callable[[], Any]) -> Any:
    """Calls `call`, which calls `on_host` for a lane."""
    del lane
    return call()

  def call_rule(
    self,
    function: Callable[..., Any],
    lead: Sequence[Any],
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    static: Static,
  ) -> Any:
    """Calls a user's function about this operation (a rule, a reference) with `lead` and the call.

    Static arguments, and the callable's defaults where the call leaves them, go where the function
    has parameters for them.
    """
    lead, args, kwargs = split.joined((tuple(lead), tuple(args), dict(kwargs)))
    if self.defaults:
      given = {*kwargs, *(name for name, _ in static)}
      left = signatures.open_parameters(function, len(lead) + len(args), given)
      more = {name: self.defaults[name] for name in left if name in self.defaults}
      kwargs = {**kwargs, **more}
    return function(*lead, *args, **kwargs, **signatures.accepted(function, dict(static)))
