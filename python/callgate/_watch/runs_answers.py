# SPDX-License-Identifier: Apache-2.0
"""Answers the page of runs: the table, curves of several runs, and a run's images and texts."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from callgate._watch.answers import PageAnswers, image
from callgate._watch.images import Image
from callgate._watch.media import Shown
from callgate._watch.model import Key
from callgate._watch.runs import RunsFollower, WatchedRun
from callgate._watch.server import Query, RequestError

_MOST_RUNS = 64  # the most runs in one plot


class RunsAnswers:
  """Answers about the followed runs.

  Args:
    runs: the follower.
    points: the most points of a drawn curve.
    plots: the most plots at the page's start.
  """

  def __init__(self, runs: RunsFollower, *, points: int, plots: int) -> None:
    self._runs, self._points, self._plots = runs, points, plots

  def gets(self) -> dict[str, Callable[[Query], Any]]:
    return {"runs": self.runs, "curves": self.curves, "media": self.media, "run": self.run}

  def runs(self, query: Query) -> dict[str, Any]:
    """Returns the table: a row for each run, the newest first."""
    del query
    rows = [run.row() for run in self._runs.runs()]
    return {"folders": self._runs.states(), "runs": rows, "plots": self._plots}

  def curves(self, query: Query) -> dict[str, Any]:
    """Returns a leaf's curves in several runs.

    The query has `leaf`, a label; `run`, once for each run; and `x`, `window`, `from`, `to` and
    `points`, as a stream's page sends them for a leaf. `x` may be a label, too.
    """
    label, chosen = _one(query, "leaf"), query.get("run", [])
    if len(chosen) > _MOST_RUNS:
      raise RequestError(400, f"run: expected at most {_MOST_RUNS}, got {len(chosen)}")
    series: list[dict[str, Any]] = []
    left_out = 0
    for name in chosen:
      run = self._find(name)
      labels = _labels(run)
      x = query.get("x", ["record"])[-1]
      if label not in labels or (x not in ("record", "seconds") and x not in labels):
        continue  # the run has no such tap
      passed = {key: query[key] for key in ("window", "from", "to", "points") if key in query}
      asked = {**passed, "id": [str(labels[label])], "x": [str(labels.get(x, x))]}
      answers = PageAnswers(run.model, list, points=self._points)
      found = answers.leaf(asked)
      own = found["series"]
      if label.startswith("knob:"):  # every channel's stream has it
        own = [one for one in own if one["source"] == own[0]["source"]]
      series += [{**one, "run": name} for one in own]
      left_out += found["left_out"]
    return {"x": query.get("x", ["record"])[-1], "left_out": left_out, "series": series}

  def media(self, query: Query) -> dict[str, Any]:
    """Returns an image or a text of `run` and `leaf`, at the index `at`; -1 is the last one."""
    run = self._find(_one(query, "run"))
    label = _one(query, "leaf")
    key = next((key for key in run.model.versions() if key.label == label), None)
    held = [] if key is None else _media(run, key)
    if not held:
      raise RequestError(404, f"leaf: expected a leaf with images or texts, got {label!r}")
    text = query.get("at", ["-1"])[-1]
    try:
      at = int(text)
    except ValueError:
      raise RequestError(400, f"at: expected an integer, got {text!r}") from None
    at = max(0, min(at, len(held) - 1)) if at >= 0 else len(held) - 1
    places = [{"record": one.position, "seconds": one.seconds, "lane": one.lane} for one in held]
    value = held[at].value
    shown = {"image": image(value)} if isinstance(value, Image) else {"text": value}
    return {"places": places, "at": at, **shown}

  def run(self, query: Query) -> dict[str, Any]:
    """Returns the details for which the table has no room."""
    run = self._find(_one(query, "run"))
    trace = run.about.get("traceback")
    return {"folder": str(run.folder), "traceback": trace if isinstance(trace, str) else ""}

  def _find(self, name: str) -> WatchedRun:
    for run in self._runs.runs():
      if run.id == name:
        return run
    raise RequestError(404, f"run: expected a run of the table, got {name!r}")


def _labels(run: WatchedRun) -> dict[str, int]:
  return {key.label: number for number, key in enumerate(run.model.versions())}


def _media(run: WatchedRun, key: Key) -> list[Shown]:
  streams = run.model.ask(key, lambda panel: [one.all() for one in panel.media.values()])
  return sorted((one for each in streams for one in each), key=lambda one: one.seconds)


def _one(query: Query, name: str) -> str:
  if not query.get(name):
    raise RequestError(400, f"{name}: expected a value, got none")
  return query[name][-1]
