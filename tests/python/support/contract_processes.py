# SPDX-License-Identifier: Apache-2.0
"""Processes in which tests of the contract ask rows of its table."""

from __future__ import annotations

import subprocess
from collections.abc import Iterable
from typing import Any

import interpreters
import jax
from contract import ROWS


def run(source: str, rows: Iterable[str], **options: Any) -> subprocess.CompletedProcess[str]:
  """Runs a process that has the devices of this one.

  Args:
    source: its program.
    rows: the rows that it asks; the process's template imports PyTorch where one needs it.
    **options: of `interpreters.run`.
  """
  platforms = "cuda,cpu" if jax.default_backend() == "gpu" else "cpu"
  environment = {"JAX_PLATFORMS": platforms, **options.pop("environment", {})}
  preload = "torch" if any(ROWS[row].needs == "torch" for row in rows) else ""
  return interpreters.run(source, environment=environment, preload=preload, **options)
