# SPDX-License-Identifier: Apache-2.0
"""Compares what programs gave with what the oracle says."""

from __future__ import annotations

import collections
from collections.abc import Sequence
from typing import Any

import numpy as np
from oracle import Event, Expected, Lane, counted

RTOL = ATOL = 2e-3

Call = tuple[list[list[np.ndarray]], list[tuple[str, tuple[float, ...]]]]


def _close(a: Sequence[float], b: Sequence[float]) -> bool:
  return len(a) == len(b) and bool(np.allclose(a, b, RTOL, ATOL))


def wrong_results(executions: Sequence[Sequence[np.ndarray]], expected: Sequence[Any]) -> str:
  """Says which result differs; nothing where all are right."""
  for k, results in enumerate(executions):
    for i, (found, right) in enumerate(zip(results, expected, strict=True)):
      if found.shape != right.shape or not np.allclose(
        found.astype(right.dtype), right, RTOL, ATOL
      ):
        return f"result {i} of execution {k}: expected {right.tolist()}, got {found.tolist()}"
  return ""


def wrong_events(
  found: Sequence[tuple[str, tuple[float, ...]]],
  expected: Sequence[tuple[Event, Lane]],
  times: int,
  devices: bool,
) -> str:
  """Says which event happened too often or too seldom in so many executions.

  `devices`: the program runs on several. XLA splits what is outside of `shard_map`s as it likes.
  """
  if devices:
    inside = {event.name for event, lane in expected if any(axis == "d" for axis, _ in lane.path)}
    found = [event for event in found if event[0] in inside]
    expected = [(event, lane) for event, lane in expected if event.name in inside]
  by_name: dict[str, list[Expected]] = collections.defaultdict(list)
  for one in counted(expected):
    same = [
      other for other in by_name[one.event.name] if _close(other.event.values, one.event.values)
    ]
    if same:  # events that rounding can't tell apart
      same[0].most += one.most
      same[0].least += one.least
    else:
      by_name[one.event.name].append(one)
  counts: dict[int, int] = collections.Counter()
  for name, values in found:
    some = [one for one in by_name[name] if _close(one.event.values, values)]
    if not some:
      return (
        f"{name} got {values}, expected one of {[one.event.values for one in by_name[name]][:4]}"
      )
    counts[id(some[0])] += 1
  for all_ in by_name.values():
    for one in all_:
      if not one.least * times <= counts[id(one)] <= one.most * times:
        many = f"{one.least} to {one.most}" if one.least < one.most else f"{one.most}"
        return (
          f"{one.event.name} got {one.event.values} {counts[id(one)]} times in {times} executions,"
          f" expected {many} an execution"
        )
  return ""


def wrong_order(
  found: Sequence[tuple[str, tuple[float, ...]]],
  expected: Sequence[tuple[Event, Lane]],
  ordered: set[str],
) -> str:
  """Says where ordered events of one execution came in another order; lanes, devices have none."""
  paths = [lane.path for event, lane in expected if event.name in ordered]
  if any(axis == "d" or axis.startswith("lane") for path in paths for axis, _ in path):
    return ""
  right = [event for event, _ in expected if event.name in ordered]
  came = [event for event in found if event[0] in ordered]
  for i, (a, b) in enumerate(zip(right, came, strict=True)):
    if a.name != b[0] or not _close(a.values, b[1]):
      return f"ordered event {i}: expected {a.name} of {a.values}, got {b[0]} of {b[1]}"
  return ""
