# SPDX-License-Identifier: Apache-2.0
"""Walks over JAX's jaxprs: evaluates their equations by rules, searches and rewrites them.

Each function accepts open and closed jaxprs. `jax.extend` has no public walker (0.10 to 0.12).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

from jax._src import core as _core

from callgate._jax import sources, tracing


def interpret(
  jaxpr: Any, args: Sequence[Any], rule: Callable[[Any, list[Any]], Sequence[Any]]
) -> list[Any]:
  """Evaluates a jaxpr under the current trace, one equation after another.

  `rule(eqn, inputs)` returns the results of each equation; `bind_equation` is JAX's own rule. Only
  the rule enters inner jaxprs. It must enter `eqn.ctx.manager` if it binds by itself.
  """
  variables = (*jaxpr.constvars, *jaxpr.invars)
  values = dict(zip(variables, (*getattr(jaxpr, "consts", ()), *args), strict=True))

  def read(atom: Any) -> Any:
    return atom.val if isinstance(atom, _core.Literal) else values[atom]

  for eqn in jaxpr.eqns:
    with sources.traced_as(eqn):
      results = rule(eqn, [read(atom) for atom in eqn.invars])
    values.update(zip(eqn.outvars, results, strict=True))
  return [read(atom) for atom in jaxpr.outvars]


def bind_equation(eqn: Any, operands: Sequence[Any]) -> list[Any]:
  """Returns the equation's results on other operands, as `jax.core.eval_jaxpr` computes them."""
  primitive = eqn.primitive
  if primitive is _core.pvary_p:  # pvary rejects values that already vary, as some may here
    (value,) = operands
    return [tracing.vary_over(frozenset(eqn.params["axes"]), value)]
  with eqn.ctx.manager:
    made = primitive.bind(*operands, **primitive.get_bind_params(eqn.params))
  return list(made) if primitive.multiple_results else [made]


def subjaxprs(eqn: Any) -> list[Any]:
  """Returns the jaxprs in an equation's parameters; before 0.12 without closed ones' constants."""
  return list(_core.jaxprs_in_params(eqn.params))


def paths(
  jaxpr: Any, inside: Callable[[Any], Sequence[Any]] = subjaxprs, around: tuple[Any, ...] = ()
) -> Iterator[tuple[Any, ...]]:
  """Yields each equation after the equations around it, in program order.

  An equation comes before those of its jaxprs, which `inside(eqn)` selects.
  """
  for eqn in jaxpr.eqns:
    path = (*around, eqn)
    yield path
    for inner in inside(eqn):
      yield from paths(inner, inside, path)


def equations(jaxpr: Any, inside: Callable[[Any], Sequence[Any]] = subjaxprs) -> Iterator[Any]:
  """Yields each equation alone, in the order of `paths`."""
  return (path[-1] for path in paths(jaxpr, inside))


def with_params(held: Any, change: Callable[[dict[str, Any]], dict[str, Any]]) -> Any:
  """Returns a jaxpr, closed or in tuples, with changed parameters of all equations, inner ones too.

  Jaxprs, closed ones and equations have a `replace` without a public name (0.10 to 0.12).
  """
  if isinstance(held, tuple):
    values = [with_params(one, change) for one in held]
    return type(held)(*values) if hasattr(held, "_fields") else tuple(values)
  if hasattr(held, "eqns") and getattr(held, "jaxpr", held) is held:  # 0.12 uses one class for both
    params = ({k: with_params(v, change) for k, v in change(e.params).items()} for e in held.eqns)
    return held.replace(eqns=[e.replace(params=p) for e, p in zip(held.eqns, params, strict=True)])
  if hasattr(held, "jaxpr") and hasattr(held, "consts"):
    return held.replace(jaxpr=with_params(held.jaxpr, change))
  return held
