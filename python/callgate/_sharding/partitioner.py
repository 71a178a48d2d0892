# SPDX-License-Identifier: Apache-2.0
"""The partitioner of callgate's calls: turns a call on whole arrays into calls on shards.

A call in a program over several devices has the attribute `shard` (`Sharded`): its rule and other
facts. XLA's partitioner calls this module when the program is compiled, with the arrays' shapes and
shardings. The answer has the shardings that the call needs, and a module in which each device makes
the same call on its tiles, with its position in the program as one more operand (xla/call_site.h).
Nothing here runs when the program runs.

XLA does not enforce the rule: an operand may be split along a dimension that must be whole. So the
shardings are computed again (`tiles.plan`), and XLA moves misplaced data.
"""

from __future__ import annotations

import dataclasses
import functools
import json
from collections.abc import Sequence
from typing import Any

import numpy as np

from callgate._core import attributes, registry
from callgate._core.levels import all_sizes, encode_levels
from callgate._jax import partitioner
from callgate._sharding import functions
from callgate._sharding import module as local_module
from callgate._sharding import tiles as _tiles
from callgate._sharding.calls import Sharded, held_mesh, located_in_manual
from callgate._sharding.rules import Rule
from callgate._sharding.tiles import TilePlan, Tiling


@dataclasses.dataclass(frozen=True)
class _Array:
  """An operand or result as XLA describes it; a token has no dtype."""

  shape: tuple[int, ...]
  dtype: Any
  sharding: Any

  @functools.cached_property
  def grid(self) -> np.ndarray | None:
    known = self.sharding is not None
    return partitioner.device_grid(self.sharding, len(self.shape)) if known else None

  def tiling(self, devices: int) -> Tiling:
    if self.grid is None or self.grid.size != devices:
      return Tiling.replicated(len(self.shape), devices)
    return Tiling.of_grid(self.grid, len(self.shape))


def _arrays(shapes: Sequence[Any], shardings: Sequence[Any]) -> list[_Array]:
  pairs = zip(shapes, shardings, strict=True)
  return [_Array(*partitioner.shape_and_dtype(shape), sharding) for shape, sharding in pairs]


# A call's plan, and the shardings of its operands and results for XLA.
_Solution = tuple[TilePlan, list[Any], list[Any]]
# Programs contain many equal calls. Emptied when it is full. Atomic: single steps, and
# solving a call twice does no harm; at most _MANY entries.
_solutions: dict[Any, _Solution] = {}
_MANY = 1024
_RULED = " has a function as its sharding rule, which"


class _PartitionedCall:
  """The call that XLA partitions: its attributes and its arrays, without a token."""

  def __init__(
    self,
    operand_shapes: Sequence[Any],
    operand_shardings: Sequence[Any],
    result_shape: Any,
    result_sharding: Any,
    config: bytes,
  ) -> None:
    self.is_tuple, self.given = result_shape.is_tuple(), result_sharding
    shapes = list(result_shape.tuple_shapes()) if self.is_tuple else [result_shape]
    shardings = [result_sharding] * len(shapes)
    if self.is_tuple and result_sharding is not None:
      # XLA gives an empty tuple one sharding, too.
      shardings = list(result_sharding.tuple_elements())[: len(shapes)]
    self.held = local_module.read_attributes(config)
    self.about = Sharded.read(self.held.pop("shard"))
    skip = int(self.about.token)
    self.tokens = [((), None)] * skip
    self.token_shardings = [s or partitioner.replicated_sharding() for s in shardings[:skip]]
    self.operands = _arrays(operand_shapes[skip:], operand_shardings[skip:])
    self.results = _arrays(shapes[skip:], shardings[skip:])
    # The number of devices that share the arrays: only some, in a partly manual program.
    grids = (array.grid for array in (*self.operands, *self.results))
    sizes = (grid.size for grid in grids if grid is not None and grid.size > 1)
    self.devices = next(sizes, self.about.devices)
    self.located = self.about.located and self.devices == self.about.devices

  # -- the shardings of its arrays -----------------------------------------------------------------
  def solution(self) -> _Solution:
    if self.about.function:
      return self._worked_out()
    arrays = tuple((a.shape, str(a.sharding)) for a in (*self.operands, *self.results))
    key = self.about.rule, self.devices, len(self.operands), arrays
    found = _solutions.get(key)
    if found is None:
      if len(_solutions) >= _MANY:
        _solutions.clear()
      found = _solutions[key] = self._worked_out()
    return found

  def _worked_out(self) -> _Solution:
    sides = self.operands, self.results
    ins, outs = ([array.tiling(self.devices) for array in side] for side in sides)
    plan = self._by_function() if self.about.function else None
    if self.about.tap >= 0 or plan is None:
      rule = Rule.read(self.about.rule, len(self.operands), len(self.results))
      plan = rule if plan is None else _with_whole(rule, plan)
    if isinstance(plan, Rule):
      shapes = [a.shape for a in self.operands], [a.shape for a in self.results]
      plan = _tiles.plan(plan, shapes, (ins, outs), self.devices)
    new_ins = list(map(_sharding, self.operands, ins, plan.operands))
    return plan, new_ins, list(map(_sharding, self.results, outs, plan.results))

  def result_sharding(self, results: Sequence[Any]) -> Any:
    """Returns the sharding of the results, or of their tuple, for XLA."""
    out = [*self.token_shardings, *results]
    if not out and self.given is not None:
      return self.given
    return partitioner.tuple_sharding(out) if self.is_tuple else out[0]

  def _by_function(self) -> Rule | TilePlan:
    """Calls the sharding function of an operation, or of a tap, with the program's mesh."""
    about = self.about
    operands = [(a.shape, a.dtype, a.sharding) for a in self.operands]
    if about.tap >= 0:
      label, function = f"tap '{about.label}'", functions.named(about.function)
      if function is None:
        raise _undefined(f"{label}{_RULED}", "trace the tap there")
      return functions.plan(label, function, about.mesh, operands[: about.tap], [], tap=True)
    operation = registry.get(about.function)
    if operation is None:
      raise _undefined(f"'{about.function}'{_RULED}", "define the gate there first")
    results = [a.shape for a in self.results]
    return functions.plan(operation.label, operation.sharding, about.mesh, operands, results)

  # -- the call on one device's tiles ------------------------------------------------------------
  def module(self, target: str, plan: TilePlan) -> bytes:
    about, held, skip = self.about, self.held, len(self.tokens)
    self._localise(plan)
    if self.located:
      runs = {group[0] for group in plan.groups} if about.once else range(self.devices)
      held["shards"] = "".join("01"[device in runs] for device in range(self.devices))
      held["mesh"] = held_mesh(about.devices, about.mesh)
    elif about.ranked:
      held |= located_in_manual(about.devices, about.mesh)
    ins, outs = (
      [(tiling.tile(a.shape), a.dtype) for a, tiling in zip(*side, strict=True)]
      for side in ((self.operands, plan.operands), (self.results, plan.results))
    )
    if "tiles" in held:  # a CUDA kernel, whose grid depends on shapes
      kernel = _defined(held["name"].partition("[")[0])
      target = kernel.retile(held, about.lanes, ins, outs, target)
    if "_key" in held:  # a kernel's hash of all attributes (see `_call/lowering.py`)
      held["_key"] = attributes.key_of({k: v for k, v in held.items() if k != "_key"})
    share = self.located and about.once and about.tap < 0 and len(plan.groups) < self.devices
    return local_module.local_module(
      target,
      [*self.tokens, *ins],
      [*self.tokens, *outs],
      held,
      has_side_effect=about.effect,
      aliases={i + skip: o + skip for i, o in about.aliases},
      partition_id=self.located or about.ranked,
      broadcast=plan.groups if share else None,
    )

  def _localise(self, plan: TilePlan) -> None:
    """Rewrites the extents in the call's attributes to those of the tiles."""
    about, held = self.about, self.held
    # The whole size of each batch level, its size here, and the begin of each device's part.
    whole: list[int] = []
    sizes: list[int] = []
    starts: list[Any] = []
    for level, mask in enumerate(about.lanes):
      operand = mask.index("1")
      axis = sum(other[operand] == "1" for other in about.lanes[:level])
      tiling = plan.operands[operand]
      whole.append(self.operands[operand].shape[axis])
      sizes.append(whole[-1] // tiling.counts[axis])
      starts.append((tiling.index[:, axis] * sizes[-1]).tolist())
    masks = [tuple(digit == "1" for digit in mask) for mask in about.lanes]
    if masks or about.numbered:
      # The number of a gate's lane comes after the operands of the masks, including a tap's.
      operands = len(self.operands) - (bool(about.numbered) and about.tap < 0)
      held["batch"] = encode_levels(list(zip(sizes, masks, strict=True)), about.numbered, operands)
    if about.tap >= 0:
      # Numbered levels have the same lanes on all devices.
      every, own = all_sizes(whole, about.numbered), iter(starts)
      starts = [[0] * self.devices if flag else next(own) for _, flag in every]
      self._localise_tap(plan, [size for size, _ in every], starts)
    elif self.located:
      named = zip(about.names, self.operands, plan.operands, strict=False)
      parts = [(name, _tiles.encode(tiling, a.shape)) for name, a, tiling in named]
      held["layout"] = _json({"devices": about.devices, "operands": parts})

  def _localise_tap(self, plan: TilePlan, sizes: list[int], starts: list[Any]) -> None:
    code = json.loads(self.held["spec"])
    if self.located:
      leaves: list[Any] = []
      for index in range(code["values"]):
        skip = sum(mask[index] == "1" for mask in self.about.lanes)
        t = plan.operands[index]
        core = dataclasses.replace(t, counts=t.counts[skip:], index=t.index[:, skip:])
        leaves.append(_tiles.encode(core, self.operands[index].shape[skip:]))
      code["shards"] = {"leaves": leaves, "lanes": starts, "sizes": sizes}
      # `TapSpec::of` reads an array's extents, and the begin of each shard.
      parts = [self._begins(_tiles.ShardedArray(leaf)) for leaf in leaves]
      self.held["parts"] = attributes.listed(parts)
      if padded := [{"leaf": np.int64(index), **parts[index]} for index in code["logical"]]:
        self.held["padded"] = attributes.listed(padded)
    self.held["spec"] = _json(code)

  def _begins(self, part: _tiles.ShardedArray) -> dict[str, Any]:
    begins = [s.start for device in range(self.devices) for s in part.slices(device)]
    return {"whole": np.array(part.shape, np.int64), "starts": np.array(begins, np.int64)}


def _json(value: Any) -> str:
  return json.dumps(value, separators=(",", ":"))


def _sharding(array: _Array, given: Tiling, wanted: Tiling) -> Any:
  """Returns the sharding of the wanted tiles: XLA's own object, if the array has them already.

  An array on a single device gets a new sharding, so XLA sends it to all devices.
  """
  came = array.sharding
  same = given.counts == wanted.counts and np.array_equal(given.index, wanted.index)
  if same and came is not None and not partitioner.is_of_one_device(came):
    return came
  return partitioner.sharding_of_grid(wanted.grid(), len(wanted.counts))


def _with_whole(rule: Rule, said: Rule | TilePlan) -> Rule:
  """Returns a tap's rule with the dimensions that its function wants whole; others stay split."""
  whole = set(rule.whole)
  for term, own in zip(rule.operands, said.operands, strict=False):
    if isinstance(own, Tiling):
      whole |= {factor for factor, count in zip(term, own.counts, strict=True) if count == 1}
    elif isinstance(said, Rule):
      whole |= {factor for factor, other in zip(term, own, strict=True) if other in said.whole}
  return dataclasses.replace(rule, whole=frozenset(whole))


def _defined(name: str) -> Any:
  kernel = registry.get(name)
  if kernel is None:
    why = ", which computes its grid for each device's part of the arrays"
    raise _undefined(f"kernel '{name}'", "define it there first", why)
  return kernel


def _undefined(what: str, expected: str, why: str = "") -> LookupError:
  where = f"the process that compiles the program{why}"
  return LookupError(f"callgate: {what} is not defined in {where}; {expected}")


def partition(target: str, *call_of_xla: Any) -> tuple[bytes, Sequence[Any], Any]:
  """Answers XLA: how a partitioned call becomes a call of `target` on each device."""
  call = _PartitionedCall(*call_of_xla)
  plan, ins, outs = call.solution()
  ins = [*call_of_xla[1][: len(call.tokens)], *ins]
  return call.module(target, plan), ins, call.result_sharding(outs)


def infer(shapes: Sequence[Any], shardings: Sequence[Any], result: Any, config: bytes) -> Any:
  """Answers XLA's older propagation: the results' shardings."""
  call = _PartitionedCall(shapes, shardings, result, None, config)
  return call.result_sharding(call.solution()[2])
