# SPDX-License-Identifier: Apache-2.0
"""Answers the page's requests about a model, as values for JSON: NaN and infinities are None.

The page requests `state` a few times a second, and then the shown leaves that have changed. A
leaf's number is its index among all leaves, which doesn't change.
"""

from __future__ import annotations

import base64
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, cast

import numpy as np

from callgate._core.png import png
from callgate._watch.curves import Axis, Span, Window
from callgate._watch.images import Image
from callgate._watch.model import COLUMNS, Key, Model, Panel, Series
from callgate._watch.server import Query, RequestError

_MOST_POINTS = 20_000
_MOST_CURVES = 64  # the most curves of one leaf
_Columns = dict[str, "np.ndarray[Any, Any]"]


class PageAnswers:
  """Answers from a model.

  Args:
    model: the model to show.
    states: returns the place and state of each stream.
    plots: the number of leaves that a page shows until its user chooses.
    points: the most points of a drawn curve.
  """

  def __init__(
    self, model: Model, states: Callable[[], Sequence[str]], *, plots: int = 12, points: int = 1000
  ) -> None:
    self._model, self._states = model, states
    self._plots, self._points = plots, points

  def gets(self) -> dict[str, Callable[[Query], Any]]:
    return {"state": lambda query: self.state(), "leaf": self.leaf}

  def state(self) -> dict[str, Any]:
    """Returns the overview: streams, counts, leaves, and each device's record rate over time."""
    versions = self._model.versions()
    table = self._model.table()
    rows = [dict(zip(table, values, strict=True)) for values in zip(*table.values(), strict=True)]
    leaves = [
      {"id": i, "label": key.label, "version": version} | self._model.ask(key, _kind) | row
      for i, ((key, version), row) in enumerate(zip(versions.items(), rows, strict=False))
    ]
    totals = self._model.totals()
    width, counts = self._model.lanes()
    return {
      "streams": list(self._states()),
      "totals": totals._asdict(),
      "columns": {name: title for name, (title, _) in COLUMNS.items()},
      "leaves": leaves,
      "plots": self._plots,
      "devices": {
        "seconds": width,
        "records": {str(device): each.tolist() for device, each in counts.items()},
      },
    }

  def leaf(self, query: Query) -> dict[str, Any]:
    """Returns the data of one leaf's plot.

    The query has `id`; `show`, "curves", "lanes", "histograms" or "latest"; `x`, "record",
    "seconds" or another leaf's number; `window`, "whole" or "recent"; `from` and `to`, a part of
    the axis; and `points`, the most points.
    """
    keys = list(self._model.versions())
    key = _leaf(keys, _one(query, "id", ""))
    show = _choice(query, "show", ("curves", "lanes", "histograms", "latest"))
    if show == "latest":
      return self._model.ask(key, _latest)
    if show == "histograms":
      return {"runs": self._model.ask(key, self._histograms)}
    other = _one(query, "x", "record")
    x_leaf = None if other in ("record", "seconds") else _leaf(keys, other)
    axis = cast("Axis", other if x_leaf is None else "seconds")
    window = cast("Window", _choice(query, "window", ("whole", "recent")))
    most = int(_number(query, "points", self._points))
    if not 2 <= most <= _MOST_POINTS:
      raise RequestError(400, f"points: expected 2 to {_MOST_POINTS}, got {most}")
    ends = _number(query, "from", -math.inf), _number(query, "to", math.inf)
    span: Span | None = (
      None if x_leaf is not None or ends == (-math.inf, math.inf) else (axis, *ends)
    )
    curves = self._model.curves(key, window, span, most, by_lane=show == "lanes")
    drawn = dict(list(curves.items())[:_MOST_CURVES])
    places = self._model.curves(x_leaf) if x_leaf is not None else {}
    return {
      "x": x_leaf.label if x_leaf is not None else axis,
      "left_out": len(curves) - len(drawn),
      "series": [self._series(one, columns, axis, places) for one, columns in drawn.items()],
    }

  def _series(
    self, one: Series, columns: _Columns, axis: Axis, places: Mapping[Series, _Columns]
  ) -> dict[str, Any]:
    x = columns[axis]
    if places:
      x = _values_at(places, one, x)
    made = {"run": self._model.run(one.source), "source": one.source, "device": one.device}
    made |= {"lane": one.lane, "x": _plain(x), "mean": _plain(columns["mean"])}
    if not np.array_equal(columns["low"], columns["high"], equal_nan=True):
      made |= {"low": _plain(columns["low"]), "high": _plain(columns["high"])}
    return made

  def _histograms(self, panel: Panel) -> list[dict[str, Any]]:
    names = ("record", "seconds", "low", "high", "counts")
    return [
      {
        "run": self._model.run(source),
        "held": [dict(zip(names, one, strict=True)) for one in each.all()],
      }
      for source, each in sorted(panel.distributions.items())
    ]


def _kind(panel: Panel) -> dict[str, Any]:
  """Returns whether a leaf is an array, and how it can be shown."""
  there = {"curves": True, "lanes": panel.lanes > 1, "histograms": bool(panel.distributions)}
  there["latest"] = panel.latest.size > 1 or bool(panel.media)
  if panel.media:  # curves of pixels and letters are of no use
    there = dict.fromkeys(there, False) | {"latest": True}
  return {"array": panel.is_array, "shows": [show for show, has in there.items() if has]}


def _latest(panel: Panel) -> dict[str, Any]:
  made: dict[str, Any] = {"kind": panel.kind, "values": _plain(panel.latest)}
  media = [one for each in panel.media.values() for one in each.all()[-1:]]
  shown = max(media, key=lambda one: one.position).value if media else panel.image
  if isinstance(shown, str):
    made["text"] = shown
  elif shown is not None:
    made["image"] = image(shown)
  return made


def image(shown: Image) -> dict[str, Any]:
  """Returns a picture for the page."""
  height, width = shown.pixels.shape[:2]
  made = {"png": base64.b64encode(png(shown.pixels)).decode(), "height": height, "width": width}
  return made | {"low": shown.low, "high": shown.high}


def _values_at(
  places: Mapping[Series, _Columns], series: Series, seconds: np.ndarray[Any, Any]
) -> np.ndarray[Any, Any]:
  """Returns another leaf's last values at these times, on this device or the run's first."""
  of_run = {one: columns for one, columns in places.items() if one.source == series.source}
  found = of_run.get(series._replace(lane=None)) or next(iter(of_run.values()), None)
  if found is None:
    return np.full(len(seconds), np.nan)
  known = ~np.isnan(found["seconds"])
  times, values = found["seconds"][known], found["mean"][known]
  index = np.searchsorted(times, seconds, side="right") - 1
  values = np.concatenate([values, [np.nan]])  # for times before the first value, and unknown times
  return np.where(np.isnan(seconds), np.nan, values[index])


def _leaf(keys: Sequence[Key], text: str) -> Key:
  if text.isascii() and text.isdigit() and len(text) < 10 and int(text) < len(keys):
    return keys[int(text)]
  raise RequestError(404, f"leaf: expected the number of one of {len(keys)} leaves, got {text!r}")


def _one(query: Query, name: str, default: str) -> str:
  return query.get(name, [default])[-1]


def _choice(query: Query, name: str, allowed: Sequence[str]) -> str:
  if (text := _one(query, name, allowed[0])) in allowed:
    return text
  raise RequestError(400, f"{name}: expected one of {', '.join(allowed)}, got {text!r}")


def _number(query: Query, name: str, default: float) -> float:
  text = _one(query, name, "")
  if not text:
    return default
  try:
    number = float(text)
  except ValueError:
    number = math.nan
  if math.isfinite(number):
    return number
  raise RequestError(400, f"{name}: expected a number, got {text!r}")


def _plain(array: np.ndarray[Any, Any]) -> list[float | None]:
  if np.isfinite(array).all():
    return array.tolist()
  return [value if math.isfinite(value) else None for value in array.tolist()]
