# SPDX-License-Identifier: Apache-2.0
"""Runs whose carry a device could not load: what comes of such a run is not to be saved.

A call that fails can't stop a program over several devices, which goes on with NaN. The word goes
round by the coordination service, so that no process makes a checkpoint of the run.
"""

from __future__ import annotations

import contextlib

from callgate._jax import distributed

_KEY = "callgate/checkpoints/refused/"
_refused: set[int] = set()


def refuse(run: int) -> None:
  """Says to all processes that nothing of a run is to be saved."""
  _refused.add(run)
  if (client := distributed.distributed_client()) is not None:
    with contextlib.suppress(ConnectionError):  # nobody is left to be told
      distributed.CommonStore(client).put(f"{_KEY}{run}", "", overwrite=True)


def is_known(run: int) -> bool:
  """Whether this process has refused the run."""
  return run in _refused


def is_told(run: int) -> bool:
  """Whether any process has."""
  client = distributed.distributed_client()
  if run not in _refused and client is not None:
    with contextlib.suppress(ConnectionError):  # the coordinator has ended: all soon do
      if distributed.CommonStore(client).get(f"{_KEY}{run}") is not None:
        _refused.add(run)
  return run in _refused
