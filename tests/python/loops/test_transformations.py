# SPDX-License-Identifier: Apache-2.0
"""Loops that stop, save or show a value, in every transformation, against `jax.lax.scan`."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from recorded_bars import recorded
from transformation_table import TRANSFORMATIONS, assert_chains_agree, diagonal, is_valid

import callgate as cg

TIMES = jnp.arange(1.0, 3.0)
LANES = ("vmap", "vmap of axis 1", "while with lanes apart")
# Transformations that run a loop twice in an execution: a cg.Checkpoints refuses its second loop.
TWICE = ("nested jit", "scan", "while", "while with lanes apart")


def looped(scan: Any, **options: Any) -> Any:
  """A function of a vector that is a loop of two steps."""

  def step(carry: Any, t: Any) -> Any:
    return jnp.sin(carry) * t, carry.sum()

  def f(x: Any) -> Any:
    carry, ys, *_ = scan(step, x, TIMES, **options)
    return carry + ys.sum()

  return f


TRUTH = looped(jax.lax.scan)


@pytest.mark.parametrize("number", [9])
def test_stoppable_scans(number: int) -> None:
  make = lambda effect: looped(cg.scan, stoppable=True)
  assert_chains_agree(diagonal(number), make=make, truth=TRUTH)


@pytest.mark.parametrize("number", [7])
def test_bars_by_value(number: int) -> None:
  bar = cg.Progress("value", total=4.0, at=lambda carry: carry[0], every=1)
  with recorded() as bars:
    make = lambda effect: looped(cg.scan, progress=bar)
    assert_chains_agree(diagonal(number), make=make, truth=TRUTH)
    jax.effects_barrier()
  assert len(bars) >= len(diagonal(number))
  assert {bar.desc for bar in bars} == {"value"}


class Saved:
  """Functions whose loops are saved, each in a folder of its own."""

  def __init__(self, folder: Path, **options: Any) -> None:
    self.folder, self.options, self.made = folder, options, list[cg.Checkpoints]()
    self.numbers = itertools.count()

  def __call__(self, effect: Any) -> Any:
    def f(x: Any) -> Any:
      saves = cg.Checkpoints(self.folder / str(next(self.numbers)), every=1, **self.options)
      self.made.append(saves)
      return looped(cg.scan, save=saves)(x)

    return f


@pytest.mark.parametrize("number", [6])
def test_saved_scans(tmp_path: Path, number: int) -> None:
  make = Saved(tmp_path)
  # JAX refuses its io_callback in a jax.checkpoint that is linearized.
  refused = ["checkpoint"]
  chains = diagonal(number, (*LANES, *TWICE))
  assert len(chains) > 4
  assert_chains_agree(chains, make=make, truth=TRUTH, not_by_jax=refused)
  cg.barrier()
  whole = [saves for saves in make.made if saves.steps()]
  assert len(whole) >= len(chains)
  assert {saves.steps() for saves in whole} == {(1, 2)}


def test_saved_scans_that_may_go_on(tmp_path: Path) -> None:
  left = (*LANES, "grad", "linearize", *TWICE)
  names = [name for name in TRANSFORMATIONS if name not in left]
  chains = [(one, other) for one, other in zip(names, names[3:] + names[:3], strict=True)]
  make = Saved(tmp_path, resume=True)
  chains = [pair for pair in chains if is_valid(pair)]
  assert_chains_agree(chains, make=make, truth=TRUTH, not_by_jax=["checkpoint"])
  cg.barrier()
  assert {saves.steps() for saves in make.made if saves.steps()} == {(1, 2)}


def program_over_devices(f: Any, kind: str) -> tuple[Any, Any]:
  """A function of a vector over four devices, by XLA or by the user; and its operand."""
  mesh = jax.make_mesh((4,), ("d",), devices=jax.devices()[:4])
  x = jax.device_put(jnp.linspace(0.1, 0.8, 8), jax.NamedSharding(mesh, jax.P("d")))
  if kind == "shard_map":
    f = jax.shard_map(f, mesh=mesh, in_specs=jax.P("d"), out_specs=jax.P("d"))
  return jax.jit(jax.vmap(f) if kind == "vmap" else f), x


@pytest.mark.parametrize("kind", ["partitioned", "shard_map"])
def test_over_several_devices(engine: str, tmp_path: Path, kind: str) -> None:
  """The step is of elements alone: the array's parts are loops of their own, or one."""
  step = lambda carry, t: (jnp.sin(carry) * t, carry)
  loop = lambda scan, **options: lambda x: scan(step, x, TIMES, **options)[0]
  saves = cg.Checkpoints(tmp_path, every=1)
  cases: dict[str, dict[str, Any]] = {
    "stoppable": {"stoppable": True},
    "bar": {"progress": cg.Progress("v", total=1.0, at=lambda c: c.max())},
    "saved": {"save": saves},
  }
  program, x = program_over_devices(loop(jax.lax.scan), kind)
  expected = program(x)
  for name, options in cases.items():
    if (name, kind) == ("saved", "shard_map"):
      continue  # refused by name
    with recorded():
      program, x = program_over_devices(loop(cg.scan, **options), kind)
      np.testing.assert_allclose(program(x), expected, rtol=1e-6, err_msg=name)
      jax.effects_barrier()
  cg.barrier()
  assert saves.steps() == ((1, 2) if kind == "partitioned" else ())


@pytest.mark.parametrize("lanes", ["one", "bars"])
@pytest.mark.parametrize("at", [None, lambda x: x])
def test_lanes_of_unequal_length_in_shard_map(engine: str, at: Any, lanes: Any) -> None:
  bar = cg.Progress("lanes", total=None if at is None else 1.0, at=at, lanes=lanes)

  def loops(r: Any, progress: Any) -> Any:
    # The inner loop's carry, and a part of the outer one's, don't vary over the devices.
    inner = lambda x: jax.lax.fori_loop(0, 2, lambda _, n: n + 1, 0) + x + r
    x = cg.while_loop(lambda x: x < 1.0, inner, 0.0 * r, progress=progress)
    counted = cg.fori_loop(
      0, (10 * r).astype(int), lambda i, y: y + r * i, 0 * r, progress=progress
    )
    return x, counted

  def run(progress: Any) -> Any:
    program, x = program_over_devices(jax.vmap(lambda r: loops(r, progress)), "shard_map")
    return program(x)

  expected = run(None)
  with recorded():
    jax.tree.map(np.testing.assert_array_equal, run(bar), expected)
    jax.effects_barrier()


@pytest.mark.parametrize("around", [jax.checkpoint, lambda f: f])
def test_a_loop_whose_results_jax_would_keep_is_refused_by_name(around: Any) -> None:
  gate = cg.gate(np.sin, like=jnp.sin, run_on=cg.thread("loops"))

  def loop(x: Any) -> Any:
    def step(c: Any) -> Any:
      cg.tap(x, lambda value: None)
      return c[0] + 1, c[1] * x, gate(c[2])

    return jax.lax.while_loop(lambda c: c[0] < 3, step, (0, x, jnp.float32(1)))[1]

  assert jax.jvp(around(loop), (2.0,), (1.0,))[1] == 4 * 2.0**3
  with pytest.raises(
    cg.GateDefinitionError, match=r"JAX linearizes, .* calls gate '.*', on a named thread"
  ):
    jax.linearize(around(loop), 2.0)
