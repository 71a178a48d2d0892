# SPDX-License-Identifier: Apache-2.0
"""The time that `import callgate` adds to `import jax`, each in a fresh interpreter.

A child process imports jax, starts a clock, imports the package and prints the time; peers are
measured alike. Bytecode is compiled by a first run that is not counted. Unit: milliseconds.
"""

from __future__ import annotations

import importlib.util
import subprocess
import sys

from benchmarks import harness

NAME = "import callgate, beyond import jax"
FIRST = "import callgate and make a gate, beyond import jax"
TARGETS = (harness.Target("import callgate beyond import jax, milliseconds", NAME, at_most=15.0),)

# Name, statement that runs before the clock, what is imported and done then, its PyPI name.
CONTESTANTS = (
  ("import jax", "import sys", "jax", "jax"),
  (NAME, "import jax", "callgate", "callgate"),
  (FIRST, "import jax", "callgate; callgate.gate(abs, out=())", "callgate"),
  ("import jax_tvm_ffi, beyond import jax", "import jax", "jax_tvm_ffi", "jax-tvm-ffi"),
  ("import brainevent, beyond import jax", "import jax", "brainevent", "brainevent"),
  ("import warp, beyond import jax", "import jax", "warp", "warp-lang"),
  (
    "import wrap_torch2jax, beyond import jax and torch",
    "import jax, torch",
    "wrap_torch2jax",
    "wrap-torch2jax",
  ),
)

Samples = dict[str, list[float]]


def run(options: harness.Options) -> harness.Report:
  """Imports every package in fresh interpreters, in interleaved rounds."""
  failed: dict[str, harness.Row] = {}
  samples: Samples = {name: [] for name, *_ in CONTESTANTS}
  for name, before, module, distribution in CONTESTANTS:
    if importlib.util.find_spec(module.partition(";")[0]) is None:
      reason = f"No module named '{module}' (PyPI: {distribution})"
      failed[name] = harness.Row(name, "not installed", reason)
    else:
      _import_seconds(name, before, module, failed)
  for _ in range(options.rounds_or(7, quick=2)):
    _one_round(samples, failed)
  rows = [
    failed.get(name) or harness.Row(name, samples=tuple(samples[name])) for name, *_ in CONTESTANTS
  ]
  title = "Import time in a fresh interpreter"
  return harness.Report("import", title, "ms", rows, "import jax", TARGETS, quick=options.quick)


def _one_round(samples: Samples, failed: dict[str, harness.Row]) -> None:
  for name, before, module, _ in CONTESTANTS:
    if name in failed:
      continue
    seconds = _import_seconds(name, before, module, failed)
    if seconds is not None:
      samples[name].append(seconds * 1e3)


def _import_seconds(
  name: str, before: str, module: str, failed: dict[str, harness.Row]
) -> float | None:
  """Seconds of one import in a child process; a failure becomes a row."""
  clock = "from time import perf_counter as now; start = now()"
  script = f"{before}; {clock}; import {module}; print('seconds', now() - start)"
  child = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
  words = child.stdout.split()
  if child.returncode != 0 or "seconds" not in words:
    failed[name] = harness.Row(
      name, "failed", harness.neutral((child.stderr.strip().splitlines() or [""])[-1])
    )
    return None
  return float(words[words.index("seconds") + 1])
