# SPDX-License-Identifier: Apache-2.0
"""Processor time of each test, children included, in the JUnit file; conftest.py registers it.

A test's element has the property `processor_seconds`: user and system time of this process and of
the children that it has waited for, fixtures included. `tools/check_times.py` makes tables of it.
"""

from __future__ import annotations

import os
from collections.abc import Generator

import pytest

_before = pytest.StashKey[float]()


def _seconds() -> float:
  return sum(os.times()[:4])


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
  """Reads the clock before the test's first fixture."""
  item.stash[_before] = _seconds()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
  item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
  """Adds the property before the last of a test's reports is made, which carries it."""
  if call.when == "teardown":
    seconds = _seconds() - item.stash[_before]
    item.user_properties.append(("processor_seconds", f"{seconds:.3f}"))
  return (yield)
