"""The README's and docs/performance.md's tables, from benchmarks/results/*.json.

    python tools/benchmark_table.py            # prints the README's table
    python tools/benchmark_table.py --write    # puts tables between the markers of both pages
    python tools/benchmark_table.py --check    # fails when a page's table is not what the JSON says

A page marks a table's place with `<!-- benchmark: NAME -->` and `<!-- end of benchmark -->`, where
NAME is "summary" or a subject of the benchmarks.
"""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmarks" / "results"
PAGES = [ROOT / "README.md", ROOT / "docs" / "performance.md"]
MARKED = re.compile(r"(<!-- benchmark: ([\w-]+) -->\n).*?(<!-- end of benchmark -->)", re.DOTALL)
UNITS = {"us": "µs", "ms": "ms", "MiB": "MiB"}

# What is measured, (subject, JAX's row, callgate's row).
SUMMARY = (
  ("one call on an f32 scalar in a compiled loop", "scalar", "jax pure_callback",
   "callgate in-place gate"),
  ("the same, `jax.pure_callback` after `callgate.install()`", "install", "jax pure_callback",
   "jax pure_callback after install()"),
  ("f32[8,1024,1024], identity, in a compiled loop", "identity", "jax pure_callback",
   "callgate in-place gate"),
  ("one of 1,000 lanes under `vmap`", "vmap", "jax pure_callback, sequential",
   'callgate in-place gate, vmap="each"'),
  ("a scalar streamed out: `jax.debug.callback`, and a tap", "taps",
   "jax debug.callback, f32 scalar", "callgate tap, f32 scalar"),
)  # fmt: skip


def subject(name: str) -> dict[str, Any] | None:
  """The newest full run of a subject, or None."""
  path = RESULTS / f"{name}.json"
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


def summary() -> str:
  """Before and after, a row for each of SUMMARY."""
  lines = ["| | JAX | callgate | ratio |", "|---|---:|---:|---:|"]
  for what, name, theirs, ours in SUMMARY:
    report = subject(name)
    if report is None:
      continue
    before, after = minimum(report, theirs), minimum(report, ours)
    ratio = f"**{before / after:.3g}x**" if before and after else ""
    unit = report["unit"]
    lines.append(f"| {what} | {quantity(before, unit)} | {quantity(after, unit)} | {ratio} |")
  return "\n".join(lines) + "\n"


def full(name: str) -> str:
  """All rows of a subject."""
  report = subject(name)
  if report is None:
    return "Not measured yet.\n"
  lines = [f"{report['title']}.", "", "| | minimum | median |", "|---|---:|---:|"]
  for row in report["rows"]:
    if row["status"] == "ok":
      unit = row.get("unit", report["unit"])
      cells = [quantity(row[key], unit) for key in ("minimum", "median")]
    else:
      cells = [row["status"], ""]
    lines.append(f"| {row['name']} | {cells[0]} | {cells[1]} |")
  return "\n".join(lines) + "\n"


def sharding() -> str:
  """What moves, what a call costs and what compiling costs, by the number of devices."""
  report = subject("sharding")
  if report is None:
    return "Not measured yet.\n"
  counts: list[int] = report["settings"]["devices"]

  def cell(who: str, what: str, devices: int, unit: str) -> str:
    name = f"{who}, {what}, {devices} device{'s' if devices > 1 else ''}"
    return quantity(minimum(report, name), unit)

  gate, kernel, theirs = "callgate gate on shards", "callgate kernel on shards", "jax pure_callback"
  lines = [
    "| | devices | gate: moved | time | `pure_callback`: moved | time |",
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
  lines += ["", f"| devices | {' | '.join(map(str, counts))} |", "|---|" + "--:|" * len(counts)]
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


def environment() -> str:
  """One line on the machine and the versions."""
  report = subject("scalar")
  if report is None:
    return ""
  where = report["environment"]
  versions = where["versions"]
  return (
    f"{where['cpu']}, {where['cores']} cores, {where['system']}, Python {where['python']}, "
    f"JAX {versions['jax']}, NumPy {versions['numpy']}.\n"
  )


def table(name: str) -> str:
  """The text between two markers."""
  own = {"summary": summary, "environment": environment, "sharding": sharding}
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
