# SPDX-License-Identifier: Apache-2.0
"""The versions of JAX that callgate works with."""

from __future__ import annotations

import contextlib
from collections.abc import Generator

import jax

FIRST, BEYOND = (0, 10, 2), (0, 13)  # the versions of JAX in pyproject.toml


@contextlib.contextmanager
def needs_its_versions() -> Generator[None]:
  """Names callgate's range of versions where imports fail on a JAX that is out of it."""
  try:
    yield
  except (AttributeError, ImportError) as error:
    if FIRST <= jax.__version_info__ < BEYOND:
      raise
    first, beyond = (".".join(map(str, version)) for version in (FIRST, BEYOND))
    raise ImportError(
      f"callgate needs JAX from {first} to below {beyond}, because it uses private parts of JAX; "
      f"got JAX {jax.__version__}, which lacks one of them ({error}): run "
      f"pip install 'jax>={first},<{beyond}'"
    ) from error
