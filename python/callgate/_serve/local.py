# SPDX-License-Identifier: Apache-2.0
"""Passes the records of this process's channels to the live page's model."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from callgate._stream.records import StreamRecord
from callgate._tap import channel, kinds
from callgate._tap.records import Record, is_part, leaf_paths
from callgate._watch.model import Model


class LocalFeed:
  """Makes the model follow all channels of the process that have consumers, until it is stopped."""

  def __init__(self, model: Model) -> None:
    self._model = model
    self._started_ns = time.time_ns()
    # By name: a channel that is opened again continues its curves.
    self._channels: dict[str, Tapped] = {}
    channel.watch(self._make)

  def stop(self, *, wait: bool) -> None:
    channel.unwatch(self._make, wait=wait)

  def states(self) -> list[str]:
    """Returns the name and state of each channel."""
    return [f"{name}: {one.state}" for name, one in dict(self._channels).items()]

  def _make(self, name: str) -> Tapped:
    if name not in self._channels:
      self._channels[name] = Tapped(self._model, self._model.add_run(name, self._started_ns))
    return self._channels[name]


class Tapped:
  """A sink that passes a channel's records to the model."""

  def __init__(self, model: Model, source: int) -> None:
    self._model, self._source = model, source
    self._descriptions: dict[str, dict[str, Any]] = {}  # by tap, as in a stream
    # Numbers of lanes, in the order of their first records.
    self._lanes: dict[tuple[int, ...], int] = {}
    self.state = "open"

  def open(self, channel: str) -> None:
    """There is nothing to open."""
    del channel
    self.state = "open"

  def write(self, records: Sequence[Record]) -> None:
    """Never raises: a record that the page can't show must not fail the program."""
    try:
      self._model.add([self._as_in_stream(one) for one in records], self._source)
    except Exception as error:  # noqa: BLE001 - shown on the page
      self.state = f"records that can't be shown: {type(error).__name__}: {error}"

  def flush(self) -> None:
    """There is nothing to write out."""

  def close(self) -> None:
    self.state = "closed"

  def _as_in_stream(self, record: Record) -> StreamRecord:
    info = record.info
    leaves, tree = jax.tree.flatten(record.value)
    paths = [path for path, _ in leaf_paths(tree)]
    if info.kind == "text":
      leaves = [kinds.text_bytes(leaves[0])]
    arrays = dict(zip(paths, map(np.asarray, leaves), strict=True))
    shard = None
    if info.shard is not None:
      parts = jax.tree.leaves(info.shard, is_leaf=is_part)
      shard = dict(zip(paths, parts, strict=False))
    return StreamRecord(
      info.name, info.seq, info.time_ns, info.device, info.run, info.role, self._lane(info.lane),
      arrays, self._descriptions.setdefault(info.name, {"kind": info.kind}), info.repeated,
      info.process, shard,
    )  # fmt: skip

  def _lane(self, lane: tuple[int, ...]) -> int:
    if len(lane) < 2:
      return lane[0] if lane else 0
    return self._lanes.setdefault(lane, len(self._lanes))
