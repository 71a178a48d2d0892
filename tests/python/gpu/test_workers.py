# SPDX-License-Identifier: Apache-2.0
"""Workers, started calls, host objects and solvers in programs on a GPU."""

from __future__ import annotations

import asyncio
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy.linalg import lu_factor, lu_solve
from worker_functions import COUNTER_OUTS, Counter

import callgate as cg

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("gpu")]

FLOAT = jax.ShapeDtypeStruct((), np.float32)


def doubled(x: Any) -> Any:
  return 2 * x


def refuse(x: Any) -> Any:
  raise LookupError(f"no {float(x):g}")


# -- workers ---------------------------------------------------------------------------------------
def test_calls_and_lanes_run_on_workers(two: cg.Workers) -> None:
  gate = cg.gate(doubled, out=lambda x: x, run_on=two, like=doubled)
  xs = jnp.arange(6.0).reshape(3, 2)
  np.testing.assert_array_equal(jax.jit(gate)(xs), 2 * xs)
  np.testing.assert_array_equal(jax.jit(jax.vmap(gate))(xs), 2 * xs)
  looped = jax.jit(lambda x: jax.lax.fori_loop(0, 3, lambda _, c: gate(c), x))
  np.testing.assert_array_equal(looped(xs), 8 * xs)
  np.testing.assert_array_equal(jax.jit(jax.grad(lambda x: gate(x).sum()))(xs), 2 + 0 * xs)


def test_objects_keep_their_state_and_errors_their_class(two: cg.Workers) -> None:
  gate = cg.gate(Counter, out=COUNTER_OUTS, effect="io", run_on=two, affinity="lane")
  lanes = jax.jit(jax.vmap(gate))
  for turn in range(1, 4):
    np.testing.assert_array_equal(lanes(jnp.zeros(5)), np.full(5, turn))
  failing = cg.gate(refuse, out=lambda x: x, run_on=two)
  with pytest.raises(LookupError, match="no 3"), cg.errors():
    jax.block_until_ready(jax.jit(failing)(3.0))
  np.testing.assert_array_equal(lanes(jnp.zeros(5)), np.full(5, 4))


def test_lanes_of_several_gpus_have_objects_of_their_own(two: cg.Workers) -> None:
  if len(jax.devices()) < 2:
    pytest.skip(f"needs 2 GPUs, has {len(jax.devices())}")
  mesh = jax.make_mesh((2,), ("d",), devices=jax.devices()[:2])
  gate = cg.gate(Counter, out=COUNTER_OUTS, effect="io", run_on=two, affinity="lane")
  parts = jax.P("d")
  lanes = jax.jit(jax.shard_map(jax.vmap(gate), mesh=mesh, in_specs=parts, out_specs=parts))
  xs = jax.device_put(jnp.zeros(4), jax.NamedSharding(mesh, parts))
  for turn in range(1, 4):
    np.testing.assert_array_equal(lanes(xs), np.full(4, turn))


# -- started calls ---------------------------------------------------------------------------------
def sine() -> cg.Gate:
  return cg.gate(np.sin, out=lambda x: x, like=jnp.sin)


def test_calls_are_started_and_waited_for(two: cg.Workers) -> None:
  async def later(x: Any) -> Any:
    await asyncio.sleep(0.001)
    return x + 1

  gates = [
    cg.gate(doubled, out=lambda x: x), cg.gate(doubled, out=lambda x: x, run_on=two),
    cg.gate(later, out=lambda x: x),
  ]  # fmt: skip

  @jax.jit
  def program(x: Any) -> Any:
    tickets = [gate.start(x) for gate in gates]
    return [ticket.result() for ticket in tickets]

  assert [float(value) for value in program(3.0)] == [6, 6, 4]
  lanes = jax.jit(lambda xs: jax.vmap(gates[0].start)(xs).result())(jnp.arange(4.0))
  np.testing.assert_array_equal(lanes, 2 * np.arange(4))


def test_a_loop_carries_a_ticket_and_derivatives_are_those_of_the_call() -> None:
  gate = sine()

  def twice(x: Any) -> Any:
    def body(ticket: Any, _: Any) -> Any:
      return gate.start(ticket.result()), None

    return jax.lax.scan(body, gate.start(x), length=1)[0].result()

  x = jnp.float32(0.7)
  np.testing.assert_allclose(jax.jit(twice)(x), np.sin(np.sin(0.7)), rtol=1e-5)
  later = lambda x: gate.start(x).result()
  looped = lambda f: lambda x: jax.lax.fori_loop(0, 2, lambda _, c: f(c), x)
  for order in (jax.grad, lambda f: jax.grad(jax.grad(f)), jax.hessian):
    got, want = jax.jit(order(looped(later)))(x), order(looped(jnp.sin))(x)
    np.testing.assert_allclose(got, want, rtol=1e-4)


def test_a_started_calls_exception_comes_with_its_result() -> None:
  failing = cg.gate(refuse, out=lambda x: x)
  with pytest.raises(LookupError, match="no 4"), cg.errors():
    jax.block_until_ready(jax.jit(lambda x: failing.start(x).result())(4.0))


# -- host objects ----------------------------------------------------------------------------------
@pytest.mark.parametrize("where", ["here", "in a worker"])
def test_objects_are_made_used_and_freed(where: str, two: cg.Workers) -> None:
  options: Any = {"run_on": two} if where == "in a worker" else {}
  make = cg.hold(lambda n: [float(n)], name=f"gpu lists {where}", **options)

  @jax.jit
  def program(x: Any) -> Any:
    def body(handle: Any, x: Any) -> Any:
      total = cg.use(lambda held, x: np.float32(held[0] + x), handle, x, out=FLOAT)
      return make(total), total

    return jax.lax.scan(body, make(x), jnp.arange(4.0))[1]

  np.testing.assert_array_equal(program(1.0), [1, 2, 4, 7])
  lanes = jax.jit(jax.vmap(lambda x: cg.use(lambda held: np.float32(held[0]), make(x), out=FLOAT)))
  np.testing.assert_array_equal(lanes(jnp.arange(3.0)), [0, 1, 2])
  assert cg.held().get(f"gpu lists {where}", 0) == 0


def test_a_solver_has_its_derivatives() -> None:
  solve = cg.linear_solver(
    factor=lu_factor, solve=lu_solve, solve_transposed=lambda lu, b: lu_solve(lu, b, trans=1),
    matvec=lambda a, x: (a * x).sum(-1),
  )  # fmt: skip
  a = jnp.array([[4.0, 1.0], [2.0, 3.0]])
  b = jnp.array([1.0, 2.0])
  inverse = np.linalg.inv(np.asarray(a))
  x = inverse @ np.asarray(b)
  np.testing.assert_allclose(jax.jit(solve)(a, b), x, rtol=1e-5)
  of_a, of_b = jax.jit(jax.grad(lambda a, b: solve(a, b).sum(), argnums=(0, 1)))(a, b)
  np.testing.assert_allclose(of_b, inverse.T @ np.ones(2), rtol=1e-5)
  np.testing.assert_allclose(of_a, -np.outer(inverse.T @ np.ones(2), x), rtol=1e-5)
