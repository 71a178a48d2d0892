# SPDX-License-Identifier: Apache-2.0
"""JAX's rules for loops, branches and reductions: the only place that wraps them (0.10 to 0.12).

Parts of callgate add layers; `_start.py` has the table of rules, with the layers in order. A layer
gets the next layer, or JAX's own rule, and then the rule's arguments.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax._src.interpreters import batching as _batching
from jax._src.interpreters import mlir as _mlir
from jax._src.interpreters import partial_eval as _partial_eval
from jax._src.lax.control_flow import loops as _loops

_Layer = Callable[..., Any]

# Constant: `wrap` changes JAX's own tables.
_RULES: dict[str, dict[Any, Any]] = {
  "vmap": _batching.fancy_primitive_batchers,
  "linearize": _partial_eval.custom_partial_eval_rules,
  "checkpoint": _partial_eval.partial_eval_jaxpr_custom_rules,
}


def wrap(rule: str, primitive: Any, *layers: _Layer) -> None:
  """Puts layers around a primitive's rule, the outermost first.

  Args:
    rule: "lowering" (for all platforms), "vmap", "linearize" or "checkpoint".
    primitive: JAX's primitive.
    *layers: the layers, see the module.
  """
  if rule == "lowering":
    original = _mlir._lowerings[primitive].rule  # pyright: ignore[reportPrivateUsage]
    _mlir.register_lowering(primitive, _around(original, layers))
  else:
    _RULES[rule][primitive] = _around(_RULES[rule][primitive], layers)


def wrap_hoisting(*layers: _Layer) -> None:
  """Puts layers around the function that hoists constants out of a scan."""
  original = _loops._scan_known_hoisting  # pyright: ignore[reportPrivateUsage]
  _loops._scan_known_hoisting = _around(original, layers)  # pyright: ignore[reportPrivateUsage]


def wrap_evaluation(*layers: _Layer) -> None:
  """Puts layers around `partial_eval_jaxpr_nounits`, by which JAX's rules split a loop's body."""
  original = _partial_eval.partial_eval_jaxpr_nounits
  _partial_eval.partial_eval_jaxpr_nounits = _around(original, layers)


def _around(original: Callable[..., Any], layers: Sequence[_Layer]) -> Callable[..., Any]:
  for layer in reversed(layers):
    original = functools.partial(layer, original)
  return original


def keep_results(holds: Callable[[Any], bool]) -> None:
  """Dead-code elimination keeps all results of a loop, branch or jit if it keeps one and `holds`.

  Wraps JAX's rules of dead-code elimination. They would drop a loop's unused carry and everything
  that only the carry needs, effects included (0.10 to 0.12; `while_loop` has a rule since 0.12).
  JAX has no public way to keep an equation.
  """
  from jax._src.pjit import jit_p

  def keeping(rule: Callable[..., Any]) -> Callable[..., Any]:
    # 0.12 also passes the live inputs: rule(used, live, eqn).
    def wrapped(used: Sequence[bool], *live_and_eqn: Any) -> Any:
      whole = any(used) and not all(used) and holds(live_and_eqn[-1])
      return rule([True] * len(used) if whole else used, *live_and_eqn)

    return wrapped

  rules: dict[Any, Callable[..., Any]] = _partial_eval.dce_rules
  for primitive in (jax.lax.scan_p, jax.lax.while_p, jax.lax.cond_p, jit_p):
    if primitive in rules:
      rules[primitive] = keeping(rules[primitive])
