# SPDX-License-Identifier: Apache-2.0
"""Fixtures of the Python tests: the two engines, clean caches, CUDA without a GPU."""

from __future__ import annotations

import gc
import os
import signal
import threading
from collections.abc import Iterator

import first_collection
import jax
import limits
import processor_times
import property_checks  # noqa: F401  (registers the profiles of properties)
import pytest
import quick_cpp
import quick_xla
import stray_output
from fake_cuda import FakeCuda, open_fake
from programs import drop_programs

import callgate as cg

jax.config.update("jax_enable_x64", False)
# Programs over several devices run on these; other programs use the first.
jax.config.update("jax_num_cpu_devices", int(os.environ.get("CALLGATE_TEST_DEVICES", "8")))

# The virtual GPU runs PTX, and no machine code. The processes that tests start need that, too.
if "VIRTUAL_GPU" in os.environ:
  os.environ.setdefault("CALLGATE_NVRTC_OUTPUT", "ptx")

# Most tests are not about XLA's optimisation of a program's own arithmetic, or Numba's. The
# processes that they start compile as this one does (support/interpreters.py).
if os.environ.get("CALLGATE_TEST_XLA") == "quick":
  quick_xla.use()
  # Numba reads it when it is imported. It keeps no code on disk that it compiled at level 0.
  os.environ.setdefault("NUMBA_OPT", "1")

# In a job that a shell started in the background SIGINT is ignored, and so in its children. Tests
# send it to processes of their own.
if threading.current_thread() is threading.main_thread():
  signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_configure(config: pytest.Config) -> None:
  for plugin in (first_collection, limits, processor_times, stray_output):
    config.pluginmanager.register(plugin)
  quick_cpp.use()


# The longest files start first; the workers take the others as they come.
_LONG = (
  "project/test_examples",
  "process/test_group",
  "compat/test_sharded_jit",
  "project/test_docs",
  "torch/test_torch",
)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
  items.sort(
    key=lambda item: not item.nodeid.removeprefix("tests/python/").startswith(_LONG)
  )  # the rest stays in order


def pytest_collection_finish() -> None:
  """Collections, and searches of the heap after errors, leave out what imports have made."""
  cg.gate(lambda x: x, out=lambda x: x)  # the process's first: it may freeze what there is by then
  gc.collect()
  gc.freeze()
  gc.set_threshold(20_000, 20, 50)  # what JAX traces lives shortly or long
  global _frozen
  _frozen = gc.get_freeze_count()


@pytest.fixture(params=["callgate", "jax"])
def engine(request: pytest.FixtureRequest) -> Iterator[str]:
  """Runs the test on callgate's runtime and on JAX's own callbacks, its oracle."""
  with cg.config(engine=request.param):
    yield request.param
    jax.effects_barrier()


@pytest.fixture(scope="module")
def two() -> Iterator[cg.Workers]:
  with cg.workers(2) as workers:
    yield workers


# A collection of the whole heap takes up to half a second, and a file of tests leaves ten thousand
# frozen objects or more: they are collected when there are so many.
_MOST_FROZEN = 300_000
_frozen = 0  # objects, after the last collection of the whole heap


def _collect_whole_heap() -> None:
  global _frozen
  gc.unfreeze()
  gc.collect()
  gc.freeze()
  _frozen = gc.get_freeze_count()


@pytest.fixture(scope="session")
def whole_heap_at_the_end() -> Iterator[None]:
  yield
  _collect_whole_heap()


@pytest.fixture(scope="module")
def whole_heap(whole_heap_at_the_end: None) -> Iterator[None]:
  yield
  gc.freeze()
  if gc.get_freeze_count() - _frozen > _MOST_FROZEN:
    _collect_whole_heap()


@pytest.fixture
def young_heap(whole_heap: None) -> None:
  """Collections, and searches of the heap after errors, see what the test itself has made."""
  gc.freeze()


# Folders with many errors and collections.
_SEARCHING = {"arrays", "contract", "futures", "loops", "objects", "places", "steer"}


@pytest.fixture(autouse=True)
def heap(request: pytest.FixtureRequest) -> None:
  if request.path.parent.name in _SEARCHING:
    request.getfixturevalue("young_heap")


@pytest.fixture
def clean_caches(young_heap: None) -> Iterator[None]:
  """No program of an earlier test is alive, and none of this one afterwards."""
  drop_programs()
  yield
  drop_programs()


@pytest.fixture
def fake() -> Iterator[FakeCuda]:
  """CUDA without a GPU. The test fails if what it ran broke a rule of CUDA's.

  A test that breaks a rule on purpose reads it by `fake.violations()` and forgets it by
  `fake.clear()`.
  """
  driver = open_fake()
  driver.clear()
  yield driver
  broken = driver.violations()
  driver.clear()
  for stream in driver.streams():
    stream.finish()
  driver.forget()
  assert broken == []
