"""What consumers of a channel receive: a record, where it comes from, and its leaves as columns.

Records are made on the channel's thread, one for each lane, and are the consumer's to keep.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import numpy as np


@dataclasses.dataclass(frozen=True, slots=True)
class TapInfo:
  """Where a record comes from.

  Attributes:
    name: the tap's name.
    seq: counts the records of a channel and device, from 0, those included that were dropped.
    time_ns: wall clock, in nanoseconds since the Unix epoch.
    process: index of the JAX process.
    device: global id of the device.
    run: XLA's id of the execution; -1 where there is none.
    shard: index of the shard in each dimension that is partitioned, or None.
    lane: index in each batch level that `vmap` put around the tap, outermost first.
    role: "primal", "tangent" or "cotangent".
    transforms: the transformations of the tap, in order of application.
    repeated: True where the tap ran before in the same execution, as under `jax.checkpoint`.
  """

  name: str
  seq: int
  time_ns: int
  process: int = 0
  device: int = 0
  run: int = -1
  shard: tuple[int, ...] | None = None
  lane: tuple[int, ...] = ()
  role: str = "primal"
  transforms: tuple[Any, ...] = ()
  repeated: bool = False


@dataclasses.dataclass(frozen=True, slots=True)
class Record:
  """A value that a tap sent.

  Attributes:
    value: the tapped pytree, of NumPy arrays.
    info: where it comes from.
  """

  value: Any
  info: TapInfo


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
  root = tap_key(record.info)
  leaves, tree = jax.tree.flatten(record.value)
  named = {
    f"{root}/{path}" if path else root: np.asarray(leaf)
    for (_, path), leaf in zip(leaf_paths(tree), leaves, strict=True)
  }
  if len(named) != len(leaves):
    paths = [path for _, path in leaf_paths(tree)]
    twice = next(path for path in paths if paths.count(path) > 1)
    raise ValueError(
      f"expected leaves of the tap {root!r} with names of their own, got two leaves {twice!r}"
    )
  return named


def tap_key(info: TapInfo) -> str:
  """The tap's name, with the role of what is no primal: "loss", "loss:cotangent"."""
  return info.name if info.role == "primal" else f"{info.name}:{info.role}"


@functools.lru_cache(maxsize=1024)
def leaf_paths(tree: Any) -> tuple[tuple[str, str], ...]:
  """Of each leaf the path as `jax.tree_util.keystr` writes it, and in the plain form "w/0"."""
  indexed = jax.tree.unflatten(tree, range(tree.num_leaves))
  paths = [path for path, _ in jax.tree_util.tree_leaves_with_path(indexed)]
  return tuple(
    (jax.tree_util.keystr(path), jax.tree_util.keystr(path, simple=True, separator="/"))
    for path in paths
  )
