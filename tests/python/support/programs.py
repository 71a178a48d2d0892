"""Compiled programs, and their end."""

from __future__ import annotations

import gc

import jax


def drop_programs() -> None:
  """Frees all compiled programs, and what only they held."""
  jax.clear_caches()
  gc.collect()
