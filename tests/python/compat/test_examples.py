# SPDX-License-Identifier: Apache-2.0
"""The examples in `callgate.compat`'s docstrings and on its page run, and print what they say."""

from __future__ import annotations

import contextlib
import doctest
import importlib
import io
import re
from pathlib import Path

import pytest

import callgate as cg

PAGE = Path(__file__).parents[3] / "docs" / "compat.md"


@pytest.mark.parametrize(
  "name",
  [
    "callgate",
    "callgate.compat.callbacks",
    "callgate.compat.buffer_callback",
  ],
)
def test_docstrings_examples_run(name: str) -> None:
  module = importlib.import_module(name)
  for public in getattr(module, "__all__", ()):
    getattr(module, public)  # callgate loads each public name at its first use
  result = doctest.testmod(module)
  assert result.attempted > 0
  assert result.failed == 0


def test_the_pages_examples_run_and_print_what_they_say() -> None:
  blocks = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)
  assert len(blocks) == 3
  for block in blocks:
    printed = io.StringIO()
    try:
      with contextlib.redirect_stdout(printed):
        exec(compile(block, str(PAGE), "exec"), {})
    finally:
      cg.uninstall()
    for expected in re.findall(r"print\(.*\)  # (.+)", block):
      assert expected in printed.getvalue()
