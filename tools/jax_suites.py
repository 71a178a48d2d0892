"""Runs JAX's own tests without and with `callgate.install()`, and prints what differs.

    python tools/jax_suites.py JAX_TESTS [--seconds 600] [--out DIR] [FILE ...]

JAX_TESTS is the folder `tests` of a checkout of JAX, at the tag of the JAX that is installed. Each
file runs in a process of its own, once on each side; one that is still running after so many
seconds is ended, its stacks in its log. FILEs are those of JAX that test callbacks, unless named.
Exit status: 1 where a test passes without callgate and not with it, 2 where none could be compared.

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
  "pallas/*_interpret_*test.py",
)
SIDE, OUTCOMES = "CALLGATE_JAX_SUITES_SIDE", "CALLGATE_JAX_SUITES_OUTCOMES"
SIDES = ("plain", "installed")
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
  arguments = parser.parse_intermixed_args()
  tests, out = arguments.tests.resolve(), arguments.out.resolve()
  files = _files(tests, arguments.files or FILES)
  out.mkdir(parents=True, exist_ok=True)
  print(
    f"JAX {importlib.metadata.version('jax')}, tests of {_jax_of(tests)}; logs in {out}", flush=True
  )
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
  match = re.search(r'^_version = "(.+)"', path.read_text(), re.M) if path.is_file() else None
  return match[1] if match else "an unknown version"


def _run(path: Path, side: str, out: Path, seconds: float) -> Run:
  log, outcomes = out / f"{path.stem}.{side}.log", out / f"{path.stem}.{side}.outcomes"
  outcomes.write_text("")
  environment = {**os.environ, SIDE: side, OUTCOMES: str(outcomes)}
  before = environment.get("PYTHONPATH")
  environment["PYTHONPATH"] = os.pathsep.join([str(Path(__file__).parent), *filter(None, [before])])
  command = [sys.executable, "-m", "pytest", "-q", "-p", "jax_suites", "-p", "no:cacheprovider"]
  # No configuration but this one, JAX's own warnings as errors neither, on both sides.
  command += ["-c", os.devnull, "--rootdir", str(path.parent), str(path)]
  began = time.monotonic()
  with log.open("w") as file:
    process = subprocess.Popen(
      command, cwd=path.parent, env=environment, stdout=file, stderr=file, start_new_session=True
    )
    ended = _wait(process, seconds)
  return Run(_read(outcomes), time.monotonic() - began, ended, log)


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
  for line in path.read_text().splitlines():
    outcome, _, name = line.partition(" ")
    outcomes[name] = outcome
  return outcomes


def _report(file: Path, plain: Run, installed: Run) -> list[str]:
  """Prints what differs in a file; returns the tests that pass on the plain side alone."""
  for side, run in zip(SIDES, (plain, installed), strict=True):
    if run.ended or not run.outcomes:
      unfinished = [name for name, outcome in run.outcomes.items() if outcome == BEGUN]
      during = f" in {unfinished[-1]}" if unfinished else ""
      print(f"  {side}: {run.ended or 'no tests were found'}{during}; see {run.log}")
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


def pytest_configure() -> None:
  if os.environ.get(SIDE) == "installed":
    import callgate

    callgate.install()


def pytest_runtest_logstart(nodeid: str) -> None:
  _worst[nodeid] = "passed"
  _write(BEGUN, nodeid)


def pytest_runtest_logreport(report: Any) -> None:
  _worst[report.nodeid] = max(_worst[report.nodeid], report.outcome, key=_ORDER.index)


def pytest_runtest_logfinish(nodeid: str) -> None:
  _write(_worst[nodeid], nodeid)


def _write(outcome: str, nodeid: str) -> None:
  with open(os.environ[OUTCOMES], "a") as file:
    file.write(f"{outcome} {nodeid.partition('::')[2]}\n")


if __name__ == "__main__":
  sys.exit(main())
