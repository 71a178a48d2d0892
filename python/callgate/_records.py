"""What consumers of a channel see: records, and what is known of each."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np


@dataclasses.dataclass(frozen=True, slots=True)
class TapInfo:
  """Where, when and how a tapped value came about.

  Attributes:
    name: the tap's name.
    seq: number of the record on its device and channel, from 0. Dropped records leave gaps.
    time_ns: wall clock, in nanoseconds since the Unix epoch, when the value left the program.
    process: index of the process (`jax.process_index()`).
    device: global id of the device (`jax.Device.id`); -1 when unknown.
    run: XLA's id of the execution; the same on all its devices.
    shard: slices of the global array that the value is; None when it is the whole one.
    lane: the value's index in each vmapped level, outermost first; () without vmap.
    role: "primal", "tangent" or "cotangent".
    transforms: transformations that the tap met, in order of application, as (name, parameters).
    repeated: whether the tap ran before in this execution: the second pass of `jax.checkpoint`.
  """

  name: str
  seq: int
  time_ns: int
  process: int
  device: int
  run: int
  shard: tuple[slice, ...] | None
  lane: tuple[int, ...]
  role: str
  transforms: tuple[tuple[str, dict[str, Any]], ...]
  repeated: bool


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
  """What is known of many records of one tap, as arrays with a row a record.

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
