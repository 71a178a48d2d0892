# SPDX-License-Identifier: Apache-2.0
"""Calls on the shards of a program over 1 to 8 simulated CPU devices, beside `pure_callback`.

Three questions, in rows of three kinds:

- The bytes that move. A large array is split by rows; a gate or `pure_callback` copies it, and the
  result stays split alike. The array has a fixed size, or each device's part has. Bytes are counted
  in the compiled program: what its collectives write on all devices together. Milliseconds an
  execution.
- The cost of a call. Every device makes a chain of calls on one float of its own in a compiled
  loop. A call's time is that of the program divided by all calls of all devices: on fewer cores
  than devices they take turns, and those of gates take turns for the GIL anyway. Processor time of
  all threads stands beside it, which doesn't depend on the number of cores. Microseconds a call.
- The cost of compiling. 100 calls in a program, traced, lowered and compiled; with an addition
  between calls, and bare. Milliseconds.

The program's process has 8 devices; meshes of fewer use the first of them.
"""

from __future__ import annotations

import functools
import os
import re
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from benchmarks import harness
from benchmarks.peers import adapters

DEVICES = (1, 2, 4, 8)
GATE, CALLBACK, KERNEL = "callgate gate on shards", "jax pure_callback", "callgate kernel on shards"
FIXED = ("fixed array", "fixed shard")
MOVES = (
  r"= (.*?) (?:all-gather|all-reduce|all-to-all|collective-permute|reduce-scatter)(?:-start)?\("
)
BYTES = {"f32": 4, "u32": 4, "s32": 4, "u64": 8, "f64": 8, "u8": 1, "pred": 1}

Function = Callable[[Any], Any]


def named(who: str, devices: int, what: str) -> str:
  """A row's name: tools/benchmark_table.py makes the same ones."""
  return f"{who}, {what}, {devices} device{'s' if devices > 1 else ''}"


def _eight_over_one(claim: str, who: str, what: str, at_most: float) -> harness.Target:
  return harness.Target(
    f"{claim}, 8 devices over 1", named(who, 8, what), named(who, 1, what), at_most
  )


PROCESSOR, BETWEEN, BARE = "call, processor time", "100 calls in a program", "100 bare calls"
TARGETS = (
  *(
    harness.Target("MiB moved by a gate", named(GATE, 8, f"{what}, moved"), at_most=0.0)
    for what in FIXED
  ),
  _eight_over_one("a gate's call", GATE, "call", 1.6),
  _eight_over_one("a gate's call, processor time", GATE, PROCESSOR, 2.0),
  _eight_over_one("a kernel's call", KERNEL, "call", 2.0),
  _eight_over_one("a kernel's call, processor time", KERNEL, PROCESSOR, 2.0),
  _eight_over_one("compiling a program with 100 calls", GATE, BETWEEN, 1.5),
)


def run(options: harness.Options) -> harness.Report:
  """All three kinds of rows."""
  # Threads of XLA's: with as many as devices, which is what it takes on few cores, `pure_callback`
  # hangs: it copies its operand on one of them, while all wait for the callback's device.
  os.environ.setdefault("NPROC", str(3 * max(DEVICES)))
  jax.config.update("jax_num_cpu_devices", max(DEVICES))
  harness.check(jax.device_count() >= max(DEVICES), f"{jax.device_count()} devices")
  rows_kib = options.pick(8 << 10, 256)  # of the whole array, or of a part of 8
  rows = [
    *_in_unit("ms", _moving(options, rows_kib, moved := {})),
    *(
      harness.Row(name, samples=(count / 2**20,), note="a count", unit="MiB")
      for name, count in moved.items()
    ),
    *_calls(options),
    *_in_unit("ms", _compiling(options)),
  ]
  title = "Calls on the shards of arrays on 1 to 8 simulated devices"
  settings = {"devices": list(DEVICES), "array_mib": rows_kib / 1024}
  return harness.Report("sharding", title, "us", rows, None, TARGETS, settings, quick=options.quick)


def _in_unit(unit: str, rows: list[harness.Row]) -> list[harness.Row]:
  return [replace(row, unit=unit) for row in rows]


def _split(devices: int, shape: tuple[int, ...]) -> jax.Array:
  mesh = jax.make_mesh((devices,), ("rows",), devices=jax.devices()[:devices])
  return jax.device_put(np.ones(shape, np.float32), NamedSharding(mesh, P("rows")))


def _gate(**options: Any) -> Function:
  return adapters.callgate_inplace(
    jax.ShapeDtypeStruct((), jnp.float32), sharding="shard", **options
  )


def _callback(x: Any) -> Any:
  return jax.pure_callback(lambda x: x, jax.ShapeDtypeStruct(x.shape, x.dtype), x)


# -- what moves ----------------------------------------------------------------------------------
def _moving(options: harness.Options, kib: int, moved: dict[str, int]) -> list[harness.Row]:
  """Times; puts the bytes into `moved`."""
  contestants: list[harness.Contestant] = []
  for what in FIXED:
    for devices in DEVICES:
      size = kib if what == FIXED[0] else kib // max(DEVICES) * devices
      for who, function in ((GATE, _gate()), (CALLBACK, _callback)):
        name = named(who, devices, what)
        key = named(who, devices, f"{what}, moved")
        build = functools.partial(_moved, key, function, devices, size, moved)
        contestants.append(harness.Contestant(name, build))
  return harness.measure(contestants, rounds=options.rounds_or(20), unit="ms")


def _moved(
  key: str, function: Function, devices: int, kib: int, moved: dict[str, int]
) -> harness.Work:
  x = _split(devices, (kib, 256))
  compiled = jax.jit(function, out_shardings=x.sharding).lower(x).compile()
  moved[key] = devices * collected(compiled.as_text() or "")
  harness.check(np.array_equal(compiled(x), x), "the result is not the argument")
  return harness.Work(lambda: jax.block_until_ready(compiled(x)), 1)


def collected(text: str) -> int:
  """Bytes that the collectives of a compiled program write on each device."""
  total = 0
  for shapes in re.findall(MOVES, text):
    for dtype, extents in re.findall(r"(\w+)\[([\d,]*)\]", shapes):
      count = int(np.prod([int(n) for n in extents.split(",") if n], dtype=np.int64))
      total += BYTES[dtype] * count
  return total


# -- what a call costs ---------------------------------------------------------------------------
def _calls(options: harness.Options) -> list[harness.Row]:
  kernel = adapters.callgate().elementwise("float32 x", "float32 y", "y = x", sharding="shard")
  most = options.pick(2000, 200)
  functions = ((GATE, _gate(), most), (KERNEL, kernel, most), (CALLBACK, _callback, most // 10))
  contestants = [
    harness.Contestant(
      named(who, devices, "call"), functools.partial(_chain, function, devices, calls)
    )
    for who, function, calls in functions
    for devices in DEVICES
  ]
  rows = harness.measure(contestants, rounds=options.rounds_or(40))
  return [*rows, *(_processor_time(row) for row in rows)]


def _processor_time(row: harness.Row) -> harness.Row:
  name = row.name.replace(", call,", f", {PROCESSOR},")
  return replace(row, name=name, samples=row.cpu_samples, cpu_samples=())


def _chain(function: Function, devices: int, most: int) -> harness.Work:
  """One float on each device, and so many calls after one another on it."""
  x = _split(devices, (devices,))

  def loop(calls: int) -> harness.Thunk:
    program = jax.jit(
      lambda x: lax.fori_loop(0, calls, lambda _, carry: function(carry), x),
      out_shardings=x.sharding,
    )
    compiled = program.lower(x).compile()
    harness.check(np.array_equal(compiled(x), x), "the result is not the argument")
    return lambda: jax.block_until_ready(compiled(x))

  work = harness.fitted(loop, most, least=20)
  return harness.Work(work.thunk, work.calls * devices)


# -- what compiling costs ------------------------------------------------------------------------
def _compiling(options: harness.Options) -> list[harness.Row]:
  """With an addition after each call, as programs have work between calls, and without."""
  contestants = [
    harness.Contestant(
      named(who, devices, what), functools.partial(_compile, function, devices, add)
    )
    for who, function in ((GATE, _gate()), (CALLBACK, _callback))
    for what, add in ((BETWEEN, True), (BARE, False))
    for devices in (1, max(DEVICES))
  ]
  return harness.measure(contestants, rounds=options.rounds_or(7, quick=1), unit="ms")


def _compile(function: Function, devices: int, add: bool) -> harness.Work:
  x = _split(devices, (8, 8))

  def program(x: Any) -> Any:
    for index in range(100):
      x = function(x) + index if add else function(x)
    return x

  # A new function each time: JAX has not traced it yet.
  return harness.Work(lambda: jax.jit(lambda x: program(x)).lower(x).compile(), 1)
