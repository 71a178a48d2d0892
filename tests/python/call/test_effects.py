# SPDX-License-Identifier: Apache-2.0
"""Effects: pure gates may be dropped, io gates run exactly once, ordered gates in program order.

Each program of the table says which values its gate must see. Values of a lane or a branch that is
not taken are not among them.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import callgate as cg

EFFECTS = ["io", "ordered"]
F = Callable[..., Any]


def recording(effect: Any, seen: list[float], **options: Any) -> cg.Gate:
  """x -> sin(x), and a record of each x."""

  def function(x: Any) -> Any:
    seen.append(round(float(x), 3))
    return np.sin(x)

  return cg.gate(function, like=jnp.sin, effect=effect, **options)


def finish(result: Any) -> None:
  jax.block_until_ready(result)
  jax.effects_barrier()


class Program(NamedTuple):
  run: Callable[[F], Any]  # a JAX function of the gate
  seen: list[float]  # what the gate gets, in program order


def lax_while(n: Any, body: F, carry: Any) -> Any:
  return jax.lax.while_loop(lambda c: c[0] < n, lambda c: (c[0] + 1, body(*c)), (0.0, carry))[1]


def sin(*values: float) -> list[float]:
  return [round(float(np.sin(v)), 3) for v in values]


LANES = jnp.arange(4.0)
ONE = {
  "plain": Program(lambda g: g(1.0), [1]),
  "unused result": Program(lambda g: (g(1.0), 0)[1], [1]),
  "twice the same": Program(lambda g: g(1.0) + g(1.0), [1, 1]),
  "nested jit": Program(lambda g: jax.jit(g)(1.0) + jax.jit(jax.jit(g))(2.0), [1, 2]),
  "scan": Program(lambda g: jax.lax.scan(lambda c, x: (c + 1, g(x + c)), 0.0, LANES), [0, 2, 4, 6]),
  "scan, unused": Program(
    lambda g: jax.lax.scan(lambda c, x: ((g(x), c)[1], None), 0.0, LANES), [0, 1, 2, 3]
  ),
  "scan, reversed and unrolled": Program(
    lambda g: jax.lax.scan(lambda c, x: (c, g(x)), 0.0, LANES, reverse=True, unroll=2), [3, 2, 1, 0]
  ),
  "map": Program(lambda g: jax.lax.map(g, LANES), [0, 1, 2, 3]),
  "map in batches": Program(lambda g: jax.lax.map(g, LANES, batch_size=3), [0, 1, 2, 3]),
  "fori": Program(lambda g: jax.lax.fori_loop(0, 3, lambda i, c: c + g(1.0 * i), 0.0), [0, 1, 2]),
  "while": Program(lambda g: lax_while(3, lambda i, c: c + g(i), 0.0), [0, 1, 2]),
  "while, in the condition": Program(
    lambda g: jax.lax.while_loop(lambda c: g(c) < 0.9, lambda c: c + 1, 0.0), [0, 1, 2]
  ),
  "cond, taken": Program(lambda g: jax.lax.cond(True, g, lambda x: g(x + 9), 1.0), [1]),
  "cond, not taken": Program(lambda g: jax.lax.cond(False, g, lambda x: x, 1.0), []),
  "traced cond": Program(
    lambda g: jax.jit(lambda p: jax.lax.cond(p, g, lambda x: g(x + 9), 1.0))(False), [10]
  ),
  "switch": Program(
    lambda g: jax.lax.switch(jnp.int32(1), [g, lambda x: g(x) + g(x + 1), lambda x: x], 5.0), [5, 6]
  ),
  "remat": Program(lambda g: jax.checkpoint(lambda x: g(g(x)))(1.0), [1, *sin(1)]),
  "custom_jvp": Program(lambda g: in_custom_jvp(g)(1.0), [1]),
  "custom_vjp": Program(lambda g: in_custom_vjp(g)(1.0), [1]),
}
LANE = {
  "vmap": Program(lambda g: jax.vmap(g)(LANES), [0, 1, 2, 3]),
  "vmap, unused": Program(lambda g: (jax.vmap(g)(LANES), 0)[1], [0, 1, 2, 3]),
  "no lanes": Program(lambda g: jax.vmap(g)(jnp.zeros(0)), []),
  "vmap of scan": Program(
    lambda g: jax.vmap(lambda x: jax.lax.scan(lambda c, i: (c, g(x + i)), 0.0, LANES[:2]))(LANES),
    [0, 1, 2, 3, 1, 2, 3, 4],
  ),
  "scan of vmap": Program(
    lambda g: jax.lax.scan(lambda c, i: (c, jax.vmap(g)(i + LANES)), 0.0, LANES[:2]),
    [0, 1, 2, 3, 1, 2, 3, 4],
  ),
  "vmap of cond, one predicate": Program(
    lambda g: jax.vmap(lambda x, p: jax.lax.cond(p, g, lambda y: y, x), (0, None))(LANES, True),
    [0, 1, 2, 3],
  ),
  "vmap of cond, a predicate a lane": Program(
    lambda g: jax.vmap(lambda x: jax.lax.cond(x > 1, g, lambda y: g(y + 10) + g(y + 20), x))(LANES),
    [10, 20, 11, 21, 2, 3],
  ),
  "vmap of switch": Program(
    lambda g: jax.vmap(lambda i, x: jax.lax.switch(i, [g, lambda y: y, lambda y: g(y + 10)], x))(
      jnp.array([0, 1, 2, 0]), LANES
    ),
    [0, 12, 3],
  ),
  "vmap of vmap of cond": Program(
    lambda g: jax.vmap(
      jax.vmap(lambda x, y: jax.lax.cond(x < y, g, lambda z: z, x + 10 * y), (0, None)), (None, 0)
    )(LANES[:3], LANES[:3]),
    [10, 20, 21],
  ),
  "vmap of while, one predicate": Program(
    lambda g: jax.vmap(lambda x: lax_while(2, lambda i, c: c + g(x + 10 * i), 0.0))(LANES),
    [0, 1, 2, 3, 10, 11, 12, 13],
  ),
  "vmap of while, a predicate a lane": Program(
    lambda g: jax.vmap(lambda n: lax_while(n, lambda i, c: c + g(10 * n + i), 0.0))(LANES),
    [10, 20, 21, 30, 31, 32],
  ),
  "vmap of while, in the condition": Program(
    lambda g: jax.vmap(
      lambda n: jax.lax.while_loop(lambda c: (g(c) < 9) & (c % 10 < n), lambda c: c + 1, 10 * n)
    )(LANES[:3]),
    [0, 10, 11, 20, 21, 22],
  ),
  "vmap of while of cond": Program(
    lambda g: jax.vmap(
      lambda n: lax_while(n, lambda i, c: jax.lax.cond(i % 2 == 0, g, lambda x: x, 10 * n + i), 0.0)
    )(LANES),
    [10, 20, 30, 32],
  ),
}
ROUND = {
  "grad": Program(lambda g: jax.grad(g)(1.0), [1]),
  "value_and_grad": Program(lambda g: jax.value_and_grad(lambda x: g(g(x)))(1.0), [1, *sin(1)]),
  "jvp": Program(lambda g: jax.jvp(g, (1.0,), (1.0,)), [1]),
  "jvp of jit": Program(lambda g: jax.jvp(jax.jit(g), (1.0,), (1.0,)), [1]),
  "linearize, applied twice": Program(
    lambda g: (lambda f: (f(1.0), f(2.0)))(jax.linearize(g, 1.0)[1]), [1]
  ),
  "grad of remat": Program(
    lambda g: jax.grad(jax.checkpoint(lambda x: g(g(x)) ** 2))(1.0), [1, *sin(1)]
  ),
  "grad of remat of jit": Program(
    lambda g: jax.grad(jax.checkpoint(jax.jit(lambda x: g(g(x)) ** 2)))(1.0), [1, *sin(1)]
  ),
  "grad of remat of cond": Program(
    lambda g: jax.grad(
      jax.checkpoint(lambda x: jax.lax.cond(x > 0, lambda x: g(g(x)) ** 2, lambda x: g(x), x))
    )(1.0),
    [1, *sin(1)],
  ),
  "grad of remat of scan": Program(
    lambda g: jax.grad(
      jax.checkpoint(lambda x: jax.lax.scan(lambda c, i: (c * g(i) ** 2, None), x, LANES)[0])
    )(1.0),
    [0, 1, 2, 3],
  ),
  "grad of scan of remat": Program(
    lambda g: jax.grad(
      lambda x: jax.lax.scan(jax.checkpoint(lambda c, i: (c * g(i) ** 2, None)), x, LANES)[0]
    )(1.0),
    [0, 1, 2, 3],
  ),
  "grad of remat of while": Program(
    lambda g: jax.grad(jax.checkpoint(lambda x: x * lax_while(3, lambda i, c: c + g(i), 1.0)))(1.0),
    [0, 1, 2],
  ),
  "grad of scan": Program(
    lambda g: jax.grad(lambda x: jax.lax.scan(lambda c, i: (c * g(i), None), x, LANES)[0])(1.0),
    [0, 1, 2, 3],
  ),
  "grad of scan, the same argument in each step": Program(
    lambda g: jax.grad(lambda x: jax.lax.scan(lambda c, _: (c * g(1.0), None), x, LANES)[0])(1.0),
    [1, 1, 1, 1],
  ),
  "grad of scan of jit, the same argument in each step": Program(
    lambda g: jax.grad(lambda x: jax.lax.fori_loop(0, 3, lambda _, c: c * jax.jit(g)(1.0), x))(1.0),
    [1, 1, 1],
  ),
  "grad of remat of scan, the same argument in each step": Program(
    lambda g: jax.grad(
      jax.checkpoint(lambda x: jax.lax.scan(lambda c, _: (c * g(1.0) * c, None), x, LANES)[0])
    )(1.0),
    [1, 1, 1, 1],
  ),
  "grad of vmap of remat": Program(
    lambda g: jax.grad(lambda x: jax.vmap(jax.checkpoint(lambda y: g(y) ** 2))(x).sum())(LANES),
    [0, 1, 2, 3],
  ),
  "grad of vmap of cond": Program(
    lambda g: jax.grad(
      lambda x: jax.vmap(lambda y: jax.lax.cond(y > 1, g, lambda z: g(z + 10), y))(x).sum()
    )(LANES),
    [10, 11, 2, 3],
  ),
  "jvp of while": Program(
    lambda g: jax.jvp(lambda x: lax_while(2, lambda i, c: c * g(i), x), (1.0,), (1.0,)), [0, 1]
  ),
  "custom_vjp with the gate in both": Program(lambda g: jax.grad(in_custom_vjp(g))(1.0), [1, 2]),
  "hessian": Program(lambda g: jax.hessian(g)(1.0), [1]),
}
PROGRAMS = ONE | LANE | ROUND


def in_custom_jvp(g: F) -> F:
  f = jax.custom_jvp(lambda x: g(x))
  f.defjvp(lambda primals, tangents: (g(*primals), tangents[0]))
  return f


def in_custom_vjp(g: F) -> F:
  f = jax.custom_vjp(lambda x: g(x))
  f.defvjp(lambda x: (g(x), x), lambda x, ct: (ct * g(x + 1),))
  return f


@functools.cache
def all_expected() -> dict[str, Any]:
  """Each program's result with the pure JAX function instead of the gate."""
  return jax.jit(lambda: {name: each.run(jnp.sin) for name, each in PROGRAMS.items()})()


@functools.cache
def found_and_seen(effect: Any) -> list[dict[str, tuple[Any, list[float]]]]:
  """All programs as one, each with a gate of its own, in two runs: traced, then from the cache."""
  seen: dict[str, list[float]] = {name: [] for name in PROGRAMS}
  gates = {name: recording(effect, seen[name]) for name in PROGRAMS}
  program = jax.jit(lambda: {name: each.run(gates[name]) for name, each in PROGRAMS.items()})
  runs: list[dict[str, tuple[Any, list[float]]]] = []
  for _ in range(2):
    found = program()
    finish(found)
    runs.append({name: (found[name], seen[name].copy()) for name in PROGRAMS})
    for values in seen.values():
      values.clear()
  return runs


@pytest.mark.parametrize("effect", EFFECTS)
@pytest.mark.parametrize("name", PROGRAMS)
def test_effectful_gates_run_exactly_once_and_give_what_they_should(effect: Any, name: str) -> None:
  want = all_expected()[name]
  for run in found_and_seen(effect):
    found, seen = run[name]
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, 1e-5, 1e-6), found, want)
    assert sorted(seen) == sorted(PROGRAMS[name].seen)
    assert effect == "io" or seen == PROGRAMS[name].seen


@pytest.fixture
def new_checkpoint() -> Iterator[None]:
  """JAX's new implementation of `jax.checkpoint`, which is off by default."""
  if not hasattr(jax.config, "jax_remat3"):
    pytest.skip("this JAX has no other implementation")
  jax.config.update("jax_remat3", True)
  yield
  jax.config.update("jax_remat3", False)


@pytest.mark.parametrize("name", [name for name in ROUND if "remat" in name])
def test_under_jaxs_new_checkpoint_they_run_once_too(name: str, new_checkpoint: None) -> None:
  seen: list[float] = []
  gate = recording("ordered", seen)
  got = jax.jit(lambda: PROGRAMS[name].run(gate))()
  finish(got)
  assert seen == PROGRAMS[name].seen
  jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, 1e-5, 1e-6), got, all_expected()[name])


def test_under_jaxs_new_checkpoint_a_gradient_is_that_of_the_one_call(new_checkpoint: None) -> None:
  numbers = iter(range(1, 100))
  gate = cg.gate(lambda x: np.float32(next(numbers)), out=lambda x: x, effect="io")
  gate.defjvp(lambda primals, tangents: (gate(*primals), 0 * tangents[0]))
  repeated = list[bool]()

  def f(x: Any) -> Any:
    cg.tap(x, lambda value, info: repeated.append(info.repeated))
    return (gate(x) * jnp.sin(x)) ** 2

  _, slope = jax.jit(jax.value_and_grad(jax.checkpoint(f)))(0.5)
  np.testing.assert_allclose(slope, 2 * np.sin(0.5) * np.cos(0.5), rtol=1e-5)
  cg.barrier()
  assert next(numbers) == 2
  assert sorted(repeated) == [False, True]


@pytest.mark.parametrize("effect", EFFECTS)
@pytest.mark.parametrize("name", ["plain", "scan", "vmap", "grad", "grad of remat", "traced cond"])
def test_without_an_outer_jit_they_run_once_too(effect: Any, name: str) -> None:
  seen: list[float] = []
  finish(PROGRAMS[name].run(recording(effect, seen)))
  assert seen == PROGRAMS[name].seen


@pytest.mark.parametrize("name", ["unused result", "scan, unused", "vmap, unused"])
def test_pure_gates_are_dropped_when_nothing_uses_them(name: str) -> None:
  seen: list[float] = []
  gate = recording("pure", seen)
  finish(jax.jit(lambda: PROGRAMS[name].run(gate))())
  assert seen == []


@pytest.mark.parametrize("method", ["whole", "broadcast"])
@pytest.mark.parametrize("effect", EFFECTS)
def test_batch_calls_of_effectful_gates_happen_once(effect: Any, method: Any) -> None:
  seen: list[Any] = []
  gate = cg.gate(lambda x: seen.append(x.tolist()), out=lambda x: (), effect=effect, vmap=method)
  finish(jax.jit(jax.vmap(gate))(LANES))
  assert seen == [LANES.tolist()]


@pytest.mark.parametrize("transform", [lambda f: f, jax.jit, jax.checkpoint])
@pytest.mark.parametrize("effect", EFFECTS)
def test_linearizing_a_while_loop_is_refused_where_calls_would_repeat(
  effect: Any, transform: Any
) -> None:
  seen: list[float] = []
  gate = recording(effect, seen)
  with pytest.raises(cg.GateDefinitionError, match=r"while_loop.*jax\.jvp.*scan"):
    jax.linearize(transform(lambda x: lax_while(2, lambda i, c: c * gate(c), x)), 1.0)
  assert seen == []


# -- order ---------------------------------------------------------------------------------------
def costly(x: Any, size: int) -> Any:
  """`x`, after work that keeps XLA's threads busy for a while."""
  m = jnp.full((size, size), x / 1e6)
  for _ in range(4):
    m = jnp.tanh(m @ m)
  return x + 0 * m.sum()


def test_ordered_gates_run_in_program_order_whatever_their_operands_cost() -> None:
  seen: list[float] = []
  gates = [recording("ordered", seen) for _ in range(3)]

  @jax.jit
  def program(x: Any) -> Any:
    sizes = [300, 4, 150, 2, 80, 2]
    return [gates[i % 3](costly(x + i, n)) for i, n in enumerate(sizes)]

  for _ in range(3):
    finish(program(0.0))
  assert seen == [0, 1, 2, 3, 4, 5] * 3


def test_ordered_gates_keep_their_order_across_calls_and_programs() -> None:
  seen: list[float] = []
  gate = recording("ordered", seen)
  slow = jax.jit(lambda x: (gate(costly(x, 250)), 0)[1])
  fast = jax.jit(lambda x: (gate(x), 0)[1])
  finish([(slow if i % 2 == 0 else fast)(float(i)) for i in range(10)])
  assert seen == list(range(10))


@pytest.mark.parametrize("method", ["each", "whole"])
def test_ordered_gates_under_vmap(method: Any, engine: str) -> None:
  seen: list[Any] = []

  @cg.gate(out=lambda x, y: x, effect="ordered", vmap=method)
  def add(x: Any, y: Any) -> Any:
    seen.append(np.asarray(x).tolist())
    return x + y

  program = jax.vmap(lambda x: jax.lax.fori_loop(0, 2, lambda _, c: add(c, x), x))
  np.testing.assert_array_equal(jax.jit(program)(jnp.arange(2.0)), [0, 3])
  finish(jax.jit(jax.vmap(jax.vmap(add, (0, None))))(jnp.ones((1, 2)), jnp.arange(1.0)))
  each = [0, 1, 0, 2, 1, 1]
  assert seen == (each if method == "each" else [[0, 1], [0, 2], [1, 1]])


def test_ordered_gates_mix_with_each_other_across_control_flow() -> None:
  seen: list[float] = []
  a, b = recording("ordered", seen), recording("ordered", seen)

  @jax.jit
  def program() -> None:
    a(1.0)
    jax.lax.scan(lambda c, x: ((a(x), c)[1], b(costly(x + 0.5, 100))), 0.0, LANES[:2])
    b(2.0)
    jax.lax.cond(True, lambda: a(3.0), lambda: b(4.0))
    lax_while(2, lambda i, c: (b(10 + i), a(20 + i))[1], 0.0)
    jax.vmap(lambda x: (a(30 + x), b(40 + x)))(LANES[:2])
    jax.jit(lambda: b(5.0))()

  program()
  jax.effects_barrier()
  assert seen == [1, 0, 0.5, 1, 1.5, 2, 3, 10, 20, 11, 21, 30, 31, 40, 41, 5]


@pytest.mark.parametrize("effect", EFFECTS)
def test_effects_barrier_waits_for_programs_whose_results_nobody_looks_at(effect: Any) -> None:
  seen: list[float] = []

  def slow(x: Any) -> None:
    time.sleep(0.02)
    seen.append(float(x))

  gate = cg.gate(slow, out=(), effect=effect)
  program = jax.jit(lambda x: (gate(x), costly(x, 50))[1])
  for i in range(5):
    program(float(i))
  jax.effects_barrier()
  assert sorted(seen) == [0, 1, 2, 3, 4]


@pytest.mark.parametrize("effect", EFFECTS)
def test_donation_and_aliases_keep_calls_exactly_once(effect: Any) -> None:
  seen: list[float] = []

  def bump(out: Any, x: Any) -> None:
    seen.append(float(x[0]))
    out += 1

  gate = cg.gate(bump, style="inplace", out=lambda x: x, aliases={0: 0}, effect=effect)
  step = jax.jit(functools.partial(jax.lax.fori_loop, 0, 4, lambda i, x: gate(x)), donate_argnums=0)
  np.testing.assert_array_equal(step(jnp.zeros(3)), np.full(3, 4))
  assert seen == [0, 1, 2, 3]
