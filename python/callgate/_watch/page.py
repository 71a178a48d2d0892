# SPDX-License-Identifier: Apache-2.0
"""The live page: a Bokeh document that shows a `Model` and looks at it anew a few times a second.

One `Page` for each open browser tab, on the server's thread; the model alone is shared. Names come
from the stream, whose writer may be anybody: what the browser takes for HTML or for mathematics
gets them as text (`html.escape`, `_figure`).
"""

from __future__ import annotations

import datetime
import html
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from bokeh import models
from bokeh.document import Document
from bokeh.layouts import column, row
from bokeh.models import ColumnDataSource
from bokeh.palettes import Blues9, Category10_10
from bokeh.plotting import figure

from callgate._watch.curves import Window
from callgate._watch.model import COLUMNS, Key, Model

_WINDOWS: tuple[Window, ...] = ("whole", "recent")
_AXES = ("record", "seconds")
_CURVES = ("low", "mean", "high")
_WIDE: dict[str, Any] = {"sizing_mode": "stretch_width"}
_DEVICES = 10  # curves in one plot, at most
_DOTS = 100  # points up to which a curve shows each of them


def _figure(text: str, *, name: str) -> Any:
  # A title looks for TeX between dollars and in parentheses with backslashes.
  title = models.Title(text=models.PlainText(text=text) if set(text) & {"$", "\\"} else text)
  made: Any = figure(title=title, name=name, width=440, height=270, min_border_left=62)
  made.toolbar.autohide = True
  return made


class _Plot:
  """A leaf's curves, and its latest values if it is an array."""

  def __init__(self, label: str) -> None:
    self.curves = _figure(label, name=f"curves:{label}")
    self.latest = _figure(f"{label}: latest", name=f"latest:{label}")
    self.latest.xaxis.axis_label = "element"
    self._dots: dict[int, Any] = {}  # by device; all of it is drawn from their source
    self._values: Any = ColumnDataSource({"x": [], "y": []})
    self.latest.line("x", "y", source=self._values, color=Category10_10[0])
    self.latest.scatter("x", "y", source=self._values, size=3, color=Category10_10[0])
    self._seen: tuple[int, Window, str] | None = None

  def update(self, model: Model, key: Key, seen: tuple[int, Window, str]) -> None:
    """Draws what has changed: `seen` is the version, window and axis to draw."""
    if seen == self._seen:
      return
    self._seen = seen
    _, window, axis = seen
    self.curves.xaxis.axis_label = axis
    for device, points in list(model.curves(key, window).items())[:_DEVICES]:
      dots = self._dots.get(device) or self._add_device(device)
      dots.data_source.data = {"x": points[axis], **{name: points[name] for name in _CURVES}}
      dots.visible = len(points[axis]) <= _DOTS
    values = model.ask(key, lambda panel: panel.latest)
    self._values.data = {"x": np.arange(len(values)), "y": values}

  def _add_device(self, device: int) -> Any:
    source: Any = ColumnDataSource({name: [] for name in ("x", *_CURVES)})
    drawn = {"source": source, "color": Category10_10[len(self._dots) % 10]}
    self.curves.varea("x", "low", "high", alpha=0.2, **drawn)
    self.curves.line("x", "mean", width=1.5, legend_label=f"device {device}", **drawn)
    self._dots[device] = self.curves.scatter("x", "mean", size=4, **drawn)
    self.curves.legend.visible = len(self._dots) > 1
    self.curves.legend.location = "top_right"
    self.curves.legend.background_fill_alpha = 0.6
    return self._dots[device]


class Page:
  """The document of one browser tab."""

  def __init__(
    self, document: Document, model: Model, states: Callable[[], Sequence[str]], plots: int
  ) -> None:
    self._model = model
    self._states = states  # of each stream: where it is and what it is at
    self._limit = plots  # leaves that are shown until the user chooses
    self._keys: dict[str, Key] = {}  # by label
    self._labels: dict[str, str] = {}  # by what the choice has for them
    self._plots: dict[str, _Plot] = {}
    self._chosen = False
    self._following = False  # whether the choice of leaves is being made here, not by the user
    controls = self._make_controls()
    self._make_lanes()
    self._table: Any = ColumnDataSource({name: [] for name in COLUMNS})
    table: Any = models.DataTable(
      source=self._table,
      columns=[models.TableColumn(field=name, title=title) for name, (title, _) in COLUMNS.items()],
      name="table", index_position=None, height=260, **_WIDE,
    )  # fmt: skip
    self._head: Any = models.Div(name="head", disable_math=True, **_WIDE)
    self._nothing: Any = models.Div(name="nothing", text="nothing to show yet")
    self._area: Any = row(self._nothing, name="plots", styles={"flex-wrap": "wrap"}, **_WIDE)
    shown = (self._head, controls, self._choice, self._area, self._lanes, table)
    document.title = "callgate watch"
    document.add_root(column(*shown, **_WIDE))
    self.update()

  def _make_controls(self) -> Any:
    def group(name: str, labels: list[str]) -> Any:
      made: Any = models.RadioButtonGroup(name=name, labels=labels, active=0)
      made.on_change("active", lambda attr, old, new: self.update())
      return made

    self._window = group("window", ["whole run", "recent"])
    self._axis = group("axis", ["by record", "by seconds"])
    self._view = group("view", ["curves", "latest values of arrays"])
    self._choice: Any = models.MultiChoice(
      name="choice", title="shown", options=[], value=[], **_WIDE
    )
    self._choice.on_change("value", self._on_choice)
    return row(self._window, self._axis, self._view, **_WIDE)

  def _make_lanes(self) -> None:
    self._devices: Any = models.FactorRange()
    self._lanes: Any = figure(
      name="lanes", title="records per second, by device", y_range=self._devices, height=150,
      tools="hover", toolbar_location=None, x_axis_label="seconds", **_WIDE,
      tooltips=[("device", "@device"), ("seconds", "@left"), ("records/s", "@rate")],
    )  # fmt: skip
    self._lanes.x_range.start = 0
    self._rates: Any = ColumnDataSource({n: [] for n in ("device", "left", "right", "rate")})
    self._colors: Any = models.LinearColorMapper(palette=Blues9[7::-1], low=0, high=1)
    self._lanes.hbar(
      y="device", left="left", right="right", height=0.8, source=self._rates, line_color=None,
      fill_color={"field": "rate", "transform": self._colors},
    )  # fmt: skip
    self._lanes.add_layout(models.ColorBar(color_mapper=self._colors, width=8), "right")

  def _on_choice(self, attr: str, old: Any, new: Any) -> None:
    if not self._following:
      self._chosen = True
      self.update()

  # -- updates -----------------------------------------------------------------------------------
  def update(self) -> None:
    versions = self._model.versions()
    self._add_keys(list(versions))
    window, axis = _WINDOWS[self._window.active], _AXES[self._axis.active]
    shown = [self._labels[value] for value in self._choice.value if value in self._labels]
    figures: list[Any] = []
    for label in shown:
      key = self._keys[label]
      plot = self._plots.get(label) or self._plots.setdefault(label, _Plot(label))
      plot.update(self._model, key, (versions[key], window, axis))
      is_array = self._model.ask(key, lambda panel: panel.is_array)
      figures.append(plot.latest if self._view.active and is_array else plot.curves)
    if (figures or [self._nothing]) != self._area.children:
      self._area.children = figures or [self._nothing]
    self._update_lanes()
    self._table.data = self._model.table()
    self._head.text = self._headline()

  def _add_keys(self, keys: Sequence[Key]) -> None:
    known = set(self._keys.values())
    added = [key for key in keys if key not in known]
    for key in added:
      label = key.label
      while label in self._keys:  # another tap's name with another leaf's path, put together
        label += "'"
      # Bokeh's choices show HTML, though nothing says so: no part of a label that would differ.
      choice = label if html.escape(label) == label else f"leaf&{len(self._keys)}"
      self._labels[choice] = label
      self._keys[label] = key
    if added:
      self._following = True
      shown = {value: html.escape(label) for value, label in self._labels.items()}
      values = sorted(self._labels, key=self._labels.__getitem__)
      self._choice.options = [v if v == shown[v] else (v, shown[v]) for v in values]
      if not self._chosen:
        self._choice.value = list(self._labels)[: self._limit]
      self._following = False

  def _update_lanes(self) -> None:
    width, counts = self._model.lanes()
    names = [f"device {device}" for device in counts]
    bars = [
      (name, i * width, (i + 1) * width, records[i] / width)
      for name, records in zip(names, counts.values(), strict=True)
      for i in map(int, np.flatnonzero(records))
    ]
    if names != list(self._devices.factors):
      self._devices.factors = names
      self._lanes.height = 110 + 22 * len(names)
    self._colors.high = max((bar[-1] for bar in bars), default=1.0)
    self._rates.data = {name: [bar[i] for bar in bars] for i, name in enumerate(self._rates.data)}

  def _headline(self) -> str:
    totals = self._model.totals()
    parts = [f"<b>{html.escape(state)}</b>" for state in self._states()]
    parts.append(f"{totals.records:,} records, {totals.per_second:,.1f} a second")
    if totals.missing:
      parts.append(f"{totals.missing:,} numbers missing (dropped, or not sent)")
    if totals.sessions > 1:
      parts.append(f"{totals.sessions} sessions")
    if totals.records:
      latest = datetime.datetime.fromtimestamp(totals.latest_ns / 1e9)
      parts.append(f"latest {latest:%Y-%m-%d %H:%M:%S}")
    return " &middot; ".join(parts)
