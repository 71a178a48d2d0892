# SPDX-License-Identifier: Apache-2.0
"""Consumers and callables that compare equal are as many as there are objects."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import callgate as cg
from callgate.compat import host_callback, host_callback_2023
from callgate.compat.buffer_callback import buffer_callback

X = np.zeros((), np.float32)


@dataclasses.dataclass(frozen=True)
class Collect:
  """Equal to any other of its name."""

  name: str
  values: list[float] = dataclasses.field(default_factory=list, compare=False)

  def __call__(self, value: Any, *_: Any) -> None:
    self.values.append(float(value))

  def returning(self, value: Any) -> Any:
    self.values.append(float(value))
    return np.float32(value)

  def write_to(self, _: Any, out: Any, value: Any) -> None:
    self.values.append(float(np.asarray(value)))
    np.asarray(out)[...] = np.asarray(value)

  def step(self, carry: Any, x: Any) -> Any:
    self.values.append(0.0)  # while it is traced
    return carry + x, x


USES: dict[str, Callable[[Any, Collect], Any]] = {
  "tap to a method": lambda x, c: cg.tap(x, c.__call__),
  "call of the object": lambda x, c: cg.call(lambda x, c: c.returning(x), x, x, c=c),
  "id_tap of 2023": lambda x, c: host_callback_2023.id_tap(c, x),
  "call of 2023": lambda x, c: host_callback_2023.call(c.returning, x, result_shape=x),
  "buffer_callback": lambda x, c: buffer_callback(c.write_to, jax.typeof(x))(x),
}


@pytest.mark.parametrize("use", USES)
def test_each_gets_what_is_its_own(use: str) -> None:
  """In one program, in a program of each, and outside of programs, again and again."""
  logs = [Collect("loss") for _ in range(4)]
  jax.jit(lambda x: (USES[use](x, logs[0]), USES[use](x + 1, logs[1])))(X)
  jax.block_until_ready(jax.jit(lambda x: USES[use](x + 2, logs[2]))(X))
  for step in range(3):
    jax.block_until_ready(USES[use](jnp.float32(3 + step), logs[3]))
  jax.effects_barrier()
  cg.barrier()
  host_callback_2023.barrier_wait()
  assert [log.values for log in logs] == [[0.0], [1.0], [2.0], [3.0, 4.0, 5.0]]


def test_id_tap_of_2020_calls_the_function_that_it_was_given() -> None:
  logs = [Collect("loss") for _ in range(2)]
  for step, log in enumerate(logs):
    host_callback.id_tap(log, jnp.float32(step))
  assert [log.values for log in logs] == [[0.0], [1.0]]


def test_a_channel_has_equal_consumers_and_lets_the_right_one_go() -> None:
  logs = [Collect("loss") for _ in range(3)]
  with cg.channel("equal.consumers", to=logs) as channel:
    send = jax.jit(lambda x: cg.tap(x, channel))
    send(X)
    channel.flush()
    channel.remove(logs[1])
    channel.add(logs[2].returning)
    send(X + 1)
    channel.flush()
    channel.remove(logs[2].returning)  # a method is made anew each time
    send(X + 2)
    with pytest.raises(cg.GateDefinitionError, match="expected one of its consumers"):
      channel.remove(Collect("loss"))
  assert [log.values for log in logs] == [[0.0, 1.0, 2.0], [0.0], [0.0, 1.0, 1.0, 2.0]]


def test_loops_with_bars_run_the_body_that_they_were_given() -> None:
  bodies = [Collect("body") for _ in range(2)]
  for body in bodies:
    cg.scan(body.step, X, jnp.ones(3), progress=cg.Progress("equal", file=None, show=()))
  assert all(body.values for body in bodies)
