# SPDX-License-Identifier: Apache-2.0
"""The documentation's charts, docs/assets/chart_*.svg, from benchmarks/results/*.json.

    python tools/benchmark_charts.py --write    # draws them
    python tools/benchmark_charts.py --check    # fails when one is not what the JSON says

A chart has a bar for each row of a subject that it names, on a logarithmic axis: a bar's length is
the row's least time. Colours follow the reader's light or dark scheme.
"""

from __future__ import annotations

import html
import math
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


def main(options: list[str]) -> int:
  if options not in (["--write"], ["--check"]):
    print(__doc__, file=sys.stderr)
    return 2
  stale = []
  for name, chart in CHARTS.items():
    path = ASSETS / f"chart_{name}.svg"
    if not path.exists() or path.read_text(encoding="utf-8") != drawn(chart):
      stale.append(path.name)
      if options == ["--write"]:
        path.write_text(drawn(chart), encoding="utf-8")
  if options == ["--check"] and stale:
    print(f"stale: {', '.join(stale)}: run python tools/benchmark_charts.py --write")
    return 1
  return 0


if __name__ == "__main__":
  sys.exit(main(sys.argv[1:]))
