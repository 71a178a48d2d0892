# SPDX-License-Identifier: Apache-2.0
"""Every transformation of JAX around every other, with a gate in the middle.

A transformation here maps a function R^3 -> R^3 to another one, so that any chain of them is a
program. Each chain runs three times: with the gate, with the gate on JAX's own callbacks, and with
the gate's reference, which is pure JAX.
"""

from __future__ import annotations

import random
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from property_checks import examples
from transformation_table import (
  EFFECT_PAIRS,
  PAIRS,
  TRANSFORMATIONS,
  TRIPLES,
  X,
  assert_chains_agree,
  gate,
  groups,
  reference,
  run,
)

import callgate as cg

# JAX's own callbacks are in some pairs; in all of them in a soak.
BY_JAX = [pair for group in groups(1, 4, 11) for pair in group]


@pytest.mark.parametrize("outer", TRANSFORMATIONS)
def test_pairs_of_transformations_agree_with_jax(outer: str) -> None:
  assert_chains_agree([pair for pair in PAIRS if pair[0] == outer], by_jax=BY_JAX)


@pytest.mark.parametrize("effect", ["io", "ordered"])
@pytest.mark.parametrize("chains", groups(5, 10, pairs=EFFECT_PAIRS))
def test_pairs_of_transformations_take_effects(effect: Any, chains: Any) -> None:
  assert_chains_agree(chains, effect)


@pytest.mark.parametrize("part", range(2))
def test_triples_of_transformations_agree_with_jax(part: int) -> None:
  assert_chains_agree(random.Random(part).sample(TRIPLES, 10))


@pytest.mark.parametrize("name", TRANSFORMATIONS)
def test_transformations_work_outside_jit(name: str) -> None:
  want = run([[name]], reference)[0]
  np.testing.assert_allclose(TRANSFORMATIONS[name](gate("pure"))(X), want, rtol=1e-4, atol=1e-5)


# -- properties ----------------------------------------------------------------------------------
DTYPES = ["bool", "int8", "uint16", "int32", "float16", "bfloat16", "float32", "complex64"]
axes = st.one_of(st.none(), st.integers(-3, 2))


def arrays(shape: tuple[int, ...], dtype: str) -> Any:
  return (np.arange(np.prod(shape, dtype=int)) % 7).reshape(shape).astype(jnp.dtype(dtype))


@examples(9)
@given(hnp.array_shapes(min_dims=0, max_dims=3, min_side=0, max_side=3), st.sampled_from(DTYPES))
def test_any_shape_and_dtype_comes_back_as_numpy_makes_it(shape: Any, dtype: str) -> None:
  def halves(x: Any) -> Any:
    return x.T.copy(), x.ravel()[::-1]

  x = arrays(shape, dtype)
  out = tuple(jax.ShapeDtypeStruct(y.shape, y.dtype) for y in halves(x))
  for got, want in zip(jax.jit(cg.gate(halves, out=out))(x), halves(x), strict=True):
    np.testing.assert_array_equal(np.asarray(got), want)
    assert got.dtype == want.dtype


@examples(9)
@given(
  first=axes,
  second=axes,
  out=st.integers(-2, 1),
  dtype=st.sampled_from(DTYPES),
  method=st.sampled_from(["each", "whole", "broadcast"]),
)
def test_any_axis_and_dtype_can_be_mapped(
  first: Any, second: Any, out: int, dtype: str, method: Any
) -> None:
  if first is None and second is None:
    first = 0

  def joined(x: Any, y: Any) -> Any:
    lead = np.broadcast_shapes(x.shape[:-2], y.shape[:-2])
    return np.where(np.broadcast_to(x, (*lead, 2, 2)) != 0, y, x)[..., 0]

  x = arrays((2, 2, 2) if first is not None else (2, 2), dtype)
  y = arrays((2, 2, 2) if second is not None else (2, 2), dtype)[::-1]
  gate = cg.gate(joined, out=lambda x, y: jax.ShapeDtypeStruct(x.shape[:1], x.dtype), vmap=method)
  got = jax.vmap(gate, (first, second), out)(x, y)
  xs = [x] * 2 if first is None else np.moveaxis(x, first, 0)
  ys = [y] * 2 if second is None else np.moveaxis(y, second, 0)
  want = np.stack([joined(a, b) for a, b in zip(xs, ys, strict=True)], out)
  np.testing.assert_array_equal(np.asarray(got), want)


leaves = st.builds(
  arrays, hnp.array_shapes(min_dims=0, max_dims=2, max_side=3), st.sampled_from(DTYPES)
)
trees = st.recursive(
  leaves | st.none(),
  lambda nodes: st.one_of(
    st.lists(nodes, max_size=3),
    st.tuples(nodes, nodes),
    st.dictionaries(st.sampled_from("abc"), nodes, max_size=3),
  ),
  max_leaves=6,
)


@examples(9)
@given(tree=trees, keyword=trees)
def test_any_pytree_makes_the_round_trip(tree: Any, keyword: Any) -> None:
  gate = cg.gate(lambda t, k: {"out": (t, k)}, out=lambda t, k: {"out": (t, k)})
  got = jax.jit(lambda t, k: gate(t, {"k": k}))(tree, keyword)
  want = {"out": (tree, {"k": keyword})}
  assert jax.tree.structure(got) == jax.tree.structure(want)
  for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
    np.testing.assert_array_equal(np.asarray(a), b)
    assert a.dtype == b.dtype
