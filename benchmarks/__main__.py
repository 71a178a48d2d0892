# SPDX-License-Identifier: Apache-2.0
"""`python -m benchmarks [subject ...] [--quick] [--rounds N]`: runs subjects and writes their JSON.

With `--check` it writes nothing: it says which of callgate's rows got worse by more than 15 % since
the committed JSON, and fails if one did in two runs (benchmarks/regression.py).

Contestants of one subject share a process; several subjects run in one child process each, so that
what one of them imports or installs does not reach the next. `cuda` stands for the subjects that
need a CUDA device; without one they say so, and write nothing.
"""

from __future__ import annotations

import argparse
import importlib
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

from benchmarks import harness, regression

SUBJECTS = (
  "scalar",
  "kernels",
  "identity",
  "vmap",
  "workers",
  "envs",
  "sharding",
  "feed",
  "install",
  "dispatch",
  "taps",
  "channels",
  "progress",
  "growth",
  "first",
  "import",
  "solver",
  "objects",
  "steer",
  "memory",
  "threads",
  "tools",
)
CUDA_SUBJECTS = (
  "cuda_identity",
  "cuda_gates",
  "cuda_kernels",
  "cuda_taps",
  "cuda_elementwise",
)


def main() -> int:
  """Runs what the command line asks for; non-zero when a subject could not be run."""
  arguments = _parser().parse_args()
  subjects = arguments.subjects or list(SUBJECTS)
  subjects = [each for name in subjects for each in (CUDA_SUBJECTS if name == "cuda" else [name])]
  if len(subjects) == 1:
    return _run(subjects[0], arguments)
  return max(_run_in_child(subject, arguments) for subject in subjects)


def _parser() -> argparse.ArgumentParser:
  parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
  parser.add_argument(
    "subjects", nargs="*", metavar="subject", help=", ".join((*SUBJECTS, *CUDA_SUBJECTS))
  )
  parser.add_argument("--quick", action="store_true", help="short run, for a smoke test")
  parser.add_argument("--rounds", type=int, help="rounds, in place of each subject's own number")
  parser.add_argument("--no-json", action="store_true", help="print only")
  parser.add_argument(
    "--into", default="", metavar="FOLDER", help="of benchmarks/results, for the JSON"
  )
  parser.add_argument("--check", action="store_true", help="compare with the committed JSON")
  return parser


def _run(subject: str, arguments: argparse.Namespace) -> int:
  known = (*SUBJECTS, *CUDA_SUBJECTS)
  if subject not in known:
    print(f"no benchmark named '{subject}'; there are {', '.join(known)}", file=sys.stderr)
    return 2
  if subject in CUDA_SUBJECTS:
    # Other libraries and pinned memory need some of the device, too.
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
  else:
    # Deviceless runs must not pick up an accelerator or probe for one.
    os.environ.setdefault("JAX_PLATFORMS", "cpu")
  module = importlib.import_module(f"benchmarks.bench_{subject}")
  options = harness.Options(quick=arguments.quick, rounds=arguments.rounds)
  try:
    report = module.run(options)
  except harness.NoDevice as error:
    print(f"{subject}: nothing measured and nothing written: {error}")
    return 3
  report.show()
  where = harness.environment()
  versions = where["versions"]
  print(f"{where['cpu']}, {where['cores']} cores, Python {where['python']}, jax {versions['jax']}")
  if arguments.check:
    return _compare(subject, report, lambda: module.run(options))
  if not arguments.no_json:
    print(f"written: {report.write(arguments.into).relative_to(Path(__file__).parent.parent)}")
  return 0


def _compare(subject: str, report: harness.Report, again: Callable[[], harness.Report]) -> int:
  """1 if a row is worse than the committed one in `report` and in another run, else 0."""
  then = regression.committed(subject)
  found = regression.worse(then, report.to_json())
  if found:
    print(f"{subject}: {len(found)} rows look worse; measured once more")
    names = {each.row for each in found}
    found = [each for each in regression.worse(then, again().to_json()) if each.row in names]
  count = len(regression.ratios(report.to_json()))
  print(*found, f"{subject}: {len(found)} of {count} rows got worse", sep="\n")
  return 1 if found else 0


def _run_in_child(subject: str, arguments: argparse.Namespace) -> int:
  command = [sys.executable, "-m", "benchmarks", subject]
  command += ["--quick"] if arguments.quick else []
  command += ["--rounds", str(arguments.rounds)] if arguments.rounds else []
  command += ["--no-json"] if arguments.no_json else []
  command += ["--into", arguments.into] if arguments.into else []
  command += ["--check"] if arguments.check else []
  return subprocess.run(command, check=False).returncode


if __name__ == "__main__":
  sys.exit(main())
