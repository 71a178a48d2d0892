# SPDX-License-Identifier: Apache-2.0
"""The shared code of the scripts of `compat.sharded_jit`'s cases: see compat/test_sharded_jit.py.

A case is a function without arguments that passes or raises. A script imports them, runs all in its
process, and writes {case: "" or what failed} as JSON.
"""

from __future__ import annotations

import json
import pathlib
import traceback
from collections.abc import Callable

import jax
import numpy as np

X = np.arange(64, dtype=np.float32).reshape(8, 8)
CASES: dict[str, Callable[[], None]] = {}


def case(function: Callable[[], None]) -> Callable[[], None]:
  CASES[function.__name__] = function
  return function


def shard_shapes(array: jax.Array) -> list[tuple[int, ...]]:
  return [shard.data.shape for shard in array.addressable_shards]


def message_of(error: type[Exception], function: Callable[[], object]) -> str:
  try:
    function()
  except error as caught:
    return str(caught)
  raise AssertionError(f"expected {error.__name__}, got none")


def report(file: str) -> None:
  """Runs all cases, in order."""
  failures: dict[str, str] = {}
  for name, run in CASES.items():
    try:
      run()
      failures[name] = ""
    except Exception:  # noqa: BLE001 - reported by name
      failures[name] = traceback.format_exc()
  pathlib.Path(file).write_text(json.dumps(failures), encoding="utf-8")
