# SPDX-License-Identifier: Apache-2.0
"""Pictures of the gallery's examples that draw none themselves: curves of the numbers they print.

tools/gallery.py writes them. A curve is read from the output that is kept in docs/gallery, so a
picture shows the numbers that the page shows.
"""

from __future__ import annotations

import html
import math
import re
from typing import NamedTuple

from benchmark_charts import PLOT, WIDTH, frame, level, line

LEFT, RIGHT, TOP, BOTTOM = 60, 24, 44, 48


class Curve(NamedTuple):
  """A curve: its title, its axis, and a pattern of its points: an `x`, and groups of values.

  Without an `x` the points are numbered.
  """

  title: str
  axis: str
  points: str
  logarithmic: bool = False


LOSS = r"(?P<x>\d+) .*loss ([\d.]+)"
CURVES = {
  "cartpole_seeds": Curve(
    "Mean length of an episode, four seeds", "update",
    r"updates +(?P<x>\d+): mean length +(\d+) +(\d+) +(\d+) +(\d+)",
  ),
  "early_stopping": Curve(
    "Area under the ROC curve", "epoch", r"epoch +(?P<x>\d+) +area under the curve ([\d.]+)"
  ),
  "feed": Curve("Loss", "epoch", LOSS),
  "follow_stream": Curve("Loss, read by another process", "step", LOSS),
  "gymnasium_cartpole": Curve(
    "Steps for which the pole stays up", "update", r"update +(?P<x>\d+): .* for +([\d.]+)"
  ),
  "hospital_ward": Curve(
    "Cost per day", "beds", r"(?m)^ +(?P<x>\d+) +[\d.]+ +[\d.]+ +[\d.]+ +([\d.]+)$"
  ),
  "launch_processes": Curve("Loss, mean over four devices", "step", LOSS),
  "mujoco_swing": Curve("Cost of the end state", "step of descent", r"([\d.]+) at (?P<x>\d+)"),
  "ppo_cartpole": Curve(
    "Mean length of 100 episodes", "episode", r"to +(?P<x>\d+) of \d+: +([\d.]+)"
  ),
  "sparse_solver": Curve("Misfit", "step of Gauss-Newton", r"(\d\.\d+e[-+]\d+)", logarithmic=True),
}  # fmt: skip


def drawn(name: str, output: str) -> str:
  """The curve of an example's output as SVG."""
  curve = CURVES[name]
  rows: list[tuple[float, list[float]]] = []
  for k, match in enumerate(re.finditer(curve.points, output)):
    at = match.re.groupindex.get("x")
    values = [float(text) for i, text in enumerate(match.groups(), 1) if i != at]
    rows.append((float(match["x"]) if at else k, values))
  if len(rows) < 3:
    raise ValueError(f"expected 3 points or more in the output of {name}, found {len(rows)}")
  if curve.logarithmic:
    rows = [(x, [math.log10(value) for value in values]) for x, values in rows]
  xs, ys = [x for x, _ in rows], [value for _, values in rows for value in values]
  x_ticks, y_ticks = ticks(min(xs), max(xs)), ticks(min(ys), max(ys))
  (x_low, x_high), (y_low, y_high) = (min(xs), max(xs)), (y_ticks[0], y_ticks[-1])
  height, right = TOP + PLOT + BOTTOM, WIDTH - RIGHT

  def place(x: float, y: float) -> tuple[float, float]:
    across, up = (x - x_low) / (x_high - x_low), (y - y_low) / (y_high - y_low)
    return LEFT + across * (right - LEFT), TOP + PLOT - up * PLOT

  title = curve.title + (", logarithmic" if curve.logarithmic else "")
  out = [
    *frame(f"{curve.title}, by {curve.axis}", height),
    f'<text class="title" x="14" y="24">{html.escape(title)}</text>',
    f'<text x="{(LEFT + right) / 2:.1f}" y="{height - 8}" text-anchor="middle">{curve.axis}</text>',
  ]
  for value in y_ticks:
    _, y = place(x_low, value)
    said = f"1e{value:g}" if curve.logarithmic else f"{value:g}"
    out.append(level(LEFT, right, y, said))
  for value in x_ticks:
    if x_low <= value <= x_high:
      x, _ = place(value, y_low)
      at = f'x="{x:.1f}" y="{TOP + PLOT + 20}"'
      out.append(f'<text {at} text-anchor="middle">{value:g}</text>')
  for series in zip(*(values for _, values in rows), strict=True):
    places = [place(x, y) for x, y in zip(xs, series, strict=True)]
    out.append(line("ours", places, 3.5))
  return "\n".join([*out, "</svg>"]) + "\n"


def ticks(low: float, high: float) -> list[float]:
  """Round numbers, four to seven, that enclose the range."""
  rough = (high - low) / 4
  power = 10.0 ** math.floor(math.log10(rough))
  step = next(power * k for k in (1, 2, 2.5, 5, 10) if power * k >= rough * 0.999)
  first, last = math.floor(low / step), math.ceil(high / step)
  return [round(step * k, 10) for k in range(first, last + 1)]
