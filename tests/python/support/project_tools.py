# SPDX-License-Identifier: Apache-2.0
"""The scripts in tools/, as modules."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

TOOLS = Path(__file__).resolve().parents[3] / "tools"


def load(name: str) -> Any:
  """A new module of tools/`name`.py."""
  spec = importlib.util.spec_from_file_location(name, TOOLS / f"{name}.py")
  assert spec is not None
  assert spec.loader is not None
  module = importlib.util.module_from_spec(spec)
  spec.loader.exec_module(module)
  return module
