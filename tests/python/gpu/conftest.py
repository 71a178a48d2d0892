# SPDX-License-Identifier: Apache-2.0
"""Fixtures of the tests on a GPU."""

from __future__ import annotations

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
