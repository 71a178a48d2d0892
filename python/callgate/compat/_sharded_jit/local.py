"""Which devices a `sharded_jit` function has, and how a process sees its part of their arrays.

In one process: the first devices. In several, a program on few devices runs in each process by
itself, on its own first devices; one on more devices is one program of all processes, on all
devices. Each process passes and gets arrays that hold its own tiles alone and lie on its own
devices; here they become shards of the program's arrays, and back, without moving.
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

from callgate.compat._sharded_jit.parts import PartitionSpec, Parts, sharding_of, specs


class Stated:
  """What the caller says of the program's partitions or, with "local_", of its process's part.

  `said` is their number, None where nothing says it; `split` whether an array is split. Raises
  ValueError for numbers that disagree.
  """

  def __init__(self, in_parts: Any, out_parts: Any, count: int | None, local: str = "") -> None:
    self.in_parts, self.out_parts = in_parts, out_parts
    counts = {} if count is None else {int(count): f"{local}num_partitions={count}"}
    by_specs: set[int] = set()
    for name, parts in ((f"{local}in_parts", in_parts), (f"{local}out_parts", out_parts)):
      for spec in specs(parts, name):
        by_specs.add(math.prod(spec))
        counts.setdefault(math.prod(spec), f"{spec} in {name}")
    if len(counts) > 1:
      # The first words of the old module, for specs that disagree.
      old = "All partition specs must use the same number of total partitions: "
      texts = [f"{count} ({who})" for count, who in counts.items()]
      raise ValueError(
        f"sharded_jit: {old if len(by_specs) > 1 else ''}expected one number of "
        f"{local.replace('_', ' ')}partitions everywhere, got {' and '.join(texts)}"
      )
    self.said = next(iter(counts), None)
    self.split = bool(by_specs)


def devices_of(count: int, local: Stated, split: bool) -> tuple[Any, ...]:
  """The devices of a program of `count` partitions: this process's first ones, or all there are.

  Where an argument or a result is `split`, the devices say what is local. Raises ValueError where
  there are not that many, for a part of the devices across processes, and where the number of local
  partitions is missing or another one.
  """
  own, everyone = jax.local_devices(), jax.devices()
  if count > len(everyone):
    raise ValueError(
      f"sharded_jit computation requires {count} devices, but only {len(everyone)} devices are "
      "available."
    )
  if local.said is not None and local.said > len(own):
    raise ValueError(
      f"sharded_jit computation requires {local.said} local devices, but only {len(own)} local "
      "devices are available."
    )
  if count <= len(own) and local.said in (None, count):
    return tuple(own[:count])
  if jax.process_count() == 1:
    raise ValueError(
      f"sharded_jit: expected {count} local partitions, as there is one process, got {local.said}"
    )
  if count != len(everyone):
    known = f", {local.said} of them local" if local.said is not None else ""
    raise ValueError(
      f"sharded_jit across processes must use all devices: expected {len(everyone)} partitions, "
      f"got {count}{known}, with {len(own)} local devices"
    )
  if local.said is None and not split:
    raise ValueError(
      "sharded_jit across processes: expected local_num_partitions, as all arguments and results "
      f"are replicated: how many of the {count} partitions are on this process's devices "
      f"({len(own)} of {len(everyone)})"
    )
  if local.said not in (None, len(own)):
    raise ValueError(
      f"sharded_jit across processes must use all devices: expected {len(own)} local partitions "
      f"of {count}, got {local.said}"
    )
  return tuple(everyone)


def is_shared(devices: Sequence[Any]) -> bool:
  """Whether devices belong to several processes."""
  return any(device.process_index != jax.process_index() for device in devices)


@dataclasses.dataclass(frozen=True)
class Part:
  """How one array is split among the processes."""

  whole: NamedSharding  # of the program's array
  own: NamedSharding  # of this process's part
  # The parts of each dimension in the program and in this process; none if replicated.
  counts: tuple[tuple[int, int], ...]

  def whole_shape(self, shape: tuple[int, ...]) -> tuple[int, ...]:
    """The shape of the program's array, of which this process has a part of `shape`."""
    if any(size % own for size, (_, own) in zip(shape, self.counts, strict=False)):
      raise ValueError(
        "sharded_jit: expected a local array that splits evenly into "
        f"{PartitionSpec(*[own for _, own in self.counts])}, got shape {list(shape)}"
      )
    if not self.counts:
      return shape
    return tuple(n // own * total for n, (total, own) in zip(shape, self.counts, strict=True))

  def to_program(self, leaf: Any) -> Any:
    """The program's array of which `leaf` is this process's part; what lies right isn't moved."""
    if isinstance(leaf, jax.Array) and not leaf.is_fully_addressable:
      raise ValueError(
        "sharded_jit: expected this process's part of an argument, got an array over "
        f"{len(leaf.sharding.device_set)} devices of several processes: shape {list(leaf.shape)}"
      )
    mine = put(leaf, self.own)
    return _rewrapped(mine, self.whole, self.whole_shape(mine.shape))

  def to_process(self, whole: Any) -> Any:
    """This process's part of a result: its shards, not copied."""
    shape = whole.shape
    if self.counts:
      pairs = zip(shape, self.counts, strict=True)
      shape = tuple(size // total * own for size, (total, own) in pairs)
    return _rewrapped(whole, self.own, shape)


@functools.lru_cache(maxsize=1024)
def part_of(devices: tuple[Any, ...], parts: Parts) -> Part:
  """The part of this process, on its own ones of the program's devices, in an array."""
  own = [k for k, device in enumerate(devices) if device.process_index == jax.process_index()]
  block = [len(set(at.tolist())) for at in np.unravel_index(own, parts)] if parts else []
  if parts and math.prod(block) != len(own):
    raise ValueError(
      f"sharded_jit: {parts}: expected tiles that are a block of the array in each process, got "
      f"tiles {own} in process {jax.process_index()}"
    )
  local = PartitionSpec(*block) if parts is not None else None
  return Part(
    sharding_of(devices, parts),
    sharding_of(tuple(devices[k] for k in own), local),
    tuple(zip(parts or (), block, strict=True)),
  )


def check_local(parts: Sequence[Part], stated: Sequence[Parts], what: str) -> None:
  """Raises unless what the caller said of its process's parts, in `what`, is how devices lie."""
  for index, (part, said) in enumerate(zip(parts, stated, strict=True)):
    expected = PartitionSpec(*[own for _, own in part.counts]) if part.counts else None
    if said != expected and not (math.prod(said or ()) == 1 == math.prod(expected or ())):
      raise ValueError(
        f"sharded_jit: {what}: expected {expected} for array {index}, which is what the "
        f"{len(part.own.device_set)} local devices of {len(part.whole.device_set)} hold of "
        f"{PartitionSpec(*[total for total, _ in part.counts]) if part.counts else None}, "
        f"got {said}"
      )


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
