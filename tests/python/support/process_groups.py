# SPDX-License-Identifier: Apache-2.0
"""Starts groups of local processes that `jax.distributed` joins, and collects what they say.

A process runs a script with its index, the number of processes and the coordinator's port as first
arguments. It reports results as lines of JSON in a file of its own (`report` here, in the child):
on its standard output JAX's libraries have their say, too.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import pathlib
import socket
import subprocess
import time
from typing import Any

from interpreters import Process, same_path, start

_REPORTS = "PROCESS_GROUP_REPORTS"  # the file that a child reports to


@dataclasses.dataclass(frozen=True)
class Ended:
  """A process that has ended.

  Attributes:
    status: its exit status, negative for a signal.
    reports: what it reported, by name.
    errors: its standard error.
  """

  status: int
  reports: dict[str, Any]
  errors: str


def free_port() -> int:
  """A port of the loopback interface that was free a moment ago."""
  with socket.socket() as probe:
    probe.bind(("127.0.0.1", 0))
    return probe.getsockname()[1]


def run_group(
  script: pathlib.Path,
  count: int,
  *arguments: str,
  folder: pathlib.Path,
  devices: int = 2,
  seconds: float = 240,
  **environment: str,
) -> list[Ended]:
  """Runs `count` processes of a script; all are killed when the time is over.

  Args:
    script: what they run.
    count: how many.
    *arguments: for the script, after index, count and port.
    folder: where they run, and where their outputs go.
    devices: of the CPU backend, in each process.
    seconds: the time limit for all together.
    **environment: variables of their environment.

  Returns:
    How each ended.
  """
  port = free_port()
  flags = f"--xla_force_host_platform_device_count={devices}"
  variables = {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": flags, **same_path(), **environment}
  with contextlib.ExitStack() as stack:
    children: list[Process] = []
    for index in range(count):
      out = stack.enter_context(open(folder / f"{index}.out", "wb"))
      err = stack.enter_context(open(folder / f"{index}.err", "wb"))
      own = {**variables, _REPORTS: str(_reports(folder, index))}
      child = start(
        script, index, count, port, *arguments, environment=own, cwd=folder,
        stdout=out, stderr=err,
      )  # fmt: skip
      stack.callback(_end, child)
      children.append(child)
    deadline = time.monotonic() + seconds
    for child in children:
      with contextlib.suppress(subprocess.TimeoutExpired):
        child.wait(max(0.1, deadline - time.monotonic()))
  return [_ended(folder, index, child) for index, child in enumerate(children)]


def _end(child: Process) -> None:
  if child.poll() is None:
    child.kill()
    child.wait()


def _ended(folder: pathlib.Path, index: int, child: Process) -> Ended:
  reports: dict[str, Any] = {}
  written = _reports(folder, index)
  for line in written.read_text().splitlines() if written.exists() else ():
    reports.update(json.loads(line))
  assert child.returncode is not None
  return Ended(child.returncode, reports, (folder / f"{index}.err").read_text(errors="replace"))


def _reports(folder: pathlib.Path, index: int) -> pathlib.Path:
  return folder / f"{index}.reports"


def report(**results: Any) -> None:
  """In a child: reports results by name."""
  with open(os.environ[_REPORTS], "a", encoding="utf-8") as file:
    file.write(json.dumps(results) + "\n")
