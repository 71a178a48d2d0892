"""`compat.sharded_jit`: its cases run in two groups of processes, and are reported apart.

One process has 8 CPU devices, and a group of two has 4 each.
"""

from __future__ import annotations

import copy
import json
import os
import pathlib
import pickle
import re
import socket
import subprocess
import sys

import pytest

from callgate.compat.sharded_jit import PartitionSpec

HERE = pathlib.Path(__file__).parent
ONE = HERE / "sharded_jit_cases.py"
ERRORS = HERE / "sharded_jit_errors.py"  # in the same process
TWO = HERE / "sharded_jit_processes.py"


def names(cases: pathlib.Path) -> list[str]:
  return re.findall(r"^@case\ndef (\w+)", cases.read_text(encoding="utf-8"), re.MULTILINE)


def run_cases(commands: list[list[str]], devices: int) -> None:
  """Runs scripts at once, with `devices` CPU devices each; all must succeed."""
  environment = {
    **os.environ,
    "JAX_PLATFORMS": "cpu",
    "XLA_FLAGS": f"--xla_force_host_platform_device_count={devices}",
    "PYTHONPATH": os.pathsep.join(filter(None, sys.path)),
  }
  running = [
    subprocess.Popen(
      [sys.executable, "-W", "error", *command], env=environment, stderr=subprocess.PIPE, text=True
    )
    for command in commands
  ]
  try:
    errors = [process.communicate(timeout=240)[1] for process in running]
  finally:
    for process in running:
      process.kill()
      process.wait()
  assert [process.returncode for process in running] == [0] * len(running), "\n".join(errors)


@pytest.fixture(scope="module")
def outcome(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
  file = tmp_path_factory.mktemp("one") / "outcome.json"
  run_cases([[str(ONE), str(file)]], devices=8)
  return json.loads(file.read_text(encoding="utf-8"))


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, str]]:
  files = [tmp_path_factory.mktemp("two") / f"{process}.json" for process in range(2)]
  with socket.socket() as free:
    free.bind(("127.0.0.1", 0))
    address = f"127.0.0.1:{free.getsockname()[1]}"
  run_cases([[str(TWO), address, str(i), str(file)] for i, file in enumerate(files)], devices=4)
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
  assert repr(PartitionSpec(4)) == "PartitionSpec(4)"
  for again in (copy.deepcopy(spec := PartitionSpec(2, 1)), pickle.loads(pickle.dumps(spec))):
    assert (again, type(again)) == (spec, PartitionSpec)
  for wrong in (0, -1, 1.5, "x", True, None):
    with pytest.raises(ValueError, match="PartitionSpec: expected counts of at least 1, got"):
      PartitionSpec(2, wrong)  # pyright: ignore[reportArgumentType]
