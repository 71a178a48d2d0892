"""The partitioner of callgate's calls: how a call on whole arrays becomes one on shards.

A call in a program over several devices holds, besides what every call holds, the attribute `shard`
(`Sharded`): its rule and what else is to be known of it. When the program is compiled XLA's
partitioner calls `_partition` with the arrays' shapes and shardings. It answers with the shardings
that the call needs and a module in which every device makes the same call on its tiles, with its
position in the program as one more operand (xla/call_site.h). Nothing here runs when the program
does.

XLA gives what it found by the rule, but holds nobody to it: an operand may come split along a
dimension that must be whole. So the shardings are worked out anew (`tiles.plan`), and XLA moves
what doesn't lie right.
"""

from __future__ import annotations

import dataclasses
import functools
import json
from collections.abc import Sequence
from typing import Any

import numpy as np

from callgate._core import attributes, registry
from callgate._core.encoding import encode_levels
from callgate._jax import partitioner
from callgate._sharding import functions
from callgate._sharding import module as local_module
from callgate._sharding import tiles as _tiles
from callgate._sharding.calls import Sharded, held_mesh
from callgate._sharding.rules import Rule
from callgate._sharding.tiles import Plan, Tiling


@dataclasses.dataclass(frozen=True)
class _Array:
  """An operand or result as XLA describes it; a token has no dtype."""

  shape: tuple[int, ...]
  dtype: Any
  sharding: Any

  def grid(self) -> np.ndarray | None:
    known = self.sharding is not None
    return partitioner.device_grid(self.sharding, len(self.shape)) if known else None

  def tiling(self, devices: int) -> Tiling:
    grid = self.grid()
    if grid is None or grid.size != devices:
      return Tiling.replicated(len(self.shape), devices)
    return Tiling.of_grid(grid, len(self.shape))


def _partition(
  target: str,
  operand_shapes: Sequence[Any],
  operand_shardings: Sequence[Any],
  result_shape: Any,
  result_sharding: Any,
  config: bytes,
) -> tuple[bytes, Sequence[Any], Any]:
  is_tuple = result_shape.is_tuple()
  result_shapes = list(result_shape.tuple_shapes()) if is_tuple else [result_shape]
  shardings = list(result_sharding.tuple_elements()) if is_tuple else [result_sharding]
  shardings = shardings[: len(result_shapes)]  # XLA's empty tuple has a sharding
  operands = _arrays(operand_shapes, operand_shardings)
  results = _arrays(result_shapes, shardings)
  held = local_module.read_attributes(config)
  call = Sharded.read(held.pop("shard"))
  found, devices = _solve(call, operands[call.token :], results[call.token :])
  module = _module(target, call, found.plan, operands, results, held, devices)
  ins = [*operand_shardings[: call.token], *found.operands]
  outs = [*shardings[: call.token], *found.results]
  if not outs:
    return module, ins, result_sharding
  return module, ins, partitioner.tuple_sharding(outs) if is_tuple else outs[0]


def _propagate(sharding: Any, *_: Any) -> Any:
  """What users of the results ask for goes back to the call as it is."""
  return sharding


def _infer(
  operand_shapes: Sequence[Any], operand_shardings: Sequence[Any], result_shape: Any, config: bytes
) -> Any:
  """The results' shardings from the operands': asked for by XLA's older propagation alone."""
  is_tuple = result_shape.is_tuple()
  shapes = list(result_shape.tuple_shapes()) if is_tuple else [result_shape]
  operands = _arrays(operand_shapes, operand_shardings)
  results = _arrays(shapes, [None] * len(shapes))
  call = Sharded.read(local_module.read_attributes(config)["shard"])
  found, _ = _solve(call, operands[call.token :], results[call.token :])
  out = [*[partitioner.replicated_sharding()] * call.token, *found.results]
  return partitioner.tuple_sharding(out) if is_tuple else out[0]


def _arrays(shapes: Sequence[Any], shardings: Sequence[Any]) -> list[_Array]:
  return [
    _Array(*partitioner.shape_and_dtype(shape), sharding)
    for shape, sharding in zip(shapes, shardings, strict=True)
  ]


@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class _Solution:
  """A call's plan, and the shardings that XLA is told."""

  plan: Plan
  operands: list[Any]
  results: list[Any]


# Programs hold many calls alike. Emptied when it is full.
_solutions: dict[Any, _Solution] = {}
_MANY = 1024


def _solve(
  call: Sharded, inputs: Sequence[_Array], outputs: Sequence[_Array]
) -> tuple[_Solution, int]:
  """The solution, and among how many devices the arrays are shared.

  Of a partly manual program these are only some.
  """
  grids = (array.grid() for array in (*inputs, *outputs))
  devices = next((g.size for g in grids if g is not None and g.size > 1), call.devices)
  if call.function:
    return _worked_out(call, inputs, outputs, devices), devices
  arrays = tuple((a.shape, str(a.sharding)) for a in (*inputs, *outputs))
  key = call.rule, devices, len(inputs), arrays
  found = _solutions.get(key)
  if found is None:
    if len(_solutions) >= _MANY:
      _solutions.clear()
    found = _solutions[key] = _worked_out(call, inputs, outputs, devices)
  return found, devices


def _worked_out(
  call: Sharded, inputs: Sequence[_Array], outputs: Sequence[_Array], devices: int
) -> _Solution:
  given = [a.tiling(devices) for a in inputs], [a.tiling(devices) for a in outputs]
  plan: Rule | Plan
  if call.function and call.tap < 0:
    plan = _by_function(call, inputs, outputs)
  else:
    plan = Rule.read(call.rule, len(inputs), len(outputs))
    if call.function:
      plan = _with_whole(call, plan, inputs)
  if isinstance(plan, Rule):
    shapes = [a.shape for a in inputs], [a.shape for a in outputs]
    plan = _tiles.plan(plan, shapes, given, devices)
  return _Solution(
    plan,
    [_sharding(*each) for each in zip(inputs, given[0], plan.operands, strict=True)],
    [_sharding(*each) for each in zip(outputs, given[1], plan.results, strict=True)],
  )


def _sharding(array: _Array, given: Tiling, wanted: Tiling) -> Any:
  """One that stays is the one that came: XLA then has nothing to compare."""
  same = given.counts == wanted.counts and np.array_equal(given.index, wanted.index)
  if same and array.sharding is not None:
    return array.sharding
  return partitioner.sharding_of_grid(wanted.grid(), len(wanted.counts))


def _with_whole(call: Sharded, rule: Rule, inputs: Sequence[_Array]) -> Rule:
  """A tap's rule with what its function wants whole."""
  function = functions.named(call.function)
  if function is None:
    raise LookupError(
      f"callgate: tap '{call.label}' has a function as its sharding rule, which is not defined in "
      "the process that compiles the program; expected the tap to be traced there"
    )
  values = [(a.shape, a.dtype, a.sharding) for a in inputs[: call.tap]]
  axes = functions.whole_axes(f"tap '{call.label}'", function, call.mesh, values)
  whole = {rule.operands[leaf][axis] for leaf, axis in axes}
  return dataclasses.replace(rule, whole=rule.whole | whole)


def _by_function(call: Sharded, inputs: Sequence[_Array], outputs: Sequence[_Array]) -> Rule | Plan:
  """What an operation's function says of these operands, on the program's mesh."""
  operation = registry.get(call.function)
  if operation is None:
    raise LookupError(
      f"callgate: '{call.function}' has a function as its sharding rule, and is not defined in the "
      "process that compiles the program; expected the gate to be defined before"
    )
  operands = [(a.shape, a.dtype, a.sharding) for a in inputs]
  return functions.plan(
    operation.label, operation.sharding, call.mesh, operands, [a.shape for a in outputs]
  )


def _module(
  target: str,
  call: Sharded,
  plan: Plan,
  operands: Sequence[_Array],
  results: Sequence[_Array],
  held: dict[str, Any],
  devices: int,
) -> bytes:
  """The call on one device's tiles, as the bytes of a module."""
  located = call.located and devices == call.devices
  groups = plan.groups
  if located and call.once:
    runs = {group[0] for group in groups}
  else:
    runs = set(range(call.devices))
  _localise(call, plan, held, operands, located)
  if located:
    held["shards"] = "".join("01"[device in runs] for device in range(devices))
    held["mesh"] = held_mesh(call.devices, call.mesh)
  skip = int(call.token)
  tiles = [
    *((a.shape, None) for a in operands[:skip]),
    *((t.tile(a.shape), a.dtype) for a, t in zip(operands[skip:], plan.operands, strict=True)),
  ]
  outs = [
    *((a.shape, None) for a in results[:skip]),
    *((t.tile(a.shape), a.dtype) for a, t in zip(results[skip:], plan.results, strict=True)),
  ]
  if "tiles" in held:  # of a kernel for CUDA, whose grid depends on shapes
    kernel = _defined(held["name"].partition("[")[0])
    target = kernel.retile(held, call.lanes, tiles[skip:], outs[skip:], target)
  if "_key" in held:  # of a kernel: the hash of all else (see `_call/lowering.py`)
    held["_key"] = attributes.key_of({k: v for k, v in held.items() if k != "_key"})
  share = located and call.once and call.tap < 0 and len(groups) < devices
  return local_module.local_module(
    target,
    tiles,
    outs,
    held,
    has_side_effect=call.effect,
    aliases={i + skip: o + skip for i, o in call.aliases},
    partition_id=located,
    broadcast=groups if share else None,
  )


def _defined(name: str) -> Any:
  kernel = registry.get(name)
  if kernel is None:
    raise LookupError(
      f"callgate: kernel '{name}' is not defined in the process that compiles the program, where "
      "its grid is worked out for each device's part of the arrays; expected it to be defined "
      "before"
    )
  return kernel


def _localise(
  call: Sharded, plan: Plan, held: dict[str, Any], operands: Sequence[_Array], located: bool
) -> None:
  """Rewrites what the call says of its arrays' extents, which are the tiles' now."""
  inputs = operands[call.token :]
  lanes = _lanes(call, plan)
  if call.lanes:
    sizes = [size // count for size, (count, _) in zip(call.sizes, lanes, strict=True)]
    masks = [tuple(digit == "1" for digit in mask) for mask in call.lanes]
    held["batch"] = encode_levels(list(zip(sizes, masks, strict=True)))
  if call.tap >= 0:
    held["spec"], padded = _tap_spec(call, plan, inputs, lanes, held["spec"], located)
    if padded:
      held["padded"] = attributes.listed(padded)
  elif located:
    named = zip(call.names, inputs, plan.operands, strict=False)
    parts = [(name, _tiles.encode(tiling, a.shape)) for name, a, tiling in named]
    layout = {"devices": call.devices, "operands": parts}
    held["layout"] = json.dumps(layout, separators=(",", ":"))


def _lanes(call: Sharded, plan: Plan) -> list[tuple[int, np.ndarray]]:
  """Of each batch level into how many parts it is split, and which of them each device has."""
  found: list[tuple[int, np.ndarray]] = []
  for level, mask in enumerate(call.lanes):
    operand = mask.index("1")
    axis = sum(other[operand] == "1" for other in call.lanes[:level])
    tiling = plan.operands[operand]
    found.append((tiling.counts[axis], tiling.index[:, axis]))
  return found


def _tap_spec(
  call: Sharded,
  plan: Plan,
  inputs: Sequence[_Array],
  lanes: Sequence[tuple[int, np.ndarray]],
  spec: str,
  located: bool,
) -> tuple[str, list[dict[str, Any]]]:
  """A tap's description on shards, and what is new of its padded leaves."""
  code = json.loads(spec)
  whole: list[int] = code["sizes"]
  sizes = [size // count for size, (count, _) in zip(whole, lanes, strict=True)]
  code["sizes"] = sizes
  padded: list[dict[str, Any]] = []
  if located:
    leaves: list[Any] = []
    for index in range(code["values"]):
      skip = sum(mask[index] == "1" for mask in call.lanes)
      tiling = plan.operands[index]
      core = dataclasses.replace(tiling, counts=tiling.counts[skip:], index=tiling.index[:, skip:])
      leaves.append(_tiles.encode(core, inputs[index].shape[skip:]))
    starts = [(index * size).tolist() for size, (_, index) in zip(sizes, lanes, strict=True)]
    code["shards"] = {"leaves": leaves, "lanes": starts, "sizes": whole}
    padded = [_padded(call, index, _tiles.Part(leaves[index])) for index in code["logical"]]
  return json.dumps(code, separators=(",", ":")), padded


def _padded(call: Sharded, leaf: int, part: _tiles.Part) -> dict[str, Any]:
  """What `TapSpec::of` reads of a padded array: its extents, and where each shard begins."""
  shards = (part.slices(device) for device in range(call.devices))
  return {
    "leaf": np.int64(leaf),
    "whole": np.array(part.shape, np.int64),
    "starts": np.array([s.start for one in shards for s in one], np.int64),
  }


def register(target: str, partitioned: str) -> None:
  """Has XLA ask this partitioner about calls of `partitioned`, to make calls of `target`."""
  partitioner.register_partitioner(
    partitioned, _propagate, functools.partial(_partition, target), _infer
  )
