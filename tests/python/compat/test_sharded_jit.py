# SPDX-License-Identifier: Apache-2.0
"""`compat.sharded_jit`: its cases run in two groups of processes, and are reported apart.

One process has 8 CPU devices, and a group of two has 4 each.
"""

from __future__ import annotations

import contextlib
import copy
import json
import pathlib
import pickle
import re
import socket
import subprocess
import time

import pytest
from interpreters import FOLDER, same_path, start

from callgate.compat.sharded_jit import PartitionSpec

ONE = FOLDER / "sharded_jit_cases.py"
ERRORS = FOLDER / "sharded_jit_errors.py"  # in the same process
TWO = FOLDER / "sharded_jit_processes.py"


def names(cases: pathlib.Path) -> list[str]:
  return re.findall(r"^@case\ndef (\w+)", cases.read_text(encoding="utf-8"), re.MULTILINE)


def run_cases(folder: pathlib.Path, commands: list[list[str]], devices: int) -> None:
  """Runs scripts at once, with `devices` CPU devices each; all must succeed."""
  environment = {
    "JAX_PLATFORMS": "cpu",
    "XLA_FLAGS": f"--xla_force_host_platform_device_count={devices}",
    **same_path(),
  }
  logs = [folder / f"{i}.log" for i in range(len(commands))]
  with contextlib.ExitStack() as stack:
    running = [
      start(
        pathlib.Path(command[0]),
        *command[1:],
        environment=environment,
        errors=True,
        stdout=stack.enter_context(log.open("wb")),
        stderr=subprocess.STDOUT,
      )
      for command, log in zip(commands, logs, strict=True)
    ]
    deadline = time.monotonic() + 240
    try:
      codes = [process.wait(deadline - time.monotonic()) for process in running]
    finally:
      for process in running:
        process.kill()
        process.wait()
  assert codes == [0] * len(running), "\n".join(log.read_text() for log in logs)


@pytest.fixture(scope="module")
def outcome(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
  folder = tmp_path_factory.mktemp("one")
  file = folder / "outcome.json"
  run_cases(folder, [[str(ONE), str(file)]], devices=8)
  return json.loads(file.read_text(encoding="utf-8"))


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, str]]:
  folder = tmp_path_factory.mktemp("two")
  files = [folder / f"{process}.json" for process in range(2)]
  with socket.socket() as free:
    free.bind(("127.0.0.1", 0))
    address = f"127.0.0.1:{free.getsockname()[1]}"
  commands = [[str(TWO), address, str(i), str(file)] for i, file in enumerate(files)]
  run_cases(folder, commands, devices=4)
  return [json.loads(file.read_text(encoding="utf-8")) for file in files]


@pytest.mark.parametrize("name", names(ONE) + names(ERRORS))
def test_with_eight_devices(name: str, outcome: dict[str, str]) -> None:
  assert outcome[name] == ""


@pytest.mark.parametrize("name", names(TWO))
def test_with_two_processes(name: str, outcomes: list[dict[str, str]]) -> None:
  assert [outcome[name] for outcome in outcomes] == ["", ""]


def test_a_spec_is_a_tuple_of_counts() -> None:
  assert repr(PartitionSpec(2, 1)) == "PartitionSpec(2, 1)"
  assert PartitionSpec(2, 1) == (2, 1)
  assert repr(PartitionSpec(4)) == "PartitionSpec(4,)"  # a tuple's, as in 2020
  for again in (copy.deepcopy(spec := PartitionSpec(2, 1)), pickle.loads(pickle.dumps(spec))):
    assert (again, type(again)) == (spec, PartitionSpec)
  for wrong in (0, -1, 1.5, "x", True, None):
    with pytest.raises(ValueError, match="PartitionSpec: expected counts of at least 1, got"):
      PartitionSpec(2, wrong)  # pyright: ignore[reportArgumentType]
