# SPDX-License-Identifier: Apache-2.0
"""Draws which folder of the package imports which: docs/imports.svg.

    python tools/draw_imports.py [--check]

An arrow goes from a folder to one that it imports, unless another arrow's way leads there, too. The
folders stand in the layers of tests/check_layers.py, which keeps the arrows pointing down. With
`--check` nothing is written; the exit status is 1 where the picture is not what the code says. The
picture needs Matplotlib.
"""

from __future__ import annotations

import ast
import re
import sys
from pathlib import Path, PurePosixPath

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "tests"))

import check_layers  # noqa: E402 - after the path

PICTURE = ROOT / "docs" / "imports.svg"
_DESCRIPTION = re.compile(r"<dc:description>(.*?)</dc:description>", re.DOTALL)

Edges = dict[str, set[str]]


def edges() -> Edges:
  """For each folder those that its files import, without itself."""
  files = sorted((ROOT / check_layers.PACKAGE).rglob("*.py"))
  package = {
    PurePosixPath(path.relative_to(ROOT).as_posix()): ast.parse(path.read_text()) for path in files
  }
  found: Edges = {layer: set() for layer in check_layers.PYTHON_LAYERS}
  for name, target, _ in check_layers.imports_of(package):
    layer, other = check_layers.layer_of(name), check_layers.layer_of(target)
    if layer and other and layer != other:
      found[layer].add(other)
  return found


def heights(graph: Edges) -> dict[str, int]:
  """How far above the lowest a folder stands."""
  found: dict[str, int] = {}

  def height(layer: str) -> int:
    if layer not in found:
      found[layer] = 1 + max((height(below) for below in graph[layer]), default=-1)
    return found[layer]

  for layer in graph:
    height(layer)
  return found


def reduced(graph: Edges) -> Edges:
  """Without the edges that a longer way stands for."""

  def below(layer: str) -> set[str]:
    return graph[layer].union(*map(below, graph[layer]))

  return {
    layer: {one for one in others if not any(one in below(other) for other in others - {one})}
    for layer, others in graph.items()
  }


def text_of(graph: Edges) -> str:
  return "; ".join(f"{layer}: {' '.join(sorted(graph[layer]))}" for layer in sorted(graph))


def _places(graph: Edges) -> dict[str, tuple[float, int]]:
  """Where a folder stands: in its row, above what it imports."""
  rows: dict[int, list[str]] = {}
  for layer, height in heights(graph).items():
    rows.setdefault(height, []).append(layer)
  found: dict[str, tuple[float, int]] = {}
  for height, row in sorted(rows.items()):

    def middle(layer: str) -> tuple[float, str]:
      below = [found[other][0] for other in reduced(graph)[layer]]
      return sum(below) / max(len(below), 1), layer

    for i, layer in enumerate(sorted(row, key=middle)):
      found[layer] = ((i + 0.5) / len(row), height)
  return found


def draw(graph: Edges) -> None:
  import matplotlib as mpl
  from matplotlib.figure import Figure

  arrows, places = reduced(graph), _places(graph)
  with mpl.rc_context({"svg.fonttype": "none", "svg.hashsalt": "callgate"}):
    figure = Figure(figsize=(11, 8))
    axes = figure.add_axes((0, 0, 1, 1))
    axes.set(xlim=(0, 1), ylim=(-0.6, max(y for _, y in places.values()) + 0.6))
    axes.axis("off")
    for layer, others in arrows.items():
      for other in sorted(others):
        axes.annotate(
          "",
          xytext=places[layer],
          xy=places[other],
          arrowprops={"arrowstyle": "->", "color": "#90a4ae", "shrinkA": 12, "shrinkB": 12},
        )
    for layer, (x, y) in places.items():
      box = {"boxstyle": "round,pad=0.4", "facecolor": "#e3f2fd", "edgecolor": "#546e7a"}
      axes.text(
        x,
        y,
        layer.replace("/", "/\n"),
        ha="center",
        va="center",
        family="monospace",
        size=10,
        bbox=box,
      )
    metadata = {"Date": None, "Description": text_of(graph)}
    figure.savefig(PICTURE, metadata=metadata)


def main(options: list[str]) -> int:
  graph = edges()
  if "--check" not in options:
    draw(graph)
    return 0
  drawn = _DESCRIPTION.search(PICTURE.read_text())
  if drawn is not None and drawn[1] == text_of(graph):
    return 0
  print("docs/imports.svg is not what the code says; python tools/draw_imports.py draws it anew")
  return 1


if __name__ == "__main__":
  sys.exit(main(sys.argv[1:]))
