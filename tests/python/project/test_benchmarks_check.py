# SPDX-License-Identifier: Apache-2.0
"""`python -m benchmarks --check`: what it takes for worse, on reports that are made up."""

from __future__ import annotations

import copy
from typing import Any

import pytest

from benchmarks import __main__ as command
from benchmarks import harness, regression

SUBJECTS = [name for name in command.SUBJECTS if (harness.RESULTS / f"{name}.json").exists()]


def report(subject: str = "scalar", unit: str = "us", **minima: float) -> dict[str, Any]:
  names = {
    "raw": "C++ FFI handler, empty",
    "gate": "callgate in-place gate",
    "jax": "jax io_callback",
  }
  rows = [{"name": names.get(n, n), "minimum": m} for n, m in minima.items()]
  return {"name": subject, "unit": unit, "rows": rows}


def test_a_row_is_worse_if_its_ratio_to_the_raw_handler_grew() -> None:
  then = report(raw=0.1, gate=0.4, jax=30.0)
  assert not regression.worse(then, report(raw=0.2, gate=0.8, jax=90.0))  # a slower machine
  assert not regression.worse(then, report(raw=0.1, gate=0.45, jax=30.0))
  (found,) = regression.worse(then, report(raw=0.1, gate=0.5, jax=30.0))
  assert found == regression.Worse(
    "scalar", "callgate in-place gate", "C++ FFI handler, empty", 4.0, 5.0
  )
  said = "'callgate in-place gate' over 'C++ FFI handler, empty': 4 then, 5 now"
  assert str(found) == f"scalar: {said}"


def test_rows_that_were_not_measured_are_left_out() -> None:
  then = report(raw=0.1, gate=0.4)
  for rows in ({"raw": 0.1}, {"gate": 9.0}, {"raw": 0.1, "gate": None}):
    assert not regression.worse(then, report(**rows))  # pyright: ignore[reportArgumentType]
  assert not regression.worse(report(raw=0.1), report(raw=0.1, gate=9.0))


def test_memory_is_compared_as_it_is() -> None:
  then, now = report("memory", "MiB", gate=10.0), report("memory", "MiB", gate=12.0)
  (found,) = regression.worse(then, now)
  assert (found.anchor, found.then, found.now) == ("", 10.0, 12.0)


@pytest.mark.parametrize("subject", SUBJECTS)
def test_every_row_of_callgates_has_an_anchor_that_is_none_of_its_own(subject: str) -> None:
  committed = regression.committed(subject)
  found = regression.ratios(committed)
  own = [row for row in committed["rows"] if regression.is_own(row["name"])]
  timed = [row for row in own if row["minimum"] is not None and row.get("unit") != ""]
  assert {row["name"] for row in timed if row["minimum"] > 0} <= set(found)
  assert not [anchor for anchor, _ in found.values() if regression.is_own(anchor)]
  slower = copy.deepcopy(committed)
  for row in slower["rows"]:
    if row["name"] in found:
      row["minimum"] = 1.2 * row["minimum"] + (0 if found[row["name"]][0] else 2.0)
  assert {each.row for each in regression.worse(committed, slower)} == set(found)
  assert not regression.worse(committed, committed)


@pytest.mark.parametrize(("second", "code"), [(0.5, 1), (0.4, 0)])
def test_only_what_is_worse_twice_counts(
  monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], second: float, code: int
) -> None:
  monkeypatch.setattr(regression, "committed", lambda _: report(raw=0.1, gate=0.4))

  def measured(gate: float) -> harness.Report:
    rows = [
      harness.Row("C++ FFI handler, empty", samples=(0.1,)),
      harness.Row("callgate in-place gate", samples=(gate,)),
    ]
    return harness.Report("scalar", "", "us", rows)

  compare = command._compare  # pyright: ignore[reportPrivateUsage]
  assert compare("scalar", measured(0.5), lambda: measured(second)) == code
  assert f"{code} of 1 rows got worse" in capsys.readouterr().out
