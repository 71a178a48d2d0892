# SPDX-License-Identifier: Apache-2.0
"""Feeds over several devices: each device takes its part of an item.

A program over a mesh reads its item in a `jax.shard_map` of callgate's own. Each device calls the
feed's gate, and gets the part of the item for its place in the sharding.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding

from callgate._core.dtypes import type_text
from callgate._core.errors import GateDefinitionError
from callgate._feed import items

Arrays = list[Any]


@dataclasses.dataclass(frozen=True)
class Shares:
  """The placement of a feed's items on the devices of a mesh.

  Attributes:
    shardings: one for each leaf, all of one mesh.
    structs: types of one device's parts, one for each leaf.
    takers: the numbers of this process's devices of the mesh, by device id.
    places: for each of these devices, its part of each leaf.
  """

  shardings: tuple[NamedSharding, ...]
  structs: tuple[jax.ShapeDtypeStruct, ...]
  takers: dict[int, int]
  places: tuple[tuple[tuple[slice, ...], ...], ...]

  @property
  def mesh(self) -> Mesh:
    mesh = self.shardings[0].mesh
    assert isinstance(mesh, Mesh)
    return mesh

  def of_item(self, item: Arrays, taker: int) -> Arrays:
    """Returns the taker's part of an item."""
    return [array[place] for array, place in zip(item, self.places[taker], strict=True)]

  def mapped(self, take: Callable[[], Sequence[Any]]) -> Callable[[], tuple[Any, ...]]:
    """Returns a function that calls `take` on each device and assembles the parts."""
    specs = tuple(sharding.spec for sharding in self.shardings)
    # Devices with copies of one part take the same part, which JAX can't know.
    return jax.shard_map(
      lambda: tuple(take()), mesh=self.mesh, in_specs=(), out_specs=specs, check_vma=False
    )

  def put(self, item: Arrays) -> Arrays:
    """Returns the item as arrays on the devices."""
    return [
      jax.make_array_from_callback(array.shape, sharding, array.__getitem__)
      for array, sharding in zip(map(np.asarray, item), self.shardings, strict=True)
    ]


def of(feed: str, sharding: Any, types: items.ItemTypes) -> Shares:
  """Returns the shares that `sharding` declares, a NamedSharding or a prefix pytree of them.

  Raises:
    GateDefinitionError: it isn't one, or doesn't fit the items.
  """
  label = f"feed '{feed}': sharding"
  full = jax.tree.unflatten(types.tree, range(types.tree.num_leaves))
  try:
    leaves = jax.tree.leaves(jax.tree.broadcast(sharding, full, is_leaf=_is_sharding))
  except (ValueError, TypeError) as error:
    expected = f"expected the items' structure {types.tree} or a prefix of it"
    raise GateDefinitionError(
      f"{label}: {expected}, got {jax.tree.structure(sharding, is_leaf=_is_sharding)}"
    ) from error
  for leaf in leaves:
    if not isinstance(leaf, NamedSharding) or not isinstance(leaf.mesh, Mesh):
      expected = "expected a jax.sharding.NamedSharding of a mesh of devices, or a pytree of them"
      raise GateDefinitionError(f"{label}: {expected}, got {leaf!r}")
    if leaf.mesh != leaves[0].mesh:
      raise GateDefinitionError(
        f"{label}: expected one mesh for all leaves, got {leaves[0].mesh} and {leaf.mesh}"
      )
  structs: list[jax.ShapeDtypeStruct] = []
  for leaf, (shape, dtype) in zip(leaves, types.types, strict=True):
    try:
      leaf.check_compatible_aval(shape)
      structs.append(jax.ShapeDtypeStruct(leaf.shard_shape(shape), dtype))
    except ValueError as error:
      got = f"got {leaf.spec} for {type_text(dtype, shape)} on {dict(leaf.mesh.shape)}"
      raise GateDefinitionError(
        f"{label}: expected dimensions that the mesh divides, {got}"
      ) from error
  here = [
    device
    for device in leaves[0].mesh.devices.flat
    if device in jax.local_devices(backend=device.platform)
  ]
  maps = [
    leaf.devices_indices_map(shape) for leaf, (shape, _) in zip(leaves, types.types, strict=True)
  ]
  return Shares(
    tuple(leaves),
    tuple(structs),
    {device.id: number for number, device in enumerate(here)},
    tuple(tuple(places[device] for places in maps) for device in here),
  )


def _is_sharding(node: Any) -> bool:
  return isinstance(node, jax.sharding.Sharding)
