# SPDX-License-Identifier: Apache-2.0
"""Runs JAX's own tests without and with `callgate.install()`, and prints what differs.

    python tools/jax_suites.py JAX_TESTS [--seconds 600] [--out DIR] [FILE ...]
    python tools/jax_suites.py JAX_TESTS --compat host_callback_2023 host_callback_test.py

JAX_TESTS is the folder `tests` of a checkout of JAX, at the tag of the JAX that is installed. Each
file runs in a process of its own, once on each side; one that is still running after so many
seconds is ended, its stacks in its log. FILEs are those of JAX that test callbacks, unless named.
Exit status: 1 where a test passes without callgate and not with it, 2 where none could be compared.

With `--compat` the checkout is an old one: its tests run through that module of `callgate.compat`,
under today's JAX, and those that don't pass are named. Many of them use what JAX has removed.

The processes load this file as a plugin of pytest, too. It writes a test's name when it begins and
its outcome when it ends, so that a process that dies or hangs says how far it came, and where.
"""

from __future__ import annotations

import argparse
import collections
import importlib.metadata
import os
import re
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
FILES = (
  "python_callback_test.py",
  "debugging_primitives_test.py",
  "debugger_test.py",
  "checkify_test.py",
  "buffer_callback_test.py",
  "ffi_test.py",
  "jaxpr_effects_test.py",
  "multiprocess/host_callback_test.py",
  "pallas/*_interpret_*test.py",
)
SIDE, OUTCOMES = "CALLGATE_JAX_SUITES_SIDE", "CALLGATE_JAX_SUITES_OUTCOMES"
SIDES = ("plain", "installed")  # or a module of callgate.compat
DEVICES = 2  # of a process, where its tests want several and don't ask for them
PROCESSES = 4  # of a test in the folder `multiprocess`, which says for how many it is written
BEGUN, NOT_RUN = "unfinished", "not run"
DUMP_SECONDS = 10


@dataclass(frozen=True)
class Run:
  """A file's run on one side.

  Attributes:
    outcomes: of each test by its name: passed, failed, skipped, or unfinished.
    seconds: how long it took.
    ended: "" where the process came to its end, or what became of it.
    log: what it wrote.
  """

  outcomes: dict[str, str]
  seconds: float
  ended: str
  log: Path

  @property
  def passed(self) -> set[str]:
    return {name for name, outcome in self.outcomes.items() if outcome == "passed"}


def main() -> int:
  """Runs what the command line asks for."""
  parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
  parser.add_argument("tests", type=Path, metavar="JAX_TESTS")
  parser.add_argument("files", nargs="*", metavar="FILE", help="relative to JAX_TESTS")
  parser.add_argument("--seconds", type=float, default=600, help="for a file, on each side")
  parser.add_argument("--out", type=Path, default=ROOT / "build" / "jax-suites")
  parser.add_argument("--compat", metavar="NAME", help="a module of callgate.compat")
  arguments = parser.parse_intermixed_args()
  tests, out = arguments.tests.resolve(), arguments.out.resolve()
  files = _files(tests, arguments.files or FILES)
  out.mkdir(parents=True, exist_ok=True)
  print(
    f"JAX {importlib.metadata.version('jax')}, tests of {_jax_of(tests)}; logs in {out}", flush=True
  )
  if arguments.compat is not None:
    return _run_old(tests, files, arguments.compat, out, arguments.seconds)
  print(f"{'file':48} {'plain':>7} {'installed':>9} {'seconds':>9}", flush=True)
  worse: list[str] = []
  compared = 0
  for file in files:
    plain, installed = (_run(tests / file, side, out, arguments.seconds) for side in SIDES)
    compared += len(plain.outcomes)
    passed = f"{len(plain.passed):7} {len(installed.passed):9}"
    print(f"{file!s:48} {passed} {plain.seconds:4.0f} {installed.seconds:4.0f}", flush=True)
    worse += _report(file, plain, installed)
  print(f"{compared} tests; {len(worse)} pass without callgate.install() and not with it")
  return 1 if worse else 0 if compared else 2


def _run_old(tests: Path, files: list[Path], compat: str, out: Path, seconds: float) -> int:
  """Runs tests of an old JAX through callgate's form of what they test."""
  total = 0
  for file in files:
    run = _run(tests / file, compat, out, seconds)
    counts = collections.Counter(run.outcomes.values())
    told = ", ".join(f"{count} {name}" for name, count in sorted(counts.items()))
    print(f"{file} through callgate.compat.{compat}: {told or 'no tests'}; {run.seconds:.0f} s")
    _say_end(compat, run)
    for name, outcome in run.outcomes.items():
      if outcome not in ("passed", "skipped"):
        print(f"  {outcome}: {name}")
    total += len(run.outcomes)
  return 0 if total else 2


def _files(tests: Path, patterns: Any) -> list[Path]:
  found: list[Path] = []
  for pattern in patterns:
    matching = sorted(path.relative_to(tests) for path in tests.glob(pattern))
    if not matching:
      print(f"{tests}: expected {pattern}, found no such file")
    found += matching
  return found


def _jax_of(tests: Path) -> str:
  """The version that the checkout of the tests says it is."""
  path = tests.parent / "jax" / "version.py"
  match = re.search(r'^_+version_* = "(.+)"', path.read_text(), re.M) if path.is_file() else None
  return match[1] if match else "an unknown version"


def _run(path: Path, side: str, out: Path, seconds: float) -> Run:
  log, outcomes = out / f"{path.stem}.{side}.log", out / f"{path.stem}.{side}.outcomes"
  outcomes.write_text("")
  environment = {**os.environ, SIDE: side, OUTCOMES: str(outcomes)}
  if side not in SIDES or path.parent.name == "multiprocess":
    environment["XLA_FLAGS"] = f"--xla_force_host_platform_device_count={DEVICES}"
  paths = [str(Path(__file__).parent), environment.get("PYTHONPATH", "")]
  if path.parent.name == "multiprocess":  # a program that starts itself, once a process
    (out / "site").mkdir(exist_ok=True)
    (out / "site" / "sitecustomize.py").write_text("import jax_suites; jax_suites.prepare()\n")
    paths.insert(0, str(out / "site"))
    command = [sys.executable, str(path), f"--num_processes={PROCESSES}"]
  else:
    # No configuration but this one, JAX's own warnings as errors neither, on both sides.
    command = [sys.executable, "-m", "pytest", "-q", "-p", "jax_suites", "-p", "no:cacheprovider"]
    command += ["-c", os.devnull, "--rootdir", str(path.parent), str(path)]
  environment["PYTHONPATH"] = os.pathsep.join(filter(None, paths))
  began = time.monotonic()
  with log.open("w") as file:
    process = subprocess.Popen(
      command, cwd=path.parent, env=environment, stdout=file, stderr=file, start_new_session=True
    )
    ended = _wait(process, seconds)
  found = _read(outcomes) or _outcomes_of_processes(log.read_text(errors="replace"))
  return Run(found, time.monotonic() - began, ended, log)


def _wait(process: subprocess.Popen[bytes], seconds: float) -> str:
  try:
    status = process.wait(seconds)
  except subprocess.TimeoutExpired:
    process.send_signal(signal.SIGABRT)  # pytest's faulthandler writes the stacks of all threads
    try:
      process.wait(DUMP_SECONDS)
    except subprocess.TimeoutExpired:
      process.kill()
      process.wait()
    return f"still ran after {seconds:g} s"
  # 1: tests failed; 5: none were found, which is told by their number.
  return "" if status in (0, 1, 5) else f"ended with status {status}"


def _read(path: Path) -> dict[str, str]:
  outcomes: dict[str, str] = {}
  for line in path.read_text(encoding="utf-8").splitlines():
    outcome, _, name = line.partition(" ")
    outcomes[name] = outcome
  return outcomes


def _outcomes_of_processes(log: str) -> dict[str, str]:
  """The outcome of each test in all processes, the worst one, by absl's lines in their logs."""
  named = {"OK": "passed", "SKIPPED": "skipped", "FAILED": "failed"}
  outcomes: dict[str, str] = {}
  for word, name in re.findall(r"^\[ +(OK|SKIPPED|FAILED) +\] ([\w.]+)", log, re.M):
    outcomes[name] = max(outcomes.get(name, "passed"), named[word], key=_ORDER.index)
  return outcomes


def _say_end(side: str, run: Run) -> None:
  """Says it where a run did not come to its end, or had nothing to do."""
  if run.ended or not run.outcomes:
    unfinished = [name for name, outcome in run.outcomes.items() if outcome == BEGUN]
    during = f" in {unfinished[-1]}" if unfinished else ""
    print(f"  {side}: {run.ended or 'no tests were found'}{during}; see {run.log}")


def _report(file: Path, plain: Run, installed: Run) -> list[str]:
  """Prints what differs in a file; returns the tests that pass on the plain side alone."""
  for side, run in zip(SIDES, (plain, installed), strict=True):
    _say_end(side, run)
  worse: list[str] = []
  others: collections.Counter[str] = collections.Counter()
  for name in [*plain.outcomes, *(installed.outcomes.keys() - plain.outcomes.keys())]:
    before = plain.outcomes.get(name, NOT_RUN)
    after = installed.outcomes.get(name, NOT_RUN)
    if before == "passed" and after != "passed":
      worse.append(name)
    if before == after:
      others[before] += 1
    else:
      print(f"  {file}::{name}: {before} without, {after} with callgate.install()")
  del others["passed"]
  if others:
    print("  on both sides: " + ", ".join(f"{count} {name}" for name, count in others.items()))
  sys.stdout.flush()
  return worse


# -- the plugin of pytest --------------------------------------------------------------------------
_ORDER = ("passed", "skipped", "failed")  # of a test's phases the worst counts
_worst: dict[str, str] = {}


def prepare() -> None:
  """Makes this process one of its side."""
  side = os.environ[SIDE]
  if side == "installed":
    import callgate

    callgate.install()
  elif side != "plain":
    import old_jax_names

    old_jax_names.put_in(side)


def pytest_configure() -> None:
  prepare()


def pytest_runtest_logstart(nodeid: str) -> None:
  _worst[nodeid] = "passed"
  _write(BEGUN, nodeid)


def pytest_runtest_logreport(report: Any) -> None:
  _worst[report.nodeid] = max(_worst[report.nodeid], report.outcome, key=_ORDER.index)


def pytest_runtest_logfinish(nodeid: str) -> None:
  _write(_worst[nodeid], nodeid)


def _write(outcome: str, nodeid: str) -> None:
  with open(os.environ[OUTCOMES], "a", encoding="utf-8") as file:
    file.write(f"{outcome} {nodeid.partition('::')[2]}\n")


if __name__ == "__main__":
  sys.exit(main())
