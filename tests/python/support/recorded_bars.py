# SPDX-License-Identifier: Apache-2.0
"""A stand-in for tqdm that records what it is asked to draw, and loops to draw bars of.

It is put in by `drawn_by`. Shared by the tests of progress bars.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from callgate._loops import draw


class FakeBar:
  """A bar that records the arguments and updates of tqdm's."""

  def __init__(self, **arguments: Any) -> None:
    self.total = arguments["total"]
    self.desc = arguments["desc"]
    self.leave = arguments["leave"]
    self.arguments = arguments
    self.n = 0
    self.where: str | None = None
    self.start_t = 0.0
    self.resets = 0
    self.closed = 0
    self.postfix: dict[str, str] = {}

  def update(self, steps: int) -> None:
    assert not self.closed
    self.n += steps

  def reset(self, total: int | None) -> None:
    self.n = 0
    self.total = total
    self.resets += 1

  def set_postfix(self, values: dict[str, str], refresh: bool = True) -> None:
    self.postfix = values

  def refresh(self) -> None: ...

  def close(self) -> None:
    self.closed += 1


@contextlib.contextmanager
def drawn_by(make: Callable[..., Any]) -> Iterator[None]:
  """Bars that begin in the block are made by a function with tqdm's own arguments."""
  before, draw._make = draw._make, make
  try:
    yield
    draw.flush()
  finally:
    draw._make = before


@contextlib.contextmanager
def recorded() -> Iterator[list[FakeBar]]:
  """The bars of the block, all closed behind it. Programs in it are to be waited for."""
  bars: list[FakeBar] = []

  def make(**arguments: Any) -> FakeBar:
    bars.append(FakeBar(**arguments))
    return bars[-1]

  draw.flush()
  with drawn_by(make):
    yield bars
  assert all(bar.closed == 1 for bar in bars)


def counts(bars: list[FakeBar]) -> list[tuple[str | None, int, int | None]]:
  return [(bar.desc, bar.n, bar.total) for bar in bars]


def same(got: Any, expected: Any) -> None:
  assert jax.tree.structure(got) == jax.tree.structure(expected)
  for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(expected), strict=True):
    assert a.dtype == b.dtype
    np.testing.assert_array_equal(np.asarray(a), np.asarray(b))


def add(carry: Any, x: Any) -> tuple[Any, Any]:
  return carry * 0.5 + x, jnp.sin(carry)


done = jax.block_until_ready
XS = jnp.arange(100, dtype=jnp.float32)


def summed(scan: Callable[..., Any], **more: Any) -> Callable[[Any], Any]:
  return lambda c: scan(add, c, XS, **more)[1].sum()
