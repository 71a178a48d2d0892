# SPDX-License-Identifier: Apache-2.0
"""Ctrl-C in each kind of program: how often the prompt comes back, and how soon.

  python tools/interrupts.py                  # 20 times each
  python tools/interrupts.py --times 5 taps   # some kinds

A kind is a process of its own. In it the main thread runs a program that would take very long, as
at a prompt; another thread sends SIGINT at some moment after the program has begun. Measured is how
long the main thread takes to have its exception, and counted what that is; then a short program has
to give the right result. The exit status is 1 where a process hangs, or a program does not end so.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

begun = threading.Event()
Run = Callable[[], object]


def loop(step: Callable[[Any, Any], Any], x: Any = 0.0) -> Run:
  """Runs steps without an end, the first of which says that the program has begun."""
  import jax
  import numpy as np

  def program(x: Any) -> Any:
    _tell(x)
    return jax.lax.fori_loop(0, 2**31 - 1, step, x)

  jitted = jax.jit(program)
  return lambda: jax.block_until_ready(jitted(np.float32(x)))


def _tell(x: Any) -> None:
  """In a program: says that it has begun."""
  import callgate as cg

  cg.tap(x, lambda _: begun.set(), name="interrupts.tell")


# -- kinds -----------------------------------------------------------------------------------------
def gates(folder: Path) -> Run:
  import callgate as cg

  gate = cg.gate(lambda x: x, out=lambda x: x, effect="io", name="interrupts.gate")
  return loop(lambda i, x: gate(x))


def own_thread(folder: Path) -> Run:
  import callgate as cg

  gate = cg.gate(lambda x: x, out=lambda x: x, effect="io", thread="own", name="interrupts.own")
  return loop(lambda i, x: gate(x))


def taps(folder: Path) -> Run:
  import callgate as cg

  return loop(lambda i, x: cg.tap(x, lambda value: None) + 1)


def checks(folder: Path) -> Run:
  import callgate as cg

  return loop(lambda i, x: (cg.check(x >= 0, "below"), x + 1)[1])


def kernels(folder: Path) -> Run:
  import callgate as cg

  add = cg.cpp("void add(cg::In<float> x, cg::Out<float> y) { y[0] = x[0] + 1; }", out=lambda x: x)
  return loop(lambda i, x: add(x))


def feeds(folder: Path) -> Run:
  import itertools

  import numpy as np

  import callgate as cg

  feed = cg.feed(itertools.repeat(np.float32(1)), name="interrupts.feed")
  return loop(lambda i, x: x + feed.next())


def knobs(folder: Path) -> Run:
  import callgate as cg

  knob = cg.knob("interrupts.knob", 1.0)
  return loop(lambda i, x: x + knob.read())


def stops(folder: Path) -> Run:
  """A `while_loop` that asks whether to stop."""
  import jax

  import callgate as cg

  def wait(i: Any, x: Any) -> Any:
    def looking(state: Any) -> Any:
      return (state[0] < 1_000_000) & ~cg.stop_requested()

    return jax.lax.while_loop(looking, lambda state: (state[0] + 1, state[1] + 1), (0, x))[1]

  return loop(wait)


def stoppable_scans(folder: Path) -> Run:
  import callgate as cg

  def step(carry: Any, _: Any) -> Any:
    return carry + 1, None

  return loop(lambda i, x: cg.scan(step, x, length=1_000_000, stoppable=True)[0])


def bars(folder: Path) -> Run:
  import jax
  import jax.numpy as jnp

  import callgate as cg

  bar = cg.Progress("steps", total=1e9, at=lambda x: x, file=(folder / "bars").open("w"))

  def program(x: Any) -> Any:
    _tell(x)
    return cg.while_loop(lambda x: x >= 0, lambda x: jnp.abs(jnp.sin(x)), x, progress=bar)

  jitted = jax.jit(program)
  return lambda: jax.block_until_ready(jitted(0.5))


def breakpoints(folder: Path) -> Run:
  """Those where nobody stops."""
  import callgate as cg

  return loop(lambda i, x: cg.breakpoint(x < 0, out="x", x=x) + 1)


def stopped_breakpoints(folder: Path) -> Run:
  """The program stands in a debugger, which waits for somebody to attach."""
  import callgate as cg

  os.environ["XDG_RUNTIME_DIR"] = str(folder)
  return loop(lambda i, x: cg.breakpoint(out="x", x=x) + 1)


def recordings(folder: Path) -> Run:
  import callgate as cg

  run = gates(folder)

  def recorded() -> None:
    with cg.record(folder / "recorded.cgr", overwrite=True):
      run()

  return recorded


def replays(folder: Path) -> Run:
  """Answered from a file, which a pure gate may be without an end."""
  import jax
  import numpy as np

  import callgate as cg

  gate = cg.gate(lambda x: x, out=lambda x: x, name="interrupts.replayed")
  with cg.record(folder / "replayed.cgr"):
    jax.block_until_ready(jax.jit(gate)(np.float32(0)))
  run = loop(lambda i, x: gate(x))

  def replayed() -> None:
    with cg.replay(folder / "replayed.cgr", partial=True):
      run()

  return replayed


def checkpoints(folder: Path) -> Run:
  import jax
  import jax.numpy as jnp

  import callgate as cg

  def body(carry: Any, _: Any) -> Any:
    return carry + 1, None

  saves = cg.Checkpoints(folder / "run", every=100_000, keep=2)

  def program(carry: Any) -> Any:
    _tell(carry[0])
    return cg.scan(body, carry, length=2**31 - 1, save=saves)[0]

  jitted = jax.jit(program)
  return lambda: jax.block_until_ready(jitted(jnp.zeros(1000)))


def serve(folder: Path) -> Run:
  """With the live page of the program's own."""
  import callgate as cg

  cg.serve(control=True, file=folder / "address")
  knob = cg.knob("interrupts.served", 1.0)
  return loop(lambda i, x: cg.tap(x, lambda value: None, name="interrupts.tap") + knob.read())


KINDS: dict[str, Callable[[Path], Run]] = {
  kind.__name__.replace("_", "-"): kind
  for kind in (
    gates, own_thread, taps, checks, kernels, feeds, knobs, stops, stoppable_scans, bars,
    breakpoints, stopped_breakpoints, recordings, replays, checkpoints, serve,
  )
}  # fmt: skip


# -- in the process of a kind ----------------------------------------------------------------------
class Interrupt:
  """Sends SIGINT once, when the program has run for a while."""

  def __init__(self) -> None:
    begun.clear()
    self.sent: float | None = None
    self.called_off = False
    self.thread = threading.Thread(target=self.run, daemon=True)
    self.thread.start()

  def run(self) -> None:
    begun.wait()
    time.sleep(random.uniform(0.01, 0.1))
    if not self.called_off:
      self.sent = time.monotonic()
      os.kill(os.getpid(), signal.SIGINT)


def once(run: Run) -> tuple[str, float | None]:
  """Runs until it is interrupted: what was raised, and seconds from the signal to there."""
  interrupt = Interrupt()
  outcome = "ended by itself"
  try:
    try:
      run()
    except Exception as error:  # noqa: BLE001 - counted, where no KeyboardInterrupt follows
      outcome = f"{type(error).__name__}: {str(error).splitlines()[0][:200]}"
  except KeyboardInterrupt:
    outcome = "KeyboardInterrupt"
  end = time.monotonic()
  if interrupt.sent is None:
    interrupt.called_off = True
    begun.set()
    interrupt.thread.join()
    return f"{outcome}, uninterrupted", None
  return outcome, end - interrupt.sent


def is_usable() -> bool:
  import jax
  import jax.numpy as jnp

  import callgate as cg

  with contextlib.suppress(Exception):  # of what was interrupted
    cg.barrier()
  seen: list[float] = []
  program = jax.jit(lambda x: jax.lax.fori_loop(0, 10, lambda i, x: cg.tap(x, seen.append) + 1, x))
  result = float(program(jnp.float32(0)))
  cg.barrier()
  return result == 10 and len(seen) == 10


def measure(kind: str, times: int) -> None:
  """Prints a line of JSON: outcomes, seconds, and whether short programs were right afterwards."""
  signal.signal(signal.SIGINT, signal.default_int_handler)  # a background job's is ignored
  outcomes, seconds, usable, late = Counter[str](), list[float](), 0, 0
  with tempfile.TemporaryDirectory() as folder:
    run = KINDS[kind](Path(folder))
    for turn in range(times):
      random.seed(turn)
      try:
        outcome, took = once(run)
        outcomes[outcome] += 1
        seconds += [] if took is None else [took]
        usable += is_usable()
      except KeyboardInterrupt:
        late += 1  # a second one, behind the first
    print(json.dumps({"outcomes": outcomes, "seconds": seconds, "usable": usable, "late": late}))
    sys.stdout.flush()
    os._exit(0)


# -- the table -------------------------------------------------------------------------------------
def row(kind: str, times: int) -> bool:
  """Prints what a kind's process has measured; False where it is not as it should be."""
  command = [sys.executable, __file__, "--measure", kind, "--times", str(times)]
  environment = {"JAX_PLATFORMS": "cpu", **os.environ}
  process = subprocess.Popen(
    command, env=environment, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
    stderr=subprocess.PIPE, text=True,
  )  # fmt: skip
  errors = ""
  try:
    printed, errors = process.communicate(timeout=60 + 5 * times)
    found = json.loads(printed.splitlines()[-1])
  except (subprocess.TimeoutExpired, IndexError, ValueError) as error:
    process.kill()
    said = process.communicate()[1] if isinstance(error, subprocess.TimeoutExpired) else errors
    print(f"| {kind} | {type(error).__name__} |\n{said[-2000:]}", flush=True)
    return False
  outcomes, seconds = found["outcomes"], sorted(found["seconds"])
  told = ", ".join(f"{count} {name}" for name, count in sorted(outcomes.items()))
  times_of = (seconds[0], statistics.median(seconds), seconds[-1]) if seconds else (0.0,) * 3
  shown = " | ".join(f"{1e3 * s:.1f}" for s in times_of)
  print(f"| {kind} | {told} | {found['usable']} | {found['late']} | {shown} |", flush=True)
  return found["usable"] == times and set(outcomes) == {"KeyboardInterrupt"}


def main() -> None:
  parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n\n")[0])
  parser.add_argument("kinds", nargs="*", default=[], help=f"of {', '.join(KINDS)}")
  parser.add_argument("--times", type=int, default=20, help="interrupts of each kind")
  parser.add_argument("--measure", help=argparse.SUPPRESS)
  given = parser.parse_args()
  if given.measure:
    return measure(given.measure, given.times)
  if unknown := set(given.kinds) - set(KINDS):
    parser.error(f"expected kinds of {', '.join(KINDS)}, got {', '.join(sorted(unknown))}")
  print("| program | ended with | usable after | late | min ms | median ms | max ms |")
  print("| --- | --- | --- | --- | --- | --- | --- |", flush=True)
  fine = [row(kind, given.times) for kind in given.kinds or KINDS]
  raise SystemExit(not all(fine))


if __name__ == "__main__":
  main()
