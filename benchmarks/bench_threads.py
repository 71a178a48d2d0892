# SPDX-License-Identifier: Apache-2.0
"""Python code of gates on several threads: what runs at once without the GIL.

Each body is a loop of pure Python of half a millisecond. A contestant's pair does the same work one
after the other, and at once. With the GIL both take as long; the JSON of a free-threaded Python is
in `results/free_threaded`. Unit: milliseconds per body.
"""

from __future__ import annotations

import concurrent.futures
import functools
import sys
import warnings
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import callgate as cg
from benchmarks import harness

LOOP = 12_000
LANES = 64
CALLS = 8  # of each program, in one sample
ONE_THREAD, TWO_THREADS = "two gates, one thread", "two gates, two threads"
LANES_APART, LANES_AT_ONCE = "64 lanes", "64 lanes, parallel=True"
ONE_DEVICE, TWO_DEVICES = "a gate on one device, twice", "a gate on two devices"
ALONE, WITH_CONSUMER = "a gate and a consumer, one after the other", "a gate with a consumer"
PEER_ONE, PEER_TWO = "jax pure_callback, one thread", "jax pure_callback, two threads"
PLAIN_ONE, PLAIN_TWO = "the bodies alone, one thread", "the bodies alone, two threads"

TARGETS = (
  harness.Target("two gates on two threads", ONE_THREAD, TWO_THREADS, at_least=1.9),
  harness.Target("64 lanes at once", LANES_APART, LANES_AT_ONCE, at_least=1.9),
  harness.Target("two devices at once", ONE_DEVICE, TWO_DEVICES, at_least=1.8),
  harness.Target("a consumer beside the program's gate", ALONE, WITH_CONSUMER, at_least=1.8),
  harness.Target("the peer: pure_callback on two threads", PEER_ONE, PEER_TWO, at_least=1.9),
  harness.Target("the bodies alone on two threads", PLAIN_ONE, PLAIN_TWO, at_least=1.9),
)


def busy(x: Any) -> Any:
  """Pure Python for half a millisecond."""
  total = 0
  for i in range(LOOP):
    total += i
  return x


def run(options: harness.Options) -> harness.Report:
  """Measures each pair in one process."""
  warnings.filterwarnings("ignore", "callgate.gate: parallel=True has no effect")
  jax.config.update("jax_num_cpu_devices", 2)
  contestants = [harness.Contestant(name, build) for name, build in CONTESTANTS.items()]
  rows = harness.measure(contestants, rounds=options.rounds_or(30), unit="ms")
  free = not getattr(sys, "_is_gil_enabled", lambda: True)()
  settings = {"body": f"{LOOP} steps of a loop", "without the GIL": free}
  title = "Bodies of pure Python, one after the other and at once"
  return harness.Report(
    "threads", title, "ms", rows, ONE_THREAD, TARGETS, settings, quick=options.quick
  )


def _programs(make: Callable[[int], Callable[[Any], Any]]) -> list[Callable[[], Any]]:
  x = jnp.ones(2)
  programs = [jax.jit(make(i)) for i in range(2)]
  for program in programs:
    harness.check(np.array_equal(program(x), x), "the program's result is another")

  def calls(program: Any) -> None:
    for _ in range(CALLS):
      jax.block_until_ready(program(x))

  return [functools.partial(calls, program) for program in programs]


def _gate(number: int) -> Callable[[Any], Any]:
  return cg.gate(busy, out=lambda x: x, name=f"busy {number}")


def _callback(number: int) -> Callable[[Any], Any]:
  return lambda x: jax.pure_callback(lambda x: busy(np.asarray(x)), x, x)


def _plain(make: Any) -> list[Callable[[], Any]]:
  """The bodies without JAX: the most that two threads can gain on this machine."""
  del make
  return [lambda: [busy(None) for _ in range(CALLS)]] * 2


def _one_thread(make: Any, programs_of: Callable[[Any], Any] = _programs) -> harness.Work:
  programs = programs_of(make)
  return harness.Work(lambda: [run() for run in programs], 2 * CALLS)


def _two_threads(make: Any, programs_of: Callable[[Any], Any] = _programs) -> harness.Work:
  programs, pool = programs_of(make), concurrent.futures.ThreadPoolExecutor(2)
  return harness.Work(lambda: list(pool.map(lambda run: run(), programs)), 2 * CALLS)


def _lanes(**options: Any) -> harness.Work:
  x = jnp.arange(float(LANES))
  program = jax.jit(jax.vmap(cg.gate(busy, out=lambda x: x, name=f"lanes {options}", **options)))
  harness.check(np.array_equal(program(x), x), "the lanes' result is another")
  return harness.Work(lambda: jax.block_until_ready(program(x)), LANES)


def _devices(count: int) -> harness.Work:
  gate = cg.gate(busy, out=lambda x: x, sharding="shard", name=f"on {count} devices")
  mesh = jax.make_mesh((count,), ("d",), axis_types=(jax.sharding.AxisType.Auto,))
  x = jax.device_put(jnp.ones(2), jax.NamedSharding(mesh, jax.P("d")))
  program = jax.jit(lambda x: gate(gate(x) + 1) - 1 if count == 1 else gate(x))
  harness.check(np.array_equal(program(x), np.ones(2)), "the devices' result is another")
  return harness.Work(lambda: jax.block_until_ready(program(x)), 2)


def _consumer(at_once: bool) -> harness.Work:
  gate = cg.gate(busy, out=lambda x: x, name=f"beside a consumer {at_once}")
  channel = cg.channel(f"consumed {at_once}", to=[busy])

  def step(i: Any, x: Any) -> Any:
    return cg.tap(gate(x), f"consumed {at_once}")

  program = jax.jit(lambda x, n: jax.lax.fori_loop(0, n, step, x))
  x = jnp.ones(2)

  def thunk() -> None:
    for n in (CALLS,) if at_once else (1,) * CALLS:
      jax.block_until_ready(program(x, n))
      channel.flush()

  return harness.Work(thunk, 2 * CALLS)


CONTESTANTS: dict[str, Callable[[], harness.Work]] = {
  ONE_THREAD: functools.partial(_one_thread, _gate),
  TWO_THREADS: functools.partial(_two_threads, lambda i: _gate(i + 2)),
  LANES_APART: _lanes,
  LANES_AT_ONCE: functools.partial(_lanes, parallel=True),
  ONE_DEVICE: functools.partial(_devices, 1),
  TWO_DEVICES: functools.partial(_devices, 2),
  ALONE: functools.partial(_consumer, at_once=False),
  WITH_CONSUMER: functools.partial(_consumer, at_once=True),
  PEER_ONE: functools.partial(_one_thread, _callback),
  PEER_TWO: functools.partial(_two_threads, _callback),
  PLAIN_ONE: functools.partial(_one_thread, None, _plain),
  PLAIN_TWO: functools.partial(_two_threads, None, _plain),
}
