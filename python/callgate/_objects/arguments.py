# SPDX-License-Identifier: Apache-2.0
"""Checks of the arguments of solvers and roots, while their calls are traced."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from callgate._core import exact, foreign, split
from callgate._core.dtypes import type_text
from callgate._core.encoding import is_open
from callgate._core.errors import GateDefinitionError
from callgate._gate.callee import GateCallee

_MOST = 256  # kinds of arguments that one gate remembers


class TwoArguments(GateCallee):
  """A gate of two arguments, which `check_arguments` checks once for each kind of them."""

  names = ("", "")

  def __init__(self, *args: Any) -> None:
    super().__init__(*args)
    self.binds = None  # which `given` says in its own words
    self._checked = set[Any]()

  def check_arguments(self, leaves: Sequence[Any], tree: Any) -> None:
    """Raises where the call can't be; `leaves` are the arrays of the arguments, flat."""
    raise NotImplementedError

  def given(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    given = super().given(args, kwargs)
    if len(given[0]) != 2:
      raise GateDefinitionError(
        f"{self.label}: expected two arguments, {self.names[0]} and {self.names[1]}, "
        f"got {len(given[0])}"
      )
    leaves, tree = jax.tree.flatten(given[0])
    known = exact.exact_tree(tree)
    kind = known, *((jnp.shape(x), jnp.result_type(x)) for x in leaves)
    kind = None if known.has_objects else kind  # it would keep the user's objects
    if kind is None or kind not in self._checked:
      self.check_arguments(leaves, tree)
      if len(self._checked) >= _MOST:
        self._checked.clear()
      self._checked.add(kind)
    return given

  def types_of(self, option: str, function: Callable[..., Any], leaves: Any, tree: Any) -> Any:
    """The types, flat, that a JAX function of the user's returns for the two arguments."""

    def call(leaves: Sequence[Any]) -> Any:
      return function(*split.joined(jax.tree.unflatten(tree, leaves)))

    try:
      return jax.tree.leaves(jax.eval_shape(call, leaves))
    except Exception as error:
      foreign.add_note(error, f"callgate: raised in {option}= of {self.label}")
      raise


def is_known(leaves: Sequence[Any]) -> bool:
  """True if no extent is symbolic."""
  return not any(is_open(n) for leaf in leaves for n in jnp.shape(leaf))


def size(leaves: Sequence[Any]) -> int:
  return sum(math.prod(jnp.shape(leaf)) for leaf in leaves)


def shown(leaves: Sequence[Any]) -> str:
  types = (type_text(jnp.result_type(leaf), jnp.shape(leaf)) for leaf in leaves)
  return ", ".join(types) or "no array"
