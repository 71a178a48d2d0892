# SPDX-License-Identifier: Apache-2.0
"""`jax.debug.callback` and `jax.debug.print` after `install()`: as JAX's own, but not waited for.

Each test runs on JAX's engine and on callgate's.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import callgate as cg
from callgate.compat import callbacks


@pytest.fixture(params=["jax", "installed"], autouse=True)
def installed(request: pytest.FixtureRequest) -> Iterator[bool]:
  if request.param == "installed":
    cg.install()
  yield request.param == "installed"
  jax.effects_barrier()
  cg.uninstall()


def collect() -> tuple[list[Any], Any]:
  seen: list[Any] = []
  return seen, lambda *args, **kwargs: seen.append((args, kwargs) if kwargs else args)


def values(seen: list[Any]) -> list[Any]:
  jax.effects_barrier()
  return [np.asarray(args[0]).tolist() for args in seen]


def test_the_callback_sees_jax_arrays_and_static_values():
  seen, callback = collect()
  jax.jit(lambda x: jax.debug.callback(callback, x, "text", y={"a": x + 1}))(jnp.arange(2.0))
  jax.effects_barrier()
  ((x, text), kwargs) = seen[0]
  assert isinstance(x, jax.Array)
  assert isinstance(kwargs["y"]["a"], jax.Array)
  assert (x.tolist(), text, kwargs["y"]["a"].tolist()) == ([0.0, 1.0], "text", [1.0, 2.0])


def test_the_callback_may_run_jax():
  seen: list[float] = []
  jax.jit(lambda x: jax.debug.callback(lambda y: seen.append(float(jnp.sin(y))), x))(1.0)
  jax.effects_barrier()
  assert seen == [float(jnp.sin(1.0))]


def test_a_callback_without_arguments_runs():
  seen, callback = collect()
  jax.jit(lambda x: (jax.debug.callback(callback), x)[1])(1.0)
  jax.effects_barrier()
  assert seen == [()]


def test_vmap_calls_for_each_lane_in_order():
  seen, callback = collect()
  jax.vmap(lambda x, y: jax.debug.callback(callback, x, y), (0, None))(jnp.arange(3), 9)
  assert values(seen) == [0, 1, 2]
  assert [int(args[1]) for args in seen] == [9, 9, 9]


def test_grad_calls_for_the_primal():
  seen, callback = collect()
  f = lambda x: (jax.debug.callback(callback, x * 2), x**2)[1]
  assert float(jax.jit(jax.grad(f))(3.0)) == 6.0
  assert values(seen) == [6.0]
  jax.jvp(f, (4.0,), (1.0,))
  assert values(seen) == [6.0, 8.0]


def test_checkpoint_calls_in_both_passes():
  seen, callback = collect()
  f = jax.checkpoint(lambda x: jnp.sin((jax.debug.callback(callback, x), x * 2)[1]))
  jax.jit(jax.grad(f))(3.0)
  assert values(seen) == [3.0, 3.0]


@pytest.mark.parametrize("ordered", [False, True])
def test_scan_calls_in_order(ordered):
  seen, callback = collect()

  def step(c, x):
    jax.debug.callback(callback, x, ordered=ordered)
    return c, x

  jax.jit(lambda xs: jax.lax.scan(step, 0, xs))(jnp.arange(5))
  assert values(seen) == list(range(5))


def test_ordered_callbacks_keep_order_across_programs():
  seen, callback = collect()
  program = jax.jit(lambda x: jax.debug.callback(callback, x, ordered=True))
  for i in range(20):
    program(i)
  assert values(seen) == list(range(20))


def test_cond_calls_in_the_taken_branch():
  seen, callback = collect()
  call = lambda sign: lambda x: jax.debug.callback(callback, sign * x)
  program = jax.jit(lambda p, x: jax.lax.cond(p, call(1), call(-1), x))
  program(True, 1)
  program(False, 2)
  assert values(seen) == [1, -2]


def test_while_loops_call_in_condition_and_body():
  seen, callback = collect()

  def condition(c):
    jax.debug.callback(callback, c)
    return c < 2

  jax.jit(lambda x: jax.lax.while_loop(condition, lambda c: c + 1, x))(0)
  assert values(seen) == [0, 1, 2]


def test_shard_map_calls_on_each_device():
  mesh = jax.sharding.Mesh(jax.devices()[:1], "x")
  seen, callback = collect()

  def f(x):
    jax.debug.callback(callback, x)
    return x

  spec = jax.sharding.PartitionSpec("x")
  jax.jit(jax.shard_map(f, mesh=mesh, in_specs=spec, out_specs=spec))(jnp.arange(2.0))
  assert values(seen) == [[0.0, 1.0]]


def test_in_a_partly_automatic_shard_map_each_manual_part_calls_once():
  devices = np.array(jax.devices()[:4]).reshape(2, 2)
  mesh = jax.sharding.Mesh(devices, ("x", "y"))
  spec = jax.sharding.PartitionSpec("x")
  seen, callback = collect()

  def f(x):
    jax.debug.callback(callback, x)
    return x

  mapped = jax.shard_map(f, mesh=mesh, in_specs=spec, out_specs=spec, axis_names={"x"})
  jax.jit(mapped)(np.arange(8.0, dtype=np.float32).reshape(4, 2))
  assert sorted(values(seen)) == [[[0, 1], [2, 3]], [[4, 5], [6, 7]]]


@pytest.mark.parametrize(
  "dtype", ["bool", "int8", "uint32", "float16", "bfloat16", "complex64", "int4"]
)
def test_dtypes_arrive(dtype):
  seen, callback = collect()
  jax.jit(lambda x: jax.debug.callback(callback, x.astype(dtype)))(jnp.array([0, 1]))
  jax.effects_barrier()
  assert seen[0][0].dtype == jnp.dtype(dtype)
  assert seen[0][0].astype(jnp.complex64).tolist() == [0.0, 1.0]


def test_print_prints(capsys):
  jax.jit(lambda x: jax.debug.print("x: {x} {}", x + 1, x=x))(2)
  jax.effects_barrier()
  assert capsys.readouterr().out == "x: 2 3\n"


def test_the_form_of_two_calls_works():
  seen, callback = collect()
  jax.jit(lambda x: jax.debug.callback(ordered=True)(callback, x))(1.0)
  assert values(seen) == [1.0]


def test_the_barrier_raises_what_a_callback_raised(installed, caplog):
  def bad(x):
    raise ValueError("of the callback")

  def run() -> None:
    jax.block_until_ready(jax.jit(lambda x: (jax.debug.callback(bad, x), x)[1])(1.0))
    jax.effects_barrier()

  with pytest.raises(jax.errors.JaxRuntimeError, match="ValueError: of the callback"):
    run()
  assert "failed" in caplog.text
  if installed:
    jax.jit(lambda x: jax.debug.callback(bad, x))(1.0)
    with pytest.raises(ValueError, match="of the callback"):
      cg.barrier()


def test_the_program_does_not_wait(installed):
  go, entered = threading.Event(), threading.Event()

  def slow(x):
    entered.set()
    assert go.wait(60)

  if not installed:
    go.set()
  y = jax.jit(lambda x: (jax.debug.callback(slow, x), x * 2)[1])(3.0)
  assert float(y) == 6.0  # while the callback has not returned, when installed
  go.set()
  jax.effects_barrier()
  assert entered.is_set()


def test_the_barrier_of_callgate_keeps_its_limit(installed):
  go = threading.Event()
  if not installed:
    go.set()  # the program waits for its callback
  jax.jit(lambda x: jax.debug.callback(lambda x: go.wait(60), x))(1.0)
  if installed:
    with pytest.raises(TimeoutError, match="records still wait after 1 s"):
      cg.barrier(timeout=1)
  go.set()
  cg.barrier(timeout=60)


def test_own_functions_use_callgates_engine_whatever_is_installed(capsys):
  seen, callback = collect()
  jax.jit(lambda x: callbacks.debug_callback(callback, x, ordered=True))(1.0)
  jax.jit(lambda x: callbacks.debug_callback(ordered=True)(callback, x))(2.0)
  jax.jit(lambda x: callbacks.debug_print("x = {}", x))(3.0)
  assert values(seen) == [1.0, 2.0]
  assert capsys.readouterr().out == "x = 3.0\n"
  with pytest.raises(TypeError, match="must be callable"):
    callbacks.debug_callback(3, 1.0)
