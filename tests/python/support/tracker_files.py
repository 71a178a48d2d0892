# SPDX-License-Identifier: Apache-2.0
"""Reads the files of trackers, for tests of what sinks write there."""

from __future__ import annotations

import importlib
import json
from pathlib import Path
from typing import Any


def events_of(folder: Path) -> dict[str, list[Any]]:
  """Summaries of all event files, by tag, as (step, wall time, value)."""
  from tensorboardX.event_file_writer import EventFileWriter  # noqa: F401 - its protos are loaded
  from tensorboardX.proto import event_pb2

  found: dict[str, list[Any]] = {}
  for file in sorted(folder.iterdir()):
    data = file.read_bytes()
    while data:  # length, its checksum, the event, its checksum
      length = int.from_bytes(data[:8], "little")
      event = event_pb2.Event.FromString(data[12 : 12 + length])
      data = data[16 + length :]
      for value in event.summary.value:
        found.setdefault(value.tag, []).append((event.step, event.wall_time, value))
  return found


def history_of(path: Path) -> list[dict[str, Any]]:
  """The rows of a run's file: records of protobuf, framed as LevelDB's logs are."""
  messages = importlib.import_module("wandb.proto.wandb_internal_pb2")
  data = path.read_bytes()
  assert data[:4] == b":W&B"
  rows: list[dict[str, Any]] = []
  place, whole = 7, b""
  while place + 7 <= len(data):
    if (left := -place % 32768) < 7:  # no header fits into the rest of the block
      place += left
      continue
    size, kind = int.from_bytes(data[place + 4 : place + 6], "little"), data[place + 6]
    if place + 7 + size > len(data):
      break  # being written
    whole += data[place + 7 : place + 7 + size]
    place += 7 + size
    if kind in (1, 4):  # a whole record, or its last part
      items = messages.Record.FromString(whole).history.item
      rows += [{".".join(i.nested_key) or i.key: json.loads(i.value_json) for i in items}]
      whole = b""
  return [row for row in rows if row]
