# SPDX-License-Identifier: Apache-2.0
"""The tables of times in the README and the documentation, from benchmarks/results/*.json.

    python tools/benchmark_table.py            # prints the README's table
    python tools/benchmark_table.py --write    # puts tables between the markers of the pages
    python tools/benchmark_table.py --check    # fails when a page's table is not what the JSON says

A page marks a table's place with `<!-- benchmark: NAME -->` and `<!-- end of benchmark -->`, where
NAME is "summary", "costs", "ledger", "profiles", "environment", the same of a GPU ("gpu-summary",
"gpu-environment"), of the newest JAX ("newest-ledger", "newest-environment"), of Python without the
GIL ("free-threaded", "free-threaded-environment") or a subject of the benchmarks.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmarks" / "results"
NEWEST = RESULTS / "newest"  # the ledger's subjects again, on the newest JAX
FREE = RESULTS / "free_threaded"  # some subjects again, on a Python without the GIL
PAGES = [
  ROOT / "README.md",
  *(
    ROOT / "docs" / f"{name}.md"
    for name in ("performance", "costs", "gpu", "ledger", "ledger_profiles", "free_threading")
  ),
  *sorted((ROOT / "docs").glob("benchmarks*.md")),
]
MARKED = re.compile(r"(<!-- benchmark: ([\w-]+) -->\n).*?(<!-- end of benchmark -->)", re.DOTALL)
UNITS = {"us": "µs", "ms": "ms", "MiB": "MiB"}

# Measured calls, as (subject, JAX's row, callgate's row).
SUMMARY = (
  ("one call on an f32 scalar in a compiled loop", "scalar", "jax pure_callback",
   "callgate in-place gate"),
  ("the same, `jax.pure_callback` after `callgate.install()`", "install", "jax pure_callback",
   "jax pure_callback after install()"),
  ("f32[8,1024,1024], identity, in a compiled loop", "identity", "jax pure_callback",
   "callgate in-place gate"),
  ("one lane (batch element) of 1,000 under `vmap`", "vmap", "jax pure_callback, sequential",
   'callgate in-place gate, vmap="each"'),
  ("a scalar streamed out, by `jax.debug.callback` or a tap", "taps",
   "jax debug.callback, f32 scalar", "callgate tap, f32 scalar"),
)  # fmt: skip

# The same on a GPU.
GPU_SUMMARY = (
  ("one call with the device's array, in a compiled loop", "cuda_gates",
   "jax buffer_callback, empty body", "callgate gate, Buffer, aliased"),
  ("one call of a NumPy function, in a compiled loop", "cuda_gates", "jax pure_callback",
   "callgate numpy gate, aliased"),
  ("a NumPy identity function on 32 MiB, aliased", "cuda_identity", "jax pure_callback, 32 MiB",
   "callgate numpy gate, aliased, 32 MiB"),
  ("a scalar streamed out, the loop included", "cuda_taps", "jax debug.callback, f32 scalar",
   "callgate tap, f32 scalar"),
  ("64 MiB streamed out of a step of matrix products, the step included", "cuda_taps",
   "a step of matrix products with debug.callback of 64 MiB",
   "a step of matrix products with a tap of 64 MiB"),
  ("a kernel launch in a CUDA graph, by jax-triton or `cg.cuda`", "cuda_kernels",
   "jax-triton, in a CUDA graph", "callgate.cuda, in a CUDA graph"),
)  # fmt: skip

# Costs, as (subject, row).
COSTS = (
  ("a call of a gate in a compiled loop", "scalar", "callgate in-place gate"),
  ("a call of a gate with `vmap=\"whole\"`, for each of 1,000 lanes", "vmap",
   'callgate in-place gate, vmap="whole"'),
  ("a call of a kernel", "kernels", "callgate.cpp, empty"),
  ("a tap of a scalar", "taps", "callgate tap, f32 scalar"),
  ("a tap of 4 KiB", "taps", "callgate tap, 4 KiB"),
  ("a `cg.check` that passes", "taps", "callgate check that holds"),
  ("a consumer that is called for each record, on its own thread", "channels",
   "function called for each record, f32 scalars"),
  ("a native sink, for each record, on the channel's thread", "channels",
   "native sink (statistics), f32 scalars"),
  ("a use of a host object, on the object's own thread", "objects",
   "callgate use, on the object's own thread"),
  ("an item of a feed", "feed", "callgate feed, cheap items"),
  ("a progress bar, for each step of a loop", "progress", "callgate beyond the plain loop"),
  ("the dispatch of a program without callbacks", "dispatch", "no callback, no effect"),
  ("the same with a pure gate", "dispatch", "callgate pure gate"),
  ("the same with an io gate", "dispatch", "callgate io gate"),
  ("the same with an ordered gate", "dispatch", "callgate ordered gate"),
  ("a call of a gate outside compiled programs", "first", "eager call: callgate gate"),
  ("`import callgate`, beyond `import jax`", "import", "import callgate, beyond import jax"),
  ("compiling a small kernel for the first time", "kernels",
   "callgate.cpp, first call with an empty cache"),
  ("the same in the next process, from the cache", "kernels",
   "callgate.cpp, made in the next process"),
  ("memory left behind by calls of a gate", "memory", "calls: callgate in-place gate"),
)  # fmt: skip


# The ledger: what is measured, its unit, what it was in the release before, and the subject and the
# claim of the target. "x" is a ratio. Where there is one, an anchor: a row of the same run that
# callgate has no part in, and what it took when the target was set.
BARE, HANDLER = ("C++ FFI handler + bare Python call", 0.145), ("C++ FFI handler, empty", 0.09)
PLAIN = ("no callback, no effect", 3.4)
LEDGER = (
  ("in-place gate, f32 scalar", "us", "0.35", "scalar", "in-place gate, microseconds", BARE),
  ("return gate with a new result", "us", "0.59", "scalar",
   "return gate with a new result, microseconds", BARE),
  ("gate on 8 devices over 1", "x", "2.3", "sharding", "a gate's call, 8 devices over 1", None),
  ("tap of a scalar", "us", "0.18", "taps", "tap of a scalar, microseconds", HANDLER),
  ("tap of 4 KiB", "us", "0.64", "taps", "tap of 4 KiB, microseconds", HANDLER),
  ("ten taps in a step of 1 ms, over none", "x", "1.03", "taps", "ten taps in a step of 1 ms",
   None),
  ("feed of scalars", "us", "10", "feed", "a scalar item, microseconds", None),
  ("feed of f32[1024]", "us", "10", "feed", "an f32[1024] item, microseconds", None),
  ("a `device_put` loop over a feed, 1 MiB beside a step", "x", "1.1-1.7", "feed",
   "a device_put loop over a feed of 1 MiB", None),
  ("dispatch of a program with an io gate", "us", "50", "dispatch", "io gate, microseconds", PLAIN),
  ("dispatch of a program with a tap", "us", "50", "dispatch", "tap, microseconds", PLAIN),
  ("dispatch of a program with an ordered gate", "us", "136", "dispatch",
   "ordered gate, microseconds", PLAIN),
  ("`install()`: `pure_callback`", "us", "5.2", "install",
   "pure_callback after install(), microseconds", ("jax pure_callback", 38.6)),
  ("`install()`: `io_callback`", "us", "5.4", "install",
   "io_callback after install(), microseconds", ("jax io_callback", 34.0)),
  ("compiling a sharded call", "ms", "5", "first", "compiling a sharded call, milliseconds", None),
  ("first 100 calls: trace, lower, compile", "ms", "160", "first",
   "first 100 calls, milliseconds", None),
  ("eager gate", "us", "74", "first", "an eager gate, microseconds", None),
  ("`cg.check` that holds, 1,024 lanes", "us", "", "taps",
   "check of 1,024 lanes that holds, microseconds", HANDLER),
  ("`vmap` on one thread over two", "x", "1.97", "kernels", "vmap on one thread over two", None),
  ("a read of a knob", "us", "", "steer", "a read of a knob, microseconds", HANDLER),
  ("`cg.stop_requested()`", "us", "", "steer", "stop_requested(), microseconds", HANDLER),
  ("`import callgate`", "ms", "21", "import", "import callgate beyond import jax, milliseconds",
   None),
  ("`cg.scan(stoppable=True)` over `lax.scan`, step of 1 µs", "x", "", "tools",
   "scan(stoppable=True), step of 1 us", None),
  ("a checkpoint every 1,000 steps of 1 ms, over none", "x", "", "tools",
   "a checkpoint every 1,000 steps of 1 ms", None),
  ("an object made and used on its thread", "us", "", "objects",
   "an object made and used on its thread, microseconds", None),
  ("a recorded call on 1 KiB", "us", "", "tools", "a recorded call on 1 KiB, microseconds", None),
  ("`find_nan` over a program of 1 ms", "x", "", "tools", "find_nan over a program of 1 ms", None),
  ("the live page, 1,000 records a second", "% of a core", "", "tools",
   "the live page, percent of a core", None),
)  # fmt: skip

# With and without the GIL: the subject, and the claim of a target or a row's name.
THREADS = (
  ("two gates on two threads, speedup", "threads", "two gates on two threads"),
  ("64 lanes with `parallel=True`, speedup", "threads", "64 lanes at once"),
  ("gates on two devices, speedup", "threads", "two devices at once"),
  ("a consumer beside the program's gate, speedup", "threads",
   "a consumer beside the program's gate"),
  ("`jax.pure_callback` on two threads, speedup", "threads",
   "the peer: pure_callback on two threads"),
  ("the bodies alone, without JAX, on two threads, speedup", "threads",
   "the bodies alone on two threads"),
  ("a gate's call on 8 devices over one device's, time", "sharding",
   "a gate's call, 8 devices over 1"),
  ("one call, in-place gate, time", "scalar", "callgate in-place gate"),
  ("one call, gate that returns an array, time", "scalar", "callgate return gate, negation"),
  ("one call, Warp's `jax_callable`, time", "scalar", "warp jax_callable"),
  ("one call, `jax.pure_callback`, time", "scalar", "jax pure_callback"),
)  # fmt: skip


def subject(name: str, folder: Path = RESULTS) -> dict[str, Any] | None:
  """The newest full run of a subject, or None."""
  path = folder / f"{name}.json"
  return json.loads(path.read_text(encoding="utf-8")) if path.exists() else None


def minimum(report: dict[str, Any], row: str) -> float | None:
  """A row's least time, or None where it was not measured."""
  return next((r["minimum"] for r in report["rows"] if r["name"] == row), None)


def quantity(value: float | None, unit: str) -> str:
  """Three significant digits, or what is left of them before the point."""
  if value is None:
    return "not measured"
  text = f"{value:.3g}" if abs(value) < 100 else f"{value:.0f}"
  return f"{text} {UNITS.get(unit, unit)}".rstrip()


def summary(rows: Sequence[tuple[str, str, str, str]] = SUMMARY, they: str = "JAX") -> str:
  """Before and after, a row for each of `rows`."""
  head = f"| time, lower is better | {they} | callgate | speedup, higher is better |"
  lines = [head, "|---|---:|---:|---:|"]
  for what, name, theirs, ours in rows:
    report = subject(name)
    if report is None:
      continue
    before, after = minimum(report, theirs), minimum(report, ours)
    ratio = f"**{before / after:.3g}x**" if before and after else ""
    unit = report["unit"]
    lines.append(f"| {what} | {quantity(before, unit)} | {quantity(after, unit)} | {ratio} |")
  return "\n".join(lines) + "\n"


def costs() -> str:
  """A row for each of COSTS."""
  lines = ["| | cost, lower is better |", "|---|---:|"]
  for what, name, row in COSTS:
    if (report := subject(name)) is not None:
      unit = next((r.get("unit", report["unit"]) for r in report["rows"] if r["name"] == row), "")
      value = minimum(report, row)
      if value is not None and unit == "us" and value >= 1000:
        value, unit = value / 1000, "ms"
      lines.append(f"| {what} | {quantity(value, unit)} |")
  return "\n".join(lines) + "\n"


def ledger(folder: Path = RESULTS) -> str:
  """A row for each of LEDGER: before, the target, what was reached, and that by its anchor."""
  lines = ["| | better | before | target | now | scaled | |", "|---|---|---:|---:|---:|---:|---|"]
  for what, unit, before, name, claim, anchor in LEDGER:
    report = subject(name, folder)
    for target in report["targets"] if report is not None else ():
      if target["claim"] == claim:
        limit, value = target["at_most"] or target["at_least"], target["value"]
        verdict, scaled = target["verdict"], None
        if report is not None and anchor is not None and value is not None:
          now = minimum(report, anchor[0])
          scaled = value * anchor[1] / now if now else None
        if verdict == "missed" and scaled is not None and scaled <= limit:
          verdict = "met, scaled"
        once = f"{before} {UNITS.get(unit, unit)}" if before else ""
        by_anchor = quantity(scaled, unit) if scaled is not None else ""
        better = "lower" if target["at_most"] else "higher"
        cells = [better, once, quantity(limit, unit), quantity(value, unit), by_anchor, verdict]
        lines.append(f"| {what} | {' | '.join(cells)} |")
  return "\n".join(lines) + "\n"


def free_threaded() -> str:
  """A row for each of THREADS: with the GIL and without."""
  lines = ["| speedup: higher is better; time: lower is better | with the GIL | without |"]
  lines.append("|---|---:|---:|")
  for what, name, of in THREADS:
    cells = [_value(subject(name, folder), of) for folder in (RESULTS, FREE)]
    lines.append(f"| {what} | {' | '.join(cells)} |")
  return "\n".join(lines) + "\n"


def _value(report: dict[str, Any] | None, of: str) -> str:
  """The value of a target's claim, as a ratio, or else a row's least time."""
  if report is None:
    return "not measured"
  claimed = next((one["value"] for one in report["targets"] if one["claim"] == of), None)
  return quantity(claimed, "x") if claimed else quantity(minimum(report, of), report["unit"])


def profiles() -> str:
  """Where the time goes, a row for each contestant that was profiled."""
  report = subject("profiles")
  if report is None:
    return "Not measured yet.\n"
  lines = ["| | by | share of the time |", "|---|---|---|"]
  for row in report["rows"]:
    shares = ", ".join(f"{whose} {share:.0%}" for whose, share in row["shares"].items())
    lines.append(f"| {row['subject']}: {row['name']} | {row['by']} | {shares} |")
  return "\n".join(lines) + "\n"


def full(name: str) -> str:
  """All rows of a subject."""
  report = subject(name)
  if report is None:
    return "Not measured yet.\n"
  head = "| lower is better | minimum | median |"
  lines = [f"{report['title']}.", "", head, "|---|---:|---:|"]
  for row in report["rows"]:
    if row["status"] == "ok":
      unit = row.get("unit", report["unit"])
      cells = [quantity(row[key], unit) for key in ("minimum", "median")]
    else:
      cells = [row["status"], ""]
    lines.append(f"| {row['name']} | {cells[0]} | {cells[1]} |")
  return "\n".join(lines) + "\n"


def sharding() -> str:
  """The bytes that move, the cost of a call and of compiling, by the number of devices."""
  report = subject("sharding")
  if report is None:
    return "Not measured yet.\n"
  counts: list[int] = report["settings"]["devices"]

  def cell(who: str, what: str, devices: int, unit: str) -> str:
    name = f"{who}, {what}, {devices} device{'s' if devices > 1 else ''}"
    return quantity(minimum(report, name), unit)

  gate, kernel, theirs = "callgate gate on shards", "callgate kernel on shards", "jax pure_callback"
  lines = [
    "| lower is better | devices | gate: moved | time | `pure_callback`: moved | time |",
    "|---|--:|--:|--:|--:|--:|",
  ]
  for what in ("fixed array", "fixed shard"):
    for count in counts:
      cells = [
        cell(who, what + also, count, unit)
        for who in (gate, theirs)
        for also, unit in ((", moved", "MiB"), ("", "ms"))
      ]
      lines.append(f"| {what} | {count} | {' | '.join(cells)} |")
  head = f"| lower is better; devices: | {' | '.join(map(str, counts))} |"
  lines += ["", head, "|---|" + "--:|" * len(counts)]
  for what, unit, ways in (
    ("call", "us", (gate, kernel, theirs)),
    ("call, processor time", "us", (gate, kernel, theirs)),
    ("100 calls in a program", "ms", (gate, theirs)),
    ("100 bare calls", "ms", (gate, theirs)),
  ):
    for who in ways:
      cells = [cell(who, what, count, unit).replace("not measured", "") for count in counts]
      lines.append(f"| {who}: {what}{', compiled' if unit == 'ms' else ''} | {' | '.join(cells)} |")
  return "\n".join(lines) + "\n"


def environment(folder: Path = RESULTS) -> str:
  """One line on the machine and the versions."""
  report = subject("scalar", folder)
  if report is None:
    return ""
  where = report["environment"]
  versions = where["versions"]
  return (
    f"{where['cpu']}, {where['cores']} cores, {where['system']}, Python {where['python']}, "
    f"JAX {versions['jax']}, NumPy {versions['numpy']}.\n"
  )


def gpu_summary() -> str:
  """Before and after on a GPU."""
  return summary(GPU_SUMMARY, "JAX, or jax-triton")


def gpu_environment() -> str:
  """One line on the GPU and the versions."""
  report = subject("cuda_gates")
  if report is None:
    return ""
  where, device = report["environment"], report["environment"]["device"]
  versions = where["versions"] | device["versions"]
  names = {"jax": "JAX", "cupy-cuda13x": "CuPy", "torch": "PyTorch", "triton": "Triton",
           "numba-cuda": "numba-cuda"}  # fmt: skip
  libraries = [f"{name} {versions[key]}" for key, name in names.items() if versions.get(key)]
  return (
    f"{device['name']}, driver {device['driver']} (CUDA {device['cuda']}), {where['cores']} cores "
    f"of {where['cpu']}, Python {where['python']}, {', '.join(libraries)}.\n"
  )


def table(name: str) -> str:
  """The text between two markers."""
  own = {
    "summary": summary,
    "costs": costs,
    "ledger": ledger,
    "environment": environment,
    "newest-ledger": lambda: ledger(NEWEST),
    "newest-environment": lambda: environment(NEWEST),
    "free-threaded": free_threaded,
    "free-threaded-environment": lambda: environment(FREE),
    "profiles": profiles,
    "sharding": sharding,
    "gpu-summary": gpu_summary,
    "gpu-environment": gpu_environment,
  }
  return own.get(name, lambda: full(name))()


def filled(text: str) -> str:
  """A page with its tables as they should be."""
  return MARKED.sub(lambda match: f"{match[1]}\n{table(match[2])}\n{match[3]}", text)


def main(options: list[str]) -> int:
  if options not in ([], ["--write"], ["--check"]):
    print(__doc__, file=sys.stderr)
    return 2
  if not options:
    print(summary() + "\n" + environment(), end="")
  stale: list[str] = []
  for page in PAGES if options else []:
    text = page.read_text(encoding="utf-8")
    if filled(text) != text:
      stale.append(page.name)
      if options == ["--write"]:
        page.write_text(filled(text), encoding="utf-8")
  if options == ["--check"] and stale:
    print(f"stale tables in {', '.join(stale)}: run python tools/benchmark_table.py --write")
    return 1
  return 0


if __name__ == "__main__":
  sys.exit(main(sys.argv[1:]))
