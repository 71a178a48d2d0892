# SPDX-License-Identifier: Apache-2.0
"""Collectives of a named axis, which is of a `vmap` or of devices."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import duals
import numpy as np
from arithmetic import a_float
from bodies import Envs, with_axis
from hypothesis import strategies as st
from oracle import Lane, Machine
from program import Context, Op, Scope, Step, Values, Writer, drawn


def _sum(rows: list[Any]) -> list[Any]:
  return [functools.reduce(duals.add, rows)] * len(rows)


def _mean(rows: list[Any]) -> list[Any]:
  return [duals.scaled(total, 1.0 / len(rows)) for total in _sum(rows)]


def _largest(rows: list[Any]) -> list[Any]:
  return [np.max([duals.plain(row) for row in rows], axis=0)] * len(rows)


def _gathered(rows: list[Any]) -> list[Any]:
  return [duals.linear_of_all(np.stack, rows)] * len(rows)


def _turned(rows: list[Any]) -> list[Any]:
  return [rows[(k - 1) % len(rows)] for k in range(len(rows))]


def _numbered(rows: list[Any]) -> list[Any]:
  return [duals.shifted(row, float(k)) for k, row in enumerate(rows)]


# The text on `x` along `axis`, and what the lanes of the axis give of their values.
COLLECTIVES: dict[str, tuple[str, Callable[[list[Any]], list[Any]]]] = {
  "psum": ("jax.lax.psum({x}, '{axis}')", _sum),
  "pmean": ("jax.lax.pmean({x}, '{axis}')", _mean),
  "pmax": ("jax.lax.pmax(jax.lax.stop_gradient({x}), '{axis}')", _largest),
  "all_gather": ("jax.lax.all_gather({x}, '{axis}')", _gathered),
  "ppermute": (
    "jax.lax.ppermute({x}, '{axis}', [(i, (i + 1) % {size}) for i in range({size})])",
    _turned,
  ),
  "axis_index": ("{x} + jax.lax.axis_index('{axis}')", _numbered),
}


@dataclasses.dataclass(frozen=True)
class Collective(Op):
  """One of `COLLECTIVES`, along an axis of so many lanes."""

  kind: str
  axis: str
  size: int

  @property
  def transformation(self) -> str:  # type: ignore[override]
    return self.kind

  def write(self, writer: Writer, step: Step) -> None:
    text = COLLECTIVES[self.kind][0]
    writer.assign(step, text.format(x=step.operands[0].name, axis=self.axis, size=self.size))

  def run(
    self, machine: Machine, lanes: list[Lane], envs: Envs, operands: list[Values]
  ) -> list[Values]:
    groups: dict[Any, list[int]] = {}
    for k, lane in enumerate(lanes):
      key = tuple(one for one in lane.path if one[0] not in (self.axis, f"lane {self.axis}"))
      groups.setdefault(key, []).append(k)
    results: list[Values] = [[] for _ in lanes]
    for members in groups.values():
      found = COLLECTIVES[self.kind][1]([operands[k][0] for k in members])
      for k, value in zip(members, found, strict=True):
        results[k] = [value]
    return results


@drawn("collective")
@drawn("transformation")
def collective(scope: Scope, context: Context) -> bool:
  if not context.axes or context.branch or context.order:
    return False
  var = a_float(scope)
  axis = scope.draw(st.sampled_from(context.axes))
  kind = scope.draw(st.sampled_from(list(COLLECTIVES)))
  size = context.sizes[context.axes.index(axis)]
  if kind == "all_gather" and len(var.type.shape) > 2:
    return False
  type_ = with_axis(var.type, 0, size) if kind == "all_gather" else var.type
  scope.add(Collective(kind, axis, size), [var], type_)
  return True
