# SPDX-License-Identifier: Apache-2.0
"""Computes, when a call is lowered, its description for the partitioner of several devices.

`of_gate` and `of_tap` return the `Sharded` of a call, with its rule. They return None if the
partitioner has nothing to do: in a program of one device, and inside a fully manual
`jax.shard_map`.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import numpy as np
from jax.core import ShapedArray

from callgate._core import attributes, registry
from callgate._core.errors import GateDefinitionError
from callgate._core.levels import Level, Numbered
from callgate._jax import lowering, tracing
from callgate._sharding import functions, rules
from callgate._sharding.rules import Rule, Shape


class Called(Protocol):
  """A gate or kernel whose calls are partitioned."""

  name: str
  sharding: Any
  aliases: dict[int, int]
  collective: bool
  traits: Any  # `_call/traits.py`

  @property
  def on_each_device(self) -> bool: ...
  @property
  def label(self) -> str: ...
  @property
  def effect(self) -> str: ...
  @property
  def has_side_effect(self) -> bool: ...

  def sharding_rule(self, site: Any, operands: Sequence[Any], results: Sequence[Any]) -> Rule: ...


class BoundLike(Protocol):
  """The call that the primitive binds (`_call/site.py`)."""

  @property
  def gate(self) -> Any: ...
  @property
  def site(self) -> Any: ...
  @property
  def levels(self) -> Sequence[Level]: ...
  @property
  def whole(self) -> Level | None: ...
  @property
  def numbered(self) -> Sequence[Numbered]: ...


def of_gate(
  context: Any, avals: Sequence[Any], call: BoundLike
) -> tuple[Sharded, Rule | None] | None:
  """Describes a call of a gate or kernel; the rule is None if a function returns it later.

  `avals` are the abstract values of the call's operands, then that of its lane's number, if the
  call has one.
  """
  if not lowering.is_automatic(context):
    return None
  gate: Called = call.gate
  site, levels, whole = call.site, call.levels, call.whole
  own = avals[: len(avals) - bool(call.numbered)]
  if gate.effect == "ordered":
    _check_takes_tokens(context, f"{gate.label}: effect='ordered'")
  rule = None
  if not callable(gate.sharding):
    axes = [*levels, whole] if whole else levels
    shapes = [aval.shape for aval in own]
    rule = _rule_of(gate, site, shapes, _shapes(context)[1], axes)
    if call.numbered:
      rule = dataclasses.replace(rule, operands=(*rule.operands, ()))
  gathered = gate.traits.one_calls_for_all and gate.sharding in (None, "gather")
  names = (registry.argument(gate.name, site.spec, i) for i in range(len(own)))
  return Sharded(
    **_program(context, levels, call.numbered),
    rule=rule.text if rule is not None else "",
    effect=gate.has_side_effect,
    token=gate.effect == "ordered",
    once=not (gate.collective or gate.on_each_device) and (gate.effect != "pure" or gathered),
    ranked=gate.collective and lowering.is_partly_manual(context),
    aliases=sorted(gate.aliases.items()),
    names=[name.strip("'") for name in names],
    function=gate.name if rule is None else "",
  ), rule


def of_callback(
  context: Any, label: str, sharding: Any, *, effect: bool, aliases: Mapping[int, int]
) -> tuple[Sharded, Rule] | None:
  """Describes a callback of flat arrays; `sharding` is its option."""
  if not lowering.is_automatic(context):
    return None
  rule = rules.of_call(label, sharding, *_shapes(context)).closed()
  return Sharded(
    **_program(context, ()),
    rule=rule.text,
    effect=effect,
    once=effect or sharding in (None, "gather"),
    aliases=sorted(aliases.items()),
    names=[f"argument {i}" for i in range(len(context.avals_in))],
  ), rule


def of_tap(context: Any, tap_site: Any, levels: Sequence[Level]) -> tuple[Sharded, Rule] | None:
  """Describes a tap: its leaves keep their shardings, are gathered, or follow the user's rule."""
  if not lowering.is_automatic(context):
    return None
  label = f"tap '{tap_site.name}'"
  if tap_site.effect == "ordered":
    _check_takes_tokens(context, f"{label}: ordered=True")
  program = _program(context, levels, tap_site.numbered)
  lane, count = _lane(_shapes(context)[0], levels), tap_site.values
  function = tap_site.sharding if callable(tap_site.sharding) else None
  if function is None:
    rule = rules.of_call(label, tap_site.sharding, lane[:count], (), tap=True)
    program["mesh"] = ()
  else:
    rule = rules.independent(lane[:count])
    program |= {"function": functions.name_of(function), "label": tap_site.name}
  operands = (*rule.operands, *rules.independent(lane[count:], rule.factors()).operands)
  untapped = range(len(lane) - tap_site.untapped, len(lane))
  # Sizes and the predicate are small, so every record has them whole. The record of a padded leaf
  # must name its part.
  padded = () if program["located"] else tap_site.logical
  gathered = rule.whole.union(*(operands[i] for i in (*range(count, untapped.start), *padded)))
  rule = Rule(operands, (), gathered).under(levels)
  returned = [*range(count), *untapped] if tap_site.effect == "dataflow" else []
  rule = dataclasses.replace(rule, results=tuple(rule.operands[i] for i in returned))
  return Sharded(
    **program,
    rule=rule.text,
    effect=True,
    token=tap_site.effect == "ordered",
    once=tap_site.replicas == "once",
    aliases=[(operand, result) for result, operand in enumerate(returned)],
    tap=count,
  ), rule


def _shapes(context: Any) -> tuple[list[Shape], list[Shape]]:
  return [aval.shape for aval in context.avals_in], [aval.shape for aval in context.avals_out]


def _lane(shapes: Sequence[Shape], levels: Sequence[Level]) -> list[Shape]:
  """Returns the operands' shapes without their batch axes."""
  return [shape[sum(mask[i] for _, mask in levels) :] for i, shape in enumerate(shapes)]


def _program(
  context: Any, levels: Sequence[Level], numbered: Sequence[Numbered] = ()
) -> dict[str, Any]:
  """Returns the fields that all calls have: the program's devices and mesh, and batch levels."""
  return {
    "devices": lowering.device_count(context),
    "mesh": lowering.mesh_axes(context),
    "located": lowering.is_partitioned(context),
    "lanes": ["".join("01"[flag] for flag in mask) for _, mask in levels],
    "numbered": list(numbered),
  }


def check_whole_mesh(context: Any, what: str, where: str = "") -> None:
  """Raises GateDefinitionError for calls that a partly manual program can't have."""
  if lowering.is_partly_manual(context):
    raise GateDefinitionError(
      f"{what} works in programs that are partitioned automatically, and in a jax.shard_map over "
      f"all axes of its mesh{where}; this jax.shard_map leaves some of them to XLA: drop "
      "axis_names="
    )


def _check_takes_tokens(context: Any, what: str) -> None:
  """Raises as `check_whole_mesh` if a token beside other values would make XLA end the process."""
  if not lowering.TOKENS_IN_PARTLY_MANUAL:
    check_whole_mesh(context, what, ", and from JAX 0.11 on over some")


def _rule_of(
  gate: Called,
  site: Any,
  operands: Sequence[Shape],
  results: Sequence[Shape],
  axes: Sequence[Level],
) -> Rule:
  """Returns the rule of a call with its batch axes; the lanes of a vmap are always independent."""
  core = [shape[len(axes) :] for shape in results]
  return gate.sharding_rule(site, _lane(operands, axes), core).under(axes).closed()


def result_specs(
  gate: Called,
  site: Any,
  avals: Sequence[Any],
  results: Sequence[Any],
  levels: Sequence[Level],
  whole: Level | None,
) -> Sequence[Sequence[Any]]:
  """Returns the specs of a call's results in an explicitly sharded program.

  By default a gathered result has the sharding of an operand of its shape, because the carry of a
  loop and the branches of a `cond` must have one type.
  """
  shapes = [aval.shape for aval in results]
  if callable(gate.sharding):
    rule = functions.result_specs(gate.label, gate.sharding, avals, shapes)
    if not isinstance(rule, Rule):
      return rule
  else:
    axes = [*levels, whole] if whole else levels
    rule = _rule_of(gate, site, [aval.shape for aval in avals], shapes, axes)
  split: dict[int, Any] = {}  # the mesh axis of a factor, or a tuple of them
  for term, aval in zip(rule.operands, avals, strict=True):
    for factor, axis in zip(term, tracing.spec_of(aval), strict=True):
      if axis is not None and factor not in rule.whole:
        split.setdefault(factor, axis)
  out: list[list[Any]] = []
  for term in rule.results:
    used: set[Any] = set()
    out.append([])
    for axis in map(split.get, term):
      names: set[Any] = set(axis if isinstance(axis, tuple) else (axis,)) - {None}  # pyright: ignore[reportUnknownArgumentType]
      out[-1].append(None if names & used else axis)
      used |= names
  if gate.sharding is None:
    alike = {aval.shape: tracing.spec_of(aval) for aval in reversed(avals)}
    out = [s if any(s) else alike.get(shape, s) for s, shape in zip(out, shapes, strict=True)]
  return out


# The type of a device's position in the program, the last operand of these gates.
PARTITION = ShapedArray((), np.dtype(np.uint32))


def in_manual(context: Any, gate: Called) -> tuple[Any, dict[str, Any]] | None:
  """Returns the shard of a gate that needs it, in a fully manual `jax.shard_map`.

  Returns:
    The partition, for its last operand, and attributes; None if it gets its shard in another way.
  """
  by_lane = gate.traits.by_lane
  if not (by_lane or gate.collective or gate.traits.gets_shard):
    return None
  if lowering.is_partly_manual(context) and not by_lane:  # others are `Sharded.ranked` there
    return None
  devices, mesh = lowering.device_count(context), lowering.mesh_axes(context)
  if lowering.is_partitioned(context) or devices == 1:
    return None
  check_whole_mesh(context, f"{gate.label}: affinity='lane'")
  return lowering.partition_id(), located_in_manual(devices, mesh)


def located_in_manual(devices: int, mesh: Sequence[tuple[str, int]]) -> dict[str, Any]:
  """Returns the attributes of a call that each device makes with its part in a manual region."""
  return {"shards": "1" * devices, "mesh": held_mesh(devices, mesh), "layout": ""}


@dataclasses.dataclass(frozen=True)
class Sharded:
  """The description of a call for the partitioner."""

  rule: str  # `Rule.text`; "" if the rule is a function
  devices: int  # the number of the program's devices
  mesh: Sequence[tuple[str, int]] = ()  # names and sizes of its axes; () if unknown
  effect: bool = False
  token: bool = False  # True if the first operand and the first result are tokens
  # One of the devices with the same shards makes the call; the others get its results.
  once: bool = False
  aliases: Sequence[tuple[int, int]] = ()  # operand to result, tokens not counted
  # True if the call gets its shard. In a partly manual `jax.shard_map` it doesn't, because not all
  # devices share an array.
  located: bool = True
  # True if the call gets its position among all devices there.
  ranked: bool = False
  tap: int = -1  # the number of operands in a tap's records; -1 for other calls
  lanes: Sequence[str] = ()  # masks of the batch levels, outermost first
  numbered: Sequence[Numbered] = ()
  names: Sequence[str] = ()  # the operands' names, for messages
  function: str = ""  # the name of the operation whose rule is a function, or of a tap's rule
  label: str = ""  # a tap's name

  @property
  def text(self) -> str:
    """Returns its text in programs."""
    empty = ((), [])
    held = {k: v for k, v in vars(self).items() if v not in empty and v != vars(Sharded).get(k)}
    return json.dumps(held, separators=(",", ":"))

  @classmethod
  def read(cls, text: str) -> Sharded:
    return cls(**json.loads(text))


def held_mesh(devices: int, axes: Sequence[tuple[str, int]]) -> dict[str, Any]:
  """Returns the mesh's attributes in calls on shards (`Mesh::of` in src/core/call.h)."""
  return {
    "devices": np.int64(devices),
    "names": attributes.listed(name for name, _ in axes),
    "sizes": np.array([size for _, size in axes], np.int64),
  }
