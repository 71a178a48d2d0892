# SPDX-License-Identifier: Apache-2.0
"""Lanes that a GPU's program runs one after the other, and their numbers."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np
import pytest

import callgate as cg

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("gpu")]
LANES = np.arange(5, dtype=np.float32)
lax = jax.lax


def _notes_of(f: Any) -> str:
  lane = lambda x: lax.cond(x > 1, f, lambda x: x, x)
  with pytest.raises(Exception, match=r"this lane|not 3") as caught, cg.errors():
    jax.block_until_ready(jax.jit(jax.vmap(lane))(LANES))
  return "\n".join(getattr(caught.value, "__notes__", ()))


@pytest.mark.parametrize("options", [{}, {"thread": "own"}, {"effect": "ordered"}], ids=str)
def test_a_gate_names_its_lane(options: dict[str, Any]) -> None:
  def fail(x: Any) -> Any:
    if float(x) == 3:
      raise ValueError("this lane")
    return x

  gate = cg.gate(fail, out=lambda x: x, **{"effect": "io", **options})
  assert "in lane 3" in _notes_of(gate)


def test_a_gate_of_the_gpus_own_arrays_runs_without_its_number() -> None:
  seen: list[int] = []

  def copy(x: Any) -> Any:
    seen.append(1)
    return x

  gate = cg.gate(copy, out=lambda x: x, effect="io", arrays="buffer")
  lane = lambda x: lax.cond(x > 1, gate, lambda x: -x, x)
  found = jax.jit(jax.vmap(lane))(LANES)
  np.testing.assert_array_equal(found, np.where(LANES > 1, LANES, -LANES))
  assert len(seen) == 3


def test_a_check_names_its_lane() -> None:
  def checked(x: Any) -> Any:
    cg.check(x != 3, "not 3")
    return x

  assert "in lane 3" in _notes_of(checked)


@pytest.mark.parametrize("ordered", [False, True])
def test_a_tap_knows_its_lane(ordered: bool) -> None:
  came: dict[float, tuple[int, ...]] = {}

  def tapped(x: Any) -> Any:
    keep = lambda value, info: came.update({float(value): info.lane})
    return cg.tap(x, keep, ordered=ordered)

  inner = lambda x: jax.vmap(tapped)(jax.numpy.stack([x, x + 10])).sum()
  lane = lambda x: lax.cond(x > 2, inner, lambda x: x, x)
  jax.block_until_ready(jax.jit(jax.vmap(lane))(LANES))
  cg.barrier()
  assert came == {3.0: (3, 0), 13.0: (3, 1), 4.0: (4, 0), 14.0: (4, 1)}
