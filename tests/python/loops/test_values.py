# SPDX-License-Identifier: Apache-2.0
"""Bars that a value moves, and a bar for each lane: JAX's results, and where the bars stand."""

from __future__ import annotations

import io
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from recorded_bars import FakeBar, counts, done, recorded, same

import callgate as cg
from callgate._loops import draw, progress


def solve(loop: Any, t1: Any, rate: Any = 1.0, **more: Any) -> Any:
  """Adaptive steps from time 0 to t1."""

  def step(state: Any) -> Any:
    t, y = state
    return t + rate * (0.01 + 0.02 * jnp.abs(y)), y * 0.99

  return loop(lambda state: state[0] < t1, step, (0.0, 1.0), **more)


def by_value(total: Any, **options: Any) -> Any:
  return cg.Progress("t", total=total, at=lambda state: state[0], **options)


def ways(bars: list[FakeBar]) -> list[tuple[Any, ...]]:
  """Each bar's name, its progress and total, its value and where that ends."""
  numbers = lambda b: (b.n, b.total, *b.where.split("/"))
  return [(bar.desc, *(round(float(x), 4) for x in numbers(bar))) for bar in bars]


TRANSFORMED: dict[str, Any] = {
  "eager": lambda f: f(2.0),
  "jit": lambda f: jax.jit(f)(2.0),
  "jvp": lambda f: jax.jit(lambda x: jax.jvp(f, (x,), (1.0,)))(2.0),
  "cond": lambda f: jax.jit(lambda x: jax.lax.cond(x > 0, f, lambda x: (x, x), x))(2.0),
  "checkpoint": lambda f: jax.jit(jax.grad(jax.checkpoint(lambda x: f(2.0)[1] * x)))(1.0),
}


@pytest.mark.parametrize("name", TRANSFORMED)
def test_a_while_loops_bar_follows_a_value(name: str, engine: str) -> None:
  expected = TRANSFORMED[name](lambda t1: solve(jax.lax.while_loop, t1))
  with recorded() as bars:
    got = done(TRANSFORMED[name](lambda t1: solve(cg.while_loop, t1, progress=by_value(t1))))
    jax.effects_barrier()
  same(got, expected)
  assert ways(bars) == [("t", 2, 2, 2, 2)]


def test_scans_and_fori_loops_that_count_down() -> None:
  down = cg.Progress("down", total=1.0, at=lambda c: c, every=2)
  body = lambda c, _: (c * 0.5, c)
  with recorded() as bars:
    for unroll in (1, 2, 4):
      run = lambda scan, unroll=unroll, **more: jax.jit(
        lambda c: scan(body, c, length=3, unroll=unroll, **more)
      )(8.0)
      same(done(run(cg.scan, progress=down)), run(jax.lax.scan))
      same(
        jax.jit(jax.grad(lambda c: cg.scan(body, c, length=3, progress=down)[0]))(8.0),
        jnp.float32(0.125),
      )
    loops: list[tuple[Any, Any]] = [(cg.fori_loop, {"progress": down}), (jax.lax.fori_loop, {})]
    for loop, more in loops:
      assert done(jax.jit(lambda n: loop(0, n, lambda i, c: c * 0.5, 8.0, **more))(3)) == 1
    step = cg.progress(down)(body)
    done(jax.jit(lambda c: jax.lax.scan(step, c, length=2)[0])(8.0))
    stopped = cg.scan(body, jnp.float32(8), length=3, stoppable=True, progress=down)
    assert done(stopped)[2] == 3
  assert ways(bars) == [*[("down", 7, 7, 1, 1)] * 7, ("down", 6, 7, 2, 1), ("down", 7, 7, 1, 1)]


@pytest.mark.parametrize("engine", ["callgate", "jax"], indirect=True)
def test_lanes_share_a_bar_or_have_one_each(engine: str) -> None:
  rates = jnp.array([1.0, 0.5, 2.0])
  run = lambda loop, **more: jax.jit(jax.vmap(lambda r: solve(loop, 1.0 + r, r, **more)))(rates)
  expected = run(jax.lax.while_loop)
  with recorded() as bars:
    one = by_value(2.0)
    same(done(run(cg.while_loop, progress=one)), expected)
    each = by_value(2.0, lanes="bars")
    same(done(run(cg.while_loop, progress=each)), expected)
    jax.effects_barrier()
  shown = ways(bars)
  assert shown[0][0] == "t"
  assert shown[0][1] == pytest.approx(float(expected[0].min()), rel=1e-3)  # the slowest
  assert [one[0] for one in shown[1:]] == ["t 0", "t 1", "t 2"]
  reached = np.minimum(expected[0], 2.0)
  np.testing.assert_allclose([one[1] for one in shown[1:]], reached, rtol=1e-3)


def test_each_lane_counts_its_own_steps() -> None:
  lanes = np.array([[3, 40], [5, 0]])
  bar = cg.Progress("n", lanes="bars", every=1)
  count = lambda n: cg.while_loop(lambda c: c < n, lambda c: c + 1, 0, progress=bar)
  index = lambda n: cg.fori_loop(0, n, lambda i, c: c + i, 0, progress=bar)
  scan = lambda x: cg.scan(lambda c, _: (c + 1, None), x, length=4, progress=bar)[0]
  with recorded() as bars:
    np.testing.assert_array_equal(done(jax.jit(jax.vmap(jax.vmap(count)))(lanes)), lanes)
    done(jax.jit(jax.vmap(index))(lanes[0]))
    done(jax.jit(jax.vmap(scan))(jnp.arange(2.0)))
  by_name = lambda some: sorted(counts(some), key=lambda one: str(one[0]))
  assert by_name(bars[:4]) == [
    ("n 0", 3, None),
    ("n 1", 40, None),
    ("n 2", 5, None),
    ("n 3", 0, None),
  ]
  assert by_name(bars[4:6]) == [("n 0", 3, 3), ("n 1", 40, 40)]
  assert by_name(bars[6:]) == [("n 0", 4, 4), ("n 1", 4, 4)]
  assert all(bar.closed == 1 for bar in bars)


@pytest.mark.parametrize("effect", ["io", "dataflow"])
def test_each_lane_whose_loop_taps_has_its_bar(effect: Any) -> None:
  lanes, seen = np.array([3, 5, 0]), list[int]()
  tap = lambda c: cg.tap(c + 1, lambda value: seen.append(int(value)), effect=effect)
  count = lambda n, bar: cg.while_loop(lambda c: c < n, tap, 0, progress=bar)
  bars_of = cg.Progress("n", lanes="bars", every=1), cg.Progress("all", every=1)
  with recorded() as bars:
    got = done(jax.jit(jax.vmap(lambda n: [count(n, bar) for bar in bars_of]))(lanes))
    cg.barrier()
  np.testing.assert_array_equal(got, [lanes, lanes])
  assert counts(bars) == [("n 0", 3, None), ("n 1", 5, None), ("n 2", 0, None), ("all", 5, None)]
  assert sorted(seen) == sorted([1, 2, 3, 1, 2, 3, 4, 5] * 2)


def test_nested_loops_of_lanes_begin_again() -> None:
  inner = cg.Progress("inner", lanes="bars", every=1)

  def outer(c: Any, n: Any) -> Any:
    return cg.while_loop(lambda k: k < n, lambda k: k + 1, c * 0, progress=inner), c

  run = lambda c: cg.scan(outer, c, jnp.array([3, 5]), progress=cg.Progress("outer", lanes="bars"))
  with recorded() as bars:
    got = done(jax.jit(jax.vmap(run))(jnp.arange(2)))
  np.testing.assert_array_equal(got[0], [5, 5])
  outers = [bar for bar in bars if bar.desc.startswith("outer")]
  assert counts(outers) == [("outer 0", 2, 2), ("outer 1", 2, 2)]
  assert {bar.desc for bar in bars} <= {"outer 0", "outer 1", "inner 0", "inner 1", "inner"}


def test_values_that_a_lane_tapped_stand_behind_its_bar() -> None:
  progress.noted.clear()

  def step(c: Any, x: Any) -> Any:
    cg.tap(c * 10, lambda value: None, name="bars.loss")
    return c + x, None

  bar = cg.Progress("chain", lanes="bars", show=["bars.loss"])
  with recorded() as bars:
    run = jax.jit(jax.vmap(lambda c: cg.scan(step, c, jnp.zeros(5), progress=bar)[0]))
    done(run(jnp.arange(1.0, 4.0)))
    cg.barrier()
    done(run(jnp.arange(1.0, 4.0)))
  assert [bar.postfix for bar in bars[3:]] == [{"bars.loss": f"{10 * i}"} for i in (1, 2, 3)]


def test_more_lanes_than_bars_are_refused() -> None:
  bar = cg.Progress(lanes="bars")
  count = lambda n: cg.while_loop(lambda c: c < n, lambda c: c + 1, 0, progress=bar)
  with pytest.raises(cg.GateDefinitionError, match="at most 100 lanes, got 101; use lanes='one'"):
    jax.jit(jax.vmap(count))(jnp.arange(101))


@pytest.mark.parametrize(
  ("options", "message"),
  [
    ({"at": lambda c: c}, "Progress: total: expected the number at which `at` ends"),
    ({"at": 3, "total": 1}, "Progress: at: expected a callable, got 3"),
    ({"total": 1.5}, "Progress: total: expected an integer of at least 0, got 1.5"),
    ({"total": jnp.ones(2), "at": lambda c: c}, "got float32[2]"),
    ({"lanes": "all"}, "Progress: lanes: expected one of 'one', 'bars', got 'all'"),
    ({"style": "blue"}, "Progress: style: expected one of 'tqdm', 'rich', got 'blue'"),
  ],
)
def test_options_that_make_no_sense_are_refused(options: Any, message: str) -> None:
  with pytest.raises(cg.GateDefinitionError) as caught:
    cg.Progress(**options)
  assert message in str(caught.value)


def test_a_value_that_is_no_number_is_refused() -> None:
  bar = cg.Progress(total=1.0, at=lambda c: c)
  with pytest.raises(
    cg.GateDefinitionError, match=r"at: expected a function from the carry to a number, got .*\[2"
  ):
    cg.while_loop(lambda c: c[0] < 1, lambda c: c + 1, jnp.zeros(2), progress=bar)


class Terminal(io.StringIO):
  def isatty(self) -> bool:
    return True


@pytest.mark.parametrize("style", ["tqdm", "rich"])
def test_terminals_and_logs_show_the_value_and_its_end(
  style: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
  if style == "rich":
    pytest.importorskip("rich")
  monkeypatch.setenv("COLUMNS", "120")
  monkeypatch.setenv("TERM", "xterm")
  made: dict[str, Any] = {"position": None, "mininterval": 0.0, "style": style, "leave": True}
  for file in (Terminal(), io.StringIO()):
    bar = draw._make(file=file, total=6.0, desc="time", **made)
    other = draw._make(file=file, total=None, desc="steps", **made)
    for more in (1.5, 3.0, 1.5):
      bar.start_t = bar.start_t - 1
      bar.where = f"{2 + bar.n + more:g}/8"
      bar.update(more)
      bar.set_postfix({"loss": "0.5"}, refresh=False)
      other.update(7)
    for one in (bar, other):
      one.close()
    text = file.getvalue()
    assert "time" in text
    assert "100%" in text
    assert "8/8" in text
    assert "loss=0.5" in text
    assert "steps" in text
    assert "21" in text
    if isinstance(file, Terminal):
      assert "3.5/8" in text
