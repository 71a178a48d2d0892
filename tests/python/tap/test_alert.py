# SPDX-License-Identifier: Apache-2.0
"""`callgate.alert` and `callgate.on_alert`: where programs tell people something, and who hears."""

from __future__ import annotations

import contextlib
import logging
import pickle
import time
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import callgate as cg
from callgate._tap import alert


@pytest.fixture
def seen() -> Iterator[list[Any]]:
  alerts: list[Any] = []
  with cg.on_alert(alerts.append):
    yield alerts


def told(value: Any, x: Any) -> Any:
  cg.alert(value > 1, "it is {x}", x=value)
  return x


MESH = jax.sharding.Mesh(np.array(jax.devices()[:1]), ("d",))
PROGRAMS: dict[str, tuple[Any, list[str]]] = {
  "jit": (lambda: jax.jit(lambda x: told(x, x))(2), ["it is 2"]),
  "False": (lambda: jax.jit(lambda x: told(x, x))(1), []),
  "outside of jit": (lambda: told(jnp.int32(3), 0), ["it is 3"]),
  "NumPy's numbers": (lambda: cg.alert(np.bool_(True), "it is {x}", x=4), ["it is 4"]),
  "vmap": (lambda: jax.vmap(lambda x: told(x, x))(jnp.arange(4)), ["it is 2", "it is 3"]),
  "scan": (
    lambda: jax.jit(lambda: jax.lax.map(lambda x: told(x, x), jnp.arange(4)))(),
    ["it is 2", "it is 3"],
  ),
  "grad": (lambda: jax.grad(lambda x: told(x, x * x))(2.0), ["it is 2.0"]),
  "remat": (
    lambda: jax.grad(jax.checkpoint(lambda x: jnp.sin(told(x, x * x))))(2.0),
    ["it is 2.0", "it is 2.0"],
  ),
  "cond": (
    lambda: jax.lax.cond(True, lambda x: told(x, x), lambda x: told(x + 1, x), 2), ["it is 2"]
  ),
  "while": (
    lambda: jax.lax.while_loop(lambda x: x < 4, lambda x: told(x, x) + 1, 0),
    ["it is 2", "it is 3"],
  ),
  "shard_map": (
    lambda: jax.jit(
      jax.shard_map(
        lambda x: told(x[0], x), mesh=MESH, in_specs=jax.P("d"), out_specs=jax.P("d")
      )
    )(jnp.full(1, 2)),
    ["it is 2"],
  ),
}  # fmt: skip


@pytest.mark.parametrize("name", PROGRAMS)
def test_each_time_that_the_predicate_holds_is_an_alert(name, seen):
  program, want = PROGRAMS[name]
  for _ in range(2):  # the second time the programs are there
    seen.clear()
    program()
    cg.barrier()
    assert seen == want


def test_an_alert_has_its_values_and_says_where_it_comes_from(seen):
  jax.vmap(lambda x: cg.alert(x > 1, "{x:.1f}", x=x, more={"y": 2 * x}))(jnp.arange(3.0))
  cg.barrier()
  (one,) = seen
  assert (one, one.message, one.lane, one.left_out) == ("2.0", "{x:.1f}", (2,), 0)
  assert (one.values["x"], one.values["more"]["y"]) == (2.0, 4.0)
  assert one.time_ns > 1e18
  assert one.device == jax.devices()[0].id
  again = pickle.loads(pickle.dumps(one))
  assert again == one
  assert vars(again) == vars(one)


def test_outside_of_a_run_it_is_a_warning_of_the_logger(caplog, tmp_path):
  with caplog.at_level(logging.WARNING, "callgate"):
    cg.alert(True, "outside")
    cg.barrier()
    with cg.run("quiet", folder=tmp_path):
      cg.alert(True, "inside")
  assert [record.getMessage() for record in caplog.records] == ["callgate.alert: outside"]


def test_a_callback_is_taken_out_and_an_error_of_one_leaves_the_others(seen):
  others: list[Any] = []

  def fails(one: Any) -> None:
    raise ValueError(f"no: {one}")

  listener = cg.on_alert(others.append)
  with cg.on_alert(fails):
    cg.alert(True, "one")
    with pytest.raises(ValueError, match="no: one"):
      cg.barrier()
  listener.close()
  listener.close()
  cg.alert(True, "two")
  cg.barrier()
  assert (seen, others) == (["one", "two"], ["one"])


@pytest.mark.parametrize("count", [3, 130])
@pytest.mark.parametrize("ends", ["block", "close", "exception"])
def test_its_end_delivers_the_alerts_so_far(ends, count):
  heard: list[Any] = []
  text = f"at the end: {ends}, {count}"

  def slow(one: Any) -> None:
    time.sleep(0.001)
    heard.append(one)

  @jax.jit
  def flood() -> Any:
    waited = cg.call(lambda: time.sleep(0.05) or np.int32(0), np.int32(0), effect="io")
    jax.lax.map(lambda x: cg.alert(x >= waited, text), jnp.arange(count))
    return waited

  def block() -> None:
    with cg.on_alert(slow) as listener:
      out = flood()
      if ends == "close":
        listener.close()
      elif ends == "exception":
        out.block_until_ready()
        raise ValueError("the block's")

  with pytest.raises(ValueError) if ends == "exception" else contextlib.nullcontext():
    block()
  assert sum(1 + one.left_out for one in heard) == count
  flood()
  cg.barrier()
  assert sum(1 + one.left_out for one in heard) == count


def test_a_function_may_take_itself_out(seen):
  heard: list[Any] = []

  def once(one: Any) -> None:
    heard.append(one)
    listener.close()

  listener = cg.on_alert(once)
  for _ in range(2):
    cg.alert(True, "once")
    cg.barrier()
  assert (heard, seen) == (["once"], ["once", "once"])


def test_alerts_of_one_text_that_come_too_fast_are_counted():
  counts = alert._Counts()
  second = 10**9
  found = [counts.left_out("a", 0) for _ in range(150)]
  assert found == [0] * 100 + [None] * 50
  assert counts.left_out("b", 0) == 0  # another text
  assert counts.left_out("a", second // 2) is None
  assert counts.left_out("a", second) == 51
  assert counts.left_out("a", second) is None
  assert counts.left_out("a", 1000 * second) == 1
  for number in range(2000):
    counts.left_out(str(number), 0)
  assert len(counts._by_text) == 1024


def repeated(count: int, text: str = "again {x}") -> None:
  jax.jit(lambda: jax.lax.map(lambda x: cg.alert(x >= 0, text, x=x), jnp.arange(count)))()


def test_a_barrier_tells_of_alerts_that_were_left_out(seen):
  for text in ("again {x}", "others {x}"):
    for rest in (150, 7):
      seen.clear()
      repeated(rest, text)
      cg.barrier()
      assert sum(1 + one.left_out for one in seen) == rest
      assert seen[-1] == text.format(x=rest - 1)
  seen.clear()
  cg.barrier()
  assert seen == []


def test_a_text_that_is_forgotten_is_told_of_before():
  counts = alert._Counts()
  for number in range(150):
    counts.left_out("a", 0, number)
  assert (counts.waiting, counts.take(of_all=False)) == (50, [])
  for number in range(1024):
    counts.left_out(str(number), 0)
  assert (counts.take(of_all=False), counts.waiting) == ([(149, 50)], 0)


REFUSED: dict[str, tuple[Any, str]] = {
  "a number": (lambda: cg.alert(1, "x"), "predicate: expected a bool of shape"),
  "an array": (lambda: cg.alert(jnp.ones(2) > 0, "x"), r"predicate: expected.*got bool\[2\]"),
  "a field without a value": (lambda: cg.alert(True, "{x}"), "fields for the arrays, got '{x}'"),
  "a format": (lambda: cg.alert(True, "{x:s}", x=1.0), "fields for the arrays"),
  "no array": (lambda: cg.alert(True, "{x}", x="a text"), "x: expected an array or a pytree"),
  "no text": (lambda: cg.alert(True, 3), "text: expected a string, got 3"),
  "an f-string": (
    lambda: jax.jit(lambda x: cg.alert(x > 1, f"{x}"))(2.0), "expected fields for values"
  ),
  "no function": (lambda: cg.on_alert(3), "function: expected a callable, got 3"),
  "a coroutine": (lambda: cg.on_alert(_async), "on_alert: function: expected a function"),
}  # fmt: skip


async def _async(one: Any) -> None:
  del one


@pytest.mark.parametrize("name", REFUSED)
def test_what_makes_no_alert_is_refused(name):
  program, words = REFUSED[name]
  with pytest.raises(cg.GateDefinitionError, match=words):
    program()
