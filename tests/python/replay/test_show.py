# SPDX-License-Identifier: Apache-2.0
"""`python -m callgate show` prints a recording, and how two of them differ."""

from __future__ import annotations

import contextlib
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import callgate as cg
from callgate.__main__ import main

SCALAR = jax.ShapeDtypeStruct((), jnp.float32)
noise = [0.0]


@cg.gate(out=SCALAR, effect="io", name="show.price")
def price(day: Any, *, model: Any) -> Any:
  if day < 0:
    raise LookupError(f"no price for day {int(day)}")
  return np.float32(day + model["w"].sum() + noise[0])


@cg.gate(out=lambda x: x, effect="ordered", name="show.next")
def following(x: Any) -> Any:
  return x


@jax.jit
def program(days: Any) -> Any:
  model = {"w": jnp.arange(6.0).reshape(2, 3)}
  return following(jax.lax.map(lambda day: price(day, model=model), days))


def record(path: Path, *days: int, **options: Any) -> str:
  with cg.record(path, **options), contextlib.suppress(jax.errors.JaxRuntimeError):
    program(jnp.array(days)).block_until_ready()
  return str(path)


@pytest.fixture
def one(tmp_path: Path) -> str:
  noise[0] = 0.0
  return record(tmp_path / "one.cgr", 3, 4)


def test_each_call_has_a_line(one: str, capsys: pytest.CaptureFixture[str]) -> None:
  assert main(["show", one]) == 0
  head, *lines, count = capsys.readouterr().out.splitlines()
  assert re.split(r"\s{2,}", head) == ["call", "gate", "operands", "results", "time", "effect"]
  cells = [re.split(r"\s{2,}", line) for line in lines]
  assert [line[0] for line in cells] == ["0", "1", "2"]
  assert cells[1][1:4] == ["show.price", "(day: int32[], model[w]: float32[2,3])", "(float32[])"]
  assert cells[2][1:4] == ["show.next", "(x: float32[2])", "(float32[2])"]
  assert [line[5] for line in cells] == ["io", "io", "ordered"]
  assert all(re.fullmatch(r"\d\d:\d\d:\d\d\.\d{3}", line[4]) for line in cells)
  assert count == "3 calls"


@pytest.mark.parametrize("operands", ["arrays", "digest"])
def test_static_arguments_are_shown(
  tmp_path: Path, operands: Any, capsys: pytest.CaptureFixture[str]
) -> None:
  def record_with(label: str, **options: Any) -> str:
    with cg.record(path := tmp_path / f"{label}.cgr", **options):
      model = {"w": np.ones(1, np.float32), "label": label}
      jax.jit(lambda day: price(day, model=model))(1).block_until_ready()
    return str(path)

  one, other = record_with("a"), record_with("b", operands=operands)
  assert main(["show", one]) == 0
  assert "(day: int32[], model[w]: float32[1], model[label]='a')" in capsys.readouterr().out
  assert main(["show", one, "--diff", other]) == 1
  what = "'a', got 'b'" if operands == "arrays" else "digest "
  assert f"argument 'model'['label']: expected {what}" in capsys.readouterr().out
  assert main(["show", one, "--diff", one]) == 0


def test_lanes_and_exceptions_are_shown(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
  path = record(tmp_path / "failed.cgr", -1)
  with cg.record(tmp_path / "lanes.cgr"):
    jax.jit(jax.vmap(lambda x: price(x, model={"w": jnp.ones(2)})))(
      jnp.arange(2)
    ).block_until_ready()
  assert main(["show", path]) == 0
  assert "raised LookupError" in capsys.readouterr().out
  assert main(["show", str(tmp_path / "lanes.cgr")]) == 0
  assert "show.price lane 1" in capsys.readouterr().out


def test_equal_recordings_differ_in_nothing(
  tmp_path: Path, one: str, capsys: pytest.CaptureFixture[str]
) -> None:
  other = record(tmp_path / "other.cgr", 3, 4)
  digests = record(tmp_path / "digests.cgr", 3, 4, operands="digest")
  for path in (one, other, digests):
    assert main(["show", one, "--diff", path]) == 0
    assert capsys.readouterr().out == "equal: 3 calls\n"


@pytest.mark.parametrize("operands", ["arrays", "digest"])
def test_the_first_difference_is_shown_and_all_are_counted(
  tmp_path: Path, one: str, operands: Any, capsys: pytest.CaptureFixture[str]
) -> None:
  other = record(tmp_path / "other.cgr", 3, 5, operands=operands)
  assert main(["show", one, "--diff", other]) == 1
  first, count = capsys.readouterr().out.splitlines()
  what = "int32[] with 4, got 5" if operands == "arrays" else "int32[] with digest "
  assert first.startswith(f"call 1 of 'show.price': argument 'day': expected {what}"), first
  assert count == "2 of 3 calls differ"  # the next one's operands, too


def test_results_exceptions_and_calls_that_one_lacks_are_differences(
  tmp_path: Path, one: str, capsys: pytest.CaptureFixture[str]
) -> None:
  def shown(path: str, other: str) -> list[str]:
    assert main(["show", path, "--diff", other]) == 1
    return capsys.readouterr().out.splitlines()

  noise[0] = 1.0
  noisy = record(tmp_path / "noisy.cgr", 3, 4)
  assert (
    shown(one, noisy)[0]
    == "call 0 of 'show.price': result 0: expected float32[] with 18.0, got 19.0"
  )
  failed = record(tmp_path / "failed.cgr", -1)
  also = record(tmp_path / "also.cgr", -1)
  assert main(["show", failed, "--diff", also]) == 0
  capsys.readouterr()
  short, longer = record(tmp_path / "short.cgr", 3), record(tmp_path / "longer.cgr", 3, 4, 5)
  first, _ = shown(longer, short)
  assert first.startswith("call 1 of 'show.price': expected this call in the other recording")
  assert shown(failed, short)[0].startswith("call 0 of 'show.price': argument 'day'")


def test_files_that_are_no_recordings(tmp_path: Path, one: str) -> None:
  text = tmp_path / "text"
  text.write_text("no recording at all")
  command = [sys.executable, "-m", "callgate", "show"]
  for arguments, status in (([str(text)], 1), ([one, "--diff", str(text)], 2), ([one], 0)):
    run = subprocess.run([*command, *arguments], capture_output=True, text=True, check=False)
    assert run.returncode == status
    assert ("show: " in run.stderr and "text" in run.stderr) == (status > 0), run.stderr


def test_calls_of_different_gates_are_counted_apart(
  tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
  for name, gate in (("a", following), ("b", price)):
    with cg.record(tmp_path / f"{name}.cgr"):
      jax.jit(lambda x, gate=gate: gate(x, **({"model": {"w": x}} if gate is price else {})))(1.0)
  assert main(["show", str(tmp_path / "a.cgr"), "--diff", str(tmp_path / "b.cgr")]) == 1
  assert capsys.readouterr().out.splitlines()[1] == "2 of 2 calls differ"
