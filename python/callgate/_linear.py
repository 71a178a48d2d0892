"""Linear gates: which arguments they are linear in, and their transposes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax

from callgate import _names
from callgate.errors import GateDefinitionError


def linear_leaves(gate: Any, in_tree: Any) -> frozenset[int]:
  """Flat positions of the arguments that the gate is declared linear in."""
  if gate.linear is False:
    return frozenset()
  args, kwargs = jax.tree.unflatten(in_tree, range(in_tree.num_leaves))
  if gate.linear is True:
    return frozenset(range(in_tree.num_leaves))
  del kwargs
  return frozenset(i for p in gate.linear for i in jax.tree.leaves(args[p]))


def check(gate: Any, arguments: int) -> None:
  """Raises where a call has no argument at a position that the gate is declared linear in."""
  if not isinstance(gate.linear, bool) and max(gate.linear, default=-1) >= arguments:
    raise GateDefinitionError(
      f"{gate.label}: linear: expected positions of the call's {arguments} arguments, got "
      f"{gate.linear!r}"
    )


def linear_names(gate: Any, site: Any) -> str:
  """Names of the linear arguments, for messages."""
  return ", ".join(
    _names.argument(gate.name, site.spec, i) for i in sorted(linear_leaves(gate, site.in_tree))
  )


def transpose_leaves(
  gate: Any, site: Any, cotangents: Sequence[Any], flat: Sequence[Any], linear: Sequence[int]
) -> list[Any]:
  """Runs the transpose rule of one lane on flat values."""
  if gate.autograd:
    return list(gate.transpose_call(site, cotangents, flat, linear))
  if gate.rules.transpose is None:
    raise GateDefinitionError(
      f"{gate.label} is declared linear but has no transpose, which reverse-mode "
      "differentiation needs; expected a rule given with gate.deftranspose"
    )
  cotangent = jax.tree.unflatten(site.out_tree, cotangents)
  args, kwargs = jax.tree.unflatten(site.in_tree, flat)
  rule = gate.rules.transpose
  grads = gate.call_rule(rule, (cotangent,), args, kwargs, site.static)
  leaves = jax.tree.leaves(grads)
  if len(leaves) != len(linear):
    raise GateDefinitionError(
      f"{gate.label}: the transpose rule returned {len(leaves)} cotangents; expected one for "
      f"each of the linear arguments {linear_names(gate, site)}"
    )
  return leaves
