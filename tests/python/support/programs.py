# SPDX-License-Identifier: Apache-2.0
"""Compiled programs, and their end."""

from __future__ import annotations

import gc
import textwrap
from collections.abc import Callable

import jax
from waiting import until


def drop_programs() -> None:
  """Frees all compiled programs, and what only they held."""
  jax.clear_caches()
  gc.collect()


def drop_programs_until(condition: Callable[[], bool]) -> None:
  """Frees them until something is true: XLA's threads hold a program beyond its results."""

  def dropped() -> bool:
    drop_programs()
    return condition()

  until(dropped, "freed")


# Code for another process, after code that makes `PROGRAMS`: functions and arguments by name. Its
# first argument is the persistent cache. It prints each program's name, how often that was found
# there, and its result.
CACHED = textwrap.dedent("""
  import sys
  hits = []
  jax.monitoring.register_event_listener(
    lambda event, **_: hits.append(event) if event == "/jax/compilation_cache/cache_hits" else None
  )
  jax.config.update("jax_compilation_cache_dir", sys.argv[1])
  jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)
  jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)
  for name, (f, x) in PROGRAMS.items():
    lowered, before = jax.jit(f).lower(x), len(hits)
    got = jax.tree.map(lambda v: v.tolist(), lowered.compile()(x))
    jax.effects_barrier()
    print(name, len(hits) - before, got, sep=": ")
""")
