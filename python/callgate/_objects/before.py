# SPDX-License-Identifier: Apache-2.0
"""Makes the objects that all steps of a `callgate.scan` share, while the scan is traced.

The body of a scan that may end early has its calls in a branch, in which `shared.py` finds no
objects. So the scan makes the objects before it, as `solver.factor(a)` in the user's code would,
and its body solves with them. Transformations see the handles, and the steps that derivatives
compute again use the same objects.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import jax

from callgate._jax import tracing
from callgate._objects import shared
from callgate._objects.shared import Plan

_SOLVERS = "callgate._objects.solver"
_Body = Callable[[Any, Any], Any]
# Returns a body's jaxpr for (carry, x), and the types of its results.
_Trace = Callable[[Any, Any], tuple[Any, Any]]


def may_share() -> bool:
  """True if this process has a solver, and loops become programs."""
  config: Any = jax.config
  return _SOLVERS in sys.modules and not config.jax_disable_jit


def traced(f: _Body) -> _Trace:
  return jax.make_jaxpr(lambda carry, x: f(carry, x), return_shape=True)


def with_shared(f: _Body, trace: _Trace, init: Any, xs: Any) -> Callable[[], _Body] | None:
  """Returns a function that makes the objects and returns a body that uses them.

  None if the steps of the scan share no object.
  """
  x = tracing.result_avals(lambda xs: jax.tree.map(lambda x: x[0], xs), xs)
  closed, plan = _planned(trace(init, x)[0], init)
  return None if plan is None else lambda: _making(f, trace, closed, plan)


def _making(f: _Body, trace: _Trace, closed: Any, plan: Plan) -> _Body:
  found = shared.make_shared(plan, closed, [], lambda function, values: function(*values))

  def step(carry: Any, x: Any) -> Any:
    jaxpr, shapes = trace(carry, x)
    closed, own = _planned(jaxpr, carry)
    if own != plan:  # JAX traces the body again for other types of the carry
      return f(carry, x)
    results = shared.run_body(plan, found, closed, jax.tree.leaves((carry, x)))
    return jax.tree.unflatten(jax.tree.structure(shapes), results)

  return step


def _planned(jaxpr: Any, carry: Any) -> tuple[Any, Plan | None]:
  if not shared.may_share(jaxpr):
    return jaxpr, None
  closed = shared.inlined(jaxpr, shared.jitted)
  return closed, shared.plan_of_body(closed, 0, len(jax.tree.leaves(carry)), outlives=True)
