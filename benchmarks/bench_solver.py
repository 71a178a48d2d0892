# SPDX-License-Identifier: Apache-2.0
"""A sparse solve of SciPy's and its gradient, beside `jax.lax.custom_linear_solve`.

`callgate.linear_solver` keeps SuperLU's object from the forward to the adjoint solve. With JAX's
own way the solves are `pure_callback`s, which know arrays alone: each factorises anew. One compiled
program makes a chain of solves of a tridiagonal system, or the gradient of the chain's sum in
values and right-hand side. Factorisations of one execution are counted and stand in the notes.
Unit: microseconds a solve (forward and adjoint in the rows of gradients).
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import scipy.sparse
from scipy.sparse.linalg import splu

import callgate as cg
from benchmarks import harness

SIZES = (100, 10_000)
SHARED = "callgate.linear_solver"
ANEW = "custom_linear_solve over pure_callback"
CHAIN = 10

Solve = Callable[[jax.Array, jax.Array], jax.Array]


def named(who: str, what: str, size: int) -> str:
  """A row's name."""
  return f"{who}, {what}, n = {size:,}"


TARGETS = tuple(
  harness.Target(
    f"a gradient, n = {n:,}", named(SHARED, "gradient", n), named(ANEW, "gradient", n), 0.8
  )
  for n in SIZES
)


class _System:
  """A tridiagonal matrix by its values, and how often it was factorised."""

  def __init__(self, size: int) -> None:
    self.size, self.factorised = size, 0
    diagonal, above = np.arange(size), np.arange(size - 1)
    self.rows = np.concatenate([diagonal, above, above + 1])
    self.columns = np.concatenate([diagonal, above + 1, above])
    parts = [np.full(size, 4.0), np.full(size - 1, -1.0), np.full(size - 1, -1.5)]
    self.values = jnp.asarray(np.concatenate(parts), jnp.float32)
    self.right = jnp.ones(size, jnp.float32)

  def factor(self, values: np.ndarray) -> object:
    self.factorised += 1
    shape = (self.size, self.size)
    return splu(scipy.sparse.csc_matrix((values, (self.rows, self.columns)), shape=shape))

  def product(self, values: jax.Array, x: jax.Array) -> jax.Array:
    return jnp.zeros_like(x).at[self.rows].add(values * x[self.columns])


def _shared(system: _System) -> Solve:
  return cg.linear_solver(
    factor=system.factor, solve=lambda lu, b: lu.solve(b),
    solve_transposed=lambda lu, b: lu.solve(b, "T"), matvec=system.product,
  )  # fmt: skip


def _anew(system: _System) -> Solve:
  def on_host(kind: str, values: jax.Array, b: jax.Array) -> np.ndarray:
    return system.factor(np.asarray(values)).solve(np.asarray(b), kind)  # type: ignore[attr-defined]

  def solve(values: jax.Array, b: jax.Array) -> jax.Array:
    def by(kind: str) -> Callable[..., jax.Array]:
      call = functools.partial(on_host, kind)
      return lambda _, b: jax.pure_callback(call, b, values, b)

    product = functools.partial(system.product, values)
    return jax.lax.custom_linear_solve(product, b, by("N"), by("T"))

  return solve


def _program(make: Callable[[_System], Solve], what: str, size: int) -> tuple[Callable, _System]:
  system = _System(size)
  solve = make(system)

  def chain(values: jax.Array, b: jax.Array) -> jax.Array:
    step = lambda b, _: (solve(values, b) + 1, None)
    return jax.lax.scan(step, b, None, length=CHAIN)[0].sum()

  def solves(values: jax.Array, b: jax.Array) -> jax.Array:
    return chain(values, b)

  gradient = jax.grad(chain, (0, 1))
  return jax.jit(solves if what == "solve" else gradient), system


def run(options: harness.Options) -> harness.Report:
  """Both ways, for solves and gradients of each size."""
  rows: list[harness.Row] = []
  sizes = options.pick(SIZES, SIZES[:1])
  for what in ("solve", "gradient"):
    for size in sizes:
      counts: dict[str, int] = {}
      contestants = [
        harness.Contestant(
          named(who, what, size), functools.partial(_work, make, what, size, counts)
        )
        for who, make in ((SHARED, _shared), (ANEW, _anew))
      ]
      for row in harness.measure(contestants, rounds=options.rounds_or(20)):
        note = f"factorisations of one execution: {counts.get(row.name)}"
        rows.append(replace(row, note=note))
  title = f"A sparse solve by SuperLU and its gradient, in a chain of {CHAIN}"
  baseline = named(SHARED, "solve", sizes[0])
  settings = {"chain": CHAIN}
  return harness.Report(
    "solver", title, "us", rows, baseline, TARGETS, settings, quick=options.quick
  )


def _work(
  make: Callable[[_System], Solve], what: str, size: int, counts: dict[str, int]
) -> harness.Work:
  program, system = _program(make, what, size)
  jax.block_until_ready(program(system.values, system.right))
  before = system.factorised
  jax.block_until_ready(program(system.values, system.right))
  who = SHARED if make is _shared else ANEW
  counts[named(who, what, size)] = system.factorised - before
  return harness.Work(
    lambda: jax.block_until_ready(program(system.values, system.right)), calls=CHAIN
  )
