# SPDX-License-Identifier: Apache-2.0
"""callgate's calls and threads in JAX's profiles, and in `callgate.trace`."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import callgate as cg
from callgate import _callgate


@pytest.fixture(scope="module")
def program() -> Any:
  slow_sort = cg.gate(np.sort, out=lambda x: x, effect="io", name="timed sort")
  square = cg.elementwise("T x", "T y", "y = x * x", name="timed_square")
  items = cg.feed(itertools.repeat(np.float32(1)), name="timed feed")

  def f(x: Any) -> Any:
    x = slow_sort(x) + items.next()
    cg.tap(x, lambda x: None, name="timed tap")
    return square(x)

  return jax.jit(f)


def names_in(folder: Path) -> dict[str, list[str]]:
  """The names of events by the line of the profile that they are on."""
  (path,) = folder.glob("plugins/profile/*/*.xplane.pb")
  found: dict[str, list[str]] = {}
  for plane in jax.profiler.ProfileData.from_file(str(path)).planes:
    for line in plane.lines:
      found.setdefault(line.name, []).extend(event.name for event in line.events)
  return found


def test_a_profile_has_calls_under_their_names(tmp_path: Path, program: Any) -> None:
  x = jnp.arange(4.0)
  jax.block_until_ready(program(x))
  with jax.profiler.trace(str(tmp_path)):
    jax.block_until_ready(program(x))
    cg.barrier()
  names = {name for line in names_in(tmp_path).values() for name in line}
  operations = " ".join(sorted(names))
  for expected in ("timed_sort", "timed_square", "timed_tap", "timed_feed"):
    assert any(expected in name for name in names), operations
  assert "callgate/timed sort" in names  # its function, within the operation
  assert "callgate/deliver timed tap" in names


def test_operations_are_named_in_the_program(program: Any) -> None:
  text = program.lower(jnp.arange(4.0)).compile().as_text()
  for name in ("timed sort", "timed_square", "timed tap"):
    assert f"callgate/{name}" in text


def test_after_a_profile_nothing_is_recorded(tmp_path: Path, program: Any) -> None:
  with jax.profiler.trace(str(tmp_path)):
    jax.block_until_ready(program(jnp.arange(4.0)))
  jax.block_until_ready(program(jnp.arange(4.0)))
  assert not _callgate.tracing()


def test_a_trace_has_kinds(tmp_path: Path, program: Any) -> None:
  path = tmp_path / "trace.json"
  with cg.trace(path):
    jax.block_until_ready(program(jnp.arange(4.0)))
    cg.barrier()
  events = json.loads(path.read_text())["traceEvents"]
  kinds = {(event["cat"], event["name"]) for event in events}
  assert ("gate", "timed sort") in kinds
  assert ("kernel", "timed_square") in {(kind, name.partition("[")[0]) for kind, name in kinds}
  assert "tap" in {kind for kind, _ in kinds}
  assert ("deliver", "timed tap") in kinds
  assert all(event["dur"] >= 0 for event in events)
  threads = {event["cat"]: event["tid"] for event in events}
  assert threads["deliver"] != threads["tap"]
