# SPDX-License-Identifier: Apache-2.0
"""Looks for bytes that break what reads them: `make fuzz`, with libFuzzer and clang.

    python tools/fuzz.py [--seconds 120] [--jobs N] [TARGET...]

Builds the programs of tests/fuzz, runs each for so long, and prints a line for each: inputs run,
edges of the code covered, findings. Its corpus is kept in build/fuzz/corpus for the next run;
an input that is a finding is kept in build/fuzz/findings. Exit status 1 where there is a finding,
2 where clang is missing.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
FUZZ = ROOT / "tests" / "fuzz"
BUILD = ROOT / "build" / "fuzz"
OLDEST, NEWEST = 16, 30  # clang: older ones can't read libstdc++'s <ranges>
INPUT_BYTES = 4096
INPUT_SECONDS = 10


@dataclass(frozen=True)
class Found:
  """The outcome of a target's run."""

  runs: int
  covered: int
  inputs: list[Path]
  log: Path
  status: int

  @property
  def ok(self) -> bool:
    return self.status == 0 and not self.inputs


def compiler() -> str | None:
  """The newest clang++ of the machine that can build the targets."""
  names = [f"clang++-{version}" for version in range(NEWEST, OLDEST - 1, -1)]
  for name in [os.environ.get("CLANGXX", "clang++"), *names]:
    path = shutil.which(name)
    if path is None:
      continue
    version = subprocess.run([path, "-dumpversion"], capture_output=True, text=True).stdout
    if version.split(".")[0].isdigit() and int(version.split(".")[0]) >= OLDEST:
      return path
  return None


def targets() -> list[str]:
  return re.findall(r"^  X\((\w+)\)", (FUZZ / "targets.h").read_text(), re.MULTILINE)


def build(clang: str, names: list[str]) -> None:
  programs = [f"fuzz_{name}" for name in names]
  # CMake and Ninja are pip's, beside this Python.
  path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
  environment = {**os.environ, "PATH": path}
  for command in (
    ["cmake", "--preset", "fuzz", f"-DCMAKE_CXX_COMPILER={clang}"],
    ["cmake", "--build", "--preset", "fuzz", "--target", *programs],
  ):
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    if done.returncode != 0:
      sys.exit(f"{' '.join(command)} failed:\n{done.stdout[-4000:]}{done.stderr[-4000:]}")


def last(pattern: str, text: str) -> int:
  found = re.findall(pattern, text)
  return int(found[-1]) if found else 0


def run(name: str, seconds: int) -> Found:
  corpus, findings = BUILD / "corpus" / name, BUILD / "findings" / name
  for folder in (corpus, findings):
    folder.mkdir(parents=True, exist_ok=True)
  before = set(findings.iterdir())
  log = findings.with_suffix(".log")
  environment = {**os.environ, "ASAN_OPTIONS": "detect_stack_use_after_return=1"}
  command = [
    str(BUILD / "tests" / "fuzz" / f"fuzz_{name}"),
    str(corpus),
    str(FUZZ / "seeds" / name),
    f"-max_total_time={seconds}",
    f"-max_len={INPUT_BYTES}",
    f"-timeout={INPUT_SECONDS}",
    f"-artifact_prefix={findings}/",
    "-print_final_stats=1",
    "-verbosity=1",
  ]
  with log.open("w") as output:
    done = subprocess.run(command, stdout=output, stderr=subprocess.STDOUT, env=environment)
  text = log.read_text(errors="replace")
  return Found(
    runs=last(r"number_of_executed_units: (\d+)", text) or last(r"#(\d+)\t", text),
    covered=last(r"cov: (\d+)", text),
    inputs=sorted(set(findings.iterdir()) - before),
    log=log,
    status=done.returncode,
  )


def main() -> int:
  parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
  parser.add_argument("targets", nargs="*", metavar="TARGET", help=", ".join(targets()))
  parser.add_argument("--seconds", type=int, default=120, help="for each target")
  parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="targets at a time")
  options = parser.parse_args()
  names = options.targets or targets()
  for name in set(names) - set(targets()):
    parser.error(f"no target {name}; there are {', '.join(targets())}")
  clang = compiler()
  if clang is None:
    print(
      f"make fuzz needs clang {OLDEST} or newer with libFuzzer, which is not here. On Debian: "
      "apt-get install --no-install-recommends clang-16 libclang-rt-16-dev. CLANGXX=... names one "
      "that is elsewhere."
    )
    return 2
  build(clang, names)
  failed = False
  with ThreadPoolExecutor(options.jobs) as pool:
    runs = pool.map(lambda each: run(each, options.seconds), names)
    for name, found in zip(names, runs, strict=True):
      result = "no finding" if found.ok else f"a finding, status {found.status}: {found.log}"
      print(f"{name:15} {found.runs:>11,} runs  {found.covered:>6,} edges  {result}", flush=True)
      for path in found.inputs:
        print(f"  {path.relative_to(ROOT)}", flush=True)
      failed = failed or not found.ok
  return 1 if failed else 0


if __name__ == "__main__":
  sys.exit(main())
