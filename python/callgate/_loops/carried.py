# SPDX-License-Identifier: Apache-2.0
"""Passes a value into the jaxprs of an equation: a lane's mask or number (`control.py`).

The equation is bound again, with the value as another operand of its jaxprs: under `jit`,
`checkpoint`, control flow and custom derivatives. `rule(value, eqn, inputs)` returns the results of
each equation in them.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax

from callgate._jax import batching, loops, walk

_Values = Sequence[Any]
_Rule = Callable[[Any, Any, _Values], _Values]


def run(rule: _Rule, jaxpr: Any, value: Any, operands: _Values) -> list[Any]:
  """Returns the results of a jaxpr, closed or open."""
  return walk.interpret(jaxpr, operands, functools.partial(rule, value))


def can_carry(primitive: Any) -> bool:
  """True if `bind` knows the primitive."""
  return primitive.name in _RULES


def bind(rule: _Rule, eqn: Any, value: Any, inputs: _Values) -> _Values:
  """Returns the results of an equation, or of an object with `primitive` and `params`."""
  return _RULES[eqn.primitive.name](rule, eqn, value, inputs)


def _inlined(rule: _Rule, eqn: Any, value: Any, inputs: _Values) -> _Values:
  return run(rule, loops.called(eqn), value, inputs)


def _checkpoint(rule: _Rule, eqn: Any, value: Any, inputs: _Values) -> _Values:
  params = eqn.params
  again = jax.checkpoint(
    lambda value, *inputs: run(rule, params["jaxpr"], value, inputs),
    prevent_cse=params["prevent_cse"], policy=params["policy"],
  )  # fmt: skip
  return again(value, *inputs)


def _cond(rule: _Rule, eqn: Any, value: Any, inputs: _Values) -> _Values:
  index, *operands = inputs
  branches = [
    lambda value, *operands, branch=branch: run(rule, branch, value, operands)
    for branch in eqn.params["branches"]
  ]
  return jax.lax.switch(index, branches, value, *operands)


def _scan(rule: _Rule, eqn: Any, value: Any, inputs: _Values) -> _Values:
  params = eqn.params
  consts, carry, rows = loops.split_scan(params, inputs)

  def body(before: _Values, row: _Values) -> Any:
    results = run(rule, params["jaxpr"], value, (*consts, *before, *row))
    return results[: len(carry)], results[len(carry) :]

  carry, results = jax.lax.scan(
    body, carry, rows, params["length"], params["reverse"], params["unroll"]
  )
  return [*carry, *results]


def _while(rule: _Rule, eqn: Any, value: Any, inputs: _Values) -> _Values:
  asked, held, carry = loops.split_operands(eqn.params, inputs)
  asks, body = eqn.params["cond_jaxpr"], eqn.params["body_jaxpr"]
  return jax.lax.while_loop(
    lambda carry: run(rule, asks, value, (*asked, *carry))[0],
    lambda carry: run(rule, body, value, (*held, *carry)),
    carry,
  )


def _custom_jvp(rule: _Rule, eqn: Any, value: Any, inputs: _Values) -> _Values:
  """Evaluates, by `rule`, the user's function and derivative rule, which JAX evaluates here."""
  inside = _inside(rule, batching.axes_here())

  @jax.custom_jvp
  def function(value: Any, *inputs: Any) -> list[Any]:
    return run(rule, eqn.params["call_jaxpr"], value, inputs)

  @function.defjvp
  def _(primals: Any, tangents: Any) -> Any:
    def push(primals: Any, tangents: Any) -> Any:
      return jax.jvp(lambda *inputs: walk.bind_equation(eqn, inputs), primals, tangents)

    return inside(push, primals[0], primals[1:], tangents[1:])

  return function(value, *inputs)


def _custom_vjp(rule: _Rule, eqn: Any, value: Any, inputs: _Values) -> _Values:
  """Does the same for a custom_vjp with its two derivative rules."""
  inside = _inside(rule, batching.axes_here())

  @jax.custom_vjp
  def function(value: Any, *inputs: Any) -> list[Any]:
    return run(rule, eqn.params["call_jaxpr"], value, inputs)

  def forward(value: Any, *inputs: Any) -> Any:
    def pull(*inputs: Any) -> Any:
      return jax.vjp(lambda *inputs: walk.bind_equation(eqn, inputs), *inputs)

    results, pulling = inside(pull, value, *inputs)
    return results, (value, pulling)

  def backward(kept: Any, cotangents: Any) -> Any:
    value, pulling = kept
    return None, *inside(lambda pull, cotangents: pull(cotangents), value, pulling, cotangents)

  function.defvjp(forward, backward)
  return function(value, *inputs)


def _inside(rule: _Rule, axes: Callable[[], Any]) -> Callable[..., Any]:
  """Returns an evaluator, by `rule`, of functions of pytrees, which may name axes."""

  def evaluate(function: Callable[..., Any], value: Any, *args: Any) -> Any:
    with axes():
      closed, shapes = jax.make_jaxpr(function, return_shape=True)(*args)
    return jax.tree.unflatten(
      jax.tree.structure(shapes), run(rule, closed, value, jax.tree.leaves(args))
    )

  return evaluate


_RULES: dict[str, Callable[[_Rule, Any, Any, _Values], _Values]] = {
  "jit": _inlined, "pjit": _inlined, "closed_call": _inlined, "core_call": _inlined,
  "checkpoint": _checkpoint, "remat": _checkpoint, "remat2": _checkpoint,
  "cond": _cond, "scan": _scan, "while": _while,
  "custom_jvp_call": _custom_jvp, "custom_vjp_call": _custom_vjp,
}  # fmt: skip
