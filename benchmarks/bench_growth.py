# SPDX-License-Identifier: Apache-2.0
"""How costs grow: with lanes, bytes, devices, gates in a program and records in flight.

Five series, each a row for each size. Lanes: a scalar function under vmap, called for each lane.
Bytes: a copy of an array, a C++ handler's beside a gate's and a callback's. Devices: every device
makes a chain of calls on a float of its own; a call's time is the program's over all calls. Gates:
one execution of a program of as many different calls. Records: taps of a scalar in a loop while the
consumer holds still, so that all of them wait in the channel, and their delivery when it goes on.
Unit: microseconds.
"""

from __future__ import annotations

import functools
import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from benchmarks import harness
from benchmarks.peers import adapters

SCALAR = jax.ShapeDtypeStruct((), jnp.float32)
GATE, CALLBACK, MEMCPY, TAP = "callgate gate", "jax pure_callback", "C++ handler", "callgate tap"
LANES = (1, 10, 100, 1_000, 10_000, 100_000)
BYTES = (4, 1 << 10, 1 << 15, 1 << 20, 1 << 25, 1 << 30)
DEVICES = (1, 2, 4, 8, 16)
GATES = (1, 10, 100, 1_000)
RECORDS = (1, 10, 100, 1_000, 10_000)  # more would fill the channel, and wait for its consumer
# By series: what a row says after its contestant, and its sizes.
SERIES = {
  "lanes": ("a lane of {:,}", LANES),
  "bytes": ("{:,} bytes", BYTES),
  "devices": ("a call on each of {:,} devices", DEVICES),
  "gates": ("a call of {:,} in a program", GATES),
  "records": ("{:,} records in flight", RECORDS),
}
MOST_OF_CALLBACKS = {"lanes": 1_000, "bytes": 1 << 25, "gates": 100}  # beyond, it takes seconds
Function = Callable[[Any], Any]


def named(who: str, series: str, size: int) -> str:
  """A row's name: tools/benchmark_charts.py makes the same ones."""
  return f"{who}, {SERIES[series][0].format(size)}"


def _claim(claim: str, series: str, large: int, small: int, at_most: float) -> harness.Target:
  rows = named(GATE, series, large), named(GATE, series, small)
  return harness.Target(claim, *rows, at_most=at_most)


TARGETS = (
  _claim("a lane of 100,000 over one of 100", "lanes", 100_000, 100, 1.25),
  _claim("a call of 1,000 in a program over one of 10", "gates", 1_000, 10, 1.5),
  harness.Target(
    "1 GiB over the handler's copy", named(GATE, "bytes", 1 << 30), named(MEMCPY, "bytes", 1 << 30),
    at_most=1.1,
  ),
  harness.Target(
    "a record of 10,000 in flight over one of 1,000", named(TAP, "records", 10_000),
    named(TAP, "records", 1_000), at_most=1.5,
  ),
)  # fmt: skip


def run(options: harness.Options) -> harness.Report:
  """Measures all series; of each, the sizes that a quick run has time for."""
  os.environ.setdefault("NPROC", str(3 * max(DEVICES)))  # as in bench_sharding.py
  jax.config.update("jax_num_cpu_devices", max(DEVICES))
  rows: list[harness.Row] = []
  for series, (make, most, rounds) in PROGRAMS.items():
    sizes = [n for n in SERIES[series][1] if not options.quick or n <= most]
    for size in sizes:
      contestants = [
        harness.Contestant(named(who, series, size), functools.partial(make, who, size))
        for who in CONTESTANTS[series]
        if who != CALLBACK or size <= MOST_OF_CALLBACKS.get(series, size)
      ]
      rows += harness.measure(contestants, rounds=options.rounds_or(rounds))
  title = "How costs grow"
  return harness.Report("growth", title, "us", rows, None, TARGETS, quick=options.quick)


def _copy(out: np.ndarray, x: np.ndarray) -> None:
  out[...] = x


def _function(who: str, spec: Any) -> Function:
  if who == MEMCPY:
    return adapters.raw_memcpy(spec)
  if who == CALLBACK:
    return lambda x: jax.pure_callback(lambda v: v, spec, x, vmap_method="sequential")
  return adapters.callgate().gate(_copy, out=lambda x: x, style="inplace", vmap="each")


def _executions(program: Function, operand: Any, calls: int) -> harness.Work:
  """Runs of a program that makes so many calls."""
  harness.check(bool(jnp.all(program(operand) == operand)), "the result is not the argument")

  repeated = harness.repeated(program, operand)
  size = sum(x.nbytes for x in jax.tree.leaves(operand))
  work = harness.fitted(repeated, max(1, min(200, 10_000 // calls, (1 << 25) // size)))
  return harness.Work(work.thunk, work.calls * calls)


def _lanes(who: str, lanes: int) -> harness.Work:
  operand = jnp.arange(lanes, dtype=jnp.float32)
  return _executions(jax.jit(jax.vmap(_function(who, SCALAR))), operand, lanes)


def _bytes(who: str, size: int) -> harness.Work:
  operand = jnp.ones(size // 4, jnp.float32)
  spec = jax.ShapeDtypeStruct(operand.shape, operand.dtype)
  return _executions(jax.jit(_function(who, spec)), operand, 1)


def _devices(who: str, count: int) -> harness.Work:
  calls = 50
  mesh = Mesh(np.array(jax.devices()[:count]), ("device",))
  operand = jax.device_put(jnp.ones(count), NamedSharding(mesh, P("device")))
  function = _function(who, jax.ShapeDtypeStruct((1,), jnp.float32))

  @jax.jit
  @functools.partial(
    jax.shard_map,
    mesh=mesh,
    in_specs=P("device"),
    out_specs=P("device"),
    check_vma=who != CALLBACK,  # whose results vary over no axis
  )
  def program(x: jax.Array) -> jax.Array:
    return lax.fori_loop(0, calls, lambda _, carry: function(carry), x)

  return _executions(program, operand, calls * count)


def _gates(who: str, count: int) -> harness.Work:
  functions = [_function(who, SCALAR) for _ in range(count)]

  def program(x: jax.Array) -> jax.Array:
    for function in functions:
      x = function(x)
    return x

  return _executions(jax.jit(program), jnp.float32(1), count)


class _Holds:
  """A consumer that holds still while a program runs."""

  def __init__(self) -> None:
    self.free = threading.Event()
    self.free.set()

  def __call__(self, values: Any) -> None:
    self.free.wait()

  @contextmanager
  def still(self) -> Iterator[None]:
    self.free.clear()
    try:
      yield
    finally:
      self.free.set()


def _records(who: str, count: int) -> harness.Work:
  cg = adapters.callgate()
  consumer = _Holds()
  channel = cg.channel(f"growth {count}", to=consumer, batch=True)
  body = lambda _, x: cg.tap(x, channel) + 0.0
  program = jax.jit(lambda x: lax.fori_loop(0, count, body, x)).lower(1.0).compile()

  def repeated(repeats: int) -> harness.Thunk:
    def thunk() -> None:
      for _ in range(repeats):
        with consumer.still():
          jax.block_until_ready(program(jnp.float32(1)))
      channel.flush()

    return thunk

  work = harness.fitted(repeated, 20)
  return harness.Work(work.thunk, work.calls * count)


CONTESTANTS = {
  "lanes": (GATE, CALLBACK),
  "bytes": (GATE, CALLBACK, MEMCPY),
  "devices": (GATE,),  # callbacks of 16 devices at once may wait for each other for ever
  "gates": (GATE, CALLBACK),
  "records": (TAP,),
}
# By series: what makes a contestant's work, the largest size of a quick run, and the rounds.
PROGRAMS: dict[str, tuple[Callable[[str, int], harness.Work], int, int]] = {
  "lanes": (_lanes, 100, 7),
  "bytes": (_bytes, 1 << 20, 7),
  "devices": (_devices, 2, 7),
  "gates": (_gates, 10, 7),
  "records": (_records, 100, 7),
}
