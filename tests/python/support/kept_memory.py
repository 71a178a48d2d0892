# SPDX-License-Identifier: Apache-2.0
"""Gates that keep views, and later programs that show that XLA has taken its memory back."""

from __future__ import annotations

import gc
import itertools
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from programs import drop_programs

import callgate as cg

SIZE = 1 << 20  # 4 MiB, which the allocator gives back to the system when freed
names = itertools.count()
SCALAR = jax.ShapeDtypeStruct((), np.float32)


@pytest.fixture(autouse=True, scope="module")
def few_objects() -> Iterator[None]:
  """The search of the heap leaves out what JAX and pytest have made so far: it is quick."""
  drop_programs()
  gc.freeze()
  yield
  gc.unfreeze()
  drop_programs()
  gc.freeze()  # what imports have made, as pytest_collection_finish does


def numbers(size: int = SIZE) -> np.ndarray[Any, Any]:
  return np.arange(size, dtype=np.float32)


def run(function: Callable[..., Any], x: Any, **options: Any) -> None:
  """Calls `function(x)` in a compiled gate, on memory that lives as long as its run."""
  gate = cg.gate(
    function, **{"out": SCALAR, "effect": "io", "name": f"look{next(names)}", **options}
  )
  with cg.errors():
    jax.block_until_ready(jax.jit(lambda x: gate(x * 1))(x))


def reuse_memory() -> None:
  """Overwrites what was freed, on malloc's side and on XLA's."""
  gc.collect()
  for _ in range(5):
    junk = np.full(SIZE, -1, np.float32)
    jax.block_until_ready(jnp.asarray(junk) - 1)
