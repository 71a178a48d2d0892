# SPDX-License-Identifier: Apache-2.0
"""The cost of stops, checkpoints, recordings, `find_nan` and the live page beside real work.

Each pair of rows runs the same program with and without the tool: a loop whose step takes one
microsecond or one millisecond, a loop of gate calls on 1 KiB. The last row is the processor time of
the process of `python -m callgate watch`, while a program writes 1,000 records a second and a page
asks as a browser does. Unit: microseconds per step.
"""

from __future__ import annotations

import functools
import json
import re
import shutil
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import psutil

import callgate as cg
from benchmarks import harness

SHORT, SHORT_STOPPABLE = "lax.scan, step of 1 us", "callgate scan(stoppable=True), step of 1 us"
LONG, LONG_SAVED = "lax.scan, step of 1 ms", "callgate scan(save=), every 1,000 steps of 1 ms"
GATE, RECORDED = "callgate gate on 1 KiB", "callgate gate on 1 KiB, recorded"
PLAIN, SEARCHED = "a program of 1 ms", "the same with callgate find_nan"
PAGE = "callgate live page, 1,000 records a second"

TARGETS = (
  harness.Target("scan(stoppable=True), step of 1 us", SHORT_STOPPABLE, SHORT, at_most=1.02),
  harness.Target("a checkpoint every 1,000 steps of 1 ms", LONG_SAVED, LONG, at_most=1.01),
  harness.Target("a recorded call on 1 KiB, microseconds", RECORDED, at_most=1.5),
  harness.Target("find_nan over a program of 1 ms", SEARCHED, PLAIN, at_most=2.0),
  harness.Target("the live page, percent of a core", PAGE, at_most=2.0),
)

_folder = tempfile.mkdtemp(prefix="callgate-benchmark-")


def run(options: harness.Options) -> harness.Report:
  """Measures each pair in one process, and the page in its own."""
  steps, calls = options.pick(5000, 200), options.pick(2000, 100)
  contestants = [
    harness.Contestant(SHORT, functools.partial(_short, steps, {})),
    harness.Contestant(SHORT_STOPPABLE, functools.partial(_short, steps, {"stoppable": True})),
    harness.Contestant(GATE, functools.partial(_calls, calls, False)),
    harness.Contestant(RECORDED, functools.partial(_calls, calls, True)),
    harness.Contestant(PLAIN, functools.partial(_searched, False)),
    harness.Contestant(SEARCHED, functools.partial(_searched, True)),
  ]
  rows = harness.measure(contestants, rounds=options.rounds_or(50))
  length = options.pick(1000, 20)
  slow = [
    harness.Contestant(LONG, functools.partial(_long, length, None)),
    harness.Contestant(LONG_SAVED, functools.partial(_long, length, f"{_folder}/saves")),
  ]
  rows += harness.measure(slow, rounds=options.rounds_or(15))
  rows.append(_page(options.pick(10, 2), options.rounds_or(3, quick=1)))
  shutil.rmtree(_folder)
  title = "Tools beside the work of a program"
  references = {SHORT_STOPPABLE: SHORT, LONG_SAVED: LONG, SEARCHED: PLAIN, RECORDED: GATE}
  return harness.Report(
    "tools", title, "us", rows, None, TARGETS, quick=options.quick, references=references
  )


def _short(steps: int, options: dict[str, Any]) -> harness.Work:
  """A loop of steps of about 1 us each: sines of f32[560]."""
  return _loop(steps, options, lambda x: jnp.sin(x) + 0.5, 560)


def _long(steps: int, folder: str | None) -> harness.Work:
  """A loop of steps of about 1 ms each; with a folder, the last step is saved."""
  options = {} if folder is None else {"save": cg.Checkpoints(folder, every=steps, keep=1)}
  # Arithmetic that XLA neither splits over threads nor removes.
  work = lambda x: jax.lax.fori_loop(0, 4150, lambda _, x: jnp.sin(x) + 0.5, x)
  return _loop(steps, options, work, 128)


def _loop(
  steps: int, options: dict[str, Any], work: Callable[[Any], Any], size: int
) -> harness.Work:
  """A loop by `lax.scan`, or with options by `callgate.scan`."""
  loop: Any = functools.partial(cg.scan, **options) if options else jax.lax.scan
  program = jax.jit(lambda x: loop(lambda x, _: (work(x), None), x, None, length=steps)[0])
  x = jnp.linspace(0.0, 1.0, size)
  harness.check(bool(np.isfinite(program(x)).all()), "the loop's result is not finite")
  return harness.Work(lambda: jax.block_until_ready(program(x)), steps)


def _calls(calls: int, recorded: bool) -> harness.Work:
  gate = cg.gate(lambda x: x, out=lambda x: x, effect="io", name=f"benchmark: recorded {recorded}")
  program = jax.jit(lambda x: jax.lax.fori_loop(0, calls, lambda _, c: gate(c) + 1, x))
  x = jnp.zeros(256)
  harness.check(np.all(np.asarray(program(x)) == calls), "the loop's result is another")

  def thunk() -> Any:
    return jax.block_until_ready(program(x))

  def with_file() -> Any:
    with cg.record(f"{_folder}/calls.cgr", overwrite=True):
      return thunk()

  return harness.Work(with_file if recorded else thunk, calls)


def _searched(searched: bool) -> harness.Work:
  """Ten layers of products and activations of f32[192, 192], about 1 ms."""

  def program(x: Any) -> Any:
    for _ in range(10):
      x = jnp.tanh(x @ x.T / 192) + jnp.exp(-(x**2))
    return x

  x = jnp.linspace(-1.0, 1.0, 192 * 192).reshape(192, 192)
  run: Callable[[Any], Any] = cg.find_nan(program) if searched else jax.jit(program)
  harness.check((run(x) is None) == searched, "there is a NaN")
  return harness.Work(lambda: jax.block_until_ready(run(x)), 1)


def _page(seconds: float, rounds: int) -> harness.Row:
  """The share of a core that the page's process takes, in percent."""
  path = Path(_folder, "live.cgs")
  command = [sys.executable, "-m", "callgate", "watch", "--port", "0", "--no-browser", str(path)]
  program = jax.jit(lambda x: cg.tap({"loss": x, "rate": x + 1}, "benchmark: live"))
  with cg.channel("benchmark: live", to=cg.sinks.Stream(path)):
    program(0.0)
    cg.barrier()
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
      assert process.stdout is not None
      found = re.search(r"http://\S+/", process.stdout.readline())
      assert found is not None
      try:
        samples = tuple(_share(process.pid, found[0], program, seconds) for _ in range(rounds))
      finally:
        process.terminate()
  return harness.Row(PAGE, samples=samples, unit="% of a core")


def _share(pid: int, address: str, program: Callable[[float], Any], seconds: float) -> float:
  page, begin, sent, looks = psutil.Process(pid), time.perf_counter(), 0, 0
  before = page.cpu_times()
  while (now := time.perf_counter() - begin) < seconds:
    while sent < now * 1000:
      program(float(sent))
      sent += 1
    if looks < now * 2:  # as often as the page in a browser
      looks += 1
      leaves = _ask(address, "state")["leaves"]
      for leaf in leaves:
        _ask(address, f"leaf?id={leaf['id']}")
    time.sleep(0.002)
  after = page.cpu_times()
  spent = after.user + after.system - before.user - before.system
  return 100 * spent / (time.perf_counter() - begin)


def _ask(address: str, path: str) -> Any:
  with urllib.request.urlopen(f"{address}api/{path}", timeout=10) as answer:
    return json.load(answer)
