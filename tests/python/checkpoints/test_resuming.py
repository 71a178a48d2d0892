# SPDX-License-Identifier: Apache-2.0
"""A loop that goes on has the types, the parts and the items of the one that was saved."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from programs import drop_programs

import callgate as cg
from callgate._checkpoints import files


def run(folder: Path, f: Any, init: Any, xs: Any, every: int = 3, **options: Any) -> Any:
  """The results of a resumed loop, with its checkpoints on the disk."""
  saves = cg.Checkpoints(folder, every=every, resume=True)
  with cg.errors():
    program = jax.jit(lambda xs: cg.scan(f, init, xs, save=saves, **options))
    result = jax.block_until_ready(program(xs))
  cg.barrier()
  return result


def types(tree: Any) -> list[Any]:
  return [(x.dtype, x.weak_type) for x in jax.tree.leaves(tree)]


def test_numpys_arrays_of_64_bits_begin_a_loop_that_goes_on(tmp_path: Path) -> None:
  init = {"x": np.zeros(3), "n": np.int64(0), "i": np.arange(3)}
  step = lambda c, _: (jax.tree.map(lambda x: x + 1, c), None)
  for length in (5, 8):
    carry, _ = run(tmp_path, step, init, np.zeros(length))
  np.testing.assert_array_equal(carry["x"], np.full(3, 8.0))
  assert carry["n"] == 8
  saved = cg.Checkpoints(tmp_path).load(init)
  np.testing.assert_array_equal(saved["i"], np.arange(3) + 8)
  assert saved["x"].dtype == np.float64  # of `like`
  assert cg.Checkpoints(tmp_path).load(carry)["x"].dtype == np.float32


@pytest.mark.parametrize("stoppable", [False, True])
def test_types_are_those_of_jaxs_scan(tmp_path: Path, stoppable: bool) -> None:
  """The body promotes some of Python's numbers; others stay weakly typed."""
  xs = jnp.arange(1.0, 9.0).astype(jnp.bfloat16)
  init = {"promoted": 0, "weak": 0.5, "narrow": 1.0, "bool": False, "f8": np.float64(2)}

  def step(c: Any, x: Any) -> Any:
    after = {
      "promoted": c["promoted"] + jnp.float32(1), "weak": c["weak"] * 2.0,
      "narrow": c["narrow"] + x, "bool": c["bool"] | (x > 3), "f8": c["f8"] + x,
    }  # fmt: skip
    return after, (c["weak"], c["weak"] * x)

  want = jax.lax.scan(step, init, xs)
  run(tmp_path, step, init, xs[:5], stoppable=stoppable)
  got = run(tmp_path, step, init, xs, stoppable=stoppable)
  assert types(got[:2]) == types(want)
  for a, b in zip(jax.tree.leaves(got[0]), jax.tree.leaves(want[0]), strict=True):
    np.testing.assert_array_equal(a, b)
  np.testing.assert_array_equal(got[1][1][5:], want[1][1][5:])


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])
def test_arrays_that_are_split_over_one_axis_stay_split(tmp_path: Path, kind: AxisType) -> None:
  mesh = jax.make_mesh((4,), ("x",), axis_types=(kind,), devices=jax.devices()[:4])
  split = NamedSharding(mesh, jax.P("x"))
  step = lambda c, _: (jax.tree.map(lambda x: x * 2, c), None)
  with jax.set_mesh(mesh):
    init = {
      "a": jax.device_put(np.arange(32.0, dtype=np.float32).reshape(8, 4), split),
      "b": jax.device_put(np.arange(8.0, dtype=np.float32), split),
      "n": jnp.int32(1),
    }
    for length in (4, 6):
      saves = cg.Checkpoints(tmp_path, every=9, resume=True)
      program = jax.jit(lambda c, n=length, s=saves: cg.scan(step, c, length=n, save=s)[0])
      with cg.errors():
        carry = jax.block_until_ready(program(init))
      cg.barrier()
  assert "all-gather" not in program.lower(init).compile().as_text()
  assert carry["a"].sharding.shard_shape((8, 4)) == (2, 4)
  np.testing.assert_array_equal(carry["a"], np.arange(32.0).reshape(8, 4) * 64)
  np.testing.assert_array_equal(carry["b"], np.arange(8.0) * 64)
  assert carry["n"] == 64
  assert len(list(tmp_path.glob("step_0000000006/part_*.npz"))) == 4


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])
def test_results_of_steps_that_are_split_over_an_axis_stay_split(
  tmp_path: Path, kind: AxisType
) -> None:
  mesh = jax.make_mesh((4,), ("x",), axis_types=(kind,), devices=jax.devices()[:4])
  xs = np.arange(40.0, dtype=np.float32).reshape(10, 4)
  for length in (7, 10):
    given = jax.device_put(xs[:length], NamedSharding(mesh, jax.P(None, "x")))
    carry, ys = run(tmp_path, lambda c, x: (c + 1, (x + c, x > 9)), np.float32(0), given)
  assert carry == 10
  steps = np.arange(10, dtype=np.float32)[:, None]
  np.testing.assert_array_equal(ys[0], np.where(steps < 7, 0, xs + steps))
  np.testing.assert_array_equal(ys[1], np.broadcast_to(steps >= 7, xs.shape))
  assert kind is AxisType.Auto or ys[0].sharding.shard_shape(xs.shape) == (10, 1)


# -- feeds ----------------------------------------------------------------------------------------
def reading(feed: cg.Feed, *more: cg.Feed) -> Callable[..., Any]:
  def step(c: Any, _: Any) -> Any:
    x = jnp.sum(feed.next())
    for other in more:
      x = x + 100 * jnp.sum(other.next())
    return c + x, x

  return step


def numbers(**options: Any) -> cg.Feed:
  return cg.feed((np.float32(i) for i in range(50)), **options)


@pytest.mark.parametrize("stoppable", [False, True])
def test_a_feed_goes_on_where_the_saved_loop_was(
  engine: str, tmp_path: Path, stoppable: bool
) -> None:
  for length in (7, 10):
    with numbers() as feed:
      xs = np.zeros(length)
      carry, ys, *_ = run(tmp_path, reading(feed), np.float32(0), xs, stoppable=stoppable)
  assert carry == sum(range(10))
  np.testing.assert_array_equal(ys, [0, 0, 0, 0, 0, 0, 0, 7, 8, 9])


@pytest.mark.parametrize("devices", [1, 4])
def test_a_loop_whose_carry_has_no_arrays_goes_on(
  engine: str, tmp_path: Path, devices: int
) -> None:
  auto = {"axis_types": (AxisType.Auto,), "devices": jax.devices()[:devices]}
  split = NamedSharding(jax.make_mesh((devices,), ("x",), **auto), jax.P(None, "x"))
  xs = np.arange(40.0, dtype=np.float32).reshape(10, 4)
  for length in (7, 10):
    with numbers() as feed:
      step = lambda c, x, f=feed: (c, x + f.next())
      given = jax.device_put(xs[:length], split)
      carry, ys = run(tmp_path, step, {"none": None}, given)
    saves = cg.Checkpoints(tmp_path)
    assert saves.steps() == ((3, 6, 7) if length == 7 else (7, 9, 10))
    assert carry == saves.load({"none": None}) == {"none": None}
  items = np.arange(10, dtype=np.float32)[:, None]
  np.testing.assert_array_equal(ys, np.where(items < 7, 0, xs + items))
  assert len(list(tmp_path.glob("step_0000000010/part_*.npz"))) == 1


def test_items_that_were_taken_before_the_loop_count(tmp_path: Path) -> None:
  def program(feed: cg.Feed, length: int) -> Any:
    saves = cg.Checkpoints(tmp_path, every=4, resume=True)
    first = feed.next()
    inner = jax.jit(feed.next)  # traced once, and found in each step all the same

    def step(c: Any, _: Any) -> Any:
      return c + inner() + jax.lax.cond(c > 10, feed.next, lambda: jnp.float32(0)), None

    return cg.scan(step, first, length=length, save=saves)[0]

  results: list[float] = []
  for length in (5, 9):
    with numbers() as feed, cg.errors():
      results.append(float(jax.jit(lambda f=feed, n=length: program(f, n))()))
    cg.barrier()
  with numbers() as feed, cg.errors():
    (tmp_path / "new").mkdir()
    tmp_path = tmp_path / "new"
    assert results[1] == float(jax.jit(lambda: program(feed, 9))())


def test_shares_of_a_feed_go_on_together(tmp_path: Path) -> None:
  mesh = jax.make_mesh((4,), ("x",), devices=jax.devices()[:4])
  for length in (6, 9):
    items = (np.full(4, i, np.float32) for i in range(50))
    with cg.feed(items, sharding=NamedSharding(mesh, jax.P("x"))) as feed:
      carry, ys = run(tmp_path, reading(feed), np.float32(0), np.zeros(length))
      assert feed.stats()["served"] == 9 - (length == 6) * 3
  assert carry == 4 * sum(range(9))
  np.testing.assert_array_equal(ys, [0] * 6 + [24, 28, 32])


def test_feeds_are_known_by_their_names_or_their_order(tmp_path: Path) -> None:
  def loop(first: str, second: str, length: int) -> float:
    """Reads two feeds, `a` from its second item on; returns the last items of both."""
    with numbers(name=first) as one, numbers(name=second) as other:
      next(other if second == "a" else one)
      _, ys = run(tmp_path, reading(one, other), np.float32(0), np.zeros(length))
    drop_programs()  # and with them the names
    return float(ys[-1])

  assert loop("a", "b", 4) == 4 + 100 * 3
  assert loop("b", "a", 6) == 5 + 100 * 6
  assert loop("c", "a", 8) == 7 + 100 * 8  # of other names in their order
  with (
    numbers(name="d") as one,
    pytest.raises(ValueError, match=r"the saved loop's feeds, c, a, got d; pass name="),
  ):
    run(tmp_path, reading(one), np.float32(0), np.zeros(9))


def test_a_feed_that_goes_on_by_itself_is_not_skipped(tmp_path: Path) -> None:
  for begin, length in ((0, 4), (4, 6)):
    feed = cg.feed((np.float32(i) for i in range(begin, 50)), resumable=False)
    carry, _ = run(tmp_path, reading(feed), np.float32(0), np.zeros(length))
    feed.close()
  assert carry == sum(range(6))
  with pytest.raises(cg.GateDefinitionError, match="resumable: expected a bool"):
    cg.feed([1.0], resumable=1)  # pyright: ignore


def test_a_feed_that_cannot_go_on_is_refused(tmp_path: Path) -> None:
  with numbers() as feed:
    run(tmp_path, reading(feed), np.float32(0), np.zeros(4))
    run(tmp_path, reading(feed), np.float32(0), np.zeros(4))  # nothing is left to do
    feed.__next__()
    with pytest.raises(cg.GateError, match=r"at most 4 item\(s\), .* got one that has given 5"):
      run(tmp_path, reading(feed), np.float32(0), np.zeros(6))
  with (
    cg.feed([np.float32(1)] * 3) as feed,
    pytest.raises(cg.GateError, match=r"expected at least 4 item\(s\), .* got 3"),
  ):
    run(tmp_path, reading(feed), np.float32(0), np.zeros(6))


def test_a_checkpoint_without_counts_is_said(
  tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
  with monkeypatch.context() as patched, numbers() as feed:
    patched.setattr(files, "finish", lambda *args, f=files.finish: f(*args[:4], {}, *args[5:]))
    run(tmp_path, reading(feed), np.float32(0), np.zeros(4))
  with numbers() as feed:
    carry, _ = run(tmp_path, reading(feed), np.float32(0), np.zeros(5))
  assert carry == sum(range(4))
  assert "the loop reads them from their current" in capfd.readouterr().err


# -- what a carry can't be, and what a loop can't share -------------------------------------------
@pytest.mark.parametrize("resume", [False, True])
def test_handles_are_refused_when_the_loop_is_traced(tmp_path: Path, resume: bool) -> None:
  held = cg.hold(lambda: object())
  saves = cg.Checkpoints(tmp_path, resume=resume)
  with pytest.raises(
    cg.GateDefinitionError, match=r"got a handle at \['model'\], whose object ends"
  ):
    jax.jit(
      lambda: cg.scan(lambda c, _: (c, None), {"model": held()}, length=3, save=saves)[0]["model"]
    )()


def count(c: Any, _: Any) -> Any:
  return c + 1, None


@pytest.mark.parametrize("resume", [False, True])
def test_a_second_loop_is_refused(engine: str, tmp_path: Path, resume: bool) -> None:
  saves = cg.Checkpoints(tmp_path, resume=resume)
  loop = lambda x: cg.scan(count, x, length=5, save=saves)[0]
  with pytest.raises(cg.GateDefinitionError, match=r"expected one loop, at .* got a second"):
    jax.jit(lambda x: loop(loop(x)))(0)
  assert jax.jit(loop)(0) == 5  # the first one, traced again
  with pytest.raises(cg.GateDefinitionError, match=r"got a second one at .*test_resuming\.py:\d+"):
    jax.jit(lambda x: cg.scan(count, x, length=5, save=saves)[0])(0)
  with pytest.raises(cg.GateDefinitionError, match=r"Give each loop its own cg\.Checkpoints"):
    loop(jnp.zeros(2))  # of another carry


@pytest.mark.parametrize("resume", [False, True])
def test_a_loop_that_a_program_runs_twice_is_refused(tmp_path: Path, resume: bool) -> None:
  saves = cg.Checkpoints(tmp_path, resume=resume)
  loop = jax.jit(lambda x: cg.scan(count, x, length=5, save=saves)[0])
  for program in (
    lambda x: loop(loop(x)),
    lambda x: jax.lax.scan(lambda c, _: (loop(c), None), x, length=2)[0],
  ):
    with pytest.raises(cg.GateError, match="expected one loop in each execution"), cg.errors():
      jax.block_until_ready(jax.jit(program)(0))


def test_a_folder_with_a_newline_is_refused() -> None:
  with pytest.raises(cg.GateDefinitionError, match="folder: expected a path without a newline"):
    cg.Checkpoints("a\nb")
