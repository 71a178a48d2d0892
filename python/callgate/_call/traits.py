# SPDX-License-Identifier: Apache-2.0
"""The properties of gates and kernels that rules, lowering and recordings ask for."""

from __future__ import annotations

import dataclasses
from typing import Literal


@dataclasses.dataclass(frozen=True, kw_only=True)
class Traits:
  """A callee's properties, which are fixed when it is made. Each kind of callee says its own.

  Attributes:
    autograd: True if it differentiates itself (`Callee.tangent_call`) where the user gives no rule.
    by_lane: True if its function has to know the lane that it runs for.
    handles: "makes" objects that handles stand for, "uses" them, or "takes" what is taken once.
    knows_lanes: True if it calls a user's function: errors, recordings and workers name lanes.
    located: True if its function may ask for the place of its call (`_callgate.current_place`).
    native: True if it gets Buffers of a GPU's memory where its arrays are the host's elsewhere.
    of_thread: True if all its calls run on one thread (`callgate.thread`).
    on_device: True if it gets a GPU's own arrays in a program for one; else copies on the host.
    one_calls_for_all: True if one device's call serves all where no dimension may stay split.
    reads_cell: True if its result is a cell that the host may change, which each device reads.
    runs_programs: True if its function may run JAX programs: threads don't get far ahead of it.
    same_on_all_platforms: True if one call serves programs for several platforms.
    shares_object: True if the steps of a loop may share the object that it makes of its first
      argument, where that does not change. A call that makes and uses it has `make` and
      `with_object`.
    splits: True if arguments may hold more than arrays (`_core/split.py`).
    taped: True if recordings have its calls (`callgate.record`).
    told_shard: True if a fully manual `jax.shard_map` tells it its shard.
  """

  autograd: bool = False
  by_lane: bool = False
  handles: Literal["", "makes", "uses", "takes"] = ""
  knows_lanes: bool = False
  located: bool = False
  native: bool = False
  of_thread: bool = False
  on_device: bool = True
  one_calls_for_all: bool = False
  reads_cell: bool = False
  runs_programs: bool = False
  same_on_all_platforms: bool = False
  shares_object: bool = False
  splits: bool = False
  taped: bool = False
  told_shard: bool = False

  def but(self, **others: object) -> Traits:
    """These properties but for others."""
    return dataclasses.replace(self, **others)  # pyright: ignore[reportArgumentType]
