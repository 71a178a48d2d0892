# SPDX-License-Identifier: Apache-2.0
"""Properties of gates and kernels for rules, lowering and recordings."""

from __future__ import annotations

import dataclasses
from typing import Literal


@dataclasses.dataclass(frozen=True, kw_only=True)
class Traits:
  """The properties of a callee, fixed when it is made. Each kind of callee defines its own.

  Attributes:
    autograd: True if it differentiates itself (`Callee.tangent_call`) without a user's rule.
    by_lane: True if its function needs the lane that it runs for.
    handles: "makes" objects and returns handles, "uses" objects, or "takes" an object once.
    knows_lanes: True if it calls a user's function, so errors, recordings and workers name lanes.
    located: True if its function may ask for the place of its call (`_callgate.current_place`).
    native: True if it gets Buffers of a GPU's memory in place of host arrays.
    of_thread: True if all its calls run on one thread (`callgate.thread`).
    on_device: True if it gets a GPU's own arrays in a program for one; else copies on the host.
    one_calls_for_all: True if one device makes the call for all when no dimension may stay split.
    reads_cell: True if its result is a cell that the host may change, which each device reads.
    runs_programs: True if its function may run JAX programs, so threads don't get far ahead of it.
    same_on_all_platforms: True if one call serves programs for several platforms.
    shares_object: True if the steps of a loop may share the object made of an unchanged first
      argument. A call that makes and uses the object has `make` and `with_object`.
    splits: True if arguments may contain more than arrays (`_core/split.py`).
    taped: True if recordings contain its calls (`callgate.record`).
    gets_shard: True if it gets its shard in a fully manual `jax.shard_map`.
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
  gets_shard: bool = False

  def but(self, **others: object) -> Traits:
    """Returns these properties with changes."""
    return dataclasses.replace(self, **others)  # pyright: ignore[reportArgumentType]
