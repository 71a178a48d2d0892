# SPDX-License-Identifier: Apache-2.0
"""The cost of Python in other processes, from a compiled program, on two workers.

A call of nothing, 64 lanes of nothing, a megabyte there and back, and 16 lanes of a millisecond of
pure Python, beside the pools that programs reach through `io_callback`: ProcessPoolExecutor,
multiprocessing.Pool and loky. Unit: microseconds, per call or per lane.
"""

from __future__ import annotations

import atexit
import concurrent.futures
import functools
import multiprocessing
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import io_callback

from benchmarks import harness, worker_functions
from benchmarks.peers import adapters

OURS, INLINE, MEMCPY = "callgate workers", "callgate gate, in this process", "numpy copy"
LANES, BUSY_LANES, MEGABYTE = 64, 16, 1 << 18
EMPTY, SPREAD, COPY, BUSY = (f"{OURS}: {what}" for what in (
  "an empty call", f"a lane of {LANES}", "1 MiB there and back", f"a lane of 1 ms of {BUSY_LANES}"
))  # fmt: skip
ONE_WORKER = f"{OURS}, one: a lane of 1 ms of {BUSY_LANES}"
TWO_COPIES = f"{MEMCPY}: 1 MiB, twice"

TARGETS = (
  harness.Target("an empty call on an idle worker, microseconds", EMPTY, at_most=15.0),
  harness.Target("one lane of 64 on two workers, microseconds", SPREAD, at_most=3.0),
  harness.Target("1 MiB there and back, in times of two copies", COPY, TWO_COPIES, at_most=2.0),
  harness.Target("lanes of 1 ms, one worker over two", ONE_WORKER, BUSY, at_least=1.85),
)
Map = Callable[[Callable[[Any], Any], Any], list[Any]]


def run(options: harness.Options) -> harness.Report:
  """Measures each way with each kind of call."""
  contestants = [harness.Contestant(name, build) for name, build in _contestants().items()]
  rows = harness.measure(contestants, rounds=options.rounds_or(30))
  title = "Python in other processes, from a compiled program, 2 workers"
  settings = {"lanes": LANES, "busy_lanes": BUSY_LANES}
  return harness.Report("workers", title, "us", rows, None, TARGETS, settings, quick=options.quick)


def _contestants() -> dict[str, Callable[[], harness.Work]]:
  ways = {OURS: _ours(2), **{f"io_callback to {n}": _callback(m) for n, m in POOLS.items()}}
  kinds = {
    "an empty call": (worker_functions.same, jnp.float32(1), 1),
    f"a lane of {LANES}": (worker_functions.same, jnp.arange(float(LANES)), LANES),
    "1 MiB there and back": (worker_functions.same, jnp.zeros(MEGABYTE), 1),
    f"a lane of 1 ms of {BUSY_LANES}": (
      worker_functions.busy, jnp.arange(float(BUSY_LANES)), BUSY_LANES
    ),
  }  # fmt: skip
  made: dict[str, Callable[[], harness.Work]] = {}
  for what, (function, operand, lanes) in kinds.items():
    for way, make in ways.items():
      made[f"{way}: {what}"] = functools.partial(_work, make, function, operand, lanes)
  busy = kinds[f"a lane of 1 ms of {BUSY_LANES}"]
  made[ONE_WORKER] = functools.partial(_work, _ours(1), *busy)
  made[f"{INLINE}: an empty call"] = functools.partial(_work, _inline, *kinds["an empty call"])
  made[TWO_COPIES] = _copies
  return made


def _work(make: Any, function: Any, operand: Any, lanes: int) -> harness.Work:
  program = jax.jit(make(function, operand, lanes))
  got = jax.block_until_ready(program(operand))
  harness.check(np.array_equal(got, operand), "the result is not the argument")

  work = harness.fitted(harness.repeated(program, operand), 200)
  return harness.Work(work.thunk, work.calls * lanes)


def _copies() -> harness.Work:
  one, other = np.zeros(MEGABYTE, np.float32), np.zeros(MEGABYTE, np.float32)

  def thunk() -> None:
    for _ in range(20):
      np.copyto(other, one)
      np.copyto(one, other)

  return harness.Work(thunk, 20)


def _inline(function: Any, operand: Any, lanes: int) -> Any:
  del operand, lanes
  return adapters.callgate().gate(function, out=lambda x: x)


@functools.cache
def _workers(count: int) -> Any:
  return adapters.callgate().workers(count)


def _ours(count: int) -> Any:
  def make(function: Any, operand: Any, lanes: int) -> Any:
    del operand
    cg = adapters.callgate()
    gate = cg.gate(function, out=lambda x: x, run_on=_workers(count))
    return gate if lanes == 1 else jax.vmap(gate)

  return make


# -- peers
def _callback(pool: Callable[[], Map]) -> Any:
  """The lanes of a call mapped over a pool, within one callback."""

  def make(function: Any, operand: Any, lanes: int) -> Any:
    map_over = pool()
    type_ = jax.ShapeDtypeStruct(operand.shape, operand.dtype)

    def on_host(x: Any) -> Any:
      x = np.asarray(x)
      results = map_over(function, [x] if lanes == 1 else list(x))
      return results[0] if lanes == 1 else np.stack(results)

    return lambda x: io_callback(on_host, type_, x)

  return make


@functools.cache
def _process_pool() -> Map:
  spawn = multiprocessing.get_context("spawn")
  executor = concurrent.futures.ProcessPoolExecutor(2, mp_context=spawn)
  atexit.register(executor.shutdown)
  return lambda f, xs: list(executor.map(f, xs, chunksize=max(len(xs) // 4, 1)))


@functools.cache
def _multiprocessing_pool() -> Map:
  pool = multiprocessing.get_context("spawn").Pool(2)
  atexit.register(pool.terminate)
  return lambda f, xs: pool.map(f, xs)


@functools.cache
def _loky() -> Map:
  try:
    import loky
  except ImportError as error:
    raise harness.NotInstalled("loky") from error
  executor = loky.get_reusable_executor(2, timeout=600)
  return lambda f, xs: list(executor.map(f, xs, chunksize=max(len(xs) // 4, 1)))


POOLS: dict[str, Callable[[], Map]] = {
  "ProcessPoolExecutor.map": _process_pool,
  "multiprocessing.Pool.map": _multiprocessing_pool,
  "loky's map": _loky,
}
