# SPDX-License-Identifier: Apache-2.0
"""Taps in every transformation around every other: exactly what leaves the program.

Each chain of transformations runs with a tap in the middle on callgate's runtime and, as an oracle,
through JAX's own callbacks; its result must be that of the function without a tap.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from quick_xla import QUICKLY_COMPILED
from transformation_table import (
  PAIRS,
  TRANSFORMATIONS,
  TRIPLES,
  X,
  build,
  expected,
  groups,
)

import callgate as cg


def run(
  chains: Sequence[Sequence[str]], **options: Any
) -> tuple[list[np.ndarray], list[list[Any]]]:
  """Results of the chains, as one program, and for each what its tap saw."""
  seen: list[list[Any]] = [[] for _ in chains]

  def consumer(index: int) -> Any:
    def consume(value: Any, info: cg.TapInfo) -> None:
      seen[index].append((info.role, info.repeated, np.round(value, 4).tolist()))

    return consume

  def function(index: int) -> Any:
    to = consumer(index)
    return lambda x: cg.tap(jnp.sin(x), to, **options)

  program = jax.jit(
    lambda x: [build(chain, function(i))(x) for i, chain in enumerate(chains)],
    compiler_options=QUICKLY_COMPILED,
  )
  results = [np.asarray(y) for y in program(X)]
  cg.barrier()
  return results, [sorted(one) for one in seen]


def assert_chains_agree(chains: Sequence[Sequence[str]], **options: Any) -> None:
  want = expected(tuple(chains), jnp.sin)
  got, seen = run(chains, **options)
  with cg.config(engine="jax"):
    oracle, oracle_seen = run(chains, **options)
  for chain, a, b, c in zip(chains, got, oracle, want, strict=True):
    np.testing.assert_allclose(a, c, rtol=1e-4, atol=1e-5, err_msg=str(chain))
    np.testing.assert_allclose(b, c, rtol=1e-4, atol=1e-5, err_msg=str(chain))
  for chain, ours, theirs in zip(chains, seen, oracle_seen, strict=True):
    assert len(ours) == len(theirs), chain
    for (role, repeated, value), (role2, repeated2, value2) in zip(ours, theirs, strict=True):
      assert (role, repeated) == (role2, repeated2), chain
      np.testing.assert_allclose(value, value2, rtol=1e-3, atol=1e-3, err_msg=str(chain))


@pytest.mark.parametrize("outer", TRANSFORMATIONS)
def test_pairs_of_transformations_tap_what_they_run(outer):
  assert_chains_agree([pair for pair in PAIRS if pair[0] == outer])


@pytest.mark.parametrize("chains", groups(1, 8))
def test_pairs_take_taps_in_the_flow_of_data(chains):
  assert_chains_agree(chains, effect="dataflow", roles=("primal", "tangent", "cotangent"))


@pytest.mark.parametrize("chains", groups(2, 11))
def test_pairs_take_ordered_taps(chains):
  # JAX refuses its own ordered effects in some of these; callgate's are allowed in all.
  want = expected(tuple(chains), jnp.sin)
  got, seen = run(chains, ordered=True)
  for chain, a, c in zip(chains, got, want, strict=True):
    np.testing.assert_allclose(a, c, rtol=1e-4, atol=1e-5, err_msg=str(chain))
  assert not [chain for chain, one in zip(chains, seen, strict=True) if not one]


@pytest.mark.parametrize("part", range(2))
def test_triples_of_transformations_tap_what_they_run(part):
  assert_chains_agree(random.Random(part).sample(TRIPLES, 10), roles=("primal", "cotangent"))


def expected_counts() -> dict[str, int]:
  """How often the primal leaves the program, by the meaning of each transformation."""
  return {
    "jit": 1, "nested jit": 2, "vmap": 2, "vmap of axis 1": 2, "grad": 1, "jvp": 1,
    "linearize": 1, "checkpoint": 1, "scan": 2, "while": 2, "while with lanes apart": 3,
    "cond": 1, "switch": 1, "custom_jvp": 1, "custom_vjp": 1,
  }  # fmt: skip


def test_the_primal_leaves_exactly_as_often_as_its_place_runs():
  _, seen = run([[name] for name in TRANSFORMATIONS])
  assert dict(zip(TRANSFORMATIONS, map(len, seen), strict=True)) == expected_counts()


def test_vmap_of_grad_of_scan_taps_each_lane_and_step_once():
  steps: list[tuple[tuple[int, ...], float]] = []

  def loss(w, xs):
    def step(carry, x):
      def keep(value, info):
        steps.append((info.lane, float(value)))

      return carry + cg.tap(w * x, keep), None

    return jax.lax.scan(step, 0.0, xs)[0]

  xs = jnp.arange(1.0, 4.0)
  grads = jax.jit(jax.vmap(jax.grad(loss), (0, None)))(jnp.array([1.0, 10.0]), xs)
  cg.barrier()
  assert grads.tolist() == [6.0, 6.0]
  want = [((lane,), w * x) for lane, w in enumerate((1.0, 10.0)) for x in (1.0, 2.0, 3.0)]
  assert sorted(steps) == want
