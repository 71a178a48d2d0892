# SPDX-License-Identifier: Apache-2.0
"""Meshes, arrays that lie on them, and what a compiled program moves."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from hypothesis import strategies as st
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

MESHES = {
  "8": ((8,), "a"),
  "4x2": ((4, 2), "ab"),
  "2x4": ((2, 4), "ab"),
  "2x2x2": ((2, 2, 2), "abc"),
}
MOVES = ("all-gather", "all-reduce", "all-to-all", "collective-permute")


def mesh(name: str = "4x2", kind: AxisType = AxisType.Auto) -> Mesh:
  shape, axes = MESHES[name]
  return jax.make_mesh(shape, tuple(axes), axis_types=(kind,) * len(axes))


def put(x: Any, on: Mesh, *spec: Any) -> jax.Array:
  return jax.device_put(x, NamedSharding(on, P(*spec)))


def moves(function: Callable[..., Any], *args: Any) -> set[str]:
  """The ways in which the compiled program moves data between devices."""
  text = jax.jit(function).lower(*args).compile().as_text()
  return {name for name in MOVES if f"{name}(" in text or f"{name}-start(" in text}


X = np.arange(128, dtype=np.float32).reshape(16, 8)


@st.composite
def specs(draw: st.DrawFn, shape: tuple[int, ...], on: Mesh) -> P:
  """A sharding of an array that the mesh can hold evenly."""
  dims: list[list[str]] = [[] for _ in shape]
  for axis, size in on.shape.items():
    dim = draw(st.sampled_from([None, *range(len(shape))]))
    if dim is None:
      continue
    ways = int(np.prod([on.shape[a] for a in dims[dim]], dtype=int)) * size
    if shape[dim] % ways == 0:
      dims[dim].append(str(axis))
  return P(*(tuple(axes) if axes else None for axes in dims))
