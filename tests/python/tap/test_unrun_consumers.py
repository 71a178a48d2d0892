# SPDX-License-Identifier: Apache-2.0
"""Consumers whose calls run nothing, async functions and generator functions, are refused."""

from __future__ import annotations

import functools
from collections.abc import AsyncIterator, Iterator
from typing import Any

import jax.numpy as jnp
import pytest

import callgate as cg
from callgate import sinks


async def consumer(value: Any) -> None:
  """Would be sent its record, if it ran."""


def each(value: Any) -> Iterator[Any]:
  yield value


async def each_later(value: Any) -> AsyncIterator[Any]:
  yield value


class Client:
  async def __call__(self, value: Any) -> None:
    """As above."""

  async def consume(self, value: Any) -> None:
    """As above."""


UNRUN = {
  "async def": (consumer, "an async function"),
  "async method": (Client().consume, "an async function"),
  "async __call__": (Client(), "an async function"),
  "partial of async": (functools.partial(Client()), "an async function"),
  "generator": (each, "a generator function"),
  "async generator": (functools.partial(each_later), "a generator function"),
}


@pytest.mark.parametrize("kind", UNRUN)
def test_taps_channels_and_choices_refuse_what_a_call_does_not_run(kind: str) -> None:
  function, got = UNRUN[kind]
  with pytest.raises(cg.GateDefinitionError, match=f"^tap: to: expected a function .* got {got}"):
    cg.tap(jnp.float32(1), function)
  label = "channel 'unrun': to: expected functions"
  for batch in (None, True):
    with pytest.raises(cg.GateDefinitionError, match=f"^{label} .* got {got}"):
      cg.channel("unrun", to=function, batch=batch)
  with cg.channel("unrun") as channel, pytest.raises(cg.GateDefinitionError, match=f"^{label}"):
    channel.add(function)
  for option in ("where", "format"):
    expected = f"^sinks.Print: {option}: expected a function .* got {got}"
    with pytest.raises(cg.GateDefinitionError, match=expected):
      sinks.Print(**{option: function})


def test_a_sink_with_an_async_write_is_refused() -> None:
  class Later:
    def open(self, channel: str) -> None:
      raise AssertionError("is opened")

    async def write(self, records: Any) -> None:
      """As above."""

  with pytest.raises(cg.GateDefinitionError, match=r"to: expected a sink with a write\(\) that r"):
    cg.channel("unrun", to=Later())


def test_the_message_says_what_to_give() -> None:
  with pytest.raises(
    cg.GateDefinitionError, match=r"a def, which may call asyncio\.run_coroutine_"
  ):
    cg.tap(jnp.float32(1), consumer)
  with pytest.raises(cg.GateDefinitionError, match="use a def without yield"):
    cg.tap(jnp.float32(1), each)


def test_classes_and_wrappers_that_run_are_consumers() -> None:
  class Kept:
    """An instance of it is async, not the call that makes one."""

    made: list[Any] = []  # noqa: RUF012

    def __init__(self, value: Any) -> None:
      self.made.append(value)

    async def __call__(self) -> None: ...

  seen: list[Any] = []

  @functools.wraps(consumer)
  def runs(value: Any) -> None:
    seen.append(value)

  with cg.channel("run", to=[Kept, runs]):
    cg.tap(jnp.float32(1), "run")
  assert seen == Kept.made == [1.0]
