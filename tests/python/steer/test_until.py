# SPDX-License-Identifier: Apache-2.0
"""`callgate.scan(until=)`: where it ends, for each lane and device, and its derivatives."""

from __future__ import annotations

import functools
import pathlib
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from recorded_bars import counts, done, recorded

import callgate as cg

CONFIGS: list[dict[str, Any]] = [{}, {"checkpoint": False}, {"unroll": 3}, {"stoppable": True}]
XS = jnp.linspace(0.01, 0.02, 1000)


def body(c: Any, x: Any) -> Any:
  return jnp.sin(c) * 1.1 + x, {"y": c * x, "n": jnp.int32(1)}


def beyond(c: Any) -> Any:
  return c > 0.5


def in_python(c: Any, xs: Any) -> tuple[Any, np.ndarray, int]:
  ys: list[Any] = []
  for x in xs:
    c, y = body(c, x)
    ys.append(y["y"])
    if beyond(c):
      break
  return c, np.array(ys), len(ys)


@pytest.mark.parametrize("options", CONFIGS)
@pytest.mark.parametrize("reverse", [False, True])
def test_it_ends_after_the_first_step_that_makes_it_true(
  options: dict[str, Any], reverse: bool
) -> None:
  run = jax.jit(lambda c, xs: cg.scan(body, c, xs, until=beyond, reverse=reverse, **options))
  for _ in range(2):
    for first in (0.1, 0.3, 9.0):
      carry, ys, steps = run(jnp.float32(first), XS)
      want, some, count = in_python(jnp.float32(first), XS[::-1] if reverse else XS)
      assert int(steps) == count >= 1
      np.testing.assert_allclose(carry, want, rtol=1e-6)
      of_steps = ys["y"][::-1] if reverse else ys["y"]
      np.testing.assert_allclose(of_steps[:count], some, rtol=1e-5)
      assert not of_steps[count:].any()
      assert ys["n"].sum() == count


@pytest.mark.parametrize("length", [1, 2, 3, 4, 5, 9, 10, 17])
@pytest.mark.parametrize("reverse", [False, True])
def test_every_length_and_end(length: int, reverse: bool) -> None:
  step = lambda n, x: (n + 1, n * x)
  xs = jnp.arange(1, length + 1)
  run = jax.jit(lambda last: cg.scan(step, 0, xs, until=lambda n: n >= last, reverse=reverse))
  for last in range(length + 2):
    n, ys, steps = run(last)
    count = min(max(last, 1), length)
    order = np.array(xs)[::-1] if reverse else np.array(xs)
    want = np.zeros(length, int)
    want[:count] = np.arange(count) * order[:count]
    assert (int(n), int(steps)) == (count, count)
    np.testing.assert_array_equal(ys, want[::-1] if reverse else want)


MODES = (jax.grad, jax.jacfwd, jax.hessian, lambda f: jax.grad(jax.checkpoint(f)))


def result(scan: Any, c: Any, xs: Any) -> Any:
  carry, ys, *_ = scan(body, c, xs)
  return carry + jnp.sum(ys["y"] ** 2)


@functools.cache
def derivatives_of_the_steps() -> tuple[list[Any], Any]:
  """By JAX's own loop: of each mode, and the gradient of the inputs."""
  c = jnp.float32(0.1)
  count = in_python(c, XS)[2]
  steps = lambda c, xs: result(jax.lax.scan, c, xs[:count])
  return jax.jit(lambda c: ([of(steps)(c, XS) for of in MODES], jax.grad(steps, 1)(c, XS)))(c)


@pytest.mark.parametrize("options", CONFIGS)
def test_derivatives_are_those_of_the_steps_that_ran(options: dict[str, Any]) -> None:
  until = functools.partial(result, functools.partial(cg.scan, until=beyond, **options))
  c = jnp.float32(0.1)
  wants, of_inputs = derivatives_of_the_steps()
  gots = jax.jit(lambda c: [of(until)(c, XS) for of in MODES])(c)
  for got, want in zip(gots, wants, strict=True):
    np.testing.assert_allclose(got, want, rtol=1e-5)
  np.testing.assert_allclose(jax.grad(until, 1)(c, XS), of_inputs, rtol=1e-5, atol=1e-7)
  cs = jnp.array([0.1, 0.2, 9.0])
  gradient = jax.jit(jax.grad(until))
  each = [gradient(c, XS) for c in cs]
  lanes = lambda cs: jax.vmap(until, (0, None))(cs, XS).sum()
  for both in (jax.vmap(jax.grad(until), (0, None))(cs, XS), jax.jit(jax.grad(lanes))(cs)):
    np.testing.assert_allclose(both, each, rtol=1e-5)


def test_reverse_mode_keeps_the_square_root_of_the_steps() -> None:
  def kept(length: int, **options: Any) -> int:
    step = lambda c, x: (jnp.sin(c) * jnp.cos(c) + x, None)
    xs = jnp.zeros(length)
    loss = lambda c: cg.scan(step, c, xs, until=lambda c: c[0] > 99, **options)[0].sum()
    compiled = jax.jit(jax.grad(loss)).lower(jnp.ones(1000)).compile()
    found = compiled.memory_analysis()
    assert found is not None
    return found.temp_size_in_bytes

  assert kept(10_000) < 20 * kept(100)
  assert kept(10_000, checkpoint=False) > 50 * kept(100, checkpoint=False)


def test_lanes_end_by_themselves_and_the_loop_with_the_last() -> None:
  seen: list[float] = []
  gate = cg.gate(lambda x: (seen.append(float(x)), x)[1], out=lambda x: x, effect="io")
  step = lambda n, _: (gate(n + 1), None)
  lasts = jnp.array([3, 1, 5])
  run = jax.jit(
    jax.vmap(lambda last: cg.scan(step, 0, length=2**20, until=lambda n: n >= last)[::2])
  )
  for _ in range(2):
    seen.clear()
    carry, steps = run(lasts)
    cg.barrier()
    np.testing.assert_array_equal((carry, steps), [[3, 1, 5]] * 2)
    assert sorted(seen) == [1, 1, 1, 2, 2, 3, 3, 4, 5]


def test_an_effect_happens_once_under_a_gradient() -> None:
  seen: list[float] = []
  gate = cg.gate(lambda x: (seen.append(float(x)), x)[1], out=lambda x: x, effect="io")
  gate.defjvp(lambda primals, tangents: (gate(*primals), tangents[0]))
  loss = lambda c: cg.scan(lambda c, _: (gate(c * 2), None), c, length=99, until=lambda c: c > 9)[0]
  value, slope = jax.jit(jax.value_and_grad(loss))(1.0)
  cg.barrier()
  assert (value, slope, seen) == (16, 16, [2, 4, 8, 16])


@pytest.mark.parametrize("checkpoint", [False, True])
def test_devices_end_by_themselves_or_together(checkpoint: bool) -> None:
  mesh = jax.make_mesh((4,), ("d",), axis_types=(jax.sharding.AxisType.Auto,))
  spec = jax.sharding.PartitionSpec("d")
  step = lambda c, _: (c * 2, None)

  def alone(c: Any) -> Any:
    until = lambda c: c[0] > 9
    carry, _, steps = cg.scan(step, c, length=30, until=until, checkpoint=checkpoint)
    return carry, steps[None]

  def together(c: Any) -> Any:
    until = lambda c: jax.lax.psum(c[0], "d") > 19
    carry, _, steps = cg.scan(step, c, length=30, until=until, checkpoint=checkpoint)
    return carry, steps[None]

  c = jnp.array([1.0, 2.0, 3.0, 4.0])
  for f, want, counts_ in (
    (alone, [16, 16, 12, 16], [4, 3, 2, 2]), (together, [2, 4, 6, 8], [1, 1, 1, 1])
  ):  # fmt: skip
    program = jax.shard_map(f, mesh=mesh, in_specs=spec, out_specs=spec)
    carry, steps = jax.jit(program)(c)
    np.testing.assert_array_equal(carry, want)
    np.testing.assert_array_equal(steps, counts_)
    slope = jax.jit(jax.grad(lambda c, program=program: program(c)[0].sum()))(c)
    np.testing.assert_array_equal(slope, 2.0 ** np.array(counts_))


def test_with_bars_stops_and_checkpoints(tmp_path: Any) -> None:
  step = lambda n, _: (n + 1, n)
  saves = lambda: cg.Checkpoints(tmp_path, every=7, resume=True)
  for options in ({}, {"checkpoint": False}, {"stoppable": True}, {"save": saves()}):
    with recorded() as bars:
      run = jax.jit(
        lambda options=options: cg.scan(
          step, 0, length=1500, until=lambda n: n >= 51, progress="loop", **options
        )
      )
      n, ys, steps = done(run())
    assert (int(n), int(steps)) == (51, 51)
    assert counts(bars) == [("loop", 51, 1500)]
    np.testing.assert_array_equal(np.nonzero(ys)[0], np.arange(1, 51))
  cg.barrier()
  # A run that has ended is not taken up again.
  again = cg.scan(step, 0, length=1500, until=lambda n: n >= 51, save=saves())
  assert (int(again[0]), int(again[2])) == (51, 51)
  # With more to do it goes on from there.
  more = cg.scan(step, 0, length=1500, until=lambda n: n >= 60, save=saves())
  assert (int(more[0]), int(more[2])) == (60, 60)


@pytest.mark.parametrize(
  ("until", "said"),
  [
    (3, "until: expected a function of the carry, got 3"),
    (lambda c: c, r"until: expected a bool of shape \(\), got int32\[\]"),
    (lambda c: jnp.array([c > 0]), r"got bool\[1\]"),
  ],
)
def test_anything_else_is_refused(until: Any, said: str) -> None:
  with pytest.raises(TypeError, match=said):
    cg.scan(lambda c, x: (c, x), 0, jnp.arange(3), until=until)


@pytest.mark.parametrize("ends", [{"until": lambda c: c < 0}, {"stoppable": True}])
@pytest.mark.parametrize("length", [0, 1])
def test_a_loop_without_steps_has_derivatives(ends: Any, length: int) -> None:
  def last(x: Any) -> Any:
    return cg.scan(lambda c, t: (jnp.sin(c) * t, c), x, jnp.ones(length), **ends)[0]

  want = [1.0, np.cos(0.5)][length]
  for derivative in (jax.grad(last), jax.jacfwd(last), jax.jit(jax.grad(last))):
    np.testing.assert_allclose(derivative(0.5), want, rtol=1e-6)
  np.testing.assert_allclose(jax.jit(jax.vmap(jax.grad(last)))(jnp.array([0.5])), [want], rtol=1e-6)


@pytest.mark.parametrize("kind", ["stoppable", "until", "save"])
def test_errors_in_a_step_name_the_users_line(kind: str, tmp_path: pathlib.Path) -> None:
  def fails(x: Any) -> Any:
    raise ValueError("no")

  fails = cg.gate(fails, out=lambda x: x, name=f"lines.{kind}")

  def step_with_a_gate(c: Any, _: Any) -> Any:
    return fails(c), None

  def step_with_a_nan(c: Any, _: Any) -> Any:
    return jnp.log(-1 - c * c), None

  def run(step: Any) -> Any:
    save = cg.Checkpoints(tmp_path / step.__name__, every=2)
    more: Any = {"stoppable": True, "until": beyond, "save": save}[kind]
    return cg.scan(step, jnp.float32(0), None, length=3, **{kind: more})[0]

  with pytest.raises(ValueError, match="no") as caught, cg.errors():
    jax.block_until_ready(jax.jit(lambda: run(step_with_a_gate))())
  assert any("step_with_a_gate" in note for note in caught.value.__notes__)
  report = cg.find_nan(lambda: run(step_with_a_nan))()
  assert report is not None
  assert "step_with_a_nan" in report.source
