# SPDX-License-Identifier: Apache-2.0
"""Describes a call and its callee to rules and lowering."""

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
# The number of objects that calls of a method outside jit keep alive.
MOST_OBJECTS = 64
# callgate's runtime runs gates on these platforms; JAX's own callbacks run them on others.
RUNTIME_PLATFORMS = ("cpu", "cuda")
# The static keyword of a lane's wait for a started call that lanes may share.
SHARED = "callgate_shared"


@dataclasses.dataclass(frozen=True, eq=False)
class CallSite:
  """The facts about a call that are fixed when it is traced.

  Two sites are equal if their contents are indistinguishable, which is stricter than `==` of trees
  and static values (`_core/exact.py`).
  """

  in_tree: Any  # the structure of (args, kwargs), with arrays as leaves
  out_tree: Any
  static: Static
  results: tuple[tuple[tuple[int, ...], Any], ...]  # shape and dtype in one lane
  by_jax: bool = False  # lowered to JAX's own callbacks
  cast: bool = False  # results of other types are cast

  @functools.cached_property
  def spec(self) -> str:
    """The text in programs for this call."""
    return encoding.encode(self.in_tree, self.out_tree, self.static)

  @property
  def exported_spec(self) -> str:
    """The text in exported programs; raises GateDefinitionError if the call can't be exported."""
    return encoding.encode(self.in_tree, self.out_tree, self.static, portable=True)

  @functools.cached_property
  def kept(self) -> tuple[exact.Exact, ...]:
    """The values that the spec names; the names live as long as this object."""
    trees = exact.exact_tree(self.in_tree), exact.exact_tree(self.out_tree)
    return *trees, *(exact.exact(value) for _, value in self.static)

  @property
  def has_objects(self) -> bool:
    """True if the call has objects that only their identity distinguishes."""
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
  """The parameter of the primitive: the callee, the call site and the batch axes.

  `levels` are the levels that the runtime loops over, outermost first (vmap="each"). `whole` is the
  leading batch axis of the callable's batched arguments (vmap="whole" and "broadcast"), with nested
  vmaps folded into it. `numbered` are the levels, outermost first, whose lanes the program runs one
  after another; the call's last operand is then the number of its lane.
  """

  gate: Callee
  site: CallSite
  levels: tuple[Level, ...] = ()
  whole: Level | None = None
  scoped: bool = False  # in a loop whose steps free their objects (`_objects/scopes.py`)
  marked: bool = False  # its last result only orders later calls
  numbered: tuple[Numbered, ...] = ()
  skips: bool = False  # leaves out lanes without an object, with vmap="whole"

  @property
  def axes(self) -> tuple[Level, ...]:
    """All batch axes of the call's arrays, outermost first."""
    return self.levels if self.whole is None else (*self.levels, self.whole)


def shared_by_lanes(call: BoundCall) -> BoundCall:
  """Returns a wait for a started call as a call of lanes; other calls unchanged."""
  if call.gate.traits.handles != "takes" or dict(call.site.static).get(SHARED):
    return call
  site = dataclasses.replace(call.site, static=(*call.site.static, (SHARED, True)))
  return dataclasses.replace(call, site=site)


def in_one_lane(call: BoundCall, size: int) -> BoundCall:
  """Returns the call for one lane, in a loop over so many lanes.

  A gate's call takes the lane's number as another operand, the last (`levels.Numbered`).

  Raises:
    GateDefinitionError: the function needs the number, and the program doesn't have it.
  """
  if call.gate.traits.knows_lanes and not is_open(size) and not callable(call.gate.sharding):
    call = dataclasses.replace(call, numbered=((size, len(call.levels)), *call.numbered))
  elif call.gate.traits.by_lane:
    raise unknown_lane(call.gate)
  return shared_by_lanes(call)


def unknown_lane(gate: Callee) -> GateDefinitionError:
  """Returns the error for a gate that needs its lane in a program that doesn't have it."""
  return GateDefinitionError(
    f"{gate.label}: affinity='lane' needs a lane number, which a call doesn't have in a branch "
    "or loop that only some lanes take, under a symbolic number of lanes, with a function as "
    "sharding=, or inside a third-party primitive. Move the call outside and select from its "
    "results, or drop affinity="
  )


@dataclasses.dataclass(frozen=True)
class TangentCall:
  """The call that computes the tangents of a call's results.

  Its operands are the call's own, then the tangents of the arguments at `wanted`. It is linear in
  these tangents.
  """

  gate: Callee
  site: CallSite
  wanted: tuple[int, ...]  # flat positions of arguments
  outputs: tuple[int, ...]  # flat positions of the results that have tangents


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class Call(BoundCall):
  """A call in a program that is being lowered, for a number of devices.

  `operands` and `results` are abstract values, batch axes included.
  """

  operands: Sequence[Any]
  results: Sequence[Any]
  devices: int


@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class Emission:
  """The form of a call in a program."""

  callee: Any  # the runtime's callee, which has a name
  target: str  # the FFI target
  attributes: Mapping[str, Any]  # in addition to those of every call
  call: Call  # with the batch levels that the runtime loops over
  watcher: Any = None  # watches the program's executions (`execution.Watcher`)


# Makes the calls in programs for one platform.
Backend = Callable[[Call], Emission]


class Callee(Identity):
  """A gate or kernel for the primitive's rules; `ArrayFunction` is its public object."""

  kind = "operation"
  parameters: tuple[str, ...] = ()
  arrays = "numpy"
  style = "inplace"
  cast: bool | None = False
  collective = False
  traits = Traits()
  # The signature of calls; None if it is unknown.
  call_signature: inspect.Signature | None = None
  # The same, if Python binds a call's arguments by this signature only.
  binds: inspect.Signature | None = None
  # The defaults of the callable's parameters.
  defaults: Mapping[str, Any] = {}
  # `Emission.watcher`, for programs that use JAX's own callbacks.
  watcher_of_jax: Any = None
  # The user's derivative rules. With `symbolic_zeros` the jvp rule sees which tangents are zero, as
  # in `jax.custom_jvp`.
  jvp_rule: Callable[..., Any] | None = None
  symbolic_zeros = False
  vjp_rules: tuple[Callable[..., Any], Callable[..., Any]] | None = None
  transpose_rule: Callable[..., Any] | None = None
  # For a gate with state for each lane: all calls under vmap are calls of its lanes. If the lanes
  # run one after another, this makes a lane's call from operands, call, number and count of lanes.
  lane_rule: Callable[..., Sequence[Any]] | None = None
  no_derivatives = ""  # the reason if it can't have any, for the error
  defined_at: Where | None = None  # the line that defines it
  owners: tuple[Callable[[], type | None], ...] = ()  # the classes that have it as a method
  # Returns the call with its rules around it, by the `Exact` of static values, the structure of the
  # split arguments, and the user's line: a cache (`tracing.clearable_cache`).
  differentiable: Any

  def programs(self, site: CallSite) -> Callable[..., Any] | None:
    """Returns the cache of programs for such calls outside jit; None for JAX's own cache."""
    del site

  def __init__(self, name: str, options: CallOptions) -> None:
    """Makes a callee of checked options."""
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

  def handles_in(self, site: CallSite) -> tuple[int, ...]:
    """Returns the flat places of the handles among a call's arguments."""
    del site
    return ()

  def rename(self, name: str) -> None:
    """Gives it another name in programs lowered from now on, and frees its old name."""
    raise NotImplementedError

  @property
  def has_side_effect(self) -> bool:
    """True if XLA must not remove, merge or move a call.

    A call that makes an object, or takes one out, must not be merged or moved out of its loop,
    whatever its effect.
    """
    return self.effect != "pure" or self.traits.handles in ("makes", "takes")

  @property
  def on_each_device(self) -> bool:
    """True if each device of a program makes its own call, because processes share no memory."""
    return self.traits.reads_cell and jax.process_count() == 1

  @property
  def label(self) -> str:
    """The name in messages."""
    return f"{self.kind} '{self.name}'"

  def __repr__(self) -> str:
    return f"<{self.label}>"

  @property
  def has_rule(self) -> bool:
    """True if the user's rule, a reference or finite differences give the derivatives."""
    rules = self.jvp_rule, self.vjp_rules, self.gradient, self.like
    return any(rule is not None for rule in rules)

  def is_of_object(self, args: Sequence[Any]) -> bool:
    """Returns True if a call's first argument is the object, or the class, that has this method."""
    if not self.owners or not args:
      return False
    first = args[0].value if isinstance(args[0], split.Static) else args[0]
    classes = self.live_owners
    return isinstance(first, classes) or (isinstance(first, type) and issubclass(first, classes))

  @property
  def live_owners(self) -> tuple[type, ...]:
    """The live classes that have it as a method."""
    return tuple(filter(None, (owner() for owner in self.owners)))

  def apply_raw(self, args: tuple[Any, ...], kwargs: dict[str, Any], static: Static) -> Any:
    """Binds the call without derivative rules."""
    raise NotImplementedError

  def backend(self, platform: str) -> Backend:
    """Returns the function that makes calls in programs for a platform of `RUNTIME_PLATFORMS`.

    Raises:
      GateDefinitionError: it has no code for that platform.
    """
    raise NotImplementedError

  def check_export(self) -> None:
    """Raises GateDefinitionError if other processes can't run a program that calls it."""

  def sharding_rule(
    self, site: CallSite, operands: Sequence[Any], results: Sequence[Any]
  ) -> rules.Rule:
    """Returns the dimensions of one lane's arrays that may be split over devices, as a rule."""
    del site
    return rules.of_call(self.label, self.sharding, operands, results)

  def tangent_call(self, site: CallSite, moved: Sequence[int]) -> TangentCall:
    """Returns the call for tangents of the arguments at `moved`, for callees with `autograd`."""
    raise NotImplementedError

  def transpose_call(
    self, site: CallSite, cotangents: Sequence[Any], flat: Sequence[Any], linear: Sequence[int]
  ) -> Sequence[Any]:
    """Returns cotangents of a tangent call's arguments at `linear`, for callees with `autograd`.

    `flat` are the arguments, with ShapeDtypeStructs at `linear`.
    """
    raise NotImplementedError

  def batching(self, site: CallSite, mask: Sequence[bool], lanes: Sequence[Any]) -> Vmap:
    """Returns how to batch a call that the runtime does not loop over yet.

    `mask` has True for each flat argument with a batch axis; `lanes` are ShapeDtypeStructs of one
    lane's arguments.
    """
    del site, mask, lanes
    return self.vmap

  def batched(self, whole: Level | None) -> Callee:
    """Returns the callee for arguments with the leading axis `whole`: usually itself."""
    del whole
    return self

  def on_host(self, *args: Any, **kwargs: Any) -> Any:
    """Calls the function on NumPy arrays, without the runtime, for JAX's own callbacks."""
    raise NotImplementedError

  def on_lane(self, lane: int, call: Callable[[], Any]) -> Any:
    """Calls `call`, which calls `on_host`, for a lane."""
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
    """Calls a user's rule or reference for this operation with `lead` and the arguments.

    The function also gets the static arguments, and the callable's defaults for missing ones, that
    it has parameters for.
    """
    lead, args, kwargs = split.joined((tuple(lead), tuple(args), dict(kwargs)))
    if self.defaults:
      given = {*kwargs, *(name for name, _ in static)}
      left = signatures.open_parameters(function, len(lead) + len(args), given)
      more = {name: self.defaults[name] for name in left if name in self.defaults}
      kwargs = {**kwargs, **more}
    return function(*lead, *args, **kwargs, **signatures.accepted(function, dict(static)))
