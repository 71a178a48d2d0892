# SPDX-License-Identifier: Apache-2.0
"""Draws programs, by hypothesis."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np
from arithmetic import joined
from hypothesis import strategies as st
from program import DRAWN, Array, Body, Context, Draws, Program, Scope, Var

DEEPEST = 3
FEW = 3
TRIES = 3  # where a scope has nothing for an operation
# Axes have different extents, so that one can't be taken for another.
SHAPES = [(), (2,), (3,), (1,), (2, 3), (4,), (0,), (1, 2, 3), (3, 0), (2, 1, 3), (3, 2, 1)]
SHAPES.append((160,))  # XLA runs calls side by side only where an array has more than 512 bytes


def grow(scope: Scope, context: Context) -> None:
  """Adds steps to a scope: a few, fewer the deeper it is, and the next of what is to be nested.

  Mostly all that they make comes out.
  """
  most = (3, 2, 2, 1)[min(context.depth, DEEPEST)]
  if context.nested:
    most = 1
  plain = dataclasses.replace(context, nested=())
  for _ in range(scope.draw(st.integers(0 if context.nested else 1, most))):
    kinds = ["part", "arithmetic"]
    if context.depth < DEEPEST and not context.nested:
      kinds += ["transformation"] * 2
    if context.axes and not context.branch and not context.order:
      kinds.append("collective")
    kind = scope.draw(st.sampled_from(kinds))
    for _ in range(TRIES):
      if scope.draw(st.sampled_from(scope.drawn[kind]))(scope, plain):
        break
  _nest(scope, context)
  if scope.draw(st.integers(0, 3)):
    joined(scope)


def _nest(scope: Scope, context: Context) -> None:
  nested = list(context.nested)
  while nested:  # those that come after one without a body, or after one that can't be here
    draws, before = nested.pop(0), len(scope.steps)
    draws(scope, dataclasses.replace(context, nested=tuple(nested)))
    if any(step.op.bodies() for step in scope.steps[before:]):
      return


def _nested(draw: Any, drawn: dict[str, list[Draws]]) -> tuple[Draws, ...]:
  """Transformations and a part within them, each pair as likely as another."""
  some = {kind: list(dict.fromkeys(draws)) for kind, draws in drawn.items()}
  around = draw(st.lists(st.sampled_from(some["transformation"]), min_size=1, max_size=3))
  return *around, draw(st.sampled_from(some["part"]))


def body_of(scope: Scope, parameters: Sequence[Var], context: Context, refs: bool = False) -> Body:
  """A body of these parameters, which gives its last variable."""
  inside = scope.inner(parameters, refs=refs)
  grow(inside, context)
  return Body(tuple(parameters), tuple(inside.steps), (inside.vars[-1],))


@st.composite
def programs(draw: Any) -> Program:
  """Whole programs, with their inputs."""
  counter = [0]
  scope = Scope(draw, (), counter)
  number = draw(st.integers(1, 2))
  parameters = [scope.new(Array(draw(st.sampled_from(SHAPES)), "float32")) for _ in range(number)]
  scope.vars += parameters
  if draw(st.booleans()):  # of few kinds, so that these meet
    scope.drawn = {
      kind: draw(st.lists(st.sampled_from(draws), min_size=FEW, max_size=FEW))
      for kind, draws in DRAWN.items()
    }
  nested = _nested(draw, scope.drawn) if draw(st.integers(0, 3)) else ()
  grow(scope, Context(nested=nested))
  made = [var for step in scope.steps for var in step.results if var in scope.vars]
  results = made[-3:] or parameters
  seed = draw(st.integers(0, 3))
  body = Body(tuple(parameters), tuple(scope.steps), tuple(results))
  return Program(body, tuple(_input(var.type, seed + i) for i, var in enumerate(parameters)))


def _input(type_: Array, seed: int) -> np.ndarray:
  random = np.random.default_rng(seed)
  return np.round(random.uniform(-1.5, 1.5, type_.shape), 3).astype(np.float32).astype(np.float64)
