# SPDX-License-Identifier: Apache-2.0
"""The documentation's charts, docs/assets/chart_*.svg, from benchmarks/results/*.json.

    python tools/benchmark_charts.py --write    # draws them
    python tools/benchmark_charts.py --check    # fails when one is not what the JSON says

A bar chart has a bar for each row of a subject that it names, on a logarithmic axis: a bar's length
is the row's least time. A chart of growth has a line for each contestant, on two such axes. All are
as narrow as a phone, so that their text stays legible there. Each has a ground of its own, and its
colors follow the reader's light or dark scheme.
"""

from __future__ import annotations

import html
import math
import re
import sys
import textwrap
from typing import NamedTuple

from benchmark_table import ROOT, minimum, quantity, subject

ASSETS = ROOT / "docs" / "assets"
WIDTH, EDGE, NUMBERS, ROW, BAR = 440, 14, 74, 42, 14  # of a phone's 360 px: 15 px become 12
SHADES = (  # of an element's class: in a light scheme, in a dark one
  ("text", "fill", "#222", "#e6e8ee"),
  ("text", "stroke", "#fff", "#1b1e27"),  # a rim, in the color of the ground
  (".ground", "fill", "#fff", "#1b1e27"),
  ("line", "stroke", "#d5d8dd", "#444a57"),
  (".ours", "fill", "#3f51b5", "#8c9eff"),
  (".other", "fill", "#80868b", "#9aa2ad"),
  (".third", "fill", "#b8860b", "#e0b04a"),
  (".ours-line", "stroke", "#3f51b5", "#8c9eff"),
  (".other-line", "stroke", "#80868b", "#9aa2ad"),
  (".third-line", "stroke", "#b8860b", "#e0b04a"),
)
STYLE = (
  "text{font:15px system-ui,sans-serif;paint-order:stroke;stroke-width:4px;stroke-linejoin:round}"
  ".title{font-weight:600}polyline{fill:none;stroke-width:2.5}.third-line{stroke-dasharray:7 5}"
  + "".join(f"{what}{{{how}:{light}}}" for what, how, light, _ in SHADES)
  + "@media(prefers-color-scheme:dark){"
  + "".join(f"{what}{{{how}:{dark}}}" for what, how, _, dark in SHADES)
  + "}"
)


def frame(title: str, height: int) -> list[str]:
  """A chart's first lines, with the title that screen readers read."""
  return [
    f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" width="{WIDTH}"'
    f' height="{height}" role="img">',
    f"<title>{html.escape(title)}</title><style>{STYLE}</style>",
    f'<rect class="ground" width="{WIDTH}" height="{height}" rx="6"/>',
  ]


def level(left: float, right: float, y: float, value: str) -> str:
  """A horizontal line, with the value of the vertical axis at its left."""
  return (
    f'<line x1="{left}" x2="{right}" y1="{y:.1f}" y2="{y:.1f}"/>'
    f'<text x="{left - 8}" y="{y + 5:.1f}" text-anchor="end">{value}</text>'
  )


def line(kind: str, places: list[tuple[float, float]], radius: float) -> str:
  """A line of a kind (`SHADES`), with dots at its places."""
  path = " ".join(f"{x:.1f},{y:.1f}" for x, y in places)
  dot = f'<circle class="{kind}" cx="{{:.1f}}" cy="{{:.1f}}" r="{radius:g}"/>'
  dots = "".join(dot.format(x, y) for x, y in places)
  return f'<polyline class="{kind}-line" points="{path}"/>{dots}'


def opened(title: str, scale: str, height: int) -> list[str]:
  """A chart's first lines: its frame and, in two or three lines, its title and scale."""
  lines = frame(title, height)
  rows = textwrap.wrap(title, TITLE)
  for k, row in enumerate(rows):
    lines.append(f'<text class="title" x="{EDGE}" y="{24 + 20 * k}">{html.escape(row)}</text>')
  lines.append(f'<text x="{EDGE}" y="{24 + 20 * len(rows)}">{html.escape(scale)}</text>')
  return lines


TITLE = 46  # characters in a line of a title


def below(title: str) -> int:
  """How far down a chart's title and scale reach."""
  return 36 + 20 * len(textwrap.wrap(title, TITLE))


class Chart(NamedTuple):
  """A chart: its title, and its bars: (subject, row, label)."""

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
    "An f32 scalar out of a compiled loop: the cost to the program",
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
      ("sharding", f"{row}, fixed array, {devices}", f"{who}, {devices}")
      for devices in ("1 device", "2 devices", "4 devices", "8 devices")
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
  least, most = min(value for _, value, _ in found), max(value for _, value, _ in found)
  low, high = math.log10(least) - 0.3, math.log10(most)
  top = below(chart.title)
  height = top + ROW * len(found) + 28

  def across(value: float) -> float:
    return EDGE + (WIDTH - 2 * EDGE - NUMBERS) * (math.log10(value) - low) / (high - low)

  lines = opened(chart.title, "Shorter is better. Logarithmic scale.", height)
  for power in range(math.ceil(low), math.floor(high) + 1):
    x, tick = across(10.0**power), quantity(10.0**power, found[0][2])
    lines.append(
      f'<line x1="{x:.1f}" x2="{x:.1f}" y1="{top}" y2="{height - 24}"/>'
      f'<text x="{x:.1f}" y="{height - 8}" text-anchor="middle">{tick}</text>'
    )
  for k, (label, value, unit) in enumerate(found):
    y = top + ROW * k
    kind = "ours" if "callgate" in label else "other"
    at = f'x="{EDGE}" y="{y + 20}" width="{across(value) - EDGE:.1f}" height="{BAR}"'
    lines.append(
      f'<text x="{EDGE}" y="{y + 15}">{html.escape(label)}</text><rect class="{kind}" {at} rx="2"/>'
      f'<text x="{across(value) + 6:.1f}" y="{y + 32}">{quantity(value, unit)}</text>'
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
PLOT, LEFT, BOTTOM = 210, 66, 48


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
  top = below(chart.title) + 24
  right, height = WIDTH - 36, top + PLOT + BOTTOM

  def place(size: float, value: float) -> tuple[float, float]:
    across = (math.log10(size) - x_low) / ((x_high - x_low) or 1)
    up = (math.log10(value) - y_low) / ((y_high - y_low) or 1)
    return LEFT + across * (right - LEFT), top + PLOT - up * PLOT

  out = opened(chart.title, "Lower is better. Both axes are logarithmic.", height)
  kinds = dict(zip(lines, ("ours", "other", "third"), strict=False))
  at = EDGE
  for who, kind in kinds.items():  # a legend in one line
    out.append(
      f'<rect class="{kind}" x="{at}" y="{top - 28}" width="12" height="12" rx="2"/>'
      f'<text x="{at + 18}" y="{top - 17}">{html.escape(who)}</text>'
    )
    at += 30 + 7.5 * len(who)
  every = 1 if y_high - y_low <= 5 else 2
  for power in range(int(y_low), int(y_high) + 1, every):
    _, y = place(10**x_low, 10.0**power)
    out.append(level(LEFT, right, y, _short(10.0**power)))
  for size in sorted({size for size, _ in both}):
    x, _ = place(size, 10.0**y_low)
    out.append(f'<text x="{x:.1f}" y="{top + PLOT + 20}" text-anchor="middle">{_of(size)}</text>')
  middle = (LEFT + right) / 2
  out.append(
    f'<text x="{middle:.1f}" y="{height - 8}" text-anchor="middle">{html.escape(chart.axis)}</text>'
  )
  for who, points in lines.items():
    out.append(line(kinds[who], [place(*point) for point in points], 4))
  return "\n".join([*out, "</svg>"]) + "\n"


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
