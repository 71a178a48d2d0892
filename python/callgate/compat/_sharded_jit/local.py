"""Which devices a `sharded_jit` function has, and how a process sees its part of their arrays.

In one process: the first devices. In several, a program on few devices runs in each process by
itself; one on more devices is one program of all processes, on all devices. Each passes and gets
its own tiles; here they become shards of the program's arrays, and back, without moving.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import NamedSharding

from callgate.compat._sharded_jit import parts as _parts
from callgate.compat._sharded_jit.parts import PartitionSpec, Parts, sharding_of


class Stated:
  """What the caller says of the program's partitions or, with "local_", of its process's part."""

  def __init__(self, in_parts: Any, out_parts: Any, count: int | None, local: str = "") -> None:
    name = f"{local}num_partitions"
    if count is not None and not _parts.is_count(count):
      raise ValueError(f"sharded_jit: {name}: expected an integer of at least 1, got {count!r}")
    # A list of parts is a tuple, as the arguments are.
    self.in_parts = tuple(in_parts) if isinstance(in_parts, list) else in_parts
    self.out_parts = out_parts
    counts = {} if count is None else {int(count): f"{name}={count}"}
    by_specs: set[int] = set()
    for name, parts in ((f"{local}in_parts", self.in_parts), (f"{local}out_parts", out_parts)):
      for spec in _parts.specs(parts, name):
        by_specs.add(math.prod(spec))
        counts.setdefault(math.prod(spec), f"{spec} in {name}")
    if len(counts) > 1:
      # The first words of the old module, for specs that disagree.
      old = "All partition specs must use the same number of total partitions: "
      got = " and ".join(f"{count} ({who})" for count, who in counts.items())
      expected = f"expected one number of {local.replace('_', ' ')}partitions everywhere"
      raise ValueError(f"sharded_jit: {old if len(by_specs) > 1 else ''}{expected}, got {got}")
    self.said = next(iter(counts), None)  # the number of partitions, where something says it
    self.split = bool(by_specs)  # whether an array is split


def devices_of(count: int, local: Stated, split: bool) -> tuple[Any, ...]:
  """Those of `count` partitions: this process's first, or all; `split` arrays say what is local."""
  own, everyone = jax.local_devices(), jax.devices()
  for wanted, there, kind in ((count, everyone, ""), (local.said, own, "local ")):
    if wanted is not None and wanted > len(there):
      only = f"only {len(there)} {kind}devices are available."
      raise ValueError(f"sharded_jit computation requires {wanted} {kind}devices, but {only}")
  if count <= len(own) and local.said in (None, count):
    return tuple(own[:count])
  if jax.process_count() == 1:
    problem = f": expected {count} local partitions, as there is one process, got {local.said}"
  elif count != len(everyone):
    known = f", {local.said} of them local" if local.said is not None else ""
    problem = (
      f" across processes must use all devices: expected {len(everyone)} partitions, got {count}"
      f"{known}, with {len(own)} local devices"
    )
  elif local.said is None and not split:
    problem = (
      " across processes: expected local_num_partitions, as all arguments and results are "
      f"replicated: how many of the {count} partitions are on this process's devices ({len(own)} "
      f"of {len(everyone)})"
    )
  elif local.said not in (None, len(own)):
    problem = (
      f" across processes must use all devices: expected {len(own)} local partitions of {count}, "
      f"got {local.said}"
    )
  else:
    return tuple(everyone)
  raise ValueError(f"sharded_jit{problem}")


def is_shared(devices: Sequence[Any]) -> bool:
  """Whether devices belong to several processes."""
  return any(device.process_index != jax.process_index() for device in devices)


@dataclasses.dataclass(frozen=True)
class Part:
  """How one array is split among the processes."""

  whole: NamedSharding  # of the program's array
  own: NamedSharding  # of this process's part
  parts: Parts  # of the program's array
  block: Parts  # of this process's part

  def whole_shape(self, shape: tuple[int, ...]) -> tuple[int, ...]:
    """The shape of the program's array, of which this process has a part of `shape`."""
    if not self.parts or not self.block:
      return shape
    if any(size % own for size, own in zip(shape, self.block, strict=False)):
      expected = f"expected a local array that splits evenly into {self.block}"
      raise ValueError(f"sharded_jit: {expected}, got shape {list(shape)}")
    counts = zip(shape, self.block, self.parts, strict=True)
    return tuple(size // own * total for size, own, total in counts)

  def to_program(self, leaf: Any) -> Any:
    """The program's array of which `leaf` is this process's part; what lies right isn't moved."""
    if isinstance(leaf, jax.Array) and not leaf.is_fully_addressable:
      where = f"{len(leaf.sharding.device_set)} devices of several processes"
      got = f"an array over {where}: shape {list(leaf.shape)}"
      raise ValueError(f"sharded_jit: expected this process's part of an argument, got {got}")
    mine = put(leaf, self.own)
    return _rewrapped(mine, self.whole, self.whole_shape(mine.shape))

  def to_process(self, whole: Any) -> Any:
    """This process's part of a result: its shards, not copied."""
    shape = whole.shape
    if self.parts and self.block:
      counts = zip(shape, self.parts, self.block, strict=True)
      shape = tuple(size // total * own for size, total, own in counts)
    return _rewrapped(whole, self.own, shape)


@functools.lru_cache(maxsize=1024)
def part_of(devices: tuple[Any, ...], parts: Parts) -> Part:
  """The part of this process, on its own ones of the program's devices, in an array."""
  own = [k for k, device in enumerate(devices) if device.process_index == jax.process_index()]
  block = [len(set(at.tolist())) for at in np.unravel_index(own, parts)] if parts else []
  if parts and math.prod(block) != len(own):
    got = f"tiles {own} in process {jax.process_index()}"
    expected = "tiles that are a block of the array in each process"
    raise ValueError(f"sharded_jit: {parts}: expected {expected}, got {got}")
  local = PartitionSpec(*block) if parts is not None else None
  mine = tuple(devices[k] for k in own)
  return Part(sharding_of(devices, parts), sharding_of(mine, local), parts, local)


def check(parts: Sequence[Part], stated: Any, tree: Any, what: str) -> None:
  """Raises unless what the caller said of its process's parts, in `what`, is how devices lie."""
  if stated is None:
    return
  flat = _parts.flat_parts(stated, tree, what)
  for index, (part, said) in enumerate(zip(parts, flat, strict=True)):
    if said != part.block and not (math.prod(said or ()) == 1 == math.prod(part.block or ())):
      own, whole = len(part.own.device_set), len(part.whole.device_set)
      why = f"which is what the {own} local devices of {whole} hold of {part.parts}"
      expected = f"{part.block} for array {index}, {why}"
      raise ValueError(f"sharded_jit: {what}: expected {expected}, got {said}")


def put(leaf: Any, sharding: NamedSharding) -> Any:
  """`leaf` with the sharding; the array itself where it has it already."""
  if isinstance(leaf, jax.Array) and leaf.sharding.is_equivalent_to(sharding, leaf.ndim):
    return leaf
  return jax.device_put(leaf, sharding)


def _rewrapped(array: Any, sharding: NamedSharding, shape: tuple[int, ...]) -> Any:
  """The same shards under another name: of an array of `shape` with `sharding`."""
  held = {shard.device: shard.data for shard in array.addressable_shards}
  shards = [held[device] for device in sharding.addressable_devices_indices_map(shape)]
  return jax.make_array_from_single_device_arrays(shape, sharding, shards)
