# SPDX-License-Identifier: Apache-2.0
"""The first worker collects a fresh clone's tests before the others."""

from __future__ import annotations

import sys
import threading
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import first_collection
import pytest


@pytest.fixture
def clone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
  """A folder of tests; Python writes compiled files to it."""
  monkeypatch.setattr(first_collection, "FOLDER", tmp_path)
  monkeypatch.setattr(sys, "dont_write_bytecode", False)
  monkeypatch.setattr(sys, "pycache_prefix", None)
  return tmp_path


@pytest.fixture
def run(clone: Path) -> Iterator[Any]:
  """The configuration of the process that starts the workers."""
  config: Any = types.SimpleNamespace(stash=pytest.Stash())
  first_collection.pytest_configure(config)
  yield config
  first_collection.pytest_unconfigure(config)


def worker(config: Any, name: str) -> Any:
  """A worker's session, with the input that the configuration gives it."""
  given = {"workerid": name}
  first_collection.pytest_configure_node(types.SimpleNamespace(config=config, workerinput=given))
  return types.SimpleNamespace(config=types.SimpleNamespace(workerinput=given))


def begin(session: Any) -> Any:
  """A collection that has begun; `next` ends it."""
  collection = first_collection.pytest_collection(session)
  next(collection)
  return collection


def test_the_others_wait_for_the_first_workers_collection(run: Any) -> None:
  began: list[str] = []

  def collect(name: str) -> None:
    begin(worker(run, name))
    began.append(name)

  others = [threading.Thread(target=collect, args=(f"gw{n}",)) for n in (1, 2)]
  first = begin(worker(run, "gw0"))
  for thread in others:
    thread.start()
  others[0].join(0.2)
  assert began == []
  with pytest.raises(StopIteration):
    next(first)
  for thread in others:
    thread.join()
  assert sorted(began) == ["gw1", "gw2"]
  begin(worker(run, "gw3"))  # a worker in place of one that has crashed


def test_nobody_waits_once_tests_are_compiled(clone: Path) -> None:
  compiled = clone / "core" / "__pycache__"
  compiled.mkdir(parents=True)
  (compiled / "test_part.cpython-30-pytest-1.0.0.pyc").touch()  # other versions'
  assert not first_collection.has_compiled_tests()
  name = f"test_part.{sys.implementation.cache_tag}-pytest-{pytest.__version__}.pyc"
  (compiled / name).touch()
  assert first_collection.has_compiled_tests()
  config: Any = types.SimpleNamespace(stash=pytest.Stash())
  first_collection.pytest_configure(config)
  begin(worker(config, "gw1"))


def test_nobody_waits_where_python_writes_nothing(
  clone: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
  assert not first_collection.has_compiled_tests()
  monkeypatch.setattr(sys, "dont_write_bytecode", True)
  assert first_collection.has_compiled_tests()
