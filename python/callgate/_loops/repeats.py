# SPDX-License-Identifier: Apache-2.0
"""Marks the taps of a `while_loop` that runs again for its tangents.

JAX makes two loops of one that carries a tangent. The first computes all that depends on no
tangent; the second computes everything, once for each tangent. A tap that the first loop holds
sends again in the second, marked `info.repeated`; a tap of a tangent is in the second alone.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax.interpreters import partial_eval

from callgate._jax import walk

_Params = dict[str, Any]
_FIRST = 2  # a number is neither False nor True


class _Marks:
  """The marks of all taps in a loop's parameters, which become numbers there for a while."""

  def __init__(self, params: _Params) -> None:
    self._before: list[bool] = []
    self._in_first: set[int] = set()
    self.numbered = _of_taps(params, self._number)

  def _number(self, mark: bool) -> int:
    self._before.append(mark)
    return _FIRST + len(self._before) - 1

  def __bool__(self) -> bool:
    return bool(self._before)

  def of_first(self, params: _Params) -> _Params:
    """The first loop's parameters with their marks again."""

    def restore(number: int) -> bool:
      self._in_first.add(number)
      return self._before[number - _FIRST]

    return _of_taps(params, restore)

  def of_second(self, params: _Params) -> _Params:
    """The second loop's, after those of the first."""
    return _of_taps(params, lambda n: self._before[n - _FIRST] or n in self._in_first)


def _of_taps(params: _Params, change: Callable[[Any], Any]) -> _Params:
  def changed(of_one: _Params) -> _Params:
    return {**of_one, "repeated": change(of_one["repeated"])} if "repeated" in of_one else of_one

  return {name: walk.with_params(value, changed) for name, value in params.items()}


def checkpoint(
  rule: Callable[..., Any],
  saveable: Any,
  unknown: Sequence[bool],
  instantiated: Sequence[bool],
  eqn: Any,
) -> Any:
  """JAX's rule for a `while_loop` under `jax.checkpoint`, with marked taps."""
  marks = _Marks(eqn.params)
  if not marks:
    return rule(saveable, unknown, instantiated, eqn)
  numbered = eqn.replace(params=marks.numbered)
  first, second, *rest = rule(saveable, unknown, instantiated, numbered)
  if first is not None:
    first = first.replace(params=marks.of_first(first.params))
  return first, second.replace(params=marks.of_second(second.params)), *rest


def linearize(
  rule: Callable[..., Any],
  trace: Any,
  tracers: Sequence[Any],
  unknown: Sequence[bool],
  params: _Params,
) -> Any:
  """JAX's rule for a `while_loop` that carries a tangent, with the marks of `checkpoint`'s."""
  if not _Marks(params):
    return rule(trace, *tracers, **params)
  closed = jax.make_jaxpr(lambda *values: jax.lax.while_p.bind(*values, **params))(
    *(tracer.aval for tracer in tracers)
  )
  rules: dict[Any, Any] = partial_eval.partial_eval_jaxpr_custom_rules
  _, second, *_ = rules[jax.lax.while_p](None, unknown, [True] * len(unknown), closed.eqns[-1])
  return rule(_Second(trace, second.params), *tracers, **params)


@dataclasses.dataclass
class _Second:
  """JAX's trace, to which its rule gives the second loop alone."""

  trace: Any
  params: _Params

  def default_process_primitive(self, primitive: Any, tracers: Sequence[Any], _: Any) -> Any:
    return self.trace.default_process_primitive(primitive, tracers, self.params)
