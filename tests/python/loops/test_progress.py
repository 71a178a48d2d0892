# SPDX-License-Identifier: Apache-2.0
"""Loops with progress bars: JAX's own results, and one bar for the primal pass of each loop."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from interpreters import output_of
from property_checks import examples
from recorded_bars import XS, add, counts, done, recorded, same, summed

import callgate as cg
from callgate._loops import draw


# -- results are JAX's -----------------------------------------------------------------------------
@examples(6)
@given(
  length=st.sampled_from([0, 1, 2, 3, 7, 16]),
  reverse=st.booleans(),
  unroll=st.sampled_from([1, 2, 3, 5, 100, True, False]),
  with_xs=st.booleans(),
  every=st.sampled_from([None, 1, 4]),
)
def test_a_scan_gives_what_jax_gives_whatever_its_options(
  length: int, reverse: bool, unroll: int | bool, with_xs: bool, every: int | None
) -> None:
  rows = np.random.default_rng(length).normal(size=(length, 3)).astype(np.float32)

  def body(carry: Any, x: Any) -> Any:
    step, state = carry
    step_input = 1.0 if x is None else x["row"] + x["number"]
    return (step + 1, jnp.cos(state) * step_input), {"state": state, "step": (step, state[:1])}

  init = (np.int32(3), jnp.linspace(0, 1, 3))
  xs = {"row": rows, "number": np.arange(length)} if with_xs else None
  options: dict[str, Any] = {"length": length, "reverse": reverse, "unroll": unroll}
  run = lambda scan, **more: jax.jit(lambda i, x: scan(body, i, x, **options, **more))(init, xs)
  progress = cg.Progress("scan", every=every)
  with recorded() as bars:
    got = done(run(cg.scan, progress=progress))
  same(got, run(jax.lax.scan))
  assert counts(bars) == [("scan", length, length)]


@pytest.mark.parametrize("progress", [None, False])
def test_without_progress_the_program_is_jaxs_own(progress: bool | None) -> None:
  ours = jax.make_jaxpr(lambda c: cg.scan(add, c, XS, progress=progress))(0.0)
  assert str(ours) == str(jax.make_jaxpr(lambda c: jax.lax.scan(add, c, XS))(0.0))


@pytest.mark.parametrize(("lower", "upper"), [(0, 10), (3, 4), (5, 5), (7, 2), (-4, 9)])
@pytest.mark.parametrize("traced", [False, True])
def test_a_fori_loop_gives_what_jax_gives(lower: int, upper: int, traced: bool) -> None:
  body = lambda i, value: value * 1.5 + i
  run = lambda loop, **more: (
    jax.jit(lambda a, b: loop(a, b, body, 1.0, **more))(lower, upper)
    if traced
    else jax.jit(lambda: loop(lower, upper, body, 1.0, **more))()
  )
  with recorded() as bars:
    got = done(run(cg.fori_loop, progress="fori"))
  same(got, run(jax.lax.fori_loop))
  steps = max(upper - lower, 0)
  assert counts(bars) == [("fori", steps, steps)]


@pytest.mark.parametrize("limit", [0, 1, 1000])
def test_a_while_loop_that_ends_early_closes_its_bar_at_the_count_reached(limit: int) -> None:
  cond = lambda c: c[0] < limit
  body = lambda c: (c[0] + 1, c[1] * 0.99)
  run = lambda loop, **more: jax.jit(lambda: loop(cond, body, (0, 2.0), **more))()
  with recorded() as bars:
    got = done(run(cg.while_loop, progress=cg.Progress("while", total=2000)))
  same(got, run(jax.lax.while_loop))
  assert counts(bars) == [("while", limit, 2000)]


def test_a_while_loop_without_a_total_counts_only() -> None:
  with recorded() as bars:
    done(jax.jit(lambda: cg.while_loop(lambda c: c < 30, lambda c: c + 1, 0, progress=True))())
  assert counts(bars) == [(None, 30, None)]


def test_a_condition_with_effects_is_asked_as_often_as_by_jax() -> None:
  asked: list[int] = []

  def ask(x: np.ndarray) -> np.ndarray:
    asked.append(int(x))
    return x < 5

  gate = cg.gate(ask, out=jax.ShapeDtypeStruct((), bool), effect="io")
  with recorded() as bars:
    done(jax.jit(lambda: cg.while_loop(gate, lambda c: c + 1, np.int32(0), progress="asked"))())
  assert asked == [0, 1, 2, 3, 4, 5]
  assert counts(bars) == [("asked", 5, None)]


def test_large_ys_are_not_copied_once_more() -> None:
  xs = jnp.zeros((64, 1 << 16))
  body = lambda carry, x: (carry + 1, x + carry)
  sizes = [
    jax.jit(lambda x, f=f: f(x)).lower(xs).compile().memory_analysis().temp_size_in_bytes
    for f in (
      lambda x: jax.lax.scan(body, 0.0, x),
      lambda x: cg.scan(body, 0.0, x, progress="large"),
    )
  ]
  assert sizes[1] - sizes[0] < xs.nbytes // 8


# -- bars under transformations --------------------------------------------------------------------
TRANSFORMED: dict[str, Callable[[Callable[[Any], Any]], Any]] = {
  "eager": lambda f: f(1.0),
  "jit": lambda f: jax.jit(f)(1.0),
  "grad": lambda f: jax.grad(f)(1.0),
  "value_and_grad": lambda f: jax.jit(jax.value_and_grad(f))(1.0),
  "jvp": lambda f: jax.jit(lambda x: jax.jvp(f, (x,), (x,)))(1.0),
  "linearize": lambda f: jax.linearize(f, 1.0)[1](2.0),
  "checkpoint": lambda f: jax.jit(jax.grad(jax.checkpoint(lambda x: jnp.sin(f(jnp.sin(x))))))(1.0),
  "second order": lambda f: jax.jit(jax.grad(jax.grad(f)))(1.0),
  "vmap": lambda f: jax.jit(jax.vmap(f))(jnp.arange(3.0)),
  "vmap of grad": lambda f: jax.jit(jax.vmap(jax.grad(f)))(jnp.arange(3.0)),
  "grad of vmap": lambda f: jax.jit(jax.grad(lambda x: jax.vmap(f)(x).sum()))(jnp.arange(3.0)),
  "cond": lambda f: jax.jit(lambda x: jax.lax.cond(x > 0, f, lambda x: x, x))(1.0),
}


@pytest.mark.parametrize("name", TRANSFORMED)
def test_one_bar_for_the_primal_pass_under(name: str) -> None:
  expected = TRANSFORMED[name](summed(jax.lax.scan))
  with recorded() as bars:
    got = TRANSFORMED[name](summed(cg.scan, progress=name))
    done(got)
  same(got, expected)
  assert counts(bars) == [(name, 100, 100)]


def test_a_custom_vjp_may_hold_a_loop_with_a_bar() -> None:
  @jax.custom_vjp
  def f(x: Any) -> Any:
    return summed(cg.scan, progress="custom")(x)

  f.defvjp(lambda x: (f(x), x), lambda x, ct: (ct * x,))
  with recorded() as bars:
    assert float(jax.jit(jax.grad(f))(3.0)) == 3.0
  assert counts(bars) == [("custom", 100, 100)]


def test_lanes_that_end_at_different_times_share_a_bar() -> None:
  lanes = np.array([3, 40, 5])
  cond_free = lambda n: cg.fori_loop(0, n, lambda i, c: c + i, 0, progress="lanes")
  with recorded() as bars:
    got = done(jax.jit(jax.vmap(cond_free))(lanes))
  np.testing.assert_array_equal(got, [sum(range(n)) for n in lanes])
  assert counts(bars) == [("lanes", 40, 40)]


def test_a_checkpointed_while_loop_draws_in_the_forward_pass_alone() -> None:
  def f(x: Any) -> Any:
    steps = cg.while_loop(lambda c: c < 20, lambda c: c + 1, 0, progress="steps")
    return jnp.sin(jnp.sin(x) * steps)

  with recorded() as bars:
    done(jax.jit(jax.grad(jax.checkpoint(f)))(1.0))
  assert counts(bars) == [("steps", 20, None)]


def test_an_inner_loops_bar_is_one_bar_and_starts_again_each_time() -> None:
  def outer(carry: Any, x: Any) -> Any:
    return cg.scan(add, carry, XS, progress="inner")[0] + x, None

  with recorded() as bars:
    got = done(jax.jit(lambda: cg.scan(outer, 0.0, XS[:7], progress="outer"))())
  same(got, jax.jit(lambda: jax.lax.scan(
    lambda c, x: (jax.lax.scan(add, c, XS)[0] + x, None), 0.0, XS[:7]))())  # fmt: skip
  assert counts(bars)[0] == ("outer", 7, 7)
  assert [bar.desc for bar in bars[1:]] in ([], ["inner"])  # a short one may be gone unseen
  assert all(not bar.leave for bar in bars[1:])


def test_an_inner_bar_is_seen_while_the_outer_loop_runs() -> None:
  seen: list[bool] = []
  look = cg.gate(
    lambda: (draw.flush(), seen.append(True), np.int32(0))[2],
    out=jax.ShapeDtypeStruct((), np.int32),
    effect="io",
  )

  def outer(carry: Any, x: Any) -> Any:
    carry = cg.scan(lambda c, y: (c + y, None), carry, jnp.arange(4), progress="inner")[0]
    return carry + look(), None

  with recorded() as bars:
    done(jax.jit(lambda: cg.scan(outer, 0, jnp.arange(3), progress="outer"))())
  assert len(seen) == 3
  assert [(b.desc, b.n) for b in bars] == [("outer", 3), ("inner", 4)]
  assert bars[1].resets == 2


def test_a_bar_that_begins_when_another_has_ended_is_a_bar_of_its_own(engine: str) -> None:
  look = cg.gate(lambda x: (draw.flush(), x)[1], out=lambda x: x, effect="io")

  def f(c: Any) -> Any:
    c, _ = cg.scan(lambda c, x: (c + look(x), None), c, XS[:3], progress="first")
    # A constant of the body is what the bar waits for.
    return cg.scan(lambda k, x: (k + c, None), 0.0, XS[:7], progress="second")[0]

  with recorded() as bars:
    done(jax.jit(f).lower(1.0).compile()(1.0))
    jax.effects_barrier()
  assert counts(bars) == [("first", 3, 3), ("second", 7, 7)]


def test_each_run_of_a_program_has_a_bar_of_its_own() -> None:
  f = jax.jit(summed(cg.scan, progress="again"))
  with recorded() as bars:
    for _ in range(3):
      done(f(1.0))
  assert counts(bars) == [("again", 100, 100)] * 3


def test_several_programs_at_once_keep_their_counts() -> None:
  f = [
    jax.jit(summed(cg.scan, progress=cg.Progress(f"program {i}", every=1 + i))) for i in range(6)
  ]
  with recorded() as bars:
    threads = [threading.Thread(target=lambda g=g: done(g(1.0))) for g in f]
    for thread in threads:
      thread.start()
    for thread in threads:
      thread.join()
  assert sorted(counts(bars)) == [(f"program {i}", 100, 100) for i in range(6)]


def test_a_shard_map_over_some_axes_refuses_a_bar_by_name() -> None:
  mesh = jax.make_mesh((2, 2), ("a", "b"), axis_types=(jax.sharding.AxisType.Auto,) * 2)
  loop = lambda x: cg.fori_loop(0, 3, lambda _, x: x * 2, x, progress=True)
  spec = {"mesh": mesh, "in_specs": jax.P(), "out_specs": jax.P(), "axis_names": {"a"}}
  with pytest.raises(cg.GateDefinitionError, match=r"a progress bar .* leaves some of them to XLA"):
    jax.jit(jax.shard_map(loop, **spec, check_vma=False))(1.0)


def test_shard_map_over_four_devices_draws_once() -> None:
  printed = output_of(
    """
    import io, jax, jax.numpy as jnp, numpy as np
    from jax.sharding import Mesh, PartitionSpec as P
    import callgate as cg
    out = io.StringIO()
    mesh = Mesh(np.array(jax.devices()), ("d",))
    def f(x):
      body = lambda c, y: (c + jax.lax.psum(y, "d"), None)
      return cg.scan(body, x, jnp.arange(50.0) + x[0] * 0, progress=cg.Progress("s", file=out))[0]
    spec = dict(mesh=mesh, in_specs=P("d"), out_specs=P("d"))
    y = jax.jit(jax.shard_map(f, **spec))(jnp.zeros(4))
    np.testing.assert_array_equal(y, [4 * sum(range(50))] * 4)
    cg.barrier()
    sharding = jax.sharding.NamedSharding(mesh, P("d"))
    x = jax.device_put(jnp.zeros(4), sharding)
    auto = jax.jit(lambda x: cg.scan(lambda c, _: (c + 1, None), x, length=9,
                                     progress=cg.Progress("auto", file=out))[0])
    np.testing.assert_array_equal(auto(x), [9] * 4)
    cg.barrier()
    print(out.getvalue().count("s: 100% 50/50"), out.getvalue().count("auto: 100% 9/9"))
    """,
    XLA_FLAGS="--xla_force_host_platform_device_count=4",
  )
  assert printed.split() == ["1", "1"]


def test_other_engines_draw_by_jaxs_callbacks() -> None:
  with cg.config(engine="jax"), recorded() as bars:
    got = done(jax.jit(summed(cg.scan, progress="jax"))(1.0))
    jax.effects_barrier()
  same(got, jax.jit(summed(jax.lax.scan))(1.0))
  assert counts(bars) == [("jax", 100, 100)]


@pytest.mark.parametrize("kind", ["callgate", "jax", "Auto", "Explicit"])
def test_a_bar_is_where_its_loop_is(kind: str) -> None:
  """Also where JAX's callbacks draw, and the carry's smallest array is known from the beginning."""
  there, go_on = threading.Event(), threading.Event()

  def wait(x: Any) -> Any:
    if x == 5:
      there.set()
      assert go_on.wait(60)
    return x

  gate = cg.gate(wait, out=lambda x: x, effect="io")

  def step(carry: Any, x: Any) -> Any:
    w, rate = carry
    return (w * rate + gate(x), rate), None

  program = jax.jit(lambda *x: cg.scan(step, x[:2], x[2], progress=cg.Progress("where", every=1)))
  args: list[Any] = [np.ones(8, np.float32), np.float32(0.5), np.arange(10, dtype=np.float32)]
  if kind in ("Auto", "Explicit"):
    mesh = jax.make_mesh((4,), ("d",), axis_types=(getattr(jax.sharding.AxisType, kind),))
    specs = jax.P("d"), jax.P(), jax.P()
    args = [jax.device_put(x, jax.NamedSharding(mesh, p)) for x, p in zip(args, specs, strict=True)]
  with cg.config(engine="jax" if kind == "jax" else "callgate"), recorded() as bars:
    compiled = program.lower(*args).compile()
    thread = threading.Thread(target=lambda: done(compiled(*args)))
    thread.start()
    try:
      assert there.wait(60)
      draw.flush()
      assert counts(bars) == [("where", 5, 10)]
    finally:
      go_on.set()
      thread.join()
    draw.flush()
    assert counts(bars) == [("where", 10, 10)]


def test_a_program_with_a_bar_keeps_jaxs_fast_dispatch() -> None:
  f = jax.jit(summed(cg.scan, progress="fast"))
  with recorded():
    done(f(1.0))
    compiled = f.lower(1.0).compile()
    assert not compiled._executable.unsafe_call.has_unordered_effects


def test_under_disable_jit_loops_run_without_bars() -> None:
  with jax.disable_jit(), recorded() as bars:
    carry, _ = cg.scan(add, jnp.float32(0), XS[:3], progress="none")
  assert float(carry) == 2.5
  assert bars == []
