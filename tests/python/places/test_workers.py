# SPDX-License-Identifier: Apache-2.0
"""Gates in worker processes: the same results as elsewhere, under every transformation."""

from __future__ import annotations

import gc
import os
import random
import threading
import time
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
import worker_functions
from transformation_table import TRIPLES, assert_chains_agree, groups, on_host, reference

import callgate as cg

INT = jax.ShapeDtypeStruct((), np.int32)


# -- where a gate runs
def test_a_gate_runs_in_another_process(two: cg.Workers) -> None:
  where = cg.gate(worker_functions.pid, out=INT, run_on=two)
  assert int(jax.jit(where)(1.0)) in two.pids
  assert os.getpid() not in two.pids


def test_processes_are_as_many_as_cpus() -> None:
  where = cg.gate(worker_functions.pid, out=INT, run_on="processes")
  assert int(where(1.0)) != os.getpid()
  assert where.run_on.count == len(os.sched_getaffinity(0))


def test_own_is_a_thread_of_this_process() -> None:
  def number(x: Any) -> Any:
    del x
    return np.int32(threading.get_native_id())

  one, other = (cg.gate(number, out=INT, **how) for how in ({"run_on": "own"}, {"thread": "own"}))
  assert one.thread == other.thread == "own"
  assert int(one(1.0)) != threading.get_native_id()


# -- transformations
@pytest.mark.parametrize("chains", groups(13))
def test_pairs_of_transformations_agree_with_jax(chains: Any, two: cg.Workers) -> None:
  make = lambda effect: cg.gate(on_host, like=reference, effect=effect, run_on=two)
  assert_chains_agree(chains, make=make)


@pytest.mark.parametrize("effect", ["io", "ordered"])
@pytest.mark.parametrize("chains", groups(7))
def test_pairs_of_transformations_take_effects(chains: Any, effect: Any, two: cg.Workers) -> None:
  make = lambda effect: cg.gate(on_host, like=reference, effect=effect, run_on=two)
  assert_chains_agree(chains, effect, make)


def test_triples_of_transformations_agree_with_jax(two: cg.Workers) -> None:
  make = lambda effect: cg.gate(on_host, like=reference, effect=effect, run_on=two)
  assert_chains_agree(random.Random(0).sample(TRIPLES, 4), make=make)


@pytest.mark.parametrize("method", ["each", "whole", "broadcast"])
def test_ways_of_vmap_agree(method: Any, two: cg.Workers, engine: str) -> None:
  add = cg.gate(
    lambda x, y: x + y, out=lambda x, y: jax.eval_shape(jnp.add, x, y), vmap=method, run_on=two
  )
  x, y = jnp.arange(12.0).reshape(3, 4), jnp.arange(4.0)
  got = jax.jit(jax.vmap(add, (0, None)))(x, y)
  np.testing.assert_array_equal(got, x + y)
  np.testing.assert_array_equal(jax.jit(jax.vmap(jax.vmap(add), (0, None)))(x, y), x + y)


@pytest.mark.parametrize("lanes", [0, 1, 2, 7, 1000])
def test_lanes_come_back_in_their_places(lanes: int, two: cg.Workers) -> None:
  square = cg.gate(lambda x: (x * x, -x), out=lambda x: (x, x), run_on=two)
  x = jnp.arange(lanes, dtype=jnp.float32)
  for _ in range(2):  # the second time it is known how long a lane takes
    for got, want in zip(jax.jit(jax.vmap(square))(x), (x * x, -x), strict=True):
      np.testing.assert_array_equal(got, want)


def test_nested_lanes_of_axes_that_operands_share(two: cg.Workers) -> None:
  line = cg.gate(lambda a, x, b: a * x + b, out=lambda a, x, b: x, run_on=two)
  a, x, b = jnp.arange(3.0), jnp.arange(20.0).reshape(4, 5), jnp.arange(12.0).reshape(3, 4)
  over = jax.vmap(jax.vmap(line, (None, 0, 0)), (0, None, 0))
  want = a[:, None, None] * x + b[:, :, None]
  np.testing.assert_array_equal(jax.jit(over)(a, x, b), want)


def test_lanes_of_an_ordered_gate_run_in_their_order(two: cg.Workers, tmp_path: Any) -> None:
  path = tmp_path / "lanes"

  def write(x: Any) -> Any:
    with path.open("a") as file:
      file.write(f"{int(x)} ")

  note = cg.gate(write, effect="ordered", run_on=two)
  jax.jit(jax.vmap(note))(jnp.arange(20))
  cg.barrier()
  assert path.read_text().split() == [str(i) for i in range(20)]


def test_shards_run_at_once_on_workers(two: cg.Workers, tmp_path: Path) -> None:
  mesh = jax.make_mesh((2,), ("d",))
  sharding = jax.NamedSharding(mesh, jax.P("d"))
  meet = cg.gate(worker_functions.meet, out=INT, run_on=two)
  program = jax.vmap(lambda x: meet(x, folder=str(tmp_path)))
  x = jax.device_put(jnp.zeros(2), sharding)
  got = jax.jit(program, out_shardings=sharding)(x)
  assert set(np.asarray(got).tolist()) == set(two.pids)


# -- what arrays are
@pytest.mark.parametrize("dtype", ["bool", "int8", "uint16", "float16", "bfloat16", "complex64"])
def test_dtypes_go_there_and_back(dtype: str, two: cg.Workers, engine: str) -> None:
  x = np.arange(6).reshape(2, 3).astype(getattr(ml_dtypes, dtype, dtype))
  same = cg.gate(lambda x: x, out=lambda x: x, run_on=two)
  np.testing.assert_array_equal(np.asarray(jax.jit(same)(x)), x)


def test_pytrees_and_static_arguments(two: cg.Workers, engine: str) -> None:
  def function(tree: Any, *, by: float, names: tuple[str, ...]) -> Any:
    return {name: tree["x"] * np.float32(by) + tree["y"][0] for name in names}

  gate = cg.gate(
    function, out=lambda tree, *, by, names: dict.fromkeys(names, tree["x"]), run_on=two
  )
  tree = {"x": jnp.arange(3.0), "y": [jnp.float32(1)]}
  got = jax.jit(lambda t: gate(t, by=2.5, names=("a", "b")))(tree)
  assert sorted(got) == ["a", "b"]
  np.testing.assert_allclose(got["b"], tree["x"] * 2.5 + 1)


def test_results_in_place(two: cg.Workers, engine: str) -> None:
  def write(out: Any, x: Any) -> None:
    out[...] = 2 * x

  def add_one(out: Any, x: Any) -> None:
    del x
    out += 1

  x = jnp.arange(4.0)
  double = cg.gate(write, out=lambda x: x, style="inplace", run_on=two)
  np.testing.assert_array_equal(jax.jit(jax.vmap(double))(x), 2 * x)
  more = cg.gate(add_one, out=lambda x: x, style="inplace", aliases={0: 0}, run_on=two)
  np.testing.assert_array_equal(jax.jit(more)(x), x + 1)
  np.testing.assert_array_equal(jax.jit(jax.vmap(more))(x), x + 1)


def test_arrays_of_jax_and_buffers(two: cg.Workers) -> None:
  with_jax = cg.gate(lambda x: jnp.cumsum(x), out=lambda x: x, arrays="jax", run_on=two)
  with_buffers = cg.gate(
    lambda x: np.asarray(x)[::-1], out=lambda x: x, arrays="buffer", run_on=two
  )
  x = jnp.arange(4.0)
  np.testing.assert_array_equal(jax.jit(with_jax)(x), jnp.cumsum(x))
  np.testing.assert_array_equal(jax.jit(with_buffers)(x), x[::-1])


def test_no_results_and_no_arguments(two: cg.Workers) -> None:
  nothing = cg.gate(lambda x: None, effect="io", run_on=two)
  number = cg.gate(lambda: np.float32(3), out=jax.ShapeDtypeStruct((), np.float32), run_on=two)
  jax.jit(nothing)(1.0)
  cg.barrier()
  assert jax.jit(number)() == 3


def test_memory_grows_with_the_arrays(two: cg.Workers) -> None:
  add = cg.gate(lambda x: x + 1, out=lambda x: x, run_on=two)
  program = jax.jit(add)
  for size in (1, 1 << 22, 10):
    x = jnp.arange(size, dtype=jnp.float32)
    np.testing.assert_array_equal(program(x), x + 1)


def test_inputs_are_read_only_and_may_be_kept(two: cg.Workers, engine: str) -> None:
  kept = cg.gate(
    lambda x: np.bool_(x.flags.writeable), out=jax.ShapeDtypeStruct((), bool), run_on=two
  )
  assert not jax.jit(kept)(jnp.arange(3.0))


# -- who shares workers
def test_threads_share_the_workers(two: cg.Workers) -> None:
  double = cg.gate(lambda x: 2 * x, out=lambda x: x, run_on=two)
  program = jax.jit(jax.vmap(double))
  x = jnp.arange(50.0)
  failures: list[BaseException] = []

  def work() -> None:
    try:
      for _ in range(20):
        np.testing.assert_array_equal(program(x), 2 * x)
    except BaseException as error:  # noqa: BLE001 - shown below
      failures.append(error)

  threads = [threading.Thread(target=work) for _ in range(6)]
  for thread in threads:
    thread.start()
  for thread in threads:
    thread.join()
  assert not failures


def test_a_short_call_gets_its_turn_beside_a_long_one(two: cg.Workers, tmp_path: Path) -> None:
  dawdle = cg.gate(worker_functions.dawdle, out=lambda x: x, run_on=two)
  slow = jax.jit(jax.vmap(lambda x: dawdle(x, folder=str(tmp_path))))
  quick = jax.jit(cg.gate(lambda x: x, out=lambda x: x, run_on=two))
  jax.block_until_ready(quick(1.0))
  lanes = jnp.arange(1000)  # 25 s on two workers, if the quick call has to wait for them
  thread = threading.Thread(target=lambda: jax.block_until_ready(slow(lanes)))
  thread.start()
  while not os.listdir(tmp_path):
    time.sleep(0.005)
  jax.block_until_ready(quick(1.0))
  begun = len(os.listdir(tmp_path))
  (tmp_path / "done").touch()
  thread.join()
  assert begun < len(lanes), "the long call has ended before"
  assert len(os.listdir(tmp_path)) == len(lanes) + 1


def test_the_gil_is_not_taken(two: cg.Workers) -> None:
  sleep = jax.jit(cg.gate(worker_functions.sleep, out=lambda x: x, run_on=two))
  jax.block_until_ready(sleep(0.0))
  count = 0
  waiting = threading.Thread(target=lambda: jax.block_until_ready(sleep(0.3)))
  waiting.start()
  while waiting.is_alive():
    count += 1
  assert count > 1000  # this thread went on all the time


def test_lanes_are_spread_over_workers(two: cg.Workers, tmp_path: Path) -> None:
  meet = cg.gate(worker_functions.meet, out=INT, run_on=two)
  got = jax.jit(jax.vmap(lambda x: meet(x, folder=str(tmp_path))))(jnp.zeros(8))
  assert set(np.asarray(got).tolist()) == set(two.pids)


def test_statistics_count_lanes(two: cg.Workers) -> None:
  gate = cg.gate(lambda x: x, out=lambda x: x, name="counted_elsewhere", run_on=two)
  jax.block_until_ready(jax.jit(jax.vmap(gate))(jnp.arange(5.0)))
  assert gate.stats()["calls"] == 5
  assert gate.stats()["bytes"] == 40


# -- set-up
def test_initializer_and_environment() -> None:
  def begin() -> None:
    os.environ["BEGUN"] = "yes"

  def read(x: Any) -> Any:
    good = os.environ["BEGUN"] == "yes" and os.environ["GIVEN"] == "this"
    return x if good else -x

  with cg.workers(1, initializer=begin, env={"GIVEN": "this"}) as workers:
    assert jax.jit(cg.gate(read, out=lambda x: x, run_on=workers))(1.0) == 1.0


def test_definitions_that_nobody_has_are_dropped() -> None:
  def objects(x: Any) -> Any:
    import gc

    gc.collect()
    handlers = [o for o in gc.get_objects() if type(o).__name__ == "_RequestsOfParent"]
    return x * 0 + len(handlers[0]._gates)

  with cg.workers(1) as workers:
    count = jax.jit(cg.gate(objects, out=lambda x: x, run_on=workers))
    first = int(count(1))
    for _ in range(5):
      gate = cg.gate(lambda x: x, out=lambda x: x, run_on=workers)
      jax.block_until_ready(jax.jit(gate)(1.0))
    del gate
    jax.clear_caches()
    gc.collect()
    again = jax.jit(cg.gate(objects, out=lambda x: x, run_on=workers))
    assert int(again(1)) <= first + 2
