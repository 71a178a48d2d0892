# SPDX-License-Identifier: Apache-2.0
"""The contract: values, and how often the host is called, in every way to run a program."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import contract
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from contract import ROWS, F, Host
from switch_interval import switch_interval

import callgate as cg

P = jax.sharding.PartitionSpec


X = np.float32(3)
LANES = np.arange(4, dtype=np.float32)


def _scan(f: F) -> F:
  return lambda x: jax.lax.scan(lambda c, _: (c + 0 * x, f(c)), x, length=3)[1]


def _cond(f: F) -> F:
  return lambda x: jax.lax.cond(x > 0, f, lambda x: x, x)


def _four() -> Any:
  mesh = jax.make_mesh((4,), ("d",), axis_types=(jax.sharding.AxisType.Auto,))
  return jax.device_put(LANES, jax.sharding.NamedSharding(mesh, P("d")))


def _sharded(f: F) -> F:
  mesh = jax.make_mesh((4,), ("d",), axis_types=(jax.sharding.AxisType.Auto,))
  return jax.jit(
    jax.shard_map(lambda x: f(x[0])[None], mesh=mesh, in_specs=P("d"), out_specs=P("d"))
  )


def _split(f: F) -> F:
  program = jax.jit(jax.vmap(f))
  return lambda _: program(_four())


def _in_threads(f: F) -> F:
  program, found = jax.jit(f), [np.float32(0)] * 4

  def run(n: int) -> None:
    found[n] = np.asarray(program(np.float32(n)))

  def run_all(_: Any) -> Any:
    threads = [threading.Thread(target=run, args=(n,)) for n in range(4)]
    for thread in threads:
      thread.start()
    for thread in threads:
      thread.join()
    return np.stack(found)

  return run_all


def _under_way(f: F) -> F:
  """More executions than XLA has under way at once, before any is waited for."""
  program = jax.jit(f)
  return lambda _: jnp.stack([program(np.float32(n)) for n in range(40)])


Way = tuple[Callable[[F], F], Any, np.ndarray]
# Ways to make a program of `f`, what it is called with, and the values that `f` gets.
# `test_functions.py` asks about programs that are compiled ahead of time.
WAYS: dict[str, Way] = {
  "outside of jit": (lambda f: f, X, np.array(3)),
  "40 executions": (_under_way, X, np.arange(40)),
  "shard_map": (_sharded, LANES, LANES),
  "split lanes": (_split, LANES, LANES),
}
# These are one program, which compiles faster than one each.
WAYS_OF_ONE: dict[str, Way] = {
  "jit in jit": (jax.jit, X, np.array(3)),
  "scan": (_scan, X, np.full(3, 3)),
  "cond": (_cond, X, np.array(3)),
  "vmap": (jax.vmap, LANES, LANES),
}
WAYS_BY_JAX = ["jit in jit", "scan", "vmap"]


def _assert_right(
  row: str, way: str, turn: int, found: Any, inputs: np.ndarray, host: Host
) -> None:
  """The values of the turn are right, and the host was called once for each value of each turn."""
  np.testing.assert_array_equal(found, inputs + ROWS[row].adds, err_msg=way)
  if ROWS[row].each:
    assert host.seen() == sorted([*map(float, inputs.reshape(-1))] * turn), way


def _check(row: str, way: str, make_program: Callable[[F], F], argument: Any, inputs: Any) -> None:
  host = Host()
  program = make_program(ROWS[row].make(host))
  with ROWS[row].around():
    for turn in (1, 2):  # the second is JAX's C++ dispatch
      _assert_right(row, way, turn, program(argument), inputs, host)
  cg.barrier()


def _check_as_one(row: str, ways: list[str]) -> None:
  """Each way has a part of its own in the program."""
  hosts = {way: Host() for way in ways}
  functions = {way: WAYS_OF_ONE[way][0](ROWS[row].make(hosts[way])) for way in ways}
  arguments = {way: WAYS_OF_ONE[way][1] for way in ways}
  program = jax.jit(lambda given: {way: functions[way](given[way]) for way in ways})
  with ROWS[row].around():
    for turn in (1, 2):
      found = program(arguments)
      for way in ways:
        _assert_right(row, way, turn, found[way], WAYS_OF_ONE[way][2], hosts[way])
  cg.barrier()


@pytest.mark.parametrize(("row", "way"), contract.pairs("values", WAYS))
def test_values_and_calls(row: str, way: str) -> None:
  _check(row, way, *WAYS[way])


@pytest.mark.parametrize("row", contract.rows("values"))
def test_values_and_calls_in_one_program(row: str) -> None:
  _check_as_one(row, [way for way in WAYS_OF_ONE if row in contract.rows(f"values {way}")])


@pytest.mark.parametrize("row", contract.rows("engine"))
def test_the_same_by_jaxs_own_callbacks(row: str) -> None:
  with cg.config(engine="jax"):
    _check_as_one(row, [way for way in WAYS_BY_JAX if row in contract.rows(f"engine {way}")])
    jax.effects_barrier()


def _gradient(f: F) -> Callable[[Any], Any]:
  return lambda x: jax.value_and_grad(f)(x)


@pytest.mark.parametrize("row", ROWS)
def test_a_derivative_calls_once_or_says_that_there_is_none(row: str) -> None:
  """Reverse mode, alone and of lanes; the value is that of the call, and each calls once."""
  host, part = Host(), ROWS[row]
  f = part.make(host)
  alone, of_lanes = jax.jit(_gradient(f)), jax.jit(jax.vmap(_gradient(f)))
  with part.around():
    if "grad" in part.refuses:
      with pytest.raises(Exception, match=part.refuses["grad"]):
        alone(np.float32(3))
      return
    for _ in range(2):
      assert [*map(float, alone(np.float32(3)))] == [3 + part.adds, 1]
    if part.each and "grad calls" not in part.refuses:
      assert host.seen() == [3.0, 3.0]
    if row in contract.rows("values vmap"):
      values, gradients = of_lanes(LANES)
      np.testing.assert_array_equal(values, LANES + part.adds)
      np.testing.assert_array_equal(gradients, np.ones_like(LANES))
  cg.barrier()


@pytest.mark.parametrize("row", ROWS)
def test_threads_that_switch_all_the_time(row: str) -> None:
  with switch_interval():
    _check(row, "threads", _in_threads, None, LANES)
