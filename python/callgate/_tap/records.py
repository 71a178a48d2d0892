# SPDX-License-Identifier: Apache-2.0
"""Records as the consumers of a channel see them, and their metadata."""

from __future__ import annotations

import collections
import dataclasses
from typing import Any

import jax
import numpy as np

from callgate._jax import tracing


@dataclasses.dataclass(frozen=True, slots=True)
class TapInfo:
  """The metadata of a tapped value: where, when and how the program computed it.

  Attributes:
    name: the tap's name.
    seq: number of the record on its device and channel, from 0. Dropped records leave gaps.
    time_ns: wall clock, in nanoseconds since the Unix epoch, when the value left the program.
    process: index of the process (`jax.process_index()`).
    device: global id of the device (`jax.Device.id`); -1 if unknown.
    run: XLA's id of the execution, the same on all its devices. -1 in the replay of a CUDA graph,
      and if a tap outside of compiled code sends without a program.
    shard: a tuple of slices for each leaf of the value: its part of the global array. None in
      programs that XLA doesn't partition over several devices, and inside `jax.shard_map`. Under
      `jax.pmap` the global array has the devices' values stacked along a first axis.
    lane: the value's index in each vmapped level, outermost first; () without vmap.
    role: "primal", "tangent" or "cotangent".
    transforms: the transformations of the tap in order of application, as (name, parameters).
    repeated: True if the tap has sent this value before, in the first pass of a `jax.checkpoint`,
      or in a `while_loop` that `jax.linearize` runs again for each tangent.
    global_shape: the shape of the global array for each leaf; None if `shard` is None.
    first: a bool for each leaf; None if `shard` is None. True if no earlier device has the same
      part. So exactly one record of a replicated array, over all processes, has True.
    kind: the tap's option `kind`: "image", "text" or None.
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
  """True for an entry of `TapInfo.shard` for one leaf: a slice for each dimension."""
  return isinstance(shard, tuple) and all(isinstance(one, slice) for one in shard)


@dataclasses.dataclass(frozen=True, slots=True)
class Record:
  """One value that left a program.

  Attributes:
    value: the tapped pytree, with NumPy arrays that the consumer may keep.
    info: its `TapInfo`.
  """

  value: Any
  info: TapInfo


@dataclasses.dataclass(frozen=True, slots=True)
class BatchInfo:
  """The metadata of many records of one tap, as arrays with a row for each record.

  Attributes:
    name: the tap's name.
    role: "primal", "tangent" or "cotangent".
    transforms: as in `TapInfo`.
    seq: uint64, as in `TapInfo`.
    time_ns: int64, wall clock in nanoseconds since the Unix epoch.
    device: int64, global ids of devices.
    run: int64, XLA's ids of executions.
    lane: int64, rows of indices: one column for each vmapped level, outermost first.
    repeated: bool.
    process: index of the process.
    shard: int64, the number of each record's shard; -1 for whole values.
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
  """Returns the leaves of a record by name; these are the columns of sinks' files.

  Args:
    record: any record.

  Returns:
    A dictionary. A single array of the tap "loss" has the name "loss"; a leaf of a pytree is named
    by its path, such as "loss/w/0" for `{"w": [x]}`. Tangents and cotangents have names of their
    own: "loss:cotangent/w/0".

  Raises:
    ValueError: two leaves have the same name, as in `{"a": {"b": x}, "a/b": y}`.
  """
  named = leaves_under(tap_key(record.info), record.value)
  return {name: np.asarray(x) for name, x in named.items()}


def tap_key(info: TapInfo) -> str:
  """Returns the tap's name, with the role unless it is "primal": "loss", "loss:cotangent"."""
  return info.name if info.role == "primal" else f"{info.name}:{info.role}"


def parts_of(record: Record) -> list[tuple[tuple[slice, ...], tuple[int, ...]]]:
  """Returns (slices, shape of the whole array) for each leaf; nothing if these are not known."""
  info = record.info
  if info.shard is None:
    return []
  tree = jax.tree.structure(record.value)
  shapes = tree.flatten_up_to(info.global_shape)
  return list(zip(tree.flatten_up_to(info.shard), shapes, strict=True))


@tracing.clearable_cache(max_size=1024)  # structures may keep the user's objects alive
def leaf_paths(tree: Any) -> tuple[tuple[str, str], ...]:
  """Returns the path of each leaf in the form of `jax.tree_util.keystr`, and in the form "w/0"."""
  keystr = jax.tree_util.keystr
  indexed = jax.tree.unflatten(tree, range(tree.num_leaves))
  paths = (path for path, _ in jax.tree_util.tree_leaves_with_path(indexed))
  return tuple((keystr(path), keystr(path, simple=True, separator="/")) for path in paths)


def named_leaves(value: Any) -> list[tuple[str, Any]]:
  """Returns (path, leaf) for the leaves of a value; the path is in the form "w/0"."""
  leaves, tree = jax.tree.flatten(value)
  return [(path, leaf) for (_, path), leaf in zip(leaf_paths(tree), leaves, strict=True)]


def leaves_under(root: str, value: Any) -> dict[str, Any]:
  """Returns the leaves by unique names, which begin with `root`."""
  leaves = named_leaves(value)
  named = {f"{root}/{path}" if path else root: leaf for path, leaf in leaves}
  if len(named) < len(leaves):
    twice = collections.Counter(path for path, _ in leaves).most_common(1)[0][0]
    raise ValueError(f"{root}: expected leaves with different names, got two leaves {twice!r}")
  return named
