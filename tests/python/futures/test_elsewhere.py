# SPDX-License-Identifier: Apache-2.0
"""Calls that are started on workers and executors: as in this process, but in others."""

from __future__ import annotations

import asyncio
import concurrent.futures
import os
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import worker_functions
from interpreters import output_of
from transformation_table import assert_chains_agree, groups, on_host, reference
from worker_functions import Counter

import callgate as cg

FLOAT, INT = (jax.ShapeDtypeStruct((), d) for d in (np.float32, np.int32))


@pytest.fixture(scope="module")
def threads() -> Iterator[concurrent.futures.Executor]:
  with concurrent.futures.ThreadPoolExecutor(2) as executor:
    yield executor


def error_of(program: Any, *args: Any) -> BaseException:
  with pytest.raises(BaseException) as caught, cg.errors():
    jax.block_until_ready(program(*args))
  return caught.value


# -- transformations
@pytest.mark.parametrize("chains", groups(7))
def test_transformations_agree_with_jax(chains: Any, two: cg.Workers) -> None:
  def make(effect: Any) -> Any:
    gate = cg.gate(on_host, like=reference, effect=effect, run_on=two)
    return lambda x: gate.start(x).result()

  assert len(chains) > 10
  assert_chains_agree(chains, make=make)


@pytest.mark.parametrize("chains", groups(12))
def test_an_executor_takes_started_calls(chains: Any, threads: Any) -> None:
  def make(effect: Any) -> Any:
    gate = cg.gate(on_host, like=reference, effect=effect, run_on=threads)
    return lambda x: gate.start(x).result()

  assert_chains_agree(chains, make=make)


@pytest.mark.parametrize("arrays", ["numpy", "buffer", "jax"])
def test_arrays_and_pytrees_travel(arrays: Any, two: cg.Workers, engine: str) -> None:
  def f(tree: Any, scale: Any, *, plus: int) -> Any:
    x = np.asarray(tree["x"])
    return {"y": x * np.asarray(scale) + x.dtype.type(plus)}, np.asarray(tree["n"]) + 1

  out = lambda tree, scale, **_: ({"y": tree["x"]}, tree["n"])
  gate = cg.gate(f, out=out, arrays=arrays, run_on=two)
  x = jnp.arange(4, dtype=jnp.bfloat16)
  program = jax.jit(lambda x: gate.start({"x": x, "n": 3}, scale=x, plus=2).result())
  y, n = program(x)
  np.testing.assert_array_equal(y["y"], x * x + 2)
  assert (y["y"].dtype, int(n)) == (jnp.bfloat16, 4)


def test_derivatives_are_those_of_the_call(two: cg.Workers, engine: str) -> None:
  gate = cg.gate(np.sin, out=lambda x: x, run_on=two)
  gate.defvjp(lambda x: (gate(x), x), lambda x, ct: (ct * jnp.cos(x),))
  loss = lambda x: jnp.sum(x * gate.start(x).result())
  x = jnp.arange(3.0)
  want = jax.grad(lambda x: jnp.sum(x * jnp.sin(x)))(x)
  np.testing.assert_allclose(jax.jit(jax.grad(loss))(x), want, rtol=1e-5)
  lanes = jax.jit(jax.vmap(jax.grad(loss)))(jnp.stack([x, x]))
  np.testing.assert_allclose(lanes, [want, want], rtol=1e-5)


# -- overlap
def test_two_calls_meet_on_two_workers(two: cg.Workers, tmp_path: Path) -> None:
  gate = cg.gate(worker_functions.meet, out=INT, run_on=two)

  @jax.jit
  def program(x: Any) -> Any:
    a, b = (gate.start(x, folder=str(tmp_path)) for _ in range(2))
    return a.result(), b.result()

  pids = {int(pid) for pid in program(1.0)}
  assert pids == set(two.pids)


def test_two_gates_meet(two: cg.Workers, tmp_path: Path) -> None:
  first, second = (
    cg.gate(worker_functions.meet, out=INT, run_on=two, name=f"test meet {i}") for i in range(2)
  )

  @jax.jit
  def program(x: Any) -> Any:
    a, b = (gate.start(x, folder=str(tmp_path)) for gate in (first, second))
    return a.result() - b.result()

  assert program(1.0) != 0


def test_lanes_meet_and_more_lanes_than_workers_wait_their_turn(
  two: cg.Workers, tmp_path: Path
) -> None:
  gate = cg.gate(worker_functions.meet, out=INT, run_on=two)
  started = jax.vmap(lambda x: gate.start(x, folder=str(tmp_path)))
  pids = jax.jit(lambda xs: started(xs).result())(jnp.zeros(64))
  assert set(pids.tolist()) == set(two.pids)


def test_a_step_of_a_loop_waits_for_what_the_last_one_started(two: cg.Workers, engine: str) -> None:
  gate = cg.gate(lambda x: x + 1, out=FLOAT, run_on=two)

  @jax.jit
  def program(xs: Any) -> Any:
    step = lambda ticket, x: (gate.start(x), ticket.result())
    last, ys = jax.lax.scan(step, gate.start(jnp.float32(-1)), xs)
    return ys, last.result()

  ys, last = program(jnp.arange(5.0))
  np.testing.assert_array_equal(ys, [0, 1, 2, 3, 4])
  assert last == 5


def test_an_executors_threads_meet() -> None:
  barrier = threading.Barrier(3)

  def meet(x: Any) -> Any:
    barrier.wait(60)
    return x

  with concurrent.futures.ThreadPoolExecutor(3) as executor:
    gate = cg.gate(meet, out=FLOAT, run_on=executor)
    program = jax.jit(jax.vmap(lambda x: gate.start(x).result()))
    assert program(jnp.arange(3.0)).tolist() == [0, 1, 2]


# -- objects
def test_lanes_keep_their_objects(two: cg.Workers, engine: str) -> None:
  outs = {"__call__": FLOAT, "where": INT}
  gate = cg.gate(Counter, out=outs, effect="io", run_on=two, affinity="lane")
  lanes = jax.jit(lambda x: jax.vmap(gate.start)(x).result())
  for turn in range(1, 4):
    np.testing.assert_array_equal(lanes(jnp.zeros(5)), jnp.full(5, float(turn)))
  assert jax.jit(jax.vmap(gate))(jnp.zeros(5)).tolist() == [4.0] * 5  # the calls' objects


# -- what fails
def test_the_caller_gets_the_exception(two: cg.Workers, engine: str) -> None:
  def fail(x: Any) -> Any:
    raise KeyError("lost", 3)

  gate = cg.gate(fail, out=FLOAT, run_on=two)
  error = error_of(jax.jit(lambda x: gate.start(x).result()), 1.0)
  assert type(error) is KeyError
  assert error.args == ("lost", 3)
  if engine == "callgate":
    assert "in fail" in str(error.__cause__)


def test_a_worker_that_dies_is_told_and_replaced(two: cg.Workers) -> None:
  gate = cg.gate(worker_functions.die, out=FLOAT, run_on=two, name="test dies")
  program = jax.jit(lambda x: gate.start(x).result())
  error = error_of(program, -3.0)
  assert isinstance(error, cg.WorkerError)
  assert error.exit_code == 3
  assert "test dies" in str(error)
  assert "last words" in error.stderr
  where = cg.gate(worker_functions.pid, out=INT, run_on=two)
  assert int(where.start(1.0).result()) in two.pids


def test_a_call_that_takes_longer_than_its_timeout_fails(two: cg.Workers) -> None:
  gate = cg.gate(
    worker_functions.sleep, out=FLOAT, run_on=two, timeout=0.2, name="test elsewhere late"
  )
  error = error_of(jax.jit(lambda x: gate.start(x).result()), 60.0)
  assert isinstance(error, cg.GateTimeoutError)
  assert "test elsewhere late" in str(error)
  assert "0.2 s" in str(error)
  cg.barrier()


def test_results_are_checked_as_a_calls(two: cg.Workers, engine: str) -> None:
  gate = cg.gate(lambda x: np.zeros(3), out=FLOAT, run_on=two)
  error = error_of(jax.jit(lambda x: gate.start(x).result()), 1.0)
  assert isinstance(error, cg.ResultError)
  assert "expected float32[], got float64[3]" in str(error)


def test_a_dropped_ticket_is_waited_for_at_the_barrier(two: cg.Workers, tmp_path: Path) -> None:
  def leave(x: Any) -> Any:
    (tmp_path / "came").touch()
    raise KeyError("dropped")

  gate = cg.gate(leave, out=FLOAT, run_on=two)
  jax.block_until_ready(jax.jit(lambda x: (gate.start(x), x)[1])(3.0))
  with pytest.raises(KeyError, match="dropped"):
    cg.barrier()
  assert (tmp_path / "came").exists()


def test_a_second_wait_is_an_error(two: cg.Workers) -> None:
  gate = cg.gate(lambda x: x, out=FLOAT, run_on=two)
  ticket = gate.start(1.0)
  assert ticket.result() == 1
  with pytest.raises(cg.GateError, match="a ticket can be waited for once"), cg.errors():
    jax.block_until_ready(ticket.result())


def test_an_argument_that_can_not_travel_is_told_at_the_start(two: cg.Workers) -> None:
  lock = threading.Lock()
  gate = cg.gate(lambda x: (lock, x)[1], out=FLOAT, run_on=two)
  with pytest.raises(cg.GateDefinitionError, match="closure variable 'lock'"):
    gate.start(1.0)


def test_coroutines_are_refused(two: cg.Workers, threads: Any) -> None:
  async def fetch(x: Any) -> Any:
    await asyncio.sleep(0)
    return x

  for place in (two, threads, "processes"):
    with pytest.raises(cg.GateDefinitionError, match=r"run_on=.*got an async function"):
      cg.gate(fetch, out=FLOAT, run_on=place)


def test_with_jax_s_callbacks_it_runs_here(two: cg.Workers) -> None:
  where = cg.gate(worker_functions.pid, out=INT, run_on=two)
  with cg.config(engine="jax"):
    assert int(jax.jit(lambda x: where.start(x).result())(1.0)) == os.getpid()
    assert int(where.start(1.0).result()) == os.getpid()
  assert int(where.start(1.0).result()) in two.pids


def test_the_end_of_the_process_lets_calls_finish(tmp_path: Path) -> None:
  code = f"""
import callgate as cg, jax, pathlib
def leave(x):
  pathlib.Path({str(tmp_path / "left")!r}).touch()
  return x
gate = cg.gate(leave, out=jax.numpy.float32(0), run_on=cg.workers(1))
jax.jit(lambda x: (gate.start(x), x)[1])(1.0)
"""
  output_of(code, CALLGATE_EXIT_SECONDS="60")
  assert (tmp_path / "left").exists()
