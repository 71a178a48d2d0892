# SPDX-License-Identifier: Apache-2.0
"""Processes in which tests of the contract ask rows of its table."""

from __future__ import annotations

import importlib.util
import subprocess
from typing import Any

import interpreters
import jax
import quick_xla


def run(source: str, *, torch: bool = True, **options: Any) -> subprocess.CompletedProcess[str]:
  """Runs a process that has the devices of this one, and compiles as quickly.

  Args:
    source: its program.
    torch: True if a row needs PyTorch, which the process's template imports then, where there is
      one.
    **options: of `interpreters.run`.
  """
  platforms = "cuda,cpu" if jax.default_backend() == "gpu" else "cpu"
  environment = {"JAX_PLATFORMS": platforms, **quick_xla.environment()}
  environment |= options.pop("environment", {})
  preload = "torch" if torch and importlib.util.find_spec("torch") else ""
  return interpreters.run(source, environment=environment, preload=preload, **options)
