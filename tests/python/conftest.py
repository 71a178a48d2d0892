"""What the Python tests share: the two engines, clean caches, fresh processes."""

from __future__ import annotations

import gc
import os
import subprocess
import sys
from collections.abc import Iterator

import jax
import pytest

import callgate as cg

jax.config.update("jax_enable_x64", False)


@pytest.fixture(params=["callgate", "jax"])
def engine(request: pytest.FixtureRequest) -> Iterator[str]:
  """Runs the test on callgate's runtime and on JAX's own callbacks, its oracle."""
  with cg.config(engine=request.param):
    yield request.param
    jax.effects_barrier()


@pytest.fixture
def clean_caches() -> Iterator[None]:
  """No program of an earlier test is alive, and none of this one afterwards."""
  drop_programs()
  yield
  drop_programs()


def drop_programs() -> None:
  """Frees all compiled programs, and what only they held."""
  jax.clear_caches()
  gc.collect()


def run_python(code: str, *arguments: str, **environment: str) -> str:
  """Runs `code` in a new interpreter, which must succeed; returns what it printed."""
  done = subprocess.run(
    [sys.executable, "-W", "error", "-c", code, *arguments],
    env={**os.environ, **environment},
    capture_output=True,
    text=True,
    timeout=120,
  )
  assert done.returncode == 0, done.stderr
  return done.stdout
