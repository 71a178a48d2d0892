# SPDX-License-Identifier: Apache-2.0
"""A limit in seconds for each test; a plugin of pytest that conftest.py registers.

pytest gives every test the limit `faulthandler_timeout`, and a test marked `limit(seconds)` has
its own. A test that is over its limit ends its process of tests, with every thread's stack, even
where it holds the GIL; pytest-xdist names the test and starts another process for those that are
left.
"""

from __future__ import annotations

import faulthandler
import os
import sys
from collections.abc import Generator

import pytest

_stderr: list[int] = []  # a copy, since pytest captures the other


def pytest_configure() -> None:
  _stderr.append(os.dup(2))  # not captured yet


@pytest.hookimpl(wrapper=True, trylast=True)
def pytest_runtest_protocol(item: pytest.Item) -> Generator[None, object, object]:
  """Gives a marked test its own limit."""
  marker = item.get_closest_marker("limit")
  if marker is not None and not sys.gettrace():
    faulthandler.dump_traceback_later(marker.args[0], exit=True, file=_stderr[0])
  return (yield)
