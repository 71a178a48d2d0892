# SPDX-License-Identifier: Apache-2.0
"""Each program that the random programs found to run wrongly, as a regression test."""

from __future__ import annotations

import pathlib
import runpy

import pytest

FOUND = sorted((pathlib.Path(__file__).parents[2] / "programs" / "found").glob("*.py"))


@pytest.mark.parametrize("path", FOUND, ids=lambda path: path.stem)
def test_a_found_program_is_right(path: pathlib.Path) -> None:
  runpy.run_path(str(path), run_name=f"found.{path.stem}")


def test_there_are_programs() -> None:
  assert FOUND
