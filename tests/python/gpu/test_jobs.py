# SPDX-License-Identifier: Apache-2.0
"""Checks, shared factorizations, early ends, bars, NaNs, keys and runs of programs on a GPU."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import callgate as cg

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("gpu")]


def test_verify_finds_a_wrong_derivative_and_no_fault_in_a_right_gate() -> None:
  @cg.gate(out=lambda x: x)
  def sine(x: Any) -> Any:
    return np.sin(x)

  sine.defjvp(lambda primals, tangents: (sine(*primals), jnp.cos(primals[0]) * tangents[0]))
  x = jnp.array([0.5, 1.0], jnp.float32)
  report = sine.verify(x, seconds=60)
  assert report.failed == ()
  assert {"vmap", "jvp", "vjp", "effects", "writes"} <= {r.name for r in report.results if r.ok}

  @cg.gate(out=lambda x: x)
  def wrong(x: Any) -> Any:
    return np.sin(x)

  wrong.defjvp(lambda primals, tangents: (wrong(*primals), jnp.sin(primals[0]) * tangents[0]))
  assert "jvp" in wrong.verify(x, seconds=60).failed


def test_implicit_steps_factorize_once_forward_and_in_the_gradient() -> None:
  factorized = 0

  def factor(d: Any) -> Any:
    nonlocal factorized
    factorized += 1
    return np.array(d)

  solve = cg.linear_solver(
    factor=factor, solve=lambda d, b: b / d, symmetric=True, matvec=lambda d, x: d * x
  )

  def steps(d: Any, u: Any) -> Any:
    lu = solve.factor(d)
    return jax.lax.scan(lambda u, _: (solve(d, u, factor=lu), None), u, length=20)[0].sum()

  d, u = jnp.array([1.1, 1.2], jnp.float32), jnp.ones(2, jnp.float32)
  value, slope = jax.jit(jax.value_and_grad(steps))(d, u)
  cg.barrier()
  assert factorized == 1
  np.testing.assert_allclose(value, (np.asarray(d, np.float64) ** -20).sum(), rtol=1e-4)
  np.testing.assert_allclose(slope, -20 * np.asarray(d, np.float64) ** -21, rtol=1e-4)


def test_a_loop_ends_after_the_step_that_makes_until_true() -> None:
  def loop(x: Any) -> Any:
    return cg.scan(lambda c, _: (c * 2, c), x, length=20, until=lambda c: c > 100)

  carry, ys, steps = jax.jit(loop)(jnp.float32(1))
  assert (float(carry), int(steps)) == (128, 7)
  np.testing.assert_array_equal(ys, [*(2.0**i for i in range(7)), *[0] * 13])
  assert jax.jit(jax.grad(lambda x: loop(x)[0]))(jnp.float32(1)) == 128
  _, _, lanes = jax.jit(jax.vmap(loop))(jnp.array([1.0, 60.0], jnp.float32))
  assert lanes.tolist() == [7, 1]


def test_a_loop_that_was_written_without_a_bar_gets_one(capfd: Any) -> None:
  with cg.bars(min_steps=100):
    total = jax.jit(lambda x: jax.lax.fori_loop(0, 200, lambda i, x: x + i, x))(jnp.int32(0))
    cg.barrier()
  assert total == 19900
  assert "200/200" in capfd.readouterr().err


def test_the_first_nan_that_reaches_a_result_is_named() -> None:
  def f(x: Any) -> Any:
    return jnp.where(x > 0, jnp.log(x), 0.0), jnp.sqrt(x - 1)

  x = jnp.array([2.0, 0.5], jnp.float32)
  report = cg.find_nan(f, reaching=True)(x)
  assert report is not None
  assert report.primitive == "sqrt"
  assert cg.find_nan(lambda x: f(x)[0], reaching=True)(-x) is None


def test_a_key_is_a_key_for_gates_of_jax_arrays_and_words_for_numpy() -> None:
  key = jax.random.key(7)
  kinds = []

  def words(key: Any) -> Any:
    kinds.append(key.dtype)
    return np.asarray(key)

  shape = jax.ShapeDtypeStruct((2,), np.uint32)
  found = jax.jit(cg.gate(words, out=shape))(key)
  np.testing.assert_array_equal(found, jax.random.key_data(key))
  assert kinds == [np.uint32]
  draw = cg.gate(lambda key: jax.random.uniform(key), out=jax.ShapeDtypeStruct((), np.float32),
                 arrays="jax")  # fmt: skip
  assert jax.jit(draw)(key) == jax.random.uniform(key)


def test_a_run_keeps_records_pictures_and_alerts(tmp_path: Path) -> None:
  @jax.jit
  def step(x: Any) -> Any:
    cg.tap(x, "gpu loss")
    cg.tap(jnp.ones((4, 4)) * 0.5, "gpu picture", kind="image")
    cg.alert(x > 1, "too much: {x}", x=x)
    return x + 1

  with cg.run("gpu", folder=tmp_path, config={"rate": 0.1}) as run:
    step(step(jnp.float32(1)))
    run.summary["accuracy"] = 0.5
  about = json.loads((run.folder / "run.json").read_text("utf-8"))
  assert (about["state"], about["summary"]) == ("finished", {"accuracy": 0.5})
  assert [alert["text"] for alert in about["alerts"]] == ["too much: 2.0"]
  with cg.open_stream(str(run.folder / "*.cgs")) as stream:
    records = [record for record in stream if record.name == "gpu loss"]
  assert [float(record.leaves[""]) for record in records] == [1, 2]
