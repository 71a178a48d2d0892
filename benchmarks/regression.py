# SPDX-License-Identifier: Apache-2.0
"""Which of callgate's rows got worse since the committed results: `python -m benchmarks --check`.

Times of two machines can't be compared, so each row is divided by its anchor, a row of the same
run that callgate has no part in: a raw FFI handler where the subject has one, else what JAX does.
Rows in MiB are compared as they are. A difference of two rows counts where it is positive.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

from benchmarks import harness

LIMIT = 1.15  # of the ratio now over the ratio then

# By subject, where a row's own reference (`harness.Report`) is none or is callgate's.
ANCHORS = {
  "scalar": "C++ FFI handler, empty",
  "taps": "C++ FFI handler, empty",
  "kernels": "C++ FFI handler, empty",
  "vmap": "jax pure_callback, sequential",
  "feed": "the step alone",
  "channels": "jax debug.callback, f32 scalars",
  "growth": "C++ handler, 4 bytes",
  "first": "eager call: jnp.sin",
  "workers": "numpy copy: 1 MiB, twice",
  "envs": "SyncVectorEnv from Python: CartPole",
  "objects": "jax io_callback",
  "tools": "lax.scan, step of 1 us",
  "threads": "jax pure_callback, one thread",
  "solver": "custom_linear_solve over pure_callback, solve, n = 10,000",
}
OWN = ("callgate", "install()", "the same with", "consumer", "sink")


@dataclass(frozen=True)
class Worse:
  """A row of callgate's that got worse.

  Attributes:
    subject: of the benchmarks.
    row: its name.
    anchor: what it was divided by; "" for what is no time.
    then: the committed ratio.
    now: this run's.
  """

  subject: str
  row: str
  anchor: str
  then: float
  now: float

  def __str__(self) -> str:
    over = f" over '{self.anchor}'" if self.anchor else ""
    change = f"{self.then:.3g} then, {self.now:.3g} now"
    return f"{self.subject}: '{self.row}'{over}: {change}"


def is_own(name: str) -> bool:
  """True for a row that callgate's code makes faster or slower."""
  return any(part in name for part in OWN)


def anchor_of(report: dict[str, Any], row: dict[str, Any]) -> str:
  """The row that `row` is divided by, "" for what is no time, or KeyError if there is none."""
  if row.get("unit", report["unit"]) not in harness.SECOND:
    return ""
  if report["name"] == "sharding":  # JAX's row of the same shards
    _, shards, rest = row["name"].partition(" on shards")
    if shards:
      return f"jax pure_callback{rest}"
  reference = row.get("reference", "")
  return reference if reference and not is_own(reference) else ANCHORS[report["name"]]


def ratios(report: dict[str, Any]) -> dict[str, tuple[str, float]]:
  """The anchor, and the ratio to it, of each of callgate's rows that were measured."""
  minima = {row["name"]: row["minimum"] for row in report["rows"]}
  found = {}
  for row in report["rows"]:
    if not is_own(row["name"]) or row["minimum"] is None or row.get("unit") == "":
      continue
    anchor = anchor_of(report, row)
    below = minima.get(anchor) if anchor else 1.0
    if below and (row["minimum"] > 0 or not anchor):  # the difference of two rows may be less
      found[row["name"]] = anchor, row["minimum"] / below
  return found


def worse(then: dict[str, Any], now: dict[str, Any]) -> list[Worse]:
  """The rows whose ratio grew by more than `LIMIT`, or whose memory did and by a MiB or more.

  A row that only one of the reports has is left out.
  """
  before, found = ratios(then), list[Worse]()
  for name, (anchor, ratio) in ratios(now).items():
    once, past = before.get(name, (None, 0.0))
    least = past * LIMIT if anchor else max(past * LIMIT, past + 1.0)
    if once == anchor and ratio > least:
      found.append(Worse(now["name"], name, anchor, past, ratio))
  return found


def committed(subject: str) -> dict[str, Any]:
  """The committed results of a subject. Raises FileNotFoundError where there are none."""
  return json.loads((harness.RESULTS / f"{subject}.json").read_text(encoding="utf-8"))
