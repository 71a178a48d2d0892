# SPDX-License-Identifier: Apache-2.0
"""XLA's partitioner, its shardings, and Shardy's rules."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from jax._src import sharding_impls as _sharding_impls
from jax._src import xla_bridge as _bridge
from jax._src.lib import xla_client as _xla_client  # pyright: ignore[reportPrivateImportUsage]


# -- sharding --------------------------------------------------------------------------------------
# XLA's hook for custom calls under partitioning, its shardings, and Shardy's rules (0.10 to 0.12).
# `jax.experimental.custom_partitioning` is public, but puts pointers into programs, can't call
# callgate's targets, and rejects calls that have side effects but no results.
def register_partitioner(
  target: str,
  propagate: Callable[..., Any],
  partition: Callable[..., Any],
  infer: Callable[..., Any],
) -> None:
  """Registers functions that XLA's partitioner calls for a target's calls, on plugins too."""
  options: dict[str, Any] = {
    "name": target,
    "prop_user_sharding": propagate,
    "partition": partition,
    "infer_sharding_from_operands": infer,
    "can_side_effecting_have_replicated_sharding": True,
  }
  register: Any = _xla_client.register_custom_call_partitioner
  register(**options)
  _bridge.register_plugin_callbacks(functools.partial(register, **options))


def set_sharding_rule(operation: Any, rule: Any) -> None:
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
  """Returns the type of an `xla.Shape`; a token's dtype is None."""
  if str(shape).startswith("token"):
    return (), None
  return tuple(shape.dimensions()), shape.numpy_dtype()


def _is_of_all(sharding: Any) -> bool:
  return sharding.is_replicated() or sharding.is_manual() or sharding.is_unknown()


def is_of_one_device(sharding: Any) -> bool:
  """Returns True for an array on a single device, as JAX makes results of its callbacks."""
  return not _is_of_all(sharding) and math.prod(sharding.tile_assignment_dimensions()) == 1


def device_grid(sharding: Any, rank: int) -> Any:
  """Returns device numbers by [tile along each dimension..., replica, manual].

  Returns None for a sharding without tiles: every device has the whole array, or one device has it.
  """
  if _is_of_all(sharding) or is_of_one_device(sharding):
    return None
  dims = list(sharding.tile_assignment_dimensions())
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
  """Returns the `HloSharding` with this `device_grid`."""
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


# The `HloSharding` of an array that every device holds.
replicated_sharding: Callable[[], Any] = _xla_client.HloSharding.replicate


def tuple_sharding(shardings: Sequence[Any]) -> Any:
  """Returns the `HloSharding` of a tuple."""
  proto: Any = _xla_client.OpSharding()
  proto.type = _xla_client.OpSharding.Type.TUPLE
  proto.tuple_shardings = [sharding.to_proto() for sharding in shardings]
  return _xla_client.HloSharding.from_proto(proto)


def spec_of_sharding(sharding: Any, mesh: Any) -> Any:
  """Returns the PartitionSpec on a mesh for an `HloSharding`."""
  return _sharding_impls.parse_flatten_op_sharding(sharding, mesh)[0]
