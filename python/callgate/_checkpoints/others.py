# SPDX-License-Identifier: Apache-2.0
"""The other processes of a program that saves checkpoints: their refusals, and which are alive.

A device that can't load its part of a carry refuses the run. Its failed call can't stop a program
over several devices, which continues with NaN. The coordination service tells all processes of the
refusal, so that none makes a checkpoint of the run.
"""

from __future__ import annotations

import contextlib

from callgate._jax import distributed
from callgate._process import group as _group

_KEY = "callgate/checkpoints/refused/"
# Atomic: single steps; never emptied: one text for each run or step that is not saved.
_refused: set[str] = set()


def refuse(run: int, step: int | None = None) -> None:
  """Tells all processes not to save a run, or one step of it."""
  _refused.add(_key(run, step))
  if (client := distributed.distributed_client()) is not None:
    with contextlib.suppress(ConnectionError):  # the other processes have ended
      distributed.CommonStore(client).put(_key(run, step), "", overwrite=True)


def is_known(run: int, step: int | None = None) -> bool:
  """True if this process knows of a refusal."""
  return _key(run, step) in _refused


def is_told(run: int, step: int | None = None) -> bool:
  """True if any process has refused; asks the coordination service."""
  key, client = _key(run, step), distributed.distributed_client()
  if key not in _refused and client is not None:
    # The coordinator has ended, and all processes soon will.
    with contextlib.suppress(ConnectionError):
      if distributed.CommonStore(client).get(key) is not None:
        _refused.add(key)
  return key in _refused


def _key(run: int, step: int | None) -> str:
  return f"{_KEY}{run}" if step is None else f"{_KEY}{run}/{step}"


def ended() -> str:
  """Describes a process that no longer sends heartbeats; "" if all others are alive."""
  group = _group.group()
  if group is None:
    return "this process has left the group"
  with contextlib.suppress(ConnectionError):
    for process, failure in sorted(group.ended().items()):
      if failure.kind and process != group.index:
        return f"process {process} ended with {failure.kind}: {failure.message}"
    if silent := group.silent():
      return f"process {silent[0]} has not responded for {group.silent_seconds:g} s"
    return ""
  return "the coordinator has ended"
