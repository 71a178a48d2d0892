"""Runs Python source in a process of its own, for tests of exits, hangs and first imports."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap


def run_python(
  source: str, *, timeout: float = 120, **environment: str
) -> subprocess.CompletedProcess[str]:
  """Runs dedented source with JAX on the CPU; a hang is subprocess.TimeoutExpired."""
  return subprocess.run(
    [sys.executable, "-c", textwrap.dedent(source)],
    env={**os.environ, "JAX_PLATFORMS": "cpu", **environment},
    capture_output=True,
    text=True,
    timeout=timeout,
    check=False,
  )


def output_of(source: str, *, timeout: float = 120, **environment: str) -> str:
  """What the source prints; fails unless it exits with 0."""
  done = run_python(source, timeout=timeout, **environment)
  assert done.returncode == 0, f"exit code {done.returncode}\n{done.stdout}\n{done.stderr}"
  return done.stdout
