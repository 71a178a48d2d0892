# SPDX-License-Identifier: Apache-2.0
"""Marks of tests whose subject differs on free-threaded Python (docs/free_threading.md, Limits)."""

from __future__ import annotations

import sys

import pytest

FREE = not getattr(sys, "_is_gil_enabled", lambda: True)()

# Python 3.13t keeps functions, classes and code once a second thread has started.
frees_functions = pytest.mark.skipif(
  FREE and sys.version_info < (3, 14), reason="Python 3.13t never frees functions and classes"
)
reads_frames = pytest.mark.skipif(
  FREE, reason="without the GIL, Python can't read the variables of another thread's function"
)
fails_to_unpickle = pytest.mark.skipif(
  FREE, reason="jaxlib 0.10.2 crashes on 3.13t if a jitted function can't be unpickled"
)
