# SPDX-License-Identifier: Apache-2.0
"""One worker collects a fresh clone's tests before the others; a plugin that conftest.py registers.

pytest compiles each file of tests at its first import, and Python compiles the libraries that the
files import. Workers that collect at the same time each compile all of that. In a clone without
compiled tests, the others wait until the first worker has collected, and find what it compiled.
"""

from __future__ import annotations

import shutil
import sys
import tempfile
import time
from collections.abc import Generator
from pathlib import Path
from typing import Any

import pytest

FOLDER = Path(__file__).parents[1]  # of the tests
_COMPILED = f"*/__pycache__/test_*.{sys.implementation.cache_tag}-pytest-{pytest.__version__}.pyc"
_MOST = 300.0  # seconds that a worker waits
_KEY = "first_collection"  # in a worker's input: a file that exists after the first collection

_folder = pytest.StashKey[str]()


def has_compiled_tests() -> bool:
  """True if an earlier run compiled tests, or none can: Python writes no such files here."""
  elsewhere = sys.dont_write_bytecode or sys.pycache_prefix is not None
  return elsewhere or any(FOLDER.glob(_COMPILED))


def pytest_configure(config: pytest.Config) -> None:
  """Looks for compiled tests before the first worker starts."""
  if not hasattr(config, "workerinput") and not has_compiled_tests():
    config.stash[_folder] = tempfile.mkdtemp()


@pytest.hookimpl(optionalhook=True)
def pytest_configure_node(node: Any) -> None:
  """Tells a worker that it waits for the first one's file."""
  folder = node.config.stash.get(_folder, None)
  node.workerinput[_KEY] = folder and str(Path(folder, "collected"))


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_collection(session: pytest.Session) -> Generator[None, object, object]:
  """Waits for the first worker's collection, or says that it is done."""
  given: dict[str, Any] = getattr(session.config, "workerinput", {})
  if not given.get(_KEY):
    return (yield)
  file = Path(given[_KEY])
  if given["workerid"] == "gw0":
    try:
      return (yield)
    finally:
      if file.parent.exists():  # else the run has ended
        file.touch()
  end = time.monotonic() + _MOST
  while file.parent.exists() and not file.exists() and time.monotonic() < end:
    time.sleep(0.05)
  return (yield)


def pytest_unconfigure(config: pytest.Config) -> None:
  if folder := config.stash.get(_folder, None):
    shutil.rmtree(folder, ignore_errors=True)
