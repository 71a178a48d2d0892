# SPDX-License-Identifier: Apache-2.0
"""Gates that keep views, and later programs that show that XLA has taken its memory back."""

from __future__ import annotations

import gc
import itertools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import callgate as cg

SIZE = 1 << 20  # 4 MiB, which the allocator gives back to the system when freed
names = itertools.count()
SCALAR = jax.ShapeDtypeStruct((), np.float32)


def numbers(size: int = SIZE) -> np.ndarray[Any, Any]:
  return np.arange(size, dtype=np.float32)


def run(function: Callable[..., Any], x: Any, **options: Any) -> None:
  """Calls `function(x)` in a compiled gate, on memory that lives as long as its run."""
  gate = cg.gate(
    function, **{"out": SCALAR, "effect": "io", "name": f"look{next(names)}", **options}
  )
  with cg.errors():
    jax.block_until_ready(jax.jit(lambda x: gate(x * 1))(x))


def leaked(
  keep: Callable[[Any], Any], x: Any, match: str | None = None, **options: Any
) -> tuple[Any, str]:
  """The value that a gate keeps of its argument, once its memory is used again, and the error."""
  store: list[Any] = []

  def leak(weights: Any) -> Any:
    store.append(keep(weights))
    return np.float32(0)

  with pytest.raises(cg.EscapedViewError, match=match) as caught:
    run(leak, x, **options)
  reuse_memory()
  return store[0], str(caught.value)


def reuse_memory() -> None:
  """Overwrites what was freed, on malloc's side and on XLA's."""
  gc.collect()
  for _ in range(5):
    junk = np.full(SIZE, -1, np.float32)
    jax.block_until_ready(jnp.asarray(junk) - 1)
