# SPDX-License-Identifier: Apache-2.0
"""Where the time of the ledger's rows goes: `python -m benchmarks.profiles [--no-json]`.

A contestant of a subject runs alone in a process, which Linux's `perf` samples by the clock of its
processor: a row holds which share of the samples was in whose library. Compilation and imports are
nearly all Python: there cProfile tells whose functions took the time. Writes
`results/profiles.json`.
"""

from __future__ import annotations

import argparse
import cProfile
import functools
import importlib
import json
import os
import pstats
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks import harness

SECONDS = 4.0  # that each contestant runs under perf
# (subject, contestant)
SAMPLED = (
  ("scalar", "callgate in-place gate"),
  ("scalar", "callgate return gate, negation"),
  ("taps", "callgate tap, f32 scalar"),
  ("taps", "callgate tap, 4 KiB"),
  ("feed", "callgate feed, scalar items"),
  ("feed", "callgate feed, cheap items"),
  ("feed", "callgate feed, 1 MiB and a step"),
  ("dispatch", "callgate io gate"),
  ("dispatch", "callgate tap"),
  ("install", "jax pure_callback after install()"),
  ("install", "jax io_callback after install()"),
  ("steer", "callgate knob, read"),
  ("steer", "callgate stop_requested"),
  ("objects", "callgate hold and use, on the object's own thread"),
  ("tools", "callgate scan(stoppable=True), step of 1 us"),
  ("tools", "callgate gate on 1 KiB, recorded"),
  ("tools", "the same with callgate find_nan"),
)
TRACED = (
  ("first", "100 calls, new program: callgate gate"),
  ("first", "one more call of a split array, compiled: callgate gate"),
  ("import", "import callgate"),
)
# Whose a library is, by its file's name; the first that fits.
LIBRARIES = (
  ("callgate", r"_callgate"),
  ("XLA", r"libjax_common|xla_extension|_jax|jaxlib|libjax"),
  ("NumPy", r"_multiarray_umath|numpy|openblas"),
  ("Python", r"^python|libpython|cpython"),
  ("the kernel", r"kernel|vdso"),
  ("C library", r"^libc|^ld-|libstdc|libm\.|libpthread|libgcc"),
  ("XLA", r"JIT|perf-|anon|unknown"),  # code that XLA has compiled
)
# Whose a function is, by its file.
FILES = (
  ("callgate", r"[/\\]callgate[/\\]"),
  ("making dataclasses", r"dataclasses\.py|^<string>"),
  ("JAX, and what it calls of XLA", r"[/\\]jax[/\\]"),
  ("finding and reading modules", r"importlib|frozen"),
  ("MLIR's bindings", r"[/\\]jaxlib[/\\]"),
)


def main(arguments: Sequence[str]) -> int:
  parser = argparse.ArgumentParser(prog="python -m benchmarks.profiles", description=__doc__)
  parser.add_argument("--no-json", action="store_true", help="print only")
  parser.add_argument("--child", nargs=3, metavar=("HOW", "SUBJECT", "ROW"), help="internal")
  given = parser.parse_args(arguments)
  os.environ.setdefault("JAX_PLATFORMS", "cpu")
  if given.child:
    how, subject, row = given.child
    (_run_for if how == "sampled" else _trace)(subject, row)
    return 0
  if shutil.which("perf") is None:
    print("profiles: expected Linux's perf on the path, got none", file=sys.stderr)
    return 2
  rows = [_sampled(*row) for row in SAMPLED] + [_traced(*row) for row in TRACED]
  for row in rows:
    shares = ", ".join(f"{name} {share:.0%}" for name, share in row["shares"].items())
    print(f"{row['subject']}: {row['name']}: {shares}")
  if not given.no_json:
    report = {"name": "profiles", "environment": harness.environment(), "rows": rows}
    path = harness.RESULTS / "profiles.json"
    path.write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")
  return 0


# --- the parent -----------------------------------------------------------------------------------


def _sampled(subject: str, row: str) -> dict[str, Any]:
  """Samples a child while it repeats the contestant."""
  child = _child("sampled", subject, row)
  assert child.stdout is not None
  while (line := child.stdout.readline()) and line != "ready\n":  # benchmarks may print
    pass
  with tempfile.TemporaryDirectory() as folder:
    data = str(Path(folder, "perf.data"))
    command = ["perf", "record", "-q", "-e", "cpu-clock", "-F", "2000"]
    command += ["-p", str(child.pid), "-o", data, "--", "sleep", str(SECONDS)]
    subprocess.run(command, check=False, capture_output=True)
    child.kill()
    child.wait()
    options = ["--stdio", "--sort", "dso", "--field-separator", "\t", "-i", data]
    shown = subprocess.run(["perf", "report", *options], capture_output=True, text=True)
  found: Counter[str] = Counter()
  for share, library in re.findall(r"^\s*([\d.]+)%\s+(\S+)", shown.stdout, re.MULTILINE):
    found[_whose(library, LIBRARIES, "other")] += float(share)
  return _row(subject, row, found, "perf")


def _traced(subject: str, row: str) -> dict[str, Any]:
  child = _child("traced", subject, row)
  printed, _ = child.communicate()
  return _row(subject, row, Counter(json.loads(printed.splitlines()[-1])), "cProfile")


def _child(how: str, subject: str, row: str) -> subprocess.Popen[str]:
  command = [sys.executable, "-m", "benchmarks.profiles", "--child", how, subject, row]
  return subprocess.Popen(command, stdout=subprocess.PIPE, text=True)


def _whose(text: str, table: Sequence[tuple[str, str]], other: str) -> str:
  return next((name for name, pattern in table if re.search(pattern, text)), other)


def _row(subject: str, row: str, found: Counter[str], by: str) -> dict[str, Any]:
  total = found.total()
  if not total:
    raise SystemExit(f"profiles: {subject}: '{row}': expected samples, got none")
  shares = {name: value / total for name, value in found.most_common() if value >= total / 200}
  return {"subject": subject, "name": row, "by": by, "shares": shares}


# --- the child ------------------------------------------------------------------------------------


def _run_for(subject: str, row: str) -> None:
  work = _work_of(subject, row)
  for _ in range(50):
    work.thunk()
  print("ready", flush=True)
  end = time.monotonic() + 10 * SECONDS  # perf's end kills this process before
  while time.monotonic() < end:
    work.thunk()


class _Found(Exception):
  def __init__(self, work: harness.Work) -> None:
    super().__init__()
    self.work = work


def _work_of(subject: str, row: str) -> harness.Work:
  """Runs a subject up to where it would measure the contestant."""

  def measure(contestants: Sequence[harness.Contestant], **_: object) -> list[harness.Row]:
    for contestant in contestants:
      if contestant.name == row:
        raise _Found(contestant.build())
    return []

  harness.measure = measure  # pyright: ignore[reportAttributeAccessIssue]
  try:
    importlib.import_module(f"benchmarks.bench_{subject}").run(harness.Options())
  except _Found as found:
    return found.work
  raise SystemExit(f"profiles: no contestant '{row}' in '{subject}'")


def _trace(subject: str, row: str) -> None:
  profile = cProfile.Profile()
  if subject == "import":
    import jax  # noqa: F401 - what is profiled comes after it
    import numpy as np  # noqa: F401

    work = functools.partial(importlib.import_module, "callgate")
  else:
    work = importlib.import_module("benchmarks.bench_first").COMPILED[row]
    work()  # what comes once a process
  profile.enable()
  work()
  profile.disable()
  found: Counter[str] = Counter()
  stats: Any = pstats.Stats(profile)
  for (file, _, _), (_, _, own, _, callers) in stats.stats.items():
    if file != "~":
      found[_whose(file, FILES, "Python's library")] += own
      continue
    # A function in C counts for its caller.
    for (caller, _, _), (_, _, part, _) in callers.items():
      found[_whose(caller, FILES, "Python's library")] += part
  print(json.dumps(found))


if __name__ == "__main__":
  sys.exit(main(sys.argv[1:]))
