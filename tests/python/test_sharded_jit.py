"""`compat.sharded_jit`: its cases run in one process of 8 CPU devices, and are reported apart."""

from __future__ import annotations

import json
import pathlib
import re
import sys

import pytest
from conftest import run_python

from callgate.compat.sharded_jit import PartitionSpec

CASES = pathlib.Path(__file__).with_name("sharded_jit_cases.py")
NAMES = re.findall(r"^@case\ndef (\w+)", CASES.read_text(encoding="utf-8"), re.MULTILINE)


@pytest.fixture(scope="module")
def outcome() -> dict[str, str]:
  code = f"import runpy; runpy.run_path({str(CASES)!r}, run_name='__main__')"
  flags = "--xla_force_host_platform_device_count=8"
  return json.loads(run_python(code, XLA_FLAGS=flags, PYTHONPATH=":".join(filter(None, sys.path))))


@pytest.mark.parametrize("name", NAMES)
def test_with_eight_devices(name: str, outcome: dict[str, str]) -> None:
  assert outcome[name] == ""


def test_a_spec_is_a_tuple_of_counts() -> None:
  assert repr(PartitionSpec(2, 1)) == "PartitionSpec(2, 1)"
  assert PartitionSpec(2, 1) == (2, 1)
  assert repr(PartitionSpec(4)) == "PartitionSpec(4)"
  for wrong in (0, -1, 1.5, "x", True, None):
    with pytest.raises(ValueError, match="PartitionSpec: expected counts of at least 1, got"):
      PartitionSpec(2, wrong)  # pyright: ignore[reportArgumentType]
