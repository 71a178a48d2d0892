# SPDX-License-Identifier: Apache-2.0
"""The values that a breakpoint takes back from its user, and the line that it names."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import callgate as cg


class Stops(list[dict[str, Any]]):
  """The names at each stop; `edits` are made one after another, the last one from there on."""

  def __init__(self) -> None:
    super().__init__()
    self.edits: list[Callable[[dict[str, Any]], object]] = []


@pytest.fixture
def stops(monkeypatch: pytest.MonkeyPatch) -> Stops:
  seen = Stops()

  def hook() -> None:
    names = sys._getframe(1).f_locals
    seen.append(dict(names))
    for edit in seen.edits[len(seen) - 1 : len(seen)] or seen.edits[-1:]:
      edit(names)

  monkeypatch.setattr(sys, "breakpointhook", hook)
  return seen


@pytest.mark.parametrize(
  ("dtype", "typed", "expected"),
  [
    ("float32", np.array([1, 2]), [1, 2]),
    ("float32", np.array([0.5, 2.0]), [0.5, 2]),
    ("bfloat16", np.array([0.5, 2.0]), [0.5, 2]),
    ("float16", jnp.array([True, False]), [1, 0]),
    ("uint8", np.array([1, 255]), [1, 255]),
    ("complex64", np.array([1, 2]), [1, 2]),
    ("uint8", np.array([1, 256]), None),
    ("int32", np.array([1.0, 2.0]), None),
    ("float32", np.array([1j, 2]), None),
    ("float32", np.array(["a", "b"]), None),
    ("float32", np.array([1, 2, 3]), None),
  ],
)
def test_a_value_is_taken_in_its_dtype_or_asked_for_again(
  engine: str, stops: Stops, dtype: str, typed: Any, expected: Any
) -> None:
  f = jax.jit(lambda x: cg.breakpoint(out="x", x=x))
  stops.edits += [
    lambda names: names.update(x=typed),
    lambda names: names.update(x=names["x"] if expected else np.array([7, 8], dtype)),
  ]
  got = f(jnp.zeros(2, dtype))
  assert got.dtype == dtype
  assert got.tolist() == (expected or [7, 8])
  assert len(stops) == (1 if expected else 2)


def test_a_hook_that_leaves_a_wrong_value_is_not_asked_for_ever(stops: Stops) -> None:
  f = jax.jit(lambda x: cg.breakpoint(out="x", x=x))
  stops.edits.append(lambda names: names.update(x=np.zeros(3)))
  expected = r"breakpoint: x: expected float32\[2\], got float64\[3\] \(.* 10 times\)"
  with pytest.raises(cg.ResultError, match=expected), cg.errors():
    f(jnp.zeros(2))
  assert len(stops) == 10


def test_in_shard_map_lanes_and_shards_are_told(stops: Stops) -> None:
  mesh = jax.make_mesh((2, 2), ("d", "e"), axis_types=(jax.sharding.AxisType.Auto,) * 2)
  f = jax.vmap(lambda x: cg.breakpoint(x > 4, x=x) or x)
  whole = jax.shard_map(f, mesh=mesh, in_specs=jax.P(("d", "e")), out_specs=jax.P(("d", "e")))
  jax.block_until_ready(jax.jit(whole)(jnp.arange(8.0)))
  cg.barrier()
  seen = sorted((names["shard"], names["lane"], float(names["x"])) for names in stops)
  assert seen == [(2, 1, 5.0), (3, 0, 6.0), (3, 1, 7.0)]

  stops.clear()
  in_part = jax.shard_map(f, mesh=mesh, in_specs=jax.P("d"), out_specs=jax.P("d"), axis_names={"d"})
  jax.block_until_ready(jax.jit(in_part)(jnp.arange(8.0)))
  cg.barrier()
  assert {(names["shard"], float(names["x"])) for names in stops} == {
    (None, 5.0), (None, 6.0), (None, 7.0)
  }  # fmt: skip


NAMED = """
import jax, numpy as np
import callgate as cg

def f(w, p, n, c):
  return cg.breakpoint(out=("w", "p", "n", "c"), w=w, p=p, n=n, c=c)

for value in jax.jit(f)(1.0, np.zeros(2), 3, 4.0):
  print("result", value.tolist())
"""


def test_a_value_named_like_a_command_of_pdb_can_be_assigned() -> None:
  typed = [
    "p w + 41", "p [w] == [1.0]", "w = 5.0", "p[0] = 7", "p [1] += 2", "n, c = 8, 9.0", "w = )",
    "del n", "c", "n = 6", "n *= 2", "c",
  ]  # fmt: skip
  done = subprocess.run(
    [sys.executable, "-c", NAMED], input="\n".join(typed), capture_output=True, text=True,
    timeout=120,
  )  # fmt: skip
  assert "42.0" in done.stdout
  assert "True" in done.stdout
  assert "SyntaxError" in done.stdout
  assert "n: expected a value, got none" in done.stderr
  results = [line for line in done.stdout.splitlines() if "result" in line]
  assert [line.split("result ")[1] for line in results] == ["5.0", "[7.0, 2.0]", "12", "9.0"]
