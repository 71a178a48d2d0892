# SPDX-License-Identifier: Apache-2.0
"""Turns counts of parts into specs, devices and shardings, and finds each process's part.

In one process a `sharded_jit` function uses the first devices. With several processes, a program on
few devices runs in each process by itself; a program on more devices runs once, on all devices of
all processes. Each process passes and gets its own tiles, which become shards of the program's
arrays without copies.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import numpy as np
from jax.interpreters import ad, batching, mlir
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as _Names

from callgate._jax import lowering, walk
from callgate._jax.tracing import Primitive


class PartitionSpec(tuple[int, ...]):
  """The number of parts of each dimension: `PartitionSpec(2, 1)` halves the rows.

  The parts are numbered in row-major order, and part k is on device k: an array of shape (8, 6) has
  two tiles, of shape (4, 6). The product of the counts is the number of devices.

  Raises:
    ValueError: a count is not an integer of at least 1.
  """

  __slots__ = ()

  def __new__(cls, *partitions: int) -> PartitionSpec:
    for count in partitions:
      if not is_count(count):
        raise ValueError(f"PartitionSpec: expected counts of at least 1, got {count!r}")
    return tuple.__new__(cls, map(int, partitions))

  def __getnewargs__(self) -> tuple[int, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
    return tuple(self)  # pickle and copy would pass one tuple

  def __repr__(self) -> str:
    return f"PartitionSpec{tuple.__repr__(self)}"


Parts = PartitionSpec | None  # the split of one array; None is a copy on every device


def is_count(value: object) -> bool:
  """Returns True if `value` is an integer of at least 1."""
  return isinstance(value, (int, np.integer)) and not isinstance(value, bool) and int(value) >= 1


def is_parts(value: object) -> bool:
  """Returns True if `value` is a leaf of `in_parts` and `out_parts`."""
  return value is None or isinstance(value, PartitionSpec)


def _primes(number: int) -> Iterator[int]:
  """Yields the prime factors of a number, in order."""
  prime = 2
  while number > 1:
    if number % prime:
      prime += 1
    else:
      yield prime
      number //= prime


@functools.lru_cache(maxsize=1024)
def sharding_of(devices: tuple[Any, ...], parts: Parts) -> NamedSharding:
  """Returns a sharding with tile k on device k; its axes are prime factors, to share a mesh."""
  counts = [tuple(_primes(count)) for count in parts or ()]
  split = list(itertools.chain.from_iterable(counts))
  shape = (*split, *_primes(len(devices) // math.prod(split)))
  axes = tuple(f"parts{axis}" for axis in range(len(shape)))
  mesh, names = Mesh(np.array(devices).reshape(shape), axes), iter(axes)
  return NamedSharding(mesh, _Names(*[tuple(itertools.islice(names, len(c))) for c in counts]))


def flat_parts(parts: Any, tree: Any, what: str) -> list[Parts]:
  """Returns the spec of each leaf of `tree`; `parts`, `what` in messages, is a prefix of it."""
  specs(parts, what)
  flat: list[Parts] = []

  def repeat(part: Parts, below: Any) -> None:
    flat.extend([part] * len(jax.tree.leaves(below)))

  try:
    jax.tree.map(repeat, parts, tree, is_leaf=is_parts)
  except ValueError as error:
    expected = f"expected a prefix of the tree {jax.tree.structure(tree)}, got {parts}"
    raise ValueError(f"sharded_jit: {what}: {expected}") from error
  return flat


def specs(parts: Any, what: str) -> list[PartitionSpec]:
  """Returns the leaves of a tree of specs that aren't None; `what` is its name in messages."""
  leaves = jax.tree.leaves(parts, is_leaf=is_parts)
  for leaf in leaves:
    if not is_parts(leaf):
      expected = "expected a PartitionSpec or None as leaves"
      raise ValueError(f"sharded_jit: {what}: {expected}, got {leaf!r}")
  return [leaf for leaf in leaves if leaf is not None]


def check(
  parts: Sequence[Parts], shapes: Sequence[tuple[int, ...]], what: str, *, padded: bool = False
) -> None:
  """Raises unless each spec has a count for each dimension that divides it (if not `padded`)."""
  for index, (part, shape) in enumerate(zip(parts, shapes, strict=True)):
    head, tail = f"sharded_jit: {what}: {part}", f"shape {list(shape)}"
    if part is not None and len(part) != len(shape):
      other = f"array {index} has {len(shape)}: {tail}"
      raise ValueError(f"{head} has {len(part)} dimensions, but {other}")
    for axis, (count, size) in enumerate(zip(part or (), shape, strict=False)):
      if size % count != 0 and not padded:
        split = f"splits dimension {axis} of array {index} {count} ways"
        raise ValueError(f"{head} {split}: expected a multiple of {count}, got {size}: {tail}")


# -- several processes -----------------------------------------------------------------------------
class Stated:
  """The caller's arguments about the program's partitions or, with "local_", its process's part."""

  def __init__(self, in_parts: Any, out_parts: Any, count: int | None, local: str = "") -> None:
    name = f"{local}num_partitions"
    if count is not None and not is_count(count):
      raise ValueError(f"sharded_jit: {name}: expected an integer of at least 1, got {count!r}")
    # Arguments are a tuple, so a list of parts counts as a tuple, too.
    self.in_parts = tuple(in_parts) if isinstance(in_parts, list) else in_parts
    self.out_parts = out_parts
    counts = {} if count is None else {int(count): f"{name}={count}"}
    by_specs: set[int] = set()
    for name, parts in ((f"{local}in_parts", self.in_parts), (f"{local}out_parts", out_parts)):
      for spec in specs(parts, name):
        by_specs.add(math.prod(spec))
        counts.setdefault(math.prod(spec), f"{spec} in {name}")
    if len(counts) > 1:
      # The old module's words for specs that disagree.
      old = "All partition specs must use the same number of total partitions: "
      got = " and ".join(f"{count} ({who})" for count, who in counts.items())
      expected = f"expected one number of {local.replace('_', ' ')}partitions everywhere"
      raise ValueError(f"sharded_jit: {old if len(by_specs) > 1 else ''}{expected}, got {got}")
    self.said = next(iter(counts), None)  # the number of partitions, if known
    self.split = bool(by_specs)  # True if an array is split


def devices_of(count: int, local: Stated, split: bool) -> tuple[Any, ...]:
  """Returns the devices of `count` partitions: this process's first, or those of all processes."""
  own, everyone = jax.local_devices(), jax.devices()
  for wanted, there, kind in ((count, everyone, ""), (local.said, own, "local ")):
    if wanted is not None and wanted > len(there):
      only = f"only {len(there)} {kind}devices are available."
      raise ValueError(f"sharded_jit computation requires {wanted} {kind}devices, but {only}")
  if count <= len(own) and local.said in (None, count):
    return tuple(own[:count])
  if jax.process_count() == 1:
    problem = f": expected {count} local partitions, since there is one process, got {local.said}"
  elif count != len(everyone):
    known = f", {local.said} of them local" if local.said is not None else ""
    problem = (
      f" across processes must use all devices: expected {len(everyone)} partitions, got {count}"
      f"{known}, with {len(own)} local devices"
    )
  elif local.said is None and not split:
    problem = (
      " across processes: expected local_num_partitions, since all arguments and results are "
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
  """Returns True if the devices belong to several processes."""
  return any(device.process_index != jax.process_index() for device in devices)


@dataclasses.dataclass(frozen=True)
class LocalPart:
  """Describes how one array is split among the processes."""

  whole: NamedSharding  # the sharding of the program's array
  own: NamedSharding  # the sharding of this process's part
  parts: Parts  # the split of the program's array
  block: Parts  # the split of this process's part

  def whole_shape(self, shape: tuple[int, ...]) -> tuple[int, ...]:
    """Returns the program's shape of an array; `shape` is this process's part."""
    if not self.parts or not self.block:
      return shape
    if any(size % own for size, own in zip(shape, self.block, strict=False)):
      expected = f"expected a local array that splits evenly into {self.block}"
      raise ValueError(f"sharded_jit: {expected}, got shape {list(shape)}")
    counts = zip(shape, self.block, self.parts, strict=True)
    return tuple(size // own * total for size, own, total in counts)

  def to_program(self, leaf: Any) -> Any:
    """Returns the program's array with `leaf` as this process's part; copies only if misplaced."""
    if isinstance(leaf, jax.Array) and not leaf.is_fully_addressable:
      where = f"{len(leaf.sharding.device_set)} devices of several processes"
      got = f"an array over {where}: shape {list(leaf.shape)}"
      raise ValueError(f"sharded_jit: expected this process's part of an argument, got {got}")
    mine = put(leaf, self.own)
    return _rewrapped(mine, self.whole, self.whole_shape(mine.shape))

  def to_process(self, whole: Any) -> Any:
    """Returns this process's part of a result: its shards, not copied."""
    shape = whole.shape
    if self.parts and self.block:
      counts = zip(shape, self.parts, self.block, strict=True)
      shape = tuple(size // total * own for size, total, own in counts)
    return _rewrapped(whole, self.own, shape)


@functools.lru_cache(maxsize=1024)
def part_of(devices: tuple[Any, ...], parts: Parts) -> LocalPart:
  """Returns this process's part of an array, on its own devices of the program."""
  own = [k for k, device in enumerate(devices) if device.process_index == jax.process_index()]
  block = [len(set(at.tolist())) for at in np.unravel_index(own, parts)] if parts else []
  if parts and math.prod(block) != len(own):
    got = f"tiles {own} in process {jax.process_index()}"
    expected = "tiles that are a block of the array in each process"
    raise ValueError(f"sharded_jit: {parts}: expected {expected}, got {got}")
  local = PartitionSpec(*block) if parts is not None else None
  mine = tuple(devices[k] for k in own)
  return LocalPart(sharding_of(devices, parts), sharding_of(mine, local), parts, local)


def check_stated(parts: Sequence[LocalPart], stated: Any, tree: Any, what: str) -> None:
  """Raises unless the caller's arguments about its process's parts, `what`, match the devices."""
  if stated is None:
    return
  flat = flat_parts(stated, tree, what)
  for index, (part, said) in enumerate(zip(parts, flat, strict=True)):
    if said != part.block and not (math.prod(said or ()) == 1 == math.prod(part.block or ())):
      own, whole = len(part.own.device_set), len(part.whole.device_set)
      why = f"the part of {part.parts} on the {own} local devices of {whole}"
      expected = f"{part.block} for array {index}, {why}"
      raise ValueError(f"sharded_jit: {what}: expected {expected}, got {said}")


def put(leaf: Any, sharding: NamedSharding) -> Any:
  """Returns `leaf` with the sharding; the array itself if it has it already."""
  if isinstance(leaf, jax.Array) and leaf.sharding.is_equivalent_to(sharding, leaf.ndim):
    return leaf
  return jax.device_put(leaf, sharding)


def _rewrapped(array: Any, sharding: NamedSharding, shape: tuple[int, ...]) -> Any:
  """Returns an array of `shape` with `sharding` and the same shards."""
  held = {shard.device: shard.data for shard in array.addressable_shards}
  shards = [held[device] for device in sharding.addressable_devices_indices_map(shape)]
  return jax.make_array_from_single_device_arrays(shape, sharding, shards)


# -- constraints -----------------------------------------------------------------------------------
_constraint_p = Primitive("with_sharding_constraint_of_counts")


def with_sharding_constraint(x: Any, parts: Any) -> Any:
  """Fixes how a value is split inside a `sharded_jit` function; returns the value.

  The constraint also determines the number of devices, if everything else is replicated.

  Args:
    x: a pytree of arrays.
    parts: a `PartitionSpec`, None (a copy on every device), or a pytree of these that is a prefix
      of `x`. A spec has a count for each dimension. If a count doesn't divide its dimension, the
      dimension is padded.

  Returns:
    `x`, with the same shapes. Its gradient is split in the same way.

  Raises:
    NotImplementedError: outside a sharded_jit function.
    ValueError: a spec has another length than the array's rank, or `parts` is no prefix of `x`.
  """
  (leaves, tree), what = jax.tree.flatten(x), "with_sharding_constraint"
  flat = flat_parts(parts, x, what)
  check(flat, [jax.typeof(leaf).shape for leaf in leaves], what, padded=True)
  pairs = zip(leaves, flat, strict=True)
  return jax.tree.unflatten(tree, [_constraint_p.bind(leaf, parts=part) for leaf, part in pairs])


def counts_inside(jaxpr: Any) -> Iterator[tuple[int, str]]:
  """Yields the number of partitions of each constraint and nested function, and its name."""
  for eqn in walk.equations(jaxpr):
    if eqn.primitive is _constraint_p and (parts := eqn.params["parts"]) is not None:
      yield math.prod(parts), f"with_sharding_constraint with partitions={parts}"
    for sharding in (*eqn.params.get("in_shardings", ()), *eqn.params.get("out_shardings", ())):
      if isinstance(sharding, NamedSharding):
        yield sharding.num_devices, f"the nested {eqn.params.get('name', 'jit')}"


def _outside(*_: Any, parts: Parts) -> Any:
  got = f"got a constraint with partitions={parts}"
  where = "inside sharded_jit()"
  raise NotImplementedError(f"with_sharding_constraint() should only be called {where}: {got}")


def _lower(context: Any, x: Any, *, parts: Parts) -> Sequence[Any]:
  devices = lowering.program_devices(context)
  if devices is None:  # inside pmap or shard_map each device already has its own part
    return [x]
  if parts is not None and math.prod(parts) != len(devices):
    _outside(parts=parts)  # sharded_jit has checked its own constraints
  sharding = sharding_of(tuple(devices), parts)
  constrain = functools.partial(jax.lax.with_sharding_constraint, shardings=sharding)
  return [x] if len(devices) == 1 else mlir.lower_fun(constrain, multiple_results=False)(context, x)


def _batch(args: Sequence[Any], dims: Sequence[Any], *, parts: Parts) -> tuple[Any, int]:
  (x,), (dim,) = args, dims
  if parts is not None:
    parts = PartitionSpec(*parts[:dim], 1, *parts[dim:])
  return _constraint_p.bind(x, parts=parts), dim


_constraint_p.def_impl(_outside)
_constraint_p.def_abstract_eval(lambda x, *, parts: x)
mlir.register_lowering(_constraint_p, _lower)
batching.primitive_batchers[_constraint_p] = _batch
ad.deflinear2(_constraint_p, lambda ct, _, *, parts: [_constraint_p.bind(ct, parts=parts)])
