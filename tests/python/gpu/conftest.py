# SPDX-License-Identifier: Apache-2.0
"""Fixtures of the tests on a GPU."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import jax
import pytest


@pytest.fixture
def gpu() -> Any:
  """The first GPU; the test is skipped where JAX has none."""
  try:
    return jax.devices("gpu")[0]
  except RuntimeError as error:
    pytest.skip(f"JAX has no GPU: {error}")


@pytest.fixture
def on_gpu(gpu: Any) -> Iterator[None]:
  """Programs run on the first GPU, wherever JAX's other backends are."""
  with jax.default_device(gpu):
    yield
    jax.effects_barrier()
