# SPDX-License-Identifier: Apache-2.0
"""Walks over jaxprs: which equations they come to, and in which order."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from callgate._jax import walk

X = np.linspace(0.1, 0.9, 4, dtype=np.float32)


@jax.custom_jvp
def with_rule(x: Any) -> Any:
  return jnp.sin(x)


with_rule.defjvp(lambda primals, tangents: (with_rule(*primals), tangents[0]))


def solved(x: Any) -> Any:
  return jax.lax.custom_linear_solve(
    lambda y: y * jnp.sin(x), x, lambda _, b: b / jnp.sin(x), symmetric=True
  )


def in_while(x: Any) -> Any:
  return jax.lax.while_loop(lambda y: jnp.cos(y).sum() > 3, lambda y: jnp.sin(y) + 0.1, x)


# Programs that hold a sine in an inner jaxpr, each with the primitive around it.
HOLDERS: dict[str, Callable[[Any], Any]] = {
  "jit": jax.jit(jnp.sin),
  "scan": lambda x: jax.lax.scan(lambda c, y: (c + jnp.sin(y), c), 0.0, x),
  "cond": lambda x: jax.lax.cond(x[0] > 0.5, jnp.cos, jnp.sin, x),
  "while": in_while,
  "custom_jvp_call": with_rule,
  "custom_linear_solve": solved,
  "checkpoint": jax.checkpoint(jnp.sin),
}


def names(eqns: Iterable[Any]) -> list[str]:
  renamed = {"pjit": "jit", "remat2": "checkpoint"}
  return [renamed.get(eqn.primitive.name, eqn.primitive.name) for eqn in eqns]


# -- searches --------------------------------------------------------------------------------------
@pytest.mark.parametrize("holder", HOLDERS)
def test_equations_of_inner_jaxprs_come_behind_those_that_hold_them(holder: str) -> None:
  closed = jax.make_jaxpr(lambda x: jax.jit(HOLDERS[holder])(x * 2))(X)
  sines = [path for path in walk.paths(closed) if path[-1].primitive is jax.lax.sin_p]
  assert {tuple(names(path[:2])) for path in sines} == {("jit", holder)}
  assert [path[-1] for path in walk.paths(closed)] == list(walk.equations(closed.jaxpr))


def test_equations_come_in_the_programs_order_the_outer_one_first() -> None:
  def program(x: Any) -> Any:
    y = jax.jit(lambda x: jnp.cos(jax.jit(jnp.sin)(x)))(jnp.exp(x))
    return jax.lax.cond(y[0] > 0, jnp.tanh, jnp.log, y)

  closed = jax.make_jaxpr(program)(X)
  order = names(walk.equations(closed))
  assert order[:5] == ["exp", "jit", "jit", "sin", "cos"]
  assert order[-3:] == ["cond", "log", "tanh"]


def test_a_search_goes_where_it_is_told_to() -> None:
  closed = jax.make_jaxpr(lambda x: jax.jit(jnp.sin)(HOLDERS["cond"](x)))(X)
  jits = lambda eqn: walk.subjaxprs(eqn) if eqn.primitive.name in ("jit", "pjit") else []
  found = names(walk.equations(closed, jits))
  assert found[-3:] == ["cond", "jit", "sin"]


def test_an_equation_tells_its_jaxprs_and_not_those_within() -> None:
  eqns = {eqn.primitive.name: eqn for eqn in jax.make_jaxpr(solved)(X).eqns}
  assert len(walk.subjaxprs(eqns["custom_linear_solve"])) == 4  # two, and their transposes
  (outer,) = jax.make_jaxpr(jax.jit(lambda x: jax.jit(jnp.sin)(x)))(X).eqns
  (inner,) = walk.subjaxprs(outer)
  assert names(inner.eqns) == ["jit"]
  assert walk.subjaxprs(jax.make_jaxpr(jnp.sin)(X).eqns[0]) == []
