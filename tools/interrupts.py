# SPDX-License-Identifier: Apache-2.0
"""Ctrl-C in each kind of program: what the call raises, and how soon.

  python tools/interrupts.py                  # 20 times each
  python tools/interrupts.py --times 5 taps   # some kinds

A row is a process of its own. In it the main thread runs a program that would take very long,
within `try: ... except`; another thread sends SIGINT at some moment after the program has begun.
Measured is how long the main thread takes to have its exception, and counted what that is; then a
short program has to give the right result. Kinds with a `Loop` are asked for a program's first
call, for a later one, which JAX's C++ code dispatches, and for one that is compiled ahead of time;
a heavy one, which JAX does not run on the calling thread, for each kind of wait. In rows that say
"uncaught" each run is a process that catches nothing: counted are those that end by SIGINT with one
traceback. The exit status is 1 where a process hangs, or a run does not end so.
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
from pathlib import Path

from interrupt_kinds import CALLS, KINDS, OTHERS, WAITS, Loop, Run, begun


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


def measure(kind: str, times: int, call: str, wait: str) -> None:
  """Prints a line of JSON: outcomes, seconds, and whether short programs were right afterwards."""
  signal.signal(signal.SIGINT, signal.default_int_handler)  # a background job's is ignored
  outcomes, seconds, usable, late = Counter[str](), list[float](), 0, 0
  with tempfile.TemporaryDirectory() as folder:
    run = KINDS[kind](Path(folder))
    if isinstance(run, Loop):
      run.call, run.wait = call, wait
    for turn in range(times):
      random.seed(turn)
      try:
        if isinstance(run, Loop):
          run.prepare()
        outcome, took = once(run)
        outcomes[outcome] += 1
        seconds += [] if took is None else [took]
        usable += is_usable()
      except KeyboardInterrupt:
        late += 1  # a second one, behind the first
    print(json.dumps({"outcomes": outcomes, "seconds": seconds, "usable": usable, "late": late}))
    sys.stdout.flush()
    os._exit(0)


def end_uncaught(kind: str, call: str) -> None:
  """Runs a program that is interrupted, and catches nothing."""
  signal.signal(signal.SIGINT, signal.default_int_handler)
  with tempfile.TemporaryDirectory() as folder:
    run = KINDS[kind](Path(folder))
    if isinstance(run, Loop):
      run.call = call
      run.prepare()
    Interrupt()
    run()


# -- the table -------------------------------------------------------------------------------------
def command_of(kind: str, *more: str) -> tuple[list[str], dict[str, str]]:
  environment = {"JAX_PLATFORMS": "cpu", **os.environ}
  if kind == "devices":
    environment["XLA_FLAGS"] = "--xla_force_host_platform_device_count=4"
  return [sys.executable, __file__, kind, *more], environment


def row(kind: str, times: int, call: str, wait: str) -> bool:
  """Prints what a kind's process has measured; False where it is not as it should be."""
  more = ("--measure", "--times", str(times), "--call", call, "--wait", wait)
  command, environment = command_of(kind, *more)
  process = subprocess.Popen(
    command, env=environment, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
    stderr=subprocess.PIPE, text=True,
  )  # fmt: skip
  errors, name = "", f"{kind} | {call} | {wait}"
  try:
    printed, errors = process.communicate(timeout=60 + 5 * times)
    found = json.loads(printed.splitlines()[-1])
  except (subprocess.TimeoutExpired, IndexError, ValueError) as error:
    process.kill()
    said = process.communicate()[1] if isinstance(error, subprocess.TimeoutExpired) else errors
    print(f"| {name} | {type(error).__name__} |\n{said[-2000:]}", flush=True)
    return False
  outcomes, seconds = found["outcomes"], sorted(found["seconds"])
  told = ", ".join(f"{count} {name}" for name, count in sorted(outcomes.items()))
  times_of = (seconds[0], statistics.median(seconds), seconds[-1]) if seconds else (0.0,) * 3
  shown = " | ".join(f"{1e3 * s:.1f}" for s in times_of)
  print(f"| {name} | {told} | {found['usable']} | {found['late']} | {shown} |", flush=True)
  return found["usable"] == times and set(outcomes) == {"KeyboardInterrupt"}


def row_uncaught(kind: str, times: int, call: str) -> bool:
  """Prints how many processes end by SIGINT with one traceback, and how the others end."""
  outcomes = Counter[str]()
  for _ in range(times):
    command, environment = command_of(kind, "--uncaught", "--call", call)
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120)
    lines, tracebacks = done.stderr.splitlines(), done.stderr.count("Traceback (most recent")
    fine = done.returncode in (-signal.SIGINT, 130) and tracebacks == 1
    fine = fine and any(line.startswith("KeyboardInterrupt") for line in lines)
    last = lines[-1][:100] if lines else ""
    outcomes["by SIGINT" if fine else f"{done.returncode}, {tracebacks} tracebacks: {last}"] += 1
  told = ", ".join(f"{count} {name}" for name, count in sorted(outcomes.items()))
  print(f"| {kind} | {call} | uncaught | {told} | | | | | |", flush=True)
  return set(outcomes) == {"by SIGINT"}


def rows(kind: str, times: int) -> bool:
  """All rows of a kind."""
  is_loop = kind not in OTHERS
  waits = WAITS if kind == "heavy" else ("block",)
  fine = [row(kind, times, call, "block") for call in (CALLS if is_loop else CALLS[:1])]
  fine += [row(kind, times, "later", wait) for wait in waits if wait != "block"]
  if kind in ("gates", "taps", "heavy", "devices"):
    fine.append(row_uncaught(kind, times, "later" if is_loop else "first"))
  return all(fine)


def main() -> None:
  parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n\n")[0])
  parser.add_argument("kinds", nargs="*", default=[], help=f"of {', '.join(KINDS)}")
  parser.add_argument("--times", type=int, default=20, help="interrupts of each kind")
  parser.add_argument("--measure", action="store_true", help=argparse.SUPPRESS)
  parser.add_argument("--uncaught", action="store_true", help=argparse.SUPPRESS)
  parser.add_argument("--call", default="first", choices=CALLS, help=argparse.SUPPRESS)
  parser.add_argument("--wait", default="block", choices=WAITS, help=argparse.SUPPRESS)
  given = parser.parse_args()
  if unknown := set(given.kinds) - set(KINDS):
    parser.error(f"expected kinds of {', '.join(KINDS)}, got {', '.join(sorted(unknown))}")
  if given.measure:
    return measure(given.kinds[0], given.times, given.call, given.wait)
  if given.uncaught:
    return end_uncaught(given.kinds[0], given.call)
  print(
    "| program | call | wait | ended with | usable after | late | min ms | median ms | max ms |"
  )
  print("| --- | --- | --- | --- | --- | --- | --- | --- | --- |", flush=True)
  fine = [rows(kind, given.times) for kind in given.kinds or KINDS]
  raise SystemExit(not all(fine))


if __name__ == "__main__":
  main()
