# SPDX-License-Identifier: Apache-2.0
"""Finds the package's folder; replaces a file, and swaps two files, atomically."""

from __future__ import annotations

import contextlib
import ctypes
import os
import secrets
from collections.abc import Generator
from pathlib import Path

ROOT = Path(__file__).parents[1]


@contextlib.contextmanager
def replaced(path: Path) -> Generator[Path]:
  """Yields a new file to write, which replaces `path` at the end, unless the block raises."""
  made = path.with_name(f".{path.name}.{secrets.token_hex(8)}")
  try:
    yield made
    os.replace(made, path)
  finally:
    made.unlink(missing_ok=True)


_EXCHANGE = 2  # RENAME_EXCHANGE of linux/fs.h
_HERE = -100  # AT_FDCWD of fcntl.h


def exchange(one: Path, other: Path) -> bool:
  """Swaps the names of two files or folders atomically.

  Python has no function for this. Returns False if the system or the file system does not support
  it.
  """
  rename = getattr(ctypes.CDLL(None), "renameat2", None)  # glibc's, from 2.28 on
  paths = _HERE, os.fsencode(one), _HERE, os.fsencode(other)
  return rename is not None and rename(*paths, ctypes.c_uint(_EXCHANGE)) == 0
