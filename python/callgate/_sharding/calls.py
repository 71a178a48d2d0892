"""What a call holds for the partitioner in a program over several devices, worked out when lowered.

`of_gate` and `of_tap` give the `Sharded` of a call, with its rule, or None where nothing is to be
partitioned: in a program of one device, and inside a fully manual `jax.shard_map`.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import numpy as np
from jax.core import ShapedArray

from callgate._core import attributes, registry
from callgate._core.encoding import Level
from callgate._core.errors import GateDefinitionError
from callgate._jax import lowering, tracing
from callgate._sharding import functions, rules
from callgate._sharding.rules import Rule


class Called(Protocol):
  """What is to be known of a gate or kernel whose calls are partitioned."""

  name: str
  sharding: Any
  aliases: dict[int, int]
  collective: bool
  # Where no dimension may stay split, one device's call serves all.
  one_calls_for_all: bool

  @property
  def label(self) -> str: ...
  @property
  def effect(self) -> str: ...

  def sharding_rule(self, site: Any, operands: Sequence[Any], results: Sequence[Any]) -> Rule: ...


def of_gate(
  context: Any, gate: Called, site: Any, levels: Sequence[Level], whole: Level | None
) -> tuple[Sharded, Rule | None] | None:
  """For a call of a gate or kernel; the rule is None where a function gives it later."""
  located = lowering.is_partitioned(context)
  if not located and not lowering.is_partly_manual(context):
    return None
  if not located and gate.effect == "ordered":
    raise _no_order(f"{gate.label}: effect='ordered'")
  shapes = [aval.shape for aval in context.avals_in], [aval.shape for aval in context.avals_out]
  rule = None if callable(gate.sharding) else rule_of(gate, site, *shapes, levels, whole)
  gathered = gate.one_calls_for_all and gate.sharding in (None, "gather")
  once = not gate.collective and (gate.effect != "pure" or gathered)
  sharded = Sharded(
    rule=rule.text if rule is not None else "",
    devices=lowering.device_count(context),
    mesh=lowering.mesh_axes(context),
    effect=gate.effect != "pure",
    token=gate.effect == "ordered",
    once=once,
    aliases=tuple(sorted(gate.aliases.items())),
    located=located,
    sizes=tuple(size for size, _ in levels),
    lanes=tuple(_digits(mask) for _, mask in levels),
    names=tuple(
      registry.argument(gate.name, site.spec, i).strip("'") for i in range(len(context.avals_in))
    ),
    function=gate.name if rule is None else "",
  )
  return sharded, rule


def of_callback(
  context: Any, label: str, said: Any, *, effect: bool, aliases: Mapping[int, int]
) -> tuple[Sharded, Rule] | None:
  """For a callback of flat arrays, by `said`: its option `sharding`."""
  if not lowering.is_automatic(context):
    return None
  shapes = [aval.shape for aval in context.avals_in], [aval.shape for aval in context.avals_out]
  rule = rules.of_call(label, said, *shapes).closed()
  sharded = Sharded(
    rule=rule.text,
    devices=lowering.device_count(context),
    mesh=lowering.mesh_axes(context),
    effect=effect,
    once=effect or said in (None, "gather"),
    aliases=tuple(sorted(aliases.items())),
    located=lowering.is_partitioned(context),
    names=tuple(f"argument {i}" for i in range(len(context.avals_in))),
  )
  return sharded, rule


def rule_of(
  gate: Called,
  site: Any,
  operands: Sequence[rules.Shape],
  results: Sequence[rules.Shape],
  levels: Sequence[Level],
  whole: Level | None,
) -> Rule:
  """The rule of a call with its batch axes; the lanes of a vmap are always independent."""
  axes = [*levels, *(() if whole is None else (whole,))]
  lane = [shape[sum(mask[i] for _, mask in axes) :] for i, shape in enumerate(operands)]
  core = [shape[len(axes) :] for shape in results]
  return gate.sharding_rule(site, lane, core).under(axes, len(results)).closed()


def result_specs(
  gate: Called,
  site: Any,
  avals: Sequence[Any],
  results: Sequence[Any],
  levels: Sequence[Level],
  whole: Level | None,
) -> list[list[Any]]:
  """The specs of a call's results in an explicitly sharded program."""
  shapes = [aval.shape for aval in results]
  if callable(gate.sharding):
    found = functions.specs(gate.label, gate.sharding, avals, shapes)
    if not isinstance(found, Rule):
      return found
    rule = found
  else:
    rule = rule_of(gate, site, [aval.shape for aval in avals], shapes, levels, whole)
  return specs_of(rule, [tracing.spec_of(aval) for aval in avals])


# A device's position in the program, which collective gates get as their last operand.
PARTITION = ShapedArray((), np.dtype(np.uint32))


def in_manual(context: Any, gate: Called) -> tuple[Any, dict[str, Any]] | None:
  """For a collective gate in a fully manual `jax.shard_map`: the partition, and attributes."""
  if lowering.is_partitioned(context) or lowering.device_count(context) == 1:
    return None
  if lowering.is_partly_manual(context):
    raise GateDefinitionError(
      f"{gate.label}: collective=True works in programs that are partitioned automatically, and in "
      "a jax.shard_map over all axes of its mesh; this jax.shard_map leaves some of them to XLA "
      "(axis_names=)"
    )
  devices, mesh = lowering.device_count(context), lowering.mesh_axes(context)
  held = {"shards": "1" * devices, "mesh": held_mesh(devices, mesh), "layout": ""}
  return lowering.partition_id(), held


def specs_of(rule: Rule, specs: Sequence[Sequence[Any]]) -> list[list[Any]]:
  """The results' specs on an explicit mesh, from those of the operands.

  A spec has for each dimension a mesh axis, a tuple of them, or None.
  """
  axes: dict[int, Any] = {}
  for term, spec in zip(rule.operands, specs, strict=True):
    for factor, axis in zip(term, spec, strict=True):
      if axis is not None and factor not in rule.whole:
        axes.setdefault(factor, axis)
  out: list[list[Any]] = []
  for term in rule.results:
    used: set[Any] = set()
    own: list[Any] = []
    for factor in term:
      axis = axes.get(factor)
      names: set[Any] = set(axis if isinstance(axis, tuple) else (axis,)) - {None}  # pyright: ignore[reportUnknownArgumentType]
      own.append(None if names & used else axis)
      used |= names
    out.append(own)
  return out


def of_tap(context: Any, tap_site: Any, levels: Sequence[Level]) -> tuple[Sharded, Rule] | None:
  """For a tap: its leaves lie as they lie, or are gathered, or follow the user's rule."""
  located = lowering.is_partitioned(context)
  if not located and not lowering.is_partly_manual(context):
    return None
  if not located and tap_site.effect == "ordered":
    raise _no_order(f"tap '{tap_site.name}': ordered=True")
  count = len(context.avals_in)
  shapes = [aval.shape for aval in context.avals_in]
  lane = [shape[sum(mask[i] for _, mask in levels) :] for i, shape in enumerate(shapes)]
  values, rest = lane[: tap_site.values], lane[tap_site.values :]
  function = tap_site.sharding if callable(tap_site.sharding) else None
  said: Any = "shard" if function is not None else tap_site.sharding
  rule = rules.of_tap(f"tap '{tap_site.name}'", said, values)
  first = rule.factors()
  others = rules.independent(rest).operands
  others = tuple(tuple(first + factor for factor in term) for term in others)
  rule = Rule((*rule.operands, *others), (), rule.whole)
  # Sizes and the predicate are small, and every record has them whole.
  extras = rule.operands[tap_site.values : count - tap_site.untapped]
  # Of which part a padded leaf is must be known.
  padded = () if located else [rule.operands[leaf] for leaf in tap_site.logical]
  rule = Rule(rule.operands, (), rule.whole | {f for term in (*extras, *padded) for f in term})
  rule = rule.under(levels, 0)
  passing = tap_site.effect == "dataflow"
  returned = [*range(tap_site.values), *range(count - tap_site.untapped, count)] if passing else []
  rule = Rule(rule.operands, tuple(rule.operands[i] for i in returned), rule.whole)
  sharded = Sharded(
    rule=rule.text,
    devices=lowering.device_count(context),
    effect=True,
    token=tap_site.effect == "ordered",
    once=tap_site.replicas == "once",
    aliases=tuple((operand, result) for result, operand in enumerate(returned)),
    located=located,
    tap=tap_site.values,
    sizes=tuple(size for size, _ in levels),
    lanes=tuple(_digits(mask) for _, mask in levels),
    mesh=lowering.mesh_axes(context) if function is not None else (),
    function=functions.name_of(function) if function is not None else "",
    label=tap_site.name if function is not None else "",
  )
  return sharded, rule


def _no_order(what: str) -> GateDefinitionError:
  # XLA aborts the process over a token beside another value there.
  return GateDefinitionError(
    f"{what} works in programs that are partitioned automatically, and in a jax.shard_map over all "
    "axes of its mesh; this jax.shard_map leaves some of them to XLA (axis_names=)"
  )


def _digits(mask: Sequence[bool]) -> str:
  return "".join("01"[flag] for flag in mask)


@dataclasses.dataclass(frozen=True)
class Sharded:
  """What the partitioner has to know of a call.

  Attributes:
    rule: `Rule.text`; or "" for a function of the mesh, which the operation `function` has.
    devices: how many run the program.
    mesh: names and sizes of the program's mesh axes; () where it is not known.
    effect: the call has side effects.
    token: the first operand and the first result are tokens.
    once: of the devices with the same shards one makes the call, and the others get its results.
    aliases: operand to result, tokens not counted.
    located: the call is told its shard. Not so inside a partly manual `jax.shard_map`, where the
      devices that share an array are not all.
    tap: the operands from which a tap's records are made; -1 for other calls.
    sizes: the extents of the batch levels, outermost first.
    lanes: their masks.
    names: of the operands, for messages.
    function: the operation whose rule is a function; of a tap, the function's name.
    label: a tap's name.
  """

  rule: str
  devices: int
  mesh: tuple[tuple[str, int], ...] = ()
  effect: bool = False
  token: bool = False
  once: bool = False
  aliases: tuple[tuple[int, int], ...] = ()
  located: bool = True
  tap: int = -1
  sizes: tuple[int, ...] = ()
  lanes: tuple[str, ...] = ()
  names: tuple[str, ...] = ()
  function: str = ""
  label: str = ""

  @property
  def text(self) -> str:
    """As programs hold it."""
    fields = dataclasses.asdict(self)
    defaults = {f.name: f.default for f in dataclasses.fields(self)}
    held = {key: value for key, value in fields.items() if value != defaults[key]}
    return json.dumps(held, separators=(",", ":"))

  @classmethod
  def read(cls, text: str) -> Sharded:
    code = json.loads(text)
    for name in ("sizes", "lanes", "names"):
      code[name] = tuple(code.get(name, ()))
    for name in ("mesh", "aliases"):
      code[name] = tuple(map(tuple, code.get(name, ())))
    return cls(**code)


def held_mesh(devices: int, axes: Sequence[tuple[str, int]]) -> dict[str, Any]:
  """A mesh as calls on shards hold it (`Mesh::of` in src/core/call.h)."""
  return {
    "devices": np.int64(devices),
    "names": attributes.listed(name for name, _ in axes),
    "sizes": np.array([size for _, size in axes], np.int64),
  }
