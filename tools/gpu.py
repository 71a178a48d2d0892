# SPDX-License-Identifier: Apache-2.0
"""Runs what needs a CUDA device, within a time, and keeps the logs.

    python tools/gpu.py test  [--out DIR] [--seconds N] [PYTEST ARGUMENT ...]
    python tools/gpu.py bench [--out DIR] [--seconds N] [BENCHMARK ARGUMENT ...]

With this interpreter, from the repository's root: callgate and JAX for CUDA must be importable.
`test` runs the tests marked gpu, one after the other; `bench` the benchmarks' `cuda` subjects,
whose JSON goes to benchmarks/results and into DIR. A run that still runs after N seconds is ended,
and the log says so. Exit status: that of pytest or of the benchmarks, 3 without a device, 124 when
the time ran out.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TextIO

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmarks" / "results"
# Where tests are marked gpu.
MARKED = ("tests/python/contract", "tests/python/gpu", "tests/python/project")
TIME_IS_UP, NO_DEVICE = 124, 3
_DEVICES = """
import sys
import jax
try:
  found = jax.devices("cuda")
except RuntimeError as error:
  sys.exit(f"no CUDA device that JAX can use: {str(error).splitlines()[0]}")
print("jax", jax.__version__, [device.device_kind for device in found])
import callgate
print("callgate", callgate.__version__, callgate.__file__)
"""


def main() -> int:
  """Runs what the command line asks for."""
  parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
  parser.add_argument("what", choices=("test", "bench"))
  parser.add_argument("--out", type=Path, default=ROOT / "build" / "gpu")
  parser.add_argument("--seconds", type=float, default=570)
  arguments, rest = parser.parse_known_args()
  arguments.out.mkdir(parents=True, exist_ok=True)
  path = arguments.out / f"{arguments.what}.log"
  end = time.monotonic() + arguments.seconds
  with path.open("w", encoding="utf-8") as log:
    status = _device(log, end)
    if status == 0:
      status = (_test if arguments.what == "test" else _bench)(arguments.out, rest, log, end)
  print(f"written: {path}")
  return status


def _device(log: TextIO, end: float) -> int:
  if shutil.which("nvidia-smi"):
    _run(["nvidia-smi"], log, end)
  return NO_DEVICE if _run([sys.executable, "-c", _DEVICES], log, end) else 0


def _test(out: Path, rest: Sequence[str], log: TextIO, end: float) -> int:
  pytest = [sys.executable, "-m", "pytest", "-m", "gpu", "-v", "-p", "no:cacheprovider"]
  where = [] if any(not word.startswith("-") for word in rest) else MARKED
  return _run([*pytest, f"--junitxml={out / 'test.xml'}", *rest, *where], log, end)


def _bench(out: Path, rest: Sequence[str], log: TextIO, end: float) -> int:
  began = time.time()
  status = _run([sys.executable, "-m", "benchmarks", "cuda", *rest], log, end)
  for path in sorted(RESULTS.glob("cuda_*.json")):
    if path.stat().st_mtime >= began - 1:
      shutil.copy2(path, out / path.name)
  return status


def _run(command: Sequence[str], log: TextIO, end: float) -> int:
  """Runs a command in the time that is left; what it prints goes to the terminal and the log."""
  paths = [str(ROOT), *filter(None, [_package(), os.environ.get("PYTHONPATH")])]
  environment = {
    "XLA_PYTHON_CLIENT_PREALLOCATE": "false",
    **os.environ,
    "PYTHONPATH": os.pathsep.join(paths),
    "PYTHONUNBUFFERED": "1",
  }
  child = subprocess.Popen(
    command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
    start_new_session=True,
  )  # fmt: skip
  timer = threading.Timer(max(end - time.monotonic(), 0.1), _end, (child,))
  timer.start()
  try:
    assert child.stdout is not None
    for line in child.stdout:
      sys.stdout.write(line)
      log.write(line)
    status = child.wait()
  finally:
    timer.cancel()
  if time.monotonic() >= end:
    line = f"ended after its time: {' '.join(command[:4])}\n"
    sys.stdout.write(line)
    log.write(line)
    return TIME_IS_UP
  return status


def _end(child: subprocess.Popen[str]) -> None:
  """Ends a command with all that it started."""
  with contextlib.suppress(ProcessLookupError):
    os.killpg(child.pid, signal.SIGKILL)


def _package() -> str | None:
  """The package in the tree, where a module was built into it."""
  package = ROOT / "python" / "callgate"
  return str(package.parent) if list(package.glob("_callgate*.so")) else None


if __name__ == "__main__":
  sys.exit(main())
