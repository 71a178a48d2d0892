# SPDX-License-Identifier: Apache-2.0
"""Measures contestants side by side and reports them.

A *contestant* is a name and a `build` function. `build` imports, compiles and checks whatever the
contestant needs and returns its `Work`: a thunk, and the number of calls that one run of it makes
before it returns with all of their results there. `measure` builds every contestant once, then runs
them round-robin: one sample of each per round, in an order rotated by one every round, so that a
noisy second on a shared machine hits all of them alike. `fitted` gives a slow contestant fewer
calls a sample: were its samples longer than the others', it would hardly ever have a quiet one. A
contestant that cannot run is a row that says why; none is dropped.

A *report* is the rows of one subject (minimum and median per call), targets computed from them,
and what is needed to read them elsewhere: processor, cores, versions. It holds no host name and no
path.
"""

from __future__ import annotations

import gc
import importlib
import importlib.metadata
import json
import os
import platform
import re
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any

import jax

RESULTS = Path(__file__).parent / "results"
SECOND = {"s": 1.0, "ms": 1e3, "us": 1e6, "ns": 1e9}
PEER_DISTRIBUTIONS = (
  "callgate",
  "jaxlib",
  "jax-tvm-ffi",
  "apache-tvm-ffi",
  "warp-lang",
  "brainevent",
  "numba",
  "wrap-torch2jax",
  "jax-tap",
  "jax-tqdm",
  "torch",
)

# The time of one sample: shorter than the scheduler's slices, longer than one dispatch.
SAMPLE_SECONDS = 0.003

Thunk = Callable[[], object]


class NotInstalled(Exception):
  """A contestant's package (or compiler) is not in this environment; the message says which."""


class NoDevice(Exception):
  """A subject needs a device that is not there; the message says which."""


@dataclass(frozen=True)
class Work:
  """A thunk, and how many calls one run of it makes."""

  thunk: Thunk
  calls: int


@dataclass(frozen=True)
class Contestant:
  """One row to be measured; `build` may raise `NotInstalled`."""

  name: str
  build: Callable[[], Work]


@dataclass(frozen=True)
class Row:
  """A contestant's outcome: samples in `unit`, or the reason why there are none."""

  name: str
  status: str = "ok"
  note: str = ""
  samples: tuple[float, ...] = ()
  cpu_samples: tuple[float, ...] = ()  # the same samples in processor time of all threads
  calls: int = 1  # in each sample
  unit: str | None = None  # the report's; "" for a plain number

  @property
  def minimum(self) -> float | None:
    return min(self.samples) if self.samples else None

  @property
  def median(self) -> float | None:
    return statistics.median(self.samples) if self.samples else None

  @property
  def cpu(self) -> float | None:
    return min(self.cpu_samples) if self.cpu_samples else None


@dataclass(frozen=True)
class Target:
  """A limit on `row`'s minimum, or on its ratio to the minimum of `over`.

  Exactly one of `at_most` and `at_least` is given.
  """

  claim: str
  row: str
  over: str | None = None
  at_most: float | None = None
  at_least: float | None = None


@dataclass(frozen=True)
class Options:
  """How long a run is: `--quick` is for smoke tests, its numbers are not to be quoted."""

  quick: bool = False
  rounds: int | None = None

  def pick(self, full: int, quick: int) -> int:
    """`full`, or `quick` in a quick run."""
    return quick if self.quick else full

  def rounds_or(self, full: int, quick: int = 3) -> int:
    """The number of rounds: the user's, else the subject's own."""
    return self.rounds or self.pick(full, quick)


@dataclass
class Report:
  """One subject's rows, targets and settings; printed as a table and written as JSON."""

  name: str
  title: str
  unit: str
  rows: list[Row]
  # Ratios are taken over this row; `references` names another one for some rows.
  reference: str | None = None
  targets: Sequence[Target] = ()
  settings: dict[str, Any] = field(default_factory=dict)
  facts: dict[str, Any] = field(default_factory=dict)
  quick: bool = False
  references: dict[str, str] = field(default_factory=dict)
  device: dict[str, Any] | None = None  # that it ran on, if not the processor

  def row(self, name: str) -> Row | None:
    """The row of that name, if there is one."""
    return next((row for row in self.rows if row.name == name), None)

  def ratio(self, name: str, over: str, statistic: str = "minimum") -> float | None:
    """One row's minimum (or median) divided by another's; None where either was not measured."""
    above, below = self.row(name), self.row(over)
    if above is None or below is None:
      return None
    numerator, denominator = getattr(above, statistic), getattr(below, statistic)
    return numerator / denominator if numerator is not None and denominator else None

  def verdict(self, target: Target) -> tuple[float | None, str]:
    """The target's value and `met`, `missed` or `not measured`."""
    if target.over is None:
      row = self.row(target.row)
      value = row.minimum if row else None
    else:
      value = self.ratio(target.row, target.over)
    if value is None:
      return None, "not measured"
    if target.at_most is not None:
      return value, "met" if value <= target.at_most else "missed"
    assert target.at_least is not None
    return value, "met" if value >= target.at_least else "missed"

  def to_json(self) -> dict[str, Any]:
    """All of the report as plain values."""
    return {
      "name": self.name,
      "title": self.title,
      "unit": self.unit,
      "quick": self.quick,
      "settings": self.settings,
      "environment": environment() | ({"device": self.device} if self.device else {}),
      "rows": [self._row_to_json(row) for row in self.rows],
      "targets": [self._target_to_json(target) for target in self.targets],
      "facts": self.facts,
    }

  def _row_to_json(self, row: Row) -> dict[str, Any]:
    ratios = {}
    if reference := self.references.get(row.name, self.reference):
      ratios = {
        "reference": reference,
        "ratio_of_minima": self.ratio(row.name, reference),
        "ratio_of_medians": self.ratio(row.name, reference, "median"),
      }
    return {
      "name": row.name,
      "status": row.status,
      "note": row.note,
      **({} if row.unit is None else {"unit": row.unit}),
      "minimum": row.minimum,
      "median": row.median,
      "minimum_cpu": row.cpu,
      "rounds": len(row.samples),
      "calls_per_round": row.calls,
      **ratios,
    }

  def _target_to_json(self, target: Target) -> dict[str, Any]:
    value, verdict = self.verdict(target)
    return {**asdict(target), "value": value, "verdict": verdict}

  def write(self, folder: str = "") -> Path:
    """Writes `<name>.json` (`<name>.quick.json` for a quick run) and returns its path.

    Args:
      folder: of `results`, in which it is made.
    """
    path = RESULTS / folder / (f"{self.name}.quick.json" if self.quick else f"{self.name}.json")
    path.parent.mkdir(exist_ok=True)
    path.write_text(json.dumps(self.to_json(), indent=2) + "\n")
    return path

  def show(self) -> None:
    """Prints the table, the facts and the targets."""
    print(f"\n{self.title}\n")
    heads = ["contestant", f"min {self.unit}", "median", "min cpu", "ratio", "note"]
    lines = [[row.name, *self._numbers(row), self._note(row)] for row in self.rows]
    widths = [max(len(line[i]) for line in [heads, *lines]) for i in range(5)]
    for line in [heads, *lines]:
      cells = [line[0].ljust(widths[0])]
      cells += [line[i].rjust(widths[i]) for i in range(1, 5)]
      print("  ".join([*cells, line[5]]).rstrip())
    references = sorted({self.reference or "", *self.references.values()} - {""})
    for reference in references:
      print(f"(ratio: minimum over the minimum of '{reference}')")
    for key, value in self.facts.items():
      print(f"{key}: {value}")
    for target in self.targets:
      print(self._target_line(target))

  def _numbers(self, row: Row) -> list[str]:
    if row.minimum is None or row.median is None:
      return ["-", "-", "-", "-"]
    reference = self.references.get(row.name, self.reference)
    ratio = self.ratio(row.name, reference) if reference else None
    shown = "-" if ratio is None else f"{ratio:.2f}" if ratio >= 0.1 else f"{ratio:.2g}"
    cpu = "-" if row.cpu is None else f"{row.cpu:.3f}"
    return [f"{row.minimum:.3f}", f"{row.median:.3f}", cpu, shown]

  @staticmethod
  def _note(row: Row) -> str:
    if row.status == "ok":
      return row.note
    return f"{row.status}: {row.note}"

  def _target_line(self, target: Target) -> str:
    value, verdict = self.verdict(target)
    limit = f"<= {target.at_most}" if target.at_most is not None else f">= {target.at_least}"
    number = "-" if value is None else f"{value:.3g}"
    return f"[{verdict}] {target.claim}: {number} ({limit})"


def measure(contestants: Sequence[Contestant], *, rounds: int, unit: str = "us") -> list[Row]:
  """Builds all contestants, runs them in interleaved rounds, and returns a row for each.

  Samples are times per call in `unit`. The cyclic garbage collector is off while a sample is taken
  and runs between rounds, as in `timeit`.
  """
  works, failed = _build(contestants)
  samples: dict[str, list[tuple[float, float]]] = {name: [] for name in works}
  ready = list(works)
  for shift in range(rounds):
    gc.collect()
    start = shift % max(len(ready), 1)
    for name in ready[start:] + ready[:start]:
      scale = SECOND[unit] / works[name].calls
      wall, cpu = time_once(works[name].thunk)
      samples[name].append((wall * scale, cpu * scale))
  rows = dict(failed)
  for name, work in works.items():
    wall, cpu = zip(*samples[name], strict=True)
    rows[name] = Row(name, samples=wall, cpu_samples=cpu, calls=work.calls)
  return [rows[contestant.name] for contestant in contestants]


def repeated(program: Callable[..., Any], *operands: Any) -> Callable[[int], Thunk]:
  """Returns a function of a number of calls, which makes them in turn and waits for each."""

  def make(calls: int) -> Thunk:
    def thunk() -> None:
      for _ in range(calls):
        jax.block_until_ready(program(*operands))

    return thunk

  return make


def fitted(make: Callable[[int], Thunk], most: int, least: int = 1) -> Work:
  """`make(calls)` for as many calls as take about `SAMPLE_SECONDS`, from `least` to `most`."""
  calls = min(most, max(least, 20))
  for _ in range(3):  # the first trials are short, and mostly measure the program's dispatch
    thunk = make(calls)
    thunk()
    seconds = min(time_once(thunk)[0] for _ in range(3)) / calls
    fits = min(most, max(least, int(SAMPLE_SECONDS / seconds)))
    if fits <= calls * 1.25:
      break
    calls = fits
  return Work(make(calls), calls)


def _build(contestants: Sequence[Contestant]) -> tuple[dict[str, Work], dict[str, Row]]:
  """Builds and warms up (two runs); a contestant that fails becomes a row with the reason."""
  works: dict[str, Work] = {}
  failed: dict[str, Row] = {}
  for contestant in contestants:
    try:
      work = contestant.build()
      work.thunk()
      work.thunk()
      works[contestant.name] = work
    except NotInstalled as error:
      failed[contestant.name] = Row(contestant.name, "not installed", neutral(str(error)))
    except Exception as error:  # noqa: BLE001 (a peer's failure is a result, whatever its type)
      reason = neutral(f"{type(error).__name__}: {error}")
      failed[contestant.name] = Row(contestant.name, "failed", reason)
  return works, failed


def time_once(thunk: Thunk) -> tuple[float, float]:
  """Seconds of one run, by the clock and of processor time; the garbage collector is off."""
  enabled = gc.isenabled()
  gc.disable()
  try:
    start, start_cpu = time.perf_counter(), time.process_time()
    thunk()
    return time.perf_counter() - start, time.process_time() - start_cpu
  finally:
    if enabled:
      gc.enable()


def require(module: str, distribution: str) -> ModuleType:
  """Imports a peer's module, or raises NotInstalled with the package to install."""
  try:
    return importlib.import_module(module)
  except ModuleNotFoundError as error:
    raise NotInstalled(f"{error} (PyPI: {distribution})") from error


def check(condition: bool, message: str) -> None:
  """Raises when a contestant does not do the work that it is timed for."""
  if not condition:
    raise AssertionError(message)


def neutral(text: str) -> str:
  """The first line of a message, short, with directories taken out of paths."""
  lines = text.strip().splitlines()
  return re.sub(r"(?<![\w.])/[^\s'\":]*/", "", lines[0] if lines else "")[:160]


def environment() -> dict[str, Any]:
  """Processor, cores and versions: what a reader elsewhere needs, and nothing that names a host."""
  versions = {name: version_of(name) for name in ("jax", "numpy", *PEER_DISTRIBUTIONS)}
  return {
    "cpu": cpu_model(),
    "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
    "system": platform.system(),
    "python": platform.python_version(),
    "versions": versions,
  }


def version_of(distribution: str) -> str | None:
  """An installed distribution's version, or None."""
  try:
    return importlib.metadata.version(distribution)
  except importlib.metadata.PackageNotFoundError:
    return None


def cpu_model() -> str:
  """The processor's name and instruction set."""
  model = ""
  if Path("/proc/cpuinfo").exists():
    found = re.search(r"model name\s*:\s*(.*)", Path("/proc/cpuinfo").read_text(encoding="utf-8"))
    model = found.group(1).strip() if found else ""
  return f"{model or platform.processor() or 'unknown'} ({platform.machine()})"
