# SPDX-License-Identifier: Apache-2.0
"""Objects that belong to the thread that made them: made, used and dropped on one."""

from __future__ import annotations

import sqlite3
import threading
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from interpreters import run_python
from thread_objects import Checked

import callgate as cg

ZERO = jnp.float32(0)
LARGE = np.full((300, 300), 1e-3, np.float32)  # whose product takes XLA's own threads


@pytest.fixture(autouse=True)
def checked() -> Iterator[None]:
  cg.held()
  Checked.forget()
  yield
  cg.held()
  assert Checked.wrong == []
  assert Checked.live == 0
  assert len(Checked.threads) <= 1


@pytest.fixture(params=["default", "named"])
def place(request: pytest.FixtureRequest) -> Iterator[dict[str, Any]]:
  if request.param == "default":
    yield {}
  else:
    with cg.thread("of tests") as thread:
      yield {"run_on": thread}


def added(handle: cg.Handle, x: Any) -> Any:
  return cg.use(Checked.add, handle, x, out=ZERO)


def test_loops_that_make_and_use_objects(engine: str, place: dict[str, Any]) -> None:
  make = cg.hold(Checked, **place)

  @jax.jit
  def program(x: Any, large: Any) -> Any:
    outer = make(x)
    x = x + (large @ large)[0, 0] * 0

    def step(carry: Any, _: Any) -> Any:
      inner = make(carry)
      return added(inner, 1.0) + added(outer, 0.0) * 0, None

    return jax.lax.scan(step, x, length=5)[0]

  for _ in range(3):
    assert program(1.0, LARGE) == 6


def test_lanes_and_handles_that_leave_their_program(engine: str, place: dict[str, Any]) -> None:
  make = cg.hold(Checked, **place)
  handles = jax.jit(jax.vmap(make))(jnp.arange(4.0))
  sums = jax.vmap(lambda h: added(h, 1.0))(handles)  # outside of compiled code
  assert sums.tolist() == [1, 2, 3, 4]
  one = jax.tree.map(lambda words: words[2], handles)
  assert added(one, 1.0) == 3


def test_a_solver_with_its_derivatives(engine: str, place: dict[str, Any]) -> None:
  solver = cg.linear_solver(
    factor=Checked, solve=Checked.solve, symmetric=True, matvec=lambda a, x: a * x, **place
  )
  gradient = jax.jit(jax.grad(lambda a, b: jnp.sum(solver(a, b) ** 2)))
  a, b = jnp.array([1.0, 2.0, 4.0]), jnp.ones(3)
  live = []
  for count in (10, 10):
    for _ in range(count):
      found = gradient(a, b)
    cg.held()
    live.append(Checked.live)
  np.testing.assert_allclose(found, -2 / a**3, rtol=1e-6)
  assert live == [0, 0]


def test_programs_of_two_threads_at_once(place: dict[str, Any]) -> None:
  make = cg.hold(Checked, **place)

  @jax.jit
  def program(x: Any, large: Any) -> Any:
    x = x + (large @ large)[0, 0] * 0
    step = lambda c, _: (added(make(c), 1.0), None)
    return jax.lax.scan(step, x, length=20)[0]

  results = dict[int, float]()

  def run(number: int) -> None:
    results[number] = float(program(100.0 * number, LARGE))

  threads = [threading.Thread(target=run, args=(i,)) for i in range(2)]
  for thread in threads:
    thread.start()
  for thread in threads:
    thread.join()
  assert results == {0: 20, 1: 120}


def test_each_device_of_a_shard_map(place: dict[str, Any]) -> None:
  make = cg.hold(Checked, **place)
  mesh = jax.sharding.Mesh(np.array(jax.devices()[:4]), ("d",))
  split = jax.sharding.PartitionSpec("d")

  @jax.jit
  @jax.shard_map(mesh=mesh, in_specs=split, out_specs=split)
  def program(xs: Any) -> Any:
    return added(make(xs[0]), 1.0)[None]

  assert program(jnp.arange(4.0)).tolist() == [1, 2, 3, 4]


def test_a_program_within_a_use_makes_and_uses_objects_of_the_same_thread(
  engine: str, place: dict[str, Any]
) -> None:
  make = cg.hold(Checked, **place)
  inner = jax.jit(lambda x, large: added(make(x + (large @ large)[0, 0] * 0), 1.0))

  def nested(one: Checked, x: Any) -> Any:
    again = inner(np.float32(x), LARGE)  # large: XLA's threads run it
    small = added(make(np.float32(x)), 1.0)  # JAX runs it on this thread
    return np.float32(one.add(again) + small)

  use = jax.jit(lambda x: cg.use(nested, make(x), x, out=ZERO))
  for _ in range(2):
    assert use(2.0) == 2 + 3 + 3


def test_a_uses_exception_comes_with_its_type(place: dict[str, Any]) -> None:
  def refuse(one: Any, x: Any) -> Any:
    raise LookupError(f"no {x} in {one}")

  make = cg.hold(list, **place)
  program = jax.jit(lambda x: cg.use(refuse, make(x), x[0], out=ZERO))
  with pytest.raises(LookupError, match="no 1") as caught, cg.errors():
    jax.block_until_ready(program(jnp.ones(2)))
  assert "called with list #" in caught.value.__notes__[0]


def test_a_database_connection() -> None:
  class Database:
    def __init__(self, _: Any) -> None:
      self.connection = sqlite3.connect(":memory:")
      self.connection.execute("create table t (x real)")

    def insert(self, x: Any) -> Any:
      self.connection.execute("insert into t values (?)", (float(x),))
      return np.float32(self.connection.execute("select count(*) from t").fetchone()[0])

    def __del__(self) -> None:
      self.connection.close()

  @jax.jit
  def program(x: Any) -> Any:
    database = cg.hold(Database, effect="io")(x[0, 0])
    step = lambda n, v: (cg.use(Database.insert, database, v, out=n), None)
    return jax.lax.scan(step, ZERO, (x @ x @ x)[0])[0], database

  count, database = program(LARGE)
  assert count == 300
  assert cg.use(Database.insert, database, 1.0, out=ZERO) == 301


def test_run_on_xla_is_the_thread_of_the_call() -> None:
  own = list[int]()
  make = cg.hold(lambda x: own.append(threading.get_ident()), run_on="xla")
  make(1.0)  # a cheap program: on the thread that dispatches it
  assert own == [threading.get_ident()]


def test_handles_of_a_thread_run_there_alone() -> None:
  with cg.thread("first") as first, cg.thread("second") as second:
    one, other = cg.hold(Checked, run_on=first)(1.0), cg.hold(list)(jnp.ones(2))
    assert one.place is first
    assert other.place is None
    with pytest.raises(cg.GateDefinitionError, match=r"one place, got .*first.* and this"):
      cg.use(lambda a, b: a.add(len(b)), one, other, out=ZERO)
    for run_on in ("xla", second):
      with pytest.raises(cg.GateDefinitionError, match="where its objects live, or no run_on="):
        cg.use(Checked.add, one, 1.0, out=ZERO, run_on=run_on)
    assert cg.use(Checked.add, one, 1.0, out=ZERO, run_on="own") == 2
  with pytest.raises(cg.HandleError, match="thread 'first', which is closed"):
    added(one, 1.0)


EXIT = """
import os, threading
import jax, jax.numpy as jnp, numpy as np, callgate as cg

class Checked:
  def __init__(self, x):
    self.own = threading.get_ident()
  def __del__(self):
    os.write(1, b"right " if threading.get_ident() == self.own else b"wrong ")  # in one piece

handles = [cg.hold(Checked, **place)(1.0) for place in ({}, {"run_on": cg.thread("named")})]
kept = jax.jit(lambda: [cg.use(lambda one: np.float32(1), h, out=jnp.float32(0)) for h in handles])
kept()
"""


def test_the_end_of_the_process_drops_objects_on_their_thread() -> None:
  done = run_python(EXIT)
  assert (done.returncode, done.stdout.split(), done.stderr) == (0, ["right"] * 2, "")
