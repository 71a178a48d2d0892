# SPDX-License-Identifier: Apache-2.0
"""Taps, checks and feeds on a real GPU; deselected without `-m gpu`."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from interpreters import run_python

import callgate as cg

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("gpu")]


@pytest.mark.parametrize("size", [1, 1000, 100_000, 10_000_000])
@pytest.mark.parametrize("options", [{}, {"ordered": True}, {"effect": "dataflow"}])
def test_taps_of_all_sizes_deliver_what_the_program_had(size: int, options: Any) -> None:
  seen: list[Any] = []

  @jax.jit
  def f(x: Any) -> Any:
    for _ in range(3):
      x = cg.tap(x * 2, seen.append, **options)
    return x

  x = np.arange(size, dtype=np.float32)
  np.testing.assert_array_equal(f(x), x * 8)
  cg.barrier()
  assert sorted(float(value[-1]) for value in seen) == [float(x[-1] * n) for n in (2, 4, 8)]


def test_order_is_kept_within_and_across_programs() -> None:
  seen: list[int] = []
  add = lambda i, s: cg.tap(s + 1, lambda v: seen.append(int(v)), ordered=True)
  f = jax.jit(lambda x: jax.lax.fori_loop(0, 50, add, x))
  x = jnp.int32(0)
  for _ in range(5):
    x = f(x)
  cg.barrier()
  assert seen == list(range(1, 251))


def test_lanes_and_predicates() -> None:
  seen: list[Any] = []
  f = lambda x: cg.tap(x, lambda v, info: seen.append((info.lane, v)), where=x[0] > 1)
  jax.jit(jax.vmap(f))(np.arange(8, dtype=np.float32).reshape(4, 2)).block_until_ready()
  cg.barrier()
  assert [lane for lane, _ in seen] == [(1,), (2,), (3,)]


def test_a_program_that_is_replayed_as_a_graph_sends_every_time() -> None:
  seen: list[Any] = []

  @jax.jit
  def f(x: Any) -> Any:
    for _ in range(8):  # enough launches for XLA to make a graph of
      x = jnp.sin(x @ x)
    # Not the product itself: XLA's triton-gemm-rewriter fails where a program's only result is a
    # product that a call with an effect reads, jax.debug.callback's too.
    return cg.tap(x, seen.append) + 1

  x = jnp.ones((64, 64))
  for _ in range(20):
    f(x).block_until_ready()
  cg.barrier()
  assert len(seen) == 20
  for value in seen:
    np.testing.assert_array_equal(value, seen[0])


def test_large_arrays_stay_out_of_graphs() -> None:
  seen: list[Any] = []

  @jax.jit
  def f(x: Any) -> Any:
    for _ in range(8):
      x = jnp.sin(x @ x)
    return cg.tap(x, lambda value, info: seen.append((info.run, value))) + 1

  for _ in range(20):
    f(jnp.ones((256, 256))).block_until_ready()
  cg.barrier()
  assert len(seen) == 20
  assert all(run >= 0 for run, _ in seen), "a replay has no number"
  for _, value in seen:
    np.testing.assert_array_equal(value, seen[0][1])


def test_large_arrays_are_the_consumers_to_keep_and_to_change() -> None:
  seen: list[Any] = []
  f = jax.jit(lambda x: cg.tap({"x": x, "n": x[:3]}, seen.append)["x"] + 1)
  x = jnp.zeros(500_000)
  for _ in range(20):
    x = f(x)
  cg.barrier()
  for value in seen:
    value["x"] += 100
    value["n"] += 200
  for i, value in enumerate(seen):
    assert (value["x"] == i + 100).all()
    assert (value["n"] == i + 200).all()


def test_a_forks_child_has_its_own_copy_of_a_large_array() -> None:
  done = run_python(
    """
    import os, warnings
    import jax, jax.numpy as jnp
    import callgate as cg
    warnings.simplefilter("ignore")
    seen = []
    f = jax.jit(lambda x: cg.tap(x, seen.append) + 1)
    jax.block_until_ready(f(jnp.full(1_000_000, 3.0)))
    cg.barrier()
    ready, go = os.pipe(), os.pipe()
    if (child := os.fork()) == 0:
      os.read(go[0], 1)
      same = (seen[0] == 3).all()
      seen[0][:] = 5
      os._exit(0 if same else 1)
    seen.clear()
    for i in range(20):
      jax.block_until_ready(f(jnp.full(1_000_000, 7.0)))
    cg.barrier()
    os.write(go[1], b"!")
    assert os.waitpid(child, 0)[1] == 0
    assert all((value == 7).all() for value in seen)
    print("fine")
    """,
    timeout=100,
  )
  assert done.stdout == "fine\n", done.stderr


def test_a_check_that_fails() -> None:
  @jax.jit
  def f(x: Any) -> Any:
    cg.check(x >= 0, "expected x >= 0, got {x}", x=x)
    return x * 2

  assert f(2.0) == 4
  with pytest.raises(cg.CheckError, match=r"got -1\.0"), cg.errors():
    f(-1.0)
  assert f(3.0) == 6


def test_prints_and_bars(capsys: pytest.CaptureFixture[str]) -> None:
  def step(i: Any, s: Any) -> Any:
    cg.print("step {}", i, ordered=True)
    return s + i

  assert jax.jit(lambda: cg.fori_loop(0, 3, step, 0, progress="bar"))() == 3
  cg.barrier()
  assert capsys.readouterr().out == "step 0\nstep 1\nstep 2\n"


def test_a_feed_gives_all_items_in_order() -> None:
  items = (np.full((256, 256), i, np.float32) for i in range(100))
  with cg.feed(items, prefetch=4) as feed:
    f = jax.jit(lambda: jax.lax.scan(lambda c, _: (c, feed.next()[0, 0]), 0, length=10)[1])
    got = np.concatenate([np.asarray(f()) for _ in range(10)])
  np.testing.assert_array_equal(got, np.arange(100))


def test_a_feed_serves_lanes() -> None:
  with cg.feed(np.float32(i) for i in range(20)) as feed:
    got = jax.jit(jax.vmap(lambda x: feed.next() + x))(jnp.zeros(10))
    np.testing.assert_array_equal(got, np.arange(10))


@pytest.mark.parametrize("size", [1, 1000, 10_000_000])
def test_arrays_that_stay_on_the_device(size: int, gpu: Any) -> None:
  seen: list[Any] = []
  f = jax.jit(lambda x: cg.tap(x * 2, seen.append, on_device=True) + 1)
  x = np.arange(size, dtype=np.float32)
  for i in range(5):
    f(x + i)
  cg.barrier()
  for i, value in enumerate(seen):
    assert value.devices() == {gpu}
    np.testing.assert_array_equal(jnp.sum(value[-1:] + 1), (x[-1] + i) * 2 + 1)


def test_lanes_that_stay_on_the_device() -> None:
  seen: list[Any] = []
  f = jax.jit(jax.vmap(lambda x: cg.tap({"x": x, "n": x[0]}, seen.append, on_device=True)["n"]))
  f(np.arange(6, dtype=np.float32).reshape(3, 2)).block_until_ready()
  cg.barrier()
  for i, value in enumerate(seen):
    np.testing.assert_array_equal(value["x"], [2 * i, 2 * i + 1])
    assert value["n"] == 2 * i
