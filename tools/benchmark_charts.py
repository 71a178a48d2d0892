# SPDX-License-Identifier: Apache-2.0
"""The documentation's charts, docs/assets/chart_*.svg, from benchmarks/results/*.json.

    python tools/benchmark_charts.py --write    # draws them
    python tools/benchmark_charts.py --check    # fails when one is not what the JSON says

A chart has a bar for each row of a subject that it names, on a logarithmic axis: a bar's length is
the row's least time. A chart of growth has a line for each contestant, on two such axes. Colours
follow the reader's light or dark scheme.
"""

from __future__ import annotations

import html
import math
import re
import sys
from typing import NamedTuple

from benchmark_table import ROOT, minimum, quantity, subject

ASSETS = ROOT / "docs" / "assets"
WIDTH, LABELS, NUMBERS, ROW, TOP = 720, 270, 80, 26, 34
STYLE = (
  "text{font:13px system-ui,sans-serif;fill:#222}.title{font-weight:600}"
  ".scale{font-weight:400;opacity:.7}.ours{fill:#3f51b5}.other{fill:#9aa0a6}line{stroke:#ccc}"
  "@media(prefers-color-scheme:dark){text{fill:#e2e4e9}.ours{fill:#8c9eff}.other{fill:#767c84}"
  "line{stroke:#555}}"
)


class Chart(NamedTuple):
  """A chart: its title, and its bars, (subject, row, what the reader is told)."""

  title: str
  bars: tuple[tuple[str, str, str], ...]


CHARTS = {
  "calls": Chart(
    "One call of Python on an f32 scalar, in a compiled loop",
    (
      ("scalar", "callgate in-place gate", "callgate gate"),
      ("scalar", "jax-tvm-ffi, Python function", "jax-tvm-ffi"),
      ("scalar", "jax buffer_callback", "jax buffer_callback"),
      ("install", "jax pure_callback after install()", "pure_callback, callgate.install()"),
      ("scalar", "torch2jax (rdyro)", "torch2jax"),
      ("scalar", "brainevent numba_kernel", "brainevent numba_kernel"),
      ("scalar", "warp jax_callable", "warp jax_callable"),
      ("scalar", "jax io_callback", "jax io_callback"),
      ("scalar", "jax pure_callback", "jax pure_callback"),
    ),
  ),
  "lanes": Chart(
    "One of 1,000 lanes under vmap",
    (
      ("vmap", 'callgate in-place gate, vmap="whole"', 'callgate gate, vmap="whole"'),
      ("vmap", 'callgate in-place gate, vmap="each"', 'callgate gate, vmap="each"'),
      ("vmap", "jax pure_callback, expand_dims", "pure_callback, expand_dims"),
      ("vmap", "jax buffer_callback, sequential", "buffer_callback, sequential"),
      ("vmap", "jax pure_callback, sequential", "pure_callback, sequential"),
    ),
  ),
  "taps": Chart(
    "An f32 scalar out of a compiled loop, as the program pays for it",
    (
      ("taps", "callgate tap, f32 scalar", "callgate tap"),
      ("taps", "callgate check that holds", "callgate check that holds"),
      ("taps", "jax debug.print, f32 scalar", "jax debug.print"),
      ("taps", "jax debug.callback, f32 scalar", "jax debug.callback"),
      ("taps", "jax io_callback, f32 scalar", "jax io_callback"),
      ("taps", "jax-tap, every step", "jax-tap"),
    ),
  ),
  "shards": Chart(
    "One call on a fixed array, split over 1 to 8 devices",
    tuple(
      ("sharding", f"{row}, fixed array, {n} device{'s' * (n > 1)}", f"{who}, {n}")
      for n in (1, 2, 4, 8)
      for row, who in (
        ("callgate gate on shards", "callgate gate"),
        ("jax pure_callback", "jax pure_callback"),
      )
    ),
  ),
}


def drawn(chart: Chart) -> str:
  """The chart as SVG."""
  found = []
  for name, row, label in chart.bars:
    report = subject(name)
    if report is not None and (value := minimum(report, row)):
      entry = next(each for each in report["rows"] if each["name"] == row)
      found.append((label, value, entry.get("unit", report["unit"])))
  least = min(value for _, value, _ in found)
  low, high = math.log10(least) - 0.3, math.log10(max(value for _, value, _ in found))
  height = TOP + ROW * len(found) + 8
  lines = [
    f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" role="img">',
    f"<title>{html.escape(chart.title)}</title><style>{STYLE}</style>",
    f'<text class="title" x="0" y="18">{html.escape(chart.title)}'
    ' <tspan class="scale">(logarithmic scale)</tspan></text>',
    f'<line x1="{LABELS}" x2="{LABELS}" y1="{TOP - 6}" y2="{height - 4}"/>',
  ]
  for k, (label, value, unit) in enumerate(found):
    y = TOP + ROW * k
    room = WIDTH - LABELS - NUMBERS
    length = room * (math.log10(value) - low) / (high - low)
    kind = "ours" if "callgate" in label else "other"
    at = f'x="{LABELS}" y="{y}" width="{length:.1f}" height="{ROW - 8}"'
    lines.append(
      f'<text x="{LABELS - 8}" y="{y + 14}" text-anchor="end">{html.escape(label)}</text>'
      f'<rect class="{kind}" {at} rx="2"/>'
      f'<text x="{LABELS + length + 6:.1f}" y="{y + 14}">{quantity(value, unit)}</text>'
    )
  return "\n".join([*lines, "</svg>"]) + "\n"


class Growth(NamedTuple):
  """A chart of how a cost grows: its title, what is on its axis, and a series of `growth`."""

  title: str
  axis: str
  row: str  # of a size: what follows the contestant's name
  contestants: tuple[str, ...]


GROWTH = {
  "growth_lanes": Growth(
    "A lane under vmap", "lanes", "a lane of {:,}", ("callgate gate", "jax pure_callback")
  ),
  "growth_bytes": Growth(
    "A call on an array", "bytes", "{:,} bytes",
    ("callgate gate", "jax pure_callback", "C++ handler"),
  ),
  "growth_devices": Growth(
    "A call, on every device at once", "devices", "a call on each of {:,} devices",
    ("callgate gate",),
  ),
  "growth_gates": Growth(
    "A call of many in a program", "calls in the program", "a call of {:,} in a program",
    ("callgate gate", "jax pure_callback"),
  ),
  "growth_records": Growth(
    "A tap and its delivery, after the program", "records in flight", "{:,} records in flight",
    ("callgate tap",),
  ),
}  # fmt: skip
HEIGHT, LEFT, RIGHT, BOTTOM = 260, 70, 150, 40


def grown(chart: Growth) -> str:
  """The chart of growth as SVG."""
  report = subject("growth")
  rows = {r["name"]: r["minimum"] for r in report["rows"]} if report is not None else {}
  lines = {who: _points(rows, f"{who}, {chart.row}") for who in chart.contestants}
  lines = {who: points for who, points in lines.items() if points}
  both = [point for points in lines.values() for point in points]
  (x_low, x_high), (y_low, y_high) = (
    (math.log10(min(values)), math.log10(max(values))) for values in zip(*both, strict=True)
  )
  y_low, y_high = math.floor(y_low), math.ceil(y_high)

  def place(size: float, value: float) -> tuple[float, float]:
    across = (math.log10(size) - x_low) / ((x_high - x_low) or 1)
    up = (math.log10(value) - y_low) / ((y_high - y_low) or 1)
    return LEFT + across * (WIDTH - LEFT - RIGHT), HEIGHT - BOTTOM - up * (HEIGHT - BOTTOM - TOP)

  out = [
    f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" role="img">',
    f"<title>{html.escape(chart.title)}</title><style>{STYLE}{LINES}</style>",
    f'<text class="title" x="0" y="18">{html.escape(chart.title)}'
    f' <tspan class="scale">by {chart.axis} (both axes logarithmic)</tspan></text>',
  ]
  for power in range(int(y_low), int(y_high) + 1):
    _, y = place(10**x_low, 10.0**power)
    out.append(
      f'<line x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y:.1f}" y2="{y:.1f}"/>'
      f'<text x="{LEFT - 8}" y="{y + 4:.1f}" text-anchor="end">{_short(10.0**power)}</text>'
    )
  for size in sorted({size for size, _ in both}):
    x, _ = place(size, 10.0**y_low)
    out.append(
      f'<text x="{x:.1f}" y="{HEIGHT - BOTTOM + 18}" text-anchor="middle">{_of(size)}</text>'
    )
  for who, points in lines.items():
    kind = "ours" if "callgate" in who else "other"
    places = [place(*point) for point in points]
    path = " ".join(f"{x:.1f},{y:.1f}" for x, y in places)
    dots = "".join(f'<circle class="{kind}" cx="{x:.1f}" cy="{y:.1f}" r="3"/>' for x, y in places)
    x, y = places[-1]
    out.append(
      f'<polyline class="{kind}-line" points="{path}"/>{dots}'
      f'<text x="{x + 8:.1f}" y="{y + 4:.1f}">{html.escape(who)}</text>'
    )
  return "\n".join([*out, "</svg>"]) + "\n"


LINES = (
  "polyline{fill:none;stroke-width:2}.ours-line{stroke:#3f51b5}.other-line{stroke:#9aa0a6}"
  "@media(prefers-color-scheme:dark){.ours-line{stroke:#8c9eff}.other-line{stroke:#767c84}}"
)


def _points(rows: dict[str, float | None], row: str) -> list[tuple[int, float]]:
  """(size, least time) of the rows of that pattern."""
  pattern = re.compile(re.escape(row).replace(re.escape("{:,}"), "([0-9,]+)"))
  found = [
    (int(match[1].replace(",", "")), value)
    for name, value in rows.items()
    if (match := pattern.fullmatch(name)) and value
  ]
  return sorted(found)


def _short(microseconds: float) -> str:
  if microseconds >= 1e6:
    return f"{microseconds / 1e6:g} s"
  return f"{microseconds / 1e3:g} ms" if microseconds >= 1e3 else f"{microseconds:g} µs"


def _of(size: int) -> str:
  for unit, name in ((1 << 30, "Gi"), (1 << 20, "Mi"), (1 << 10, "Ki")):
    if size >= unit and size % unit == 0:
      return f"{size // unit} {name}"
  return f"{size:,}"


def main(options: list[str]) -> int:
  if options not in (["--write"], ["--check"]):
    print(__doc__, file=sys.stderr)
    return 2
  stale = []
  charts = {name: drawn(chart) for name, chart in CHARTS.items()}
  for name, text in (charts | {name: grown(chart) for name, chart in GROWTH.items()}).items():
    path = ASSETS / f"chart_{name}.svg"
    if not path.exists() or path.read_text(encoding="utf-8") != text:
      stale.append(path.name)
      if options == ["--write"]:
        path.write_text(text, encoding="utf-8")
  if options == ["--check"] and stale:
    print(f"stale: {', '.join(stale)}: run python tools/benchmark_charts.py --write")
    return 1
  return 0


if __name__ == "__main__":
  sys.exit(main(sys.argv[1:]))
