# SPDX-License-Identifier: Apache-2.0
"""Environment variables that make no sense are named, with what was expected."""

from __future__ import annotations

import pytest
from interpreters import run

import callgate as cg
from callgate import __main__ as cli
from callgate._core import environment

PROGRAM = """
import callgate as cg, jax
with cg.channel("c", to=print):
  jax.jit(lambda x: cg.tap(x, "c"))(1.0)
f = cg.feed(iter([1.0]), name="items")
print("done")
"""
VARIABLES = {"CALLGATE_STALL_SECONDS": "abc", "CALLGATE_EXIT_SECONDS": "1e300"}


def test_a_process_runs_as_without_seconds_that_are_none_and_names_them() -> None:
  done = run(PROGRAM, environment=VARIABLES, new=True, timeout=100)
  assert done.returncode == 0, done.stderr
  assert done.stdout == "1.0\ndone\n"
  for name, given in VARIABLES.items():
    said = [line for line in done.stderr.splitlines() if name in line]
    assert len(said) == 1
    assert f"{name}: expected seconds, a number from 0 to 100000000, got '{given}'" in said[0]
  assert "Traceback" not in done.stderr


@pytest.mark.parametrize(
  ("given", "want"),
  [("", 5), ("  ", 5), ("0", 0), (" 2.5 ", 2.5), ("1e8", 1e8), ("1e9", 5), ("-1", 5), ("nan", 5),
   ("inf", 5), ("-inf", 5), ("1s", 5), ("\u0661", 1)],
)  # fmt: skip
def test_seconds_are_numbers_that_a_clock_can_count(
  given: str, want: float, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
  name = f"CALLGATE_TEST_SECONDS_{given.encode().hex()}"
  monkeypatch.setenv(name, given)
  assert [environment.seconds(name, 5) for _ in range(2)] == [want, want]
  told = capsys.readouterr().err
  assert told.count(name) == (want == 5 and bool(given.strip()))


@pytest.mark.parametrize("given", ["'x", 'c++ "-O', "c++ \\"])
def test_a_compilers_command_with_a_quote_left_open_is_named(
  given: str, monkeypatch: pytest.MonkeyPatch
) -> None:
  monkeypatch.setenv("CXX", given)
  with pytest.raises(cg.CompileError, match="environment variable CXX: expected a compiler's com"):
    cg.cpp("void f(cg::Out<float, 0> y) { y() = 77.5; }", out=lambda: cg)


@pytest.mark.parametrize(
  ("option", "given", "expected"),
  [
    *(("port", given, "a port from 0 to 65535") for given in ("99999", "-1", "70000", "http")),
    ("plots", "-1", "1 plot or more"),
    ("points", "1", "2 to 20000 points"),
  ],
)
def test_a_number_that_is_none_is_an_error_of_usage(
  option: str, given: str, expected: str, capsys: pytest.CaptureFixture[str]
) -> None:
  with pytest.raises(SystemExit):
    cli.main(["watch", f"--{option}={given}", "--no-browser", "x"])
  assert f"argument --{option}: expected {expected}, got '{given}'" in capsys.readouterr().err
