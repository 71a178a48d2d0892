# SPDX-License-Identifier: Apache-2.0
"""Libraries that callgate does without elsewhere: what is said where one is missing."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

import callgate as cg
from callgate._core import extras


def test_a_library_that_is_there_is_imported() -> None:
  assert extras.library("json", "JSON", "json", by="f") is sys.modules["json"]


@pytest.mark.parametrize("error", [cg.GateDefinitionError, ImportError])
def test_a_missing_library_is_named_with_its_extra(error: type[Exception]) -> None:
  with pytest.raises(error) as caught:
    extras.library("no_such_library.part", "No Such", "extra", by="kernel 'f'", error=error)
  said = "kernel 'f' needs No Such, which is not installed: pip install 'callgate[extra]'"
  assert str(caught.value) == said


def test_one_that_can_t_be_loaded_says_why(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
  (tmp_path / "broken_library.py").write_text('raise ImportError("libcuda.so.1: not found")\n')
  monkeypatch.syspath_prepend(tmp_path)
  with pytest.raises(
    cg.GateDefinitionError, match=r"can't be imported \(libcuda.so.1: not found\)"
  ):
    extras.library("broken_library", "Broken", "extra", by="f")
