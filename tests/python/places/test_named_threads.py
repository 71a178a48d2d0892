# SPDX-License-Identifier: Apache-2.0
"""`callgate.thread`: gates, started calls and environments that run on one thread."""

from __future__ import annotations

import pickle
import threading
from collections.abc import Iterator
from typing import Any, ClassVar

import gymnasium
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from interpreters import output_of

import callgate as cg

ZERO = jnp.float32(0)
LARGE = np.full((300, 300), 1e-3, np.float32)


@pytest.fixture
def thread() -> Iterator[cg.Thread]:
  with cg.thread("one") as made:
    yield made


def on(thread: Any, seen: set[int], **options: Any) -> cg.Gate[..., Any]:
  def note(x: Any) -> Any:
    seen.add(threading.get_ident())
    return np.asarray(x) + 1

  return cg.gate(note, out=lambda x: x, run_on=thread, **options)


def test_all_calls_of_all_gates_run_on_the_one_thread(engine: str, thread: cg.Thread) -> None:
  seen = set[int]()
  first, second = on(thread, seen), on(cg.thread("one"), seen, effect="io")

  @jax.jit
  def program(x: Any, large: Any) -> Any:
    x = x + (large @ large)[0, 0] * 0
    return jax.lax.scan(lambda c, _: (second(first(c)), None), x, length=4)[0]

  assert program(0.0, LARGE) == 8
  assert jax.vmap(first)(jnp.arange(3.0)).tolist() == [1, 2, 3]
  assert second(1.0) == 2
  assert len(seen) == 1
  assert threading.get_ident() not in seen


@pytest.mark.parametrize("style", ["inplace", "context"])
def test_styles_that_write_into_xlas_memory(thread: cg.Thread, style: Any) -> None:
  seen = set[int]()

  def write(*given: Any) -> None:
    *_, out, x = given
    seen.add(threading.get_ident())
    out[...] = x + 1

  gate = cg.gate(write, out=lambda x: x, run_on=thread, style=style)
  assert jax.jit(lambda x: gate(gate(x)))(1.0) == 3
  assert len(seen) == 1


def test_a_name_is_one_thread_until_it_is_closed(thread: cg.Thread) -> None:
  assert cg.thread("one") is thread
  assert pickle.loads(pickle.dumps(thread)) is thread
  assert repr(thread) == "<callgate.thread('one')>"
  thread.close()
  assert cg.thread("one") is not thread
  cg.thread("one").close()


def test_a_closed_thread_is_a_clear_error(engine: str) -> None:
  with cg.thread("closed") as thread:
    gate = on(thread, set())
    program = jax.jit(lambda x: gate(x))
    assert program(1.0) == 2
  with (
    pytest.raises(cg.GateError, match=r"thread.'closed'.*is closed; call it before"),
    cg.errors(),
  ):
    jax.block_until_ready(program(2.0))
  with (
    pytest.raises(cg.GateError, match=r"thread.'closed'.*is closed; call it before"),
    cg.errors(),
  ):
    jax.block_until_ready(gate.start(2.0).result())
  with pytest.raises(cg.GateError, match="is closed; call it before"):
    thread.start()


@pytest.mark.parametrize("name", ["", "two\nlines", 3, "it's"])
def test_names_that_are_none(name: Any) -> None:
  with pytest.raises(cg.GateDefinitionError, match="thread: name: expected"):
    cg.thread(name)


def test_options_that_say_two_places_are_refused(thread: cg.Thread) -> None:
  with pytest.raises(cg.GateDefinitionError, match="'own', because of thread='own'"):
    cg.gate(lambda x: x, out=ZERO, run_on=thread, thread="own")
  with pytest.raises(cg.GateDefinitionError, match="command_buffer=True: expected run_on='xla'"):
    cg.gate(
      lambda out, x: None, out=ZERO, run_on=thread, arrays="buffer", style="inplace",
      command_buffer=True,
    )  # fmt: skip

  async def wait(x: Any) -> Any:
    return x

  with pytest.raises(cg.GateDefinitionError, match="expected a function, got an async function"):
    cg.gate(wait, out=ZERO, run_on=thread)


# -- programs within calls -------------------------------------------------------------------------
@pytest.mark.parametrize("effect", ["pure", "io", "ordered"])
def test_a_function_calls_gates_of_its_own_thread(
  engine: str, thread: cg.Thread, effect: Any
) -> None:
  inner = on(thread, set(), effect=effect)
  small = jax.jit(lambda x: inner(x))
  large = jax.jit(lambda x, y: inner(x + (y @ y)[0, 0] * 0))

  def nested(x: Any) -> Any:
    return np.float32(inner(x) + small(x) + large(x, LARGE) + inner.function(x))

  outer = cg.gate(nested, out=ZERO, run_on=thread)
  program = jax.jit(lambda x: outer(x))
  for _ in range(2):
    assert program(1.0) == 8


def test_a_function_starts_calls_on_its_own_thread(thread: cg.Thread) -> None:
  inner = on(thread, set())
  both = jax.jit(lambda x: inner.start(x).result() + inner.start(2 * x).result())
  outer = cg.gate(lambda x: np.float32(both(x)), out=ZERO, run_on=thread)
  assert outer(1.0) == 5


def test_a_gate_that_calls_itself_for_ever_is_refused(thread: cg.Thread) -> None:
  gate: Any = cg.gate(lambda x: np.asarray(gate(x)), out=ZERO, run_on=thread)
  with pytest.raises(Exception, match=r"nested calls|Recurs"), cg.errors():
    jax.block_until_ready(gate(1.0))


# -- limits ----------------------------------------------------------------------------------------
def test_a_call_that_takes_too_long_fails_and_the_thread_goes_on_when_it_ends(
  thread: cg.Thread,
) -> None:
  go_on = threading.Event()
  slow = cg.gate(lambda x: (go_on.wait(60), x)[1], out=ZERO, run_on=thread, timeout=0.2)
  with pytest.raises(cg.GateTimeoutError, match="longer than its timeout"), cg.errors():
    jax.block_until_ready(jax.jit(lambda x: slow(x))(1.0))
  go_on.set()
  assert on(thread, set())(1.0) == 2


def test_started_calls_run_on_the_thread_in_order(engine: str, thread: cg.Thread) -> None:
  order, seen = list[float](), set[int]()

  def note(x: Any) -> Any:
    seen.add(threading.get_ident())
    order.append(float(x))
    return np.asarray(x)

  gate = cg.gate(note, out=ZERO, run_on=thread, effect="io")

  @jax.jit
  def program(x: Any) -> Any:
    first = gate.start(x)
    return first.result() + gate.start(x + 1).result()

  assert program(1.0) == 3
  assert (order, len(seen)) == ([1, 2], 1)


class OfItsThread(gymnasium.Env):  # pyright: ignore[reportMissingTypeArgument]
  """Raises on any other thread than that which made it, as OpenGL's contexts do."""

  observation_space = gymnasium.spaces.Box(-1, 1, (1,), np.float32)
  action_space = gymnasium.spaces.Discrete(2)
  closed: ClassVar[list[bool]] = []

  def __init__(self) -> None:
    self.own = threading.get_ident()

  def look(self) -> Any:
    assert threading.get_ident() == self.own
    return np.zeros(1, np.float32)

  def reset(self, **_: Any) -> Any:
    return self.look(), {}

  def step(self, action: Any) -> Any:
    return self.look(), 1.0, False, False, {}

  def render(self) -> Any:
    return self.look()

  def close(self) -> None:
    self.closed.append(threading.get_ident() == self.own)


def test_environments_live_on_the_thread(engine: str, thread: cg.Thread) -> None:
  OfItsThread.closed.clear()
  with cg.envs(OfItsThread, n=2, run_on=thread) as env:
    env.reset(0)
    rewards = jax.jit(
      lambda: jax.lax.scan(lambda c, _: (c, env.step(jnp.zeros(2, int))[1]), 0, length=3)[1]
    )()
    assert rewards.sum() == 6
    assert env.render(1).tolist() == [0]
  assert OfItsThread.closed == [True] * 3  # one was made to ask for its spaces


FORK = """
import os, threading, warnings
warnings.simplefilter("ignore")
import jax, numpy as np, callgate as cg

seen = []
gate = cg.gate(lambda x: (seen.append(threading.get_ident()), x)[1], out=lambda x: x,
               run_on=cg.thread("t"))
program = jax.jit(lambda x: gate(x))
make = jax.jit(lambda x: cg.use(lambda o, x: o[0] + x, cg.hold(lambda x: [x])(x), x, out=x))
assert program(np.float32(2)) == 2 and make(np.float32(2)) == 4
if (child := os.fork()) == 0:
  ok = program(np.float32(3)) == 3 and make(np.float32(3)) == 6 and len(seen) == 2
  os._exit(0 if ok else 1)
print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), program(np.float32(5)))
"""


def test_a_forks_child_has_threads_of_its_own() -> None:
  assert output_of(FORK).split() == ["0", "5.0"]
