# SPDX-License-Identifier: Apache-2.0
"""A stoppable loop after a stop: where it ends, what it gives, and its derivatives."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from recorded_bars import counts, done, recorded

import callgate as cg
from callgate._jax import loops
from callgate._loops import marks


def stopping_at(step: int) -> Any:
  """A gate that is the identity, and asks to stop in a step."""

  def stop_at(x: Any, n: Any) -> Any:
    if n == step:
      cg.stop("there")
    return x

  ask = cg.gate(stop_at, out=lambda x, n: x, effect="io")
  ask.defjvp(lambda primals, tangents: (ask(*primals), tangents[0]))
  return ask


def test_a_stopped_loop_does_not_walk_through_the_steps_that_are_left(engine: str) -> None:
  ask = stopping_at(5)
  step = lambda n, _: (ask(n + 1, n), None)
  for options in ({}, {"unroll": 4}, {"progress": True}):
    last, _, steps = jax.jit(
      lambda n, options=options: cg.scan(step, n, length=2**31 - 4, stoppable=True, **options)
    )(jnp.int32(0))
    assert (int(last), int(steps)) == (6, 6)


@pytest.mark.parametrize(("reverse", "unroll"), [(False, 1), (True, 1), (False, 3), (True, 4)])
def test_derivatives_of_a_stopped_loop_are_those_of_its_steps(reverse: bool, unroll: int) -> None:
  ask, length, ran = stopping_at(6), 20, 7
  xs = jnp.linspace(0.5, 1.5, length)
  options: dict[str, Any] = {"reverse": reverse, "unroll": unroll}

  def stopped(w: Any, xs: Any) -> Any:
    def step(carry: Any, x: Any) -> Any:
      n, c = carry
      c = ask(jnp.sin(c) * x * w, n)
      return (n + 1, c), c * x

    (_, last), ys, steps = cg.scan(step, (0, w), xs, stoppable=True, **options)
    return last + jnp.sum(ys**2), (steps, ys)

  def whole(w: Any, xs: Any) -> Any:
    xs = xs[length - ran :] if reverse else xs[:ran]

    def step(c: Any, x: Any) -> Any:
      c = jnp.sin(c) * x * w
      return c, c * x

    last, ys = jax.lax.scan(step, w, xs, reverse=reverse)
    return last + jnp.sum(ys**2), ys

  (got, (steps, ys)), slopes = jax.jit(jax.value_and_grad(stopped, (0, 1), True))(0.7, xs)
  (want, some), expected = jax.jit(jax.value_and_grad(whole, (0, 1), True))(0.7, xs)
  assert int(steps) == ran
  np.testing.assert_allclose(got, want, rtol=1e-6)
  np.testing.assert_allclose(ys[length - ran :] if reverse else ys[:ran], some, rtol=1e-6)
  jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5), slopes, expected)
  if (reverse, unroll) not in ((False, 1), (True, 4)):
    return
  transforms = jax.jacfwd, jax.hessian, lambda f: jax.grad(jax.checkpoint(f))
  for transform in transforms:  # a program each: a stop is for all that runs
    both = lambda w, of=transform: [of(lambda w, f=f: f(w, xs)[0])(w) for f in (stopped, whole)]
    got, want = jax.jit(both)(0.7)
    np.testing.assert_allclose(got, want, rtol=1e-5)


def test_each_loop_of_a_derivative_knows_where_to_end() -> None:
  def loss(w: Any) -> Any:
    step = lambda c, _: (jnp.sin(c) * w, c)
    return cg.scan(step, w, length=9, stoppable=True)[0]

  def loops_of(jaxpr: Any) -> Any:
    for eqn in jaxpr.eqns:
      if eqn.primitive is jax.lax.scan_p:
        yield marks.taken_out(eqn.params["jaxpr"]).going(*loops.scan_counts(eqn.params))
      for inner in jax.tree.leaves(eqn.params, is_leaf=lambda x: hasattr(x, "eqns")):
        if hasattr(inner, "jaxpr") and eqn.primitive is not jax.lax.scan_p:
          yield from loops_of(inner.jaxpr)

  found = list(loops_of(jax.make_jaxpr(jax.grad(loss))(0.5).jaxpr))
  assert [one is not None and one.carried for one in found] == [True, False]


def test_the_bar_of_a_stopped_loop_shows_the_steps_that_ran(tmp_path: Any) -> None:
  ask = stopping_at(50)
  step = lambda n, _: (ask(n + 1, n), None)
  saves = lambda name: cg.Checkpoints(tmp_path / name, every=10**6, resume=name == "resumed")
  for options in ({}, {"save": saves("new")}, {"save": saves("resumed")}):
    with recorded() as bars:
      run = jax.jit(
        lambda n, options=options: cg.scan(
          step, n, length=1500, stoppable=True, progress="loop", **options
        )
      )
      done(run(jnp.int32(0)))
    assert counts(bars) == [("loop", 51, 1500)]


@pytest.mark.parametrize("saved", [False, True])
@pytest.mark.parametrize("init", [0, 0.0, np.float64(0), np.int64(0), jnp.float32(0)])
def test_a_stop_gives_the_carry_that_was_reached(init: Any, saved: bool, tmp_path: Any) -> None:
  ask = stopping_at(5)

  def step(state: Any, _: Any) -> Any:
    n, rest = state
    kind = rest["c"].dtype if isinstance(init, np.integer) else jnp.float32
    c = ask(jnp.asarray(rest["c"] + 1, kind), n)
    return (n + 1, {"c": c, "kept": rest["kept"]}), c

  saves = cg.Checkpoints(tmp_path, every=10**6) if saved else None
  first = (0, {"c": init, "kept": 7.0})
  state, ys, steps = jax.jit(lambda: cg.scan(step, first, length=50, stoppable=True, save=saves))()
  assert (int(steps), jax.tree.map(float, state)) == (6, (6.0, {"c": 6.0, "kept": 7.0}))
  np.testing.assert_array_equal(ys[:7], [1, 2, 3, 4, 5, 6, 0])
  if saves is not None:
    cg.barrier()
    assert jax.tree.map(float, saves.load(state)) == (6.0, {"c": 6.0, "kept": 7.0})
