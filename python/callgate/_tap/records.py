# SPDX-License-Identifier: Apache-2.0
"""Records, as consumers of a channel see them, and what is known of each."""

from __future__ import annotations

import collections
import dataclasses
from typing import Any

import jax
import numpy as np

from callgate._jax import tracing


@dataclasses.dataclass(frozen=True, slots=True)
class TapInfo:
  """Tells where, when and how a tapped value came about.

  Attributes:
    name: the tap's name.
    seq: number of the record on its device and channel, from 0. Dropped records leave gaps.
    time_ns: wall clock, in nanoseconds since the Unix epoch, when the value left the program.
    process: index of the process (`jax.process_index()`).
    device: global id of the device (`jax.Device.id`); -1 when unknown.
    run: XLA's id of the execution; the same on all its devices. -1 in the replay of a CUDA graph,
      and where a tap outside of programs sends without one.
    shard: for each leaf of the value a tuple of slices: which part of the global array it is. None
      in programs that are not partitioned over several devices, and inside `jax.shard_map`. Under
      `jax.pmap` the global array is the devices' values, stacked along a first axis.
    lane: the value's index in each vmapped level, outermost first; () without vmap.
    role: "primal", "tangent" or "cotangent".
    transforms: transformations that the tap met, in order of application, as (name, parameters).
    repeated: True if the tap has sent this value before: the second pass of `jax.checkpoint`, and a
      `while_loop` that `jax.linearize` runs again for each tangent.
    global_shape: the shape of the global array, likewise; None where `shard` is.
    first: whether no device before, in the program's order, has the same part, likewise: of all
      processes' records of a replicated array one says so.
    kind: as the tap was given it: "image", "text" or None.
  """

  name: str
  seq: int
  time_ns: int
  process: int = 0
  device: int = 0
  run: int = -1
  shard: Any = None
  lane: tuple[int, ...] = ()
  role: str = "primal"
  transforms: tuple[tuple[str, dict[str, Any]], ...] = ()
  repeated: bool = False
  global_shape: Any = None
  first: Any = None
  kind: str | None = None


def is_part(shard: Any) -> bool:
  """True for what `TapInfo.shard` has for a leaf: a slice of each dimension."""
  return isinstance(shard, tuple) and all(isinstance(one, slice) for one in shard)


@dataclasses.dataclass(frozen=True, slots=True)
class Record:
  """One value that left a program.

  Attributes:
    value: the tapped pytree, with NumPy arrays that are the consumer's own.
    info: its `TapInfo`.
  """

  value: Any
  info: TapInfo


@dataclasses.dataclass(frozen=True, slots=True)
class BatchInfo:
  """Tells the same of many records of one tap, as arrays with a row a record.

  Attributes:
    name: the tap's name.
    role: "primal", "tangent" or "cotangent".
    transforms: as in `TapInfo`.
    seq: uint64, as in `TapInfo`; so are the next three, int64.
    time_ns: wall clock in nanoseconds.
    device: global ids of devices.
    run: XLA's ids of executions.
    lane: int64, rows of indices: one column a vmapped level, outermost first.
    repeated: bool.
    process: index of the process.
    shard: int64, the number of each record's shard, -1 for whole values.
  """

  name: str
  role: str
  transforms: tuple[tuple[str, dict[str, Any]], ...]
  seq: np.ndarray
  time_ns: np.ndarray
  device: np.ndarray
  run: np.ndarray
  lane: np.ndarray
  repeated: np.ndarray
  process: int
  shard: np.ndarray


def columns(record: Record) -> dict[str, np.ndarray]:
  """The leaves of a record by name: what sinks call the columns of their files.

  Args:
    record: any record.

  Returns:
    For a lone leaf of the tap "loss" one entry, "loss"; else one a leaf, named by its path, as
    "loss/w/0" of `{"w": [x]}`. Tangents and cotangents are apart: "loss:cotangent/w/0".

  Raises:
    ValueError: two leaves have the same name, as in `{"a": {"b": x}, "a/b": y}`.
  """
  named = leaves_under(tap_key(record.info), record.value)
  return {name: np.asarray(x) for name, x in named.items()}


def tap_key(info: TapInfo) -> str:
  """The tap's name, with the role of what is no primal: "loss", "loss:cotangent"."""
  return info.name if info.role == "primal" else f"{info.name}:{info.role}"


def parts_of(record: Record) -> list[tuple[tuple[slice, ...], tuple[int, ...]]]:
  """The part that each leaf is, and the whole array's shape; nothing where that is not known."""
  info = record.info
  if info.shard is None:
    return []
  tree = jax.tree.structure(record.value)
  shapes = tree.flatten_up_to(info.global_shape)
  return list(zip(tree.flatten_up_to(info.shard), shapes, strict=True))


@tracing.clearable_cache(max_size=1024)  # structures may keep the user's objects
def leaf_paths(tree: Any) -> tuple[tuple[str, str], ...]:
  """The path of each leaf as `jax.tree_util.keystr` writes it, and in the plain form "w/0"."""
  keystr = jax.tree_util.keystr
  indexed = jax.tree.unflatten(tree, range(tree.num_leaves))
  paths = (path for path, _ in jax.tree_util.tree_leaves_with_path(indexed))
  return tuple((keystr(path), keystr(path, simple=True, separator="/")) for path in paths)


def named_leaves(value: Any) -> list[tuple[str, Any]]:
  """The leaves of a value, each with its path in the plain form."""
  leaves, tree = jax.tree.flatten(value)
  return [(path, leaf) for (_, path), leaf in zip(leaf_paths(tree), leaves, strict=True)]


def leaves_under(root: str, value: Any) -> dict[str, Any]:
  """The leaves by names of their own, which begin with `root`."""
  leaves = named_leaves(value)
  named = {f"{root}/{path}" if path else root: leaf for path, leaf in leaves}
  if len(named) < len(leaves):
    twice = collections.Counter(path for path, _ in leaves).most_common(1)[0][0]
    raise ValueError(f"{root}: expected leaves with names of their own, got two leaves {twice!r}")
  return named
