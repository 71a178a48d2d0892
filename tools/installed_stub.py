# SPDX-License-Identifier: Apache-2.0
"""Prints where the installed callgate keeps _callgate.pyi, the stub that its build generated.

The Makefile copies it beside the sources, where pyright and the reference see the compiled module's
types and docstrings.
"""

import importlib.util
import sys
from pathlib import Path

spec = importlib.util.find_spec("callgate")
if spec is None or not spec.submodule_search_locations:
  sys.exit("callgate is not installed in this environment")
print(Path(spec.submodule_search_locations[0]) / "_callgate.pyi")
