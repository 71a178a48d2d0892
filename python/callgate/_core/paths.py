# SPDX-License-Identifier: Apache-2.0
"""Finds the package's folder, and replaces files in one step."""

from __future__ import annotations

import contextlib
import os
import secrets
from collections.abc import Generator
from pathlib import Path

ROOT = Path(__file__).parents[1]


@contextlib.contextmanager
def replaced(path: Path) -> Generator[Path]:
  """A new file beside `path` to write, which takes its place at the end, if nothing was raised."""
  made = path.with_name(f".{path.name}.{secrets.token_hex(8)}")
  try:
    yield made
    os.replace(made, path)
  finally:
    made.unlink(missing_ok=True)
