# SPDX-License-Identifier: Apache-2.0
"""Walks over jaxprs: which equations they come to, in which order, and what rules make of them."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from callgate._jax import tracing, walk

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


# -- interpret -------------------------------------------------------------------------------------
@pytest.mark.parametrize("holder", HOLDERS)
def test_equations_bound_as_they_are_give_what_the_program_gives(holder: str) -> None:
  function = HOLDERS[holder]
  closed = jax.make_jaxpr(function)(X)
  run = lambda x: walk.interpret(closed, [x], walk.bind_equation)
  expected = jax.tree.leaves(function(X))
  for got in (run(X), jax.jit(run)(X)):
    jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=1e-6), got, expected)


def test_a_rule_gets_values_literals_and_constants_in_the_programs_order() -> None:
  table = np.arange(4, dtype=np.float32)
  closed = jax.make_jaxpr(lambda x: (jnp.asarray(table) * x + 2.0, x, 3.0))(X)
  seen: list[Any] = []

  def rule(eqn: Any, inputs: list[Any]) -> list[Any]:
    seen.append((eqn.primitive.name, inputs))
    return walk.bind_equation(eqn, inputs)

  first, same, literal = walk.interpret(closed, [X], rule)
  np.testing.assert_allclose(first, table * X + 2)
  assert same is X
  assert literal == 3
  assert [name for name, _ in seen] == ["mul", "add"]
  np.testing.assert_array_equal(seen[0][1][0], table)
  np.testing.assert_array_equal(seen[1][1][0], table * X)
  assert seen[1][1][1] == 2


def test_a_rule_replaces_an_equation_also_one_of_several_results() -> None:
  closed = jax.make_jaxpr(lambda x: jnp.sin(sum(jax.lax.split(x, (1, 2, 1))[::2])))(X)

  def rule(eqn: Any, inputs: list[Any]) -> Sequence[Any]:
    if eqn.primitive.name == "split":
      return inputs[0][3:], None, inputs[0][:1]
    return [jnp.cos(*inputs)] if eqn.primitive.name == "sin" else walk.bind_equation(eqn, inputs)

  (got,) = walk.interpret(closed, [X], rule)
  np.testing.assert_allclose(got, np.cos(X[3:] + X[:1]), rtol=1e-6)


def test_a_rule_alone_goes_into_inner_jaxprs_which_may_be_open() -> None:
  closed = jax.make_jaxpr(jax.checkpoint(lambda x: jnp.sin(x) * 2))(X)
  seen: list[str] = []

  def rule(eqn: Any, inputs: list[Any]) -> list[Any]:
    seen.append(eqn.primitive.name)
    if eqn.primitive.name == "sin":
      return [jnp.cos(*inputs)]
    inner = walk.subjaxprs(eqn)
    return walk.interpret(inner[0], inputs, rule) if inner else walk.bind_equation(eqn, inputs)

  np.testing.assert_allclose(walk.interpret(closed, [X], rule)[0], 2 * np.cos(X), rtol=1e-6)
  assert seen[1:] == ["sin", "mul"]
  seen.clear()
  walk.interpret(closed, [X], walk.bind_equation)
  assert not seen


@pytest.mark.parametrize("count", [0, 2])
def test_a_rule_has_to_give_each_result_and_a_program_gets_each_argument(count: int) -> None:
  closed = jax.make_jaxpr(jnp.sin)(X)
  with pytest.raises(ValueError, match="zip"):
    walk.interpret(closed, [X], lambda eqn, inputs: inputs * count)
  with pytest.raises(ValueError, match="zip"):
    walk.interpret(closed, [X] * count, walk.bind_equation)


def test_an_equation_is_bound_in_the_context_in_which_it_was_traced() -> None:
  draw = lambda key: jax.random.bits(key, (3,))
  with jax.threefry_partitionable(False):
    closed = jax.make_jaxpr(draw)(jax.random.key(0))
    expected = draw(jax.random.key(0))
  with jax.threefry_partitionable(True):
    (got,) = walk.interpret(closed, [jax.random.key(0)], walk.bind_equation)
    assert (draw(jax.random.key(0)) != expected).any()
  np.testing.assert_array_equal(got, expected)


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
  closed = jax.make_jaxpr(jax.jit(lambda x: jax.jit(jnp.sin)(HOLDERS["cond"](x))))(X)
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


# -- rewrites --------------------------------------------------------------------------------------
def test_parameters_of_equations_are_changed_in_inner_jaxprs_too() -> None:
  closed = jax.make_jaxpr(jax.jit(lambda x: jnp.cumsum(x)))(X)

  def change(params: dict[str, Any]) -> dict[str, Any]:
    return params | ({"reverse": True} if "reverse" in params else {})

  changed = walk.with_params(closed, change)
  reverse = np.cumsum(X[::-1])[::-1]
  np.testing.assert_allclose(tracing.jaxpr_as_fun(changed)(X)[0], reverse, rtol=1e-6)
  np.testing.assert_allclose(tracing.jaxpr_as_fun(closed)(X)[0], np.cumsum(X), rtol=1e-6)
