# SPDX-License-Identifier: Apache-2.0
"""The memory that stays behind: a process's growth over many calls, and over many gates.

Each scenario runs in its own process: it warms up, collects garbage, reads the resident set size,
does its work, and reads it again. Growth is given in MiB; the JSON also holds the growth of every
tenth of the work, which tells a leak (every tenth grows) from a pool that fills (the first does).
For dropped gates the number of callables still alive is counted through weak references.

Controls: the loop of calls with the raw C++ handler, and programs compiled and dropped with the raw
handler in place of a gate, show what XLA and JAX themselves leave behind.
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import json
import os
import subprocess
import sys
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from benchmarks import harness
from benchmarks.peers import adapters

MIB = 1024.0 * 1024.0
SCALAR = jax.ShapeDtypeStruct((), jnp.float32)
CALLS_PER_PROGRAM = 10_000
TENTHS = 10

INPLACE = "calls: callgate in-place gate"
RETURN = "calls: callgate return gate"
DROPPED = "created and dropped: callgate gates"
TRACED = "compiled and dropped: callgate gates"
CONTROL = "compiled and dropped: control, raw C++ handler"


def run(options: harness.Options) -> harness.Report:
  """Runs every scenario in a process of its own."""
  rows: list[harness.Row] = []
  details: dict[str, Any] = {}
  for name, scenario in SCENARIOS.items():
    count = options.pick(*scenario.counts)
    row, detail = _in_child(name, count)
    rows.append(row)
    details[name] = {"count": count, **detail}
  facts = {name: detail for name, detail in details.items() if "growth_by_tenth_mib" in detail}
  title = "Growth of the resident set, after warm-up"
  report = harness.Report("memory", title, "MiB", rows, None, TARGETS, quick=options.quick)
  report.settings["scenarios"] = facts
  return report


def _in_child(name: str, count: int) -> tuple[harness.Row, dict[str, Any]]:
  """One scenario's row: its total growth, and what else it counted as the note."""
  command = [sys.executable, "-m", "benchmarks.bench_memory", name, str(count)]
  root = Path(__file__).parent.parent
  child = subprocess.run(command, capture_output=True, text=True, cwd=root)
  if child.returncode != 0:
    reason = (child.stderr.strip().splitlines() or ["no message"])[-1]
    return harness.Row(name, "failed", harness.neutral(reason)), {}
  result = json.loads(child.stdout.splitlines()[-1])
  if "not_installed" in result:
    return harness.Row(name, "not installed", result["not_installed"]), {}
  note = f"{count:,} times"
  if result["alive"] is not None:
    note += f"; callables still alive: {result['alive']}"
  return harness.Row(name, note=note, samples=(sum(result["growth_by_tenth_mib"]),)), result


def main() -> None:
  """Runs one scenario in this process and prints its result as one line of JSON."""
  parser = argparse.ArgumentParser(description="one memory scenario")
  parser.add_argument("scenario", choices=SCENARIOS)
  parser.add_argument("count", type=int)
  arguments = parser.parse_args()
  try:
    result = SCENARIOS[arguments.scenario].run(arguments.count)
  except harness.NotInstalled as error:
    result = {"not_installed": harness.neutral(str(error))}
  print(json.dumps(result))


def resident_bytes() -> int:
  """The resident set after a collection, with the allocator's free pages given back."""
  gc.collect()
  if sys.platform == "linux":
    ctypes.CDLL(None).malloc_trim(0)
    pages = int(Path("/proc/self/statm").read_text(encoding="utf-8").split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")
  return harness.require("psutil", "psutil").Process().memory_info().rss


def growth(work: Callable[[int], None], count: int) -> list[float]:
  """MiB by which the process grows in each tenth of `count` units of work."""
  work(max(count // TENTHS, 1))
  before = resident_bytes()
  tenths = []
  for _ in range(TENTHS):
    work(count // TENTHS)
    after = resident_bytes()
    tenths.append((after - before) / MIB)
    before = after
  return tenths


class Calls:
  """Many calls of one compiled program."""

  def __init__(self, adapter: adapters.Adapter, full: int):
    self.adapter = adapter
    self.counts = (full, max(full // 20, TENTHS * CALLS_PER_PROGRAM))

  def run(self, count: int) -> dict[str, Any]:
    function = self.adapter(SCALAR)
    loop = jax.jit(
      lambda x: lax.fori_loop(0, CALLS_PER_PROGRAM, lambda _, carry: function(carry), x)
    )
    operand = jnp.float32(1.5)

    def work(calls: int) -> None:
      for _ in range(calls // CALLS_PER_PROGRAM):
        jax.block_until_ready(loop(operand))

    return {"growth_by_tenth_mib": growth(work, count), "alive": None}


class Dropped:
  """Many gates, each created, perhaps compiled and called, and dropped."""

  def __init__(self, make: Callable[[Callable[..., Any]], Any], compiled: bool, full: int):
    self.make = make
    self.compiled = compiled
    self.counts = (full, full // 20)

  def run(self, count: int) -> dict[str, Any]:
    alive: list[weakref.ref[Any]] = []

    def work(gates: int) -> None:
      for index in range(gates):
        alive.append(self._one())
        if index % 50 == 49:
          self._forget(alive)
      self._forget(alive)

    tenths = growth(work, count)
    return {"growth_by_tenth_mib": tenths, "alive": len(alive)}

  def _one(self) -> weakref.ref[Any]:
    """Creates one gate over a callable of its own and lets go of both."""

    def body(out: Any, x: Any) -> None:
      out[...] = x

    gate = self.make(body)
    if self.compiled:
      jax.block_until_ready(jax.jit(gate)(jnp.float32(1.5)))
    return weakref.ref(body)

  def _forget(self, alive: list[weakref.ref[Any]]) -> None:
    """Clears JAX's caches and drops the references whose callable has gone."""
    if self.compiled:
      jax.clear_caches()
    gc.collect()
    alive[:] = [reference for reference in alive if reference() is not None]


def _gate(body: Callable[..., Any]) -> Any:
  return adapters.callgate().gate(body, out=lambda x: x, style="inplace")


def _raw(body: Callable[..., Any]) -> Any:
  raw_memcpy = adapters.raw_memcpy(SCALAR)
  return lambda x: raw_memcpy(x)


SCENARIOS: dict[str, Calls | Dropped] = {
  "calls: control, raw C++ handler": Calls(adapters.raw_memcpy, 1_000_000),
  INPLACE: Calls(adapters.callgate_inplace, 1_000_000),
  RETURN: Calls(adapters.callgate_return, 1_000_000),
  "calls: jax buffer_callback": Calls(adapters.buffer_callback, 1_000_000),
  "calls: jax pure_callback": Calls(adapters.pure_callback, 1_000_000),
  DROPPED: Dropped(_gate, compiled=False, full=10_000),
  CONTROL: Dropped(_raw, compiled=True, full=3_000),
  TRACED: Dropped(_gate, compiled=True, full=3_000),
}

TARGETS = (
  harness.Target("a million in-place calls, MiB", INPLACE, at_most=1.0),
  harness.Target("a million return calls, MiB", RETURN, at_most=1.0),
  harness.Target("10,000 gates created and dropped, MiB", DROPPED, at_most=1.0),
)

if __name__ == "__main__":
  main()
