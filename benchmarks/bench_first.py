# SPDX-License-Identifier: Apache-2.0
"""The time before a program is fast: calls outside of programs, tracing, lowering, compiling.

An eager call is one of a function on an array, outside of any program, after the first. Compiling
is measured on programs that nobody has seen: 100 calls of one function, beside 100 `jnp.sin`, and
what one call more of a split array adds. Memory is the resident set that a fresh process has when
it has called something once. Units: microseconds, or as the row says.
"""

from __future__ import annotations

import functools
import itertools
import json
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from benchmarks import harness
from benchmarks.peers import adapters

EAGER, EAGER_CALLBACK = "eager call: callgate gate", "eager call: jax pure_callback"
MANY, SINES = "100 calls, new program: callgate gate", "100 calls, new program: jnp.sin"
SPLIT = "one more call of a split array, compiled: callgate gate"
RESIDENT = "resident memory of import and first gate, beyond import jax and jnp.sin"
RESIDENT_CALLBACK = "resident memory of a first jax pure_callback, beyond import jax and jnp.sin"

TARGETS = (
  harness.Target("an eager gate, microseconds", EAGER, at_most=25.0),
  harness.Target("first 100 calls, milliseconds", MANY, at_most=110.0),
  harness.Target("compiling a sharded call, milliseconds", SPLIT, at_most=2.0),
)
Function = Callable[[Any], Any]


def run(options: harness.Options) -> harness.Report:
  """Measures all three; a round of compiling takes a second."""
  jax.config.update("jax_num_cpu_devices", 2)
  eager = [
    harness.Contestant(EAGER, functools.partial(_eager, _gate())),
    harness.Contestant(EAGER_CALLBACK, functools.partial(_eager, _callback)),
    harness.Contestant("eager call: jnp.sin", functools.partial(_eager, jnp.sin)),
  ]
  rows = harness.measure(eager, rounds=options.rounds_or(50))
  rounds = options.rounds_or(10, quick=1)
  seconds: dict[str, list[float]] = {}
  for _ in range(rounds):
    for name, make in COMPILED.items():
      seconds.setdefault(name, []).append(make() * 1e3)
  rows += [harness.Row(name, samples=tuple(found), unit="ms") for name, found in seconds.items()]
  rows += [_resident(name, first, options) for name, first in FIRST.items()]
  title = "Before a program is fast"
  references = {EAGER: EAGER_CALLBACK, MANY: SINES}
  return harness.Report(
    "first", title, "us", rows, None, TARGETS, quick=options.quick, references=references
  )


def _same(x: np.ndarray) -> np.ndarray:
  return x


def _gate() -> Function:
  return adapters.callgate().gate(_same, out=lambda x: x)


def _callback(x: jax.Array) -> jax.Array:
  return jax.pure_callback(_same, jax.ShapeDtypeStruct(x.shape, x.dtype), x)


def _eager(function: Function) -> harness.Work:
  operand = jnp.float32(1)

  return harness.fitted(harness.repeated(function, operand), 500)


_numbers = itertools.count()


def _compiling(function: Function, count: int, operand: Any) -> float:
  """Seconds to trace, lower and compile a program of so many calls, the like of which is none."""
  constant = float(next(_numbers))

  def program(x: jax.Array) -> jax.Array:
    for _ in range(count):
      x = function(x) + constant
    return x

  start = time.perf_counter()
  jax.jit(program).lower(operand).compile()
  return time.perf_counter() - start


def _one_more() -> float:
  mesh = Mesh(np.array(jax.devices()[:2]), ("device",))
  operand = jax.device_put(jnp.ones(8), NamedSharding(mesh, P("device")))
  gate = adapters.callgate().gate(_same, out=lambda x: x, sharding="shard")
  few, many = (_compiling(gate, count, operand) for count in (1, 21))
  return (many - few) / 20


COMPILED: dict[str, Callable[[], float]] = {
  MANY: lambda: _compiling(_gate(), 100, jnp.float32(1)),
  SINES: lambda: _compiling(jnp.sin, 100, jnp.float32(1)),
  SPLIT: _one_more,
}
# By row: what a fresh process does between the two looks at its memory.
FIRST = {
  RESIDENT: "import callgate; g = callgate.gate(lambda x: x, out=lambda x: x)",
  RESIDENT_CALLBACK: "g = lambda x: jax.pure_callback(lambda v: v, x, x)",
}
_LOOK = """
import json, os, jax, jax.numpy as jnp
def resident():
  with open("/proc/self/statm") as f:
    return int(f.read().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 2**20
x = jnp.ones(4)
jax.block_until_ready(jax.jit(jnp.sin)(x))
before = resident()
{first}
jax.block_until_ready(jax.jit(lambda x: g(x))(x))
print(json.dumps(resident() - before))
"""


def _resident(name: str, first: str, options: harness.Options) -> harness.Row:
  found: list[float] = []
  for _ in range(options.pick(5, 1)):
    script = _LOOK.replace("{first}", first)
    child = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    if child.returncode != 0:
      reason = (child.stderr.strip().splitlines() or ["no message"])[-1]
      return harness.Row(name, "failed", harness.neutral(reason))
    found.append(json.loads(child.stdout))
  return harness.Row(name, samples=tuple(found), unit="MiB")
