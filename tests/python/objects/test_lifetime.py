# SPDX-License-Identifier: Apache-2.0
"""How long objects live: as long as a program or an array may name them, and no longer."""

from __future__ import annotations

import gc
import threading
import time
import weakref
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from free_threaded import FREE
from property_checks import is_soak

import callgate as cg
from callgate._objects import collect

ZERO = jnp.float32(0)
STEPS = 2000 if is_soak() else 400


class Counted:
  """Counts how many of it live, and the most that ever did."""

  live = most = made = 0

  def __init__(self, value: Any) -> None:
    self.value = np.float32(value)
    cls = type(self)
    cls.live, cls.made = cls.live + 1, cls.made + 1
    cls.most = max(cls.most, cls.live)

  def __del__(self) -> None:
    type(self).live -= 1


make = cg.hold(Counted, name="counted")


@pytest.fixture(autouse=True)
def count() -> Iterator[None]:
  cg.held()
  Counted.live = Counted.most = Counted.made = 0
  yield
  assert cg.held().get("counted", 0) == 0
  assert Counted.live == 0


def value_of(o: Counted, plus: Any) -> Any:
  return o.value + plus


def used(handle: cg.Handle, plus: Any = 0.0) -> Any:
  return cg.use(value_of, handle, plus, out=ZERO)


# -- programs and arrays ---------------------------------------------------------------------------
def test_an_array_keeps_its_object_and_its_end_is_the_objects() -> None:
  handle = make(1.0)
  other = jax.tree.map(lambda x: x + 0, handle)  # another array with the same words
  cg.held()
  assert Counted.live == 1
  del handle
  cg.held()
  assert used(other) == 1
  del other
  assert "counted" not in cg.held()
  assert Counted.live == 0


def test_an_object_that_a_program_does_not_return_ends_with_it() -> None:
  program = jax.jit(lambda x: used(make(x)))
  for i in range(300):
    assert program(i) == i
    assert Counted.live <= 20
  assert Counted.made == 300


def test_an_object_that_a_program_returns_lives_on() -> None:
  program = jax.jit(lambda x: (make(x), used(make(x + 1))))
  kept = [program(i)[0] for i in range(100)]
  cg.held()
  assert Counted.live == 100
  assert [used(h) for h in kept] == list(range(100))
  del kept[50:]
  cg.held()
  assert Counted.live == 50


def test_steps_from_python_leave_no_more_than_the_live_one() -> None:
  step = jax.jit(lambda h: make(used(h, 1.0)))
  handle = make(0.0)
  for _ in range(500):
    handle = step(handle)
  assert used(handle) == 500
  assert Counted.most <= 40
  cg.held()
  assert Counted.live == 1


def test_slow_programs_leave_few_where_each_result_is_waited_for(
  monkeypatch: pytest.MonkeyPatch,
) -> None:
  monkeypatch.setattr(collect, "_WAIT_SECONDS", 0)
  slow = cg.hold(lambda x: (time.sleep(0.02), Counted(x))[1], name="slow object")
  step = jax.jit(lambda x: used(slow(x)))
  lives: list[int] = []
  for number in range(20):
    jax.block_until_ready(step(np.float32(number)))
    lives.append(Counted.live)
  assert max(lives) <= 10


def test_donated_handles_are_the_programs() -> None:
  step = jax.jit(lambda h: (make(used(h, 1.0)), h), donate_argnums=0)
  first = make(0.0)
  new, old = step(first)
  cg.held()
  assert (used(new), used(old)) == (1, 0)


def test_residuals_of_an_outer_gradient_keep_their_objects() -> None:
  @jax.custom_vjp
  def f(x: Any) -> Any:
    return x * 2

  f.defvjp(lambda x: (x * 2, make(x)), lambda h, ct: (ct * used(h),))
  value, pullback = jax.vjp(jax.jit(f), 3.0)
  for i in range(50):
    jax.jit(lambda x: used(make(x)))(float(i))
  cg.held()
  assert Counted.live == 1
  assert (value, pullback(1.0)[0]) == (6, 3)
  del pullback


def test_a_program_keeps_what_it_closes_over() -> None:
  def program() -> Any:
    handle = make(7.0)
    return jax.jit(lambda x: used(handle, x)).lower(1.0).compile()

  compiled = program()
  jax.clear_caches()
  gc.collect()
  for i in range(50):
    used(make(i))
  cg.held()
  assert compiled(1.0) == 8
  del compiled
  jax.clear_caches()
  gc.collect()


def test_a_program_that_runs_keeps_what_it_was_given() -> None:
  ready, go = threading.Event(), threading.Event()

  def wait(x: Any) -> Any:
    ready.set()
    assert go.wait(60)
    return x

  slow = cg.gate(wait, out=ZERO)
  program = jax.jit(lambda h, x: (used(h, slow(x)), used(make(x), slow(x))))
  handles, results = [make(5.0)], list[Any]()
  thread = threading.Thread(target=lambda: results.append(program(handles.pop(), 1.0)))
  thread.start()
  assert ready.wait(60)
  gc.collect()
  quick = jax.jit(lambda x: used(make(x)))
  for i in range(100):
    assert quick(i) == i
  assert Counted.live >= 1  # that of the program in the other thread
  go.set()
  thread.join()
  assert results == [(6, 2)]


def test_objects_of_a_program_that_fails_end() -> None:
  kind = type("Failing", (Counted,), {"live": 0})  # what is raised keeps one by its traceback
  begin = cg.hold(kind, name="failing")

  def fail(o: Any) -> Any:
    raise ValueError("no")

  def program(x: Any) -> Any:
    def step(h: Any, _: Any) -> Any:
      new = begin(used(h, 1.0))
      return new, cg.use(fail, new, out=ZERO)

    return jax.lax.scan(step, begin(x), None, length=3)[1]

  with pytest.raises(ValueError, match="no"), cg.errors():
    jax.block_until_ready(jax.jit(program)(0.0))
  assert "failing" not in cg.held()


# -- loops -----------------------------------------------------------------------------------------
def carried(x: Any) -> Any:
  def step(h: cg.Handle, _: Any) -> Any:
    return make(used(h, 1.0)), None

  return used(jax.lax.scan(step, make(x), None, length=STEPS)[0])


def inside(x: Any) -> Any:
  return jax.lax.fori_loop(0, STEPS, lambda _, x: used(make(x), 1.0), x)


def in_while(x: Any) -> Any:
  body = lambda c: (c[0] + 1, make(used(c[1], 1.0)))
  return used(jax.lax.while_loop(lambda c: c[0] < STEPS, body, (0, make(x)))[1])


def in_branches(x: Any) -> Any:
  def step(c: Any, i: Any) -> Any:
    new = jax.lax.cond(i % 2 == 0, lambda c: make(used(c, 2.0)), lambda c: c, c)
    return new, used(new)

  return used(jax.lax.scan(step, make(x), jnp.arange(STEPS))[0])


def in_inner_jit(x: Any) -> Any:
  step = jax.jit(lambda h: make(used(h, 1.0)))
  return used(jax.lax.fori_loop(0, STEPS, lambda _, h: step(h), make(x)))


def in_loop_of_loop(x: Any) -> Any:
  def outer(_: Any, h: cg.Handle) -> cg.Handle:
    def inner(_: Any, h: cg.Handle) -> cg.Handle:
      return make(used(h, 1.0))

    return jax.lax.fori_loop(0, 20, inner, h)

  return used(jax.lax.fori_loop(0, STEPS // 20, outer, make(x)))


def kept_from_before(x: Any) -> Any:
  """An object from outside of the loop lives on beside those of the steps."""
  first = make(x)

  def step(h: cg.Handle, _: Any) -> Any:
    return make(used(h, 1.0) + used(first)), None

  return used(jax.lax.scan(step, first, None, length=STEPS)[0]) + used(first)


LOOPS = [carried, inside, in_while, in_branches, in_inner_jit, in_loop_of_loop, kept_from_before]


@pytest.mark.parametrize("loop", LOOPS)
def test_loops_leave_no_more_than_the_live_ones(loop: Any, engine: str) -> None:
  global STEPS
  before, STEPS = STEPS, 200 if engine == "jax" else STEPS
  try:
    assert jax.jit(lambda x: loop(x))(0.0) == STEPS
  finally:
    STEPS = before
  assert Counted.most <= 6


@pytest.mark.parametrize("loop", LOOPS)
def test_loops_of_lanes_leave_no_more_than_the_live_ones(loop: Any) -> None:
  got = jax.jit(jax.vmap(loop))(jnp.zeros(3))
  np.testing.assert_array_equal(got, [STEPS] * 3)
  assert Counted.most <= 18


@pytest.mark.parametrize("effect", ["ordered", "io"])
@pytest.mark.parametrize("out", [None, jax.ShapeDtypeStruct((0,), np.float32)])
def test_objects_outlive_uses_that_give_nothing(effect: str, out: Any) -> None:
  seen = []

  def look(o: Counted) -> Any:
    time.sleep(0.001)  # what waits for nothing would free it now
    seen.append(float(o.value))
    return None if out is None else np.zeros(0, np.float32)

  def step(_: Any, i: Any) -> Any:
    first, second = make(i), make(i + 0.5)
    cg.use(look, first, out=out, effect=effect)
    large = jnp.sin(jnp.full(10_000, i))  # XLA runs the steps of larger programs side by side
    cg.use(look, second, out=out, effect=effect)
    cg.use(look, first, out=out, effect=effect)
    return None, large.sum()

  jax.block_until_ready(jax.jit(lambda x: jax.lax.scan(step, None, x))(jnp.arange(20.0)))
  cg.barrier()
  assert sorted(seen) == sorted(x for i in range(20) for x in (i, i, i + 0.5))
  assert Counted.most <= 8


def test_many_steps_leave_one() -> None:
  steps = 5 * STEPS

  def step(h: cg.Handle, _: Any) -> Any:
    return make(used(h, 1.0)), None

  handle = jax.jit(lambda x: jax.lax.scan(step, make(x), None, length=steps)[0])(0.0)
  jax.block_until_ready(handle)
  assert Counted.made == steps + 1
  assert Counted.most <= 3
  assert used(handle) == steps


def _solve(make_inside: bool) -> Any:
  """x / (value + 1) by a primitive that holds jaxprs of its own."""

  def solve(value: Any, b: Any) -> Any:
    outside = None if make_inside else make(value)

    def of(_: Any, b: Any) -> Any:
      handle = make(value) if make_inside else outside
      return cg.use(lambda o, b: (b / (o.value + 1)).astype(b.dtype), handle, b, out=b)

    return jax.lax.custom_linear_solve(lambda x: (value + 1) * x, b, of, of)

  return solve


def _with_jvp(f: Any) -> Any:
  made = jax.custom_jvp(f)
  made.defjvps(None, lambda tangent, *_: tangent)
  return made


def _with_vjp(f: Any) -> Any:
  made = jax.custom_vjp(f)
  made.defvjp(lambda v, b: (f(v, b), None), lambda _, cotangent: (cotangent, cotangent))
  return made


WITHIN: dict[str, Any] = {
  "plain": lambda f: f,
  "jit": jax.jit,
  "checkpoint": jax.checkpoint,
  "cond": lambda f: lambda v, b: jax.lax.cond(b > -1, f, lambda v, b: b, v, b),
  "while": lambda f: (
    lambda v, b: jax.lax.while_loop(lambda s: s[0] < 1, lambda s: (s[0] + 1, f(v, s[1])), (0, b))[1]
  ),
  "custom_jvp": _with_jvp,
  "custom_vjp": _with_vjp,
}


@pytest.mark.parametrize("make_inside", [False, True])
def test_loops_with_primitives_that_hold_jaxprs_leave_no_more_than_the_live_ones(
  make_inside: bool,
) -> None:
  functions = [wrap(_solve(make_inside)) for wrap in WITHIN.values()]

  @jax.jit
  def program(b: Any) -> Any:
    return [jax.lax.scan(lambda c, _: (f(1.0, c), None), b, length=20)[0] for f in functions]

  found = program(jnp.float32(1))
  np.testing.assert_allclose(found, 2.0**-20)
  assert Counted.made == 20 * len(functions)
  assert Counted.most <= 3 * len(functions)  # XLA may run the loops beside each other


def test_an_object_that_a_loop_gives_out_lives_as_long_as_its_array() -> None:
  def step(c: Any, x: Any) -> Any:
    return c, (make(x), used(make(-x)))

  handles, values = jax.jit(lambda xs: jax.lax.scan(step, 0, xs)[1])(jnp.arange(50.0))
  jax.block_until_ready(values)
  assert Counted.live <= 51
  cg.held()
  assert Counted.live == 50
  np.testing.assert_array_equal(jax.vmap(used)(handles), np.arange(50.0))


def test_the_outer_loop_frees_objects_that_an_inner_loop_gives_out() -> None:
  def outer(total: Any, x: Any) -> Any:
    handles = jax.lax.scan(lambda c, x: (c, make(x)), 0, x + jnp.arange(4.0))[1]
    return total + jax.vmap(used)(handles).sum(), None

  got = jax.jit(lambda xs: jax.lax.scan(outer, 0.0, xs)[0])(jnp.zeros(300))
  assert got == 1800
  assert Counted.most <= 10


def test_gradients_of_loops_keep_what_the_backward_pass_uses() -> None:
  @jax.custom_vjp
  def f(x: Any) -> Any:
    return x * 2

  f.defvjp(lambda x: (x * 2, make(x)), lambda h, ct: (ct * (2 + 0 * used(h)),))

  def loss(x: Any) -> Any:
    return jax.lax.scan(lambda c, _: (f(c) / 2, None), x, None, length=100)[0]

  assert jax.jit(jax.grad(loss))(3.0) == 1
  assert Counted.made == 100


def test_lanes_that_end_early_keep_their_objects() -> None:
  def lane(n: Any) -> Any:
    body = lambda c: (c[0] + 1, make(used(c[1], 1.0)))
    return used(jax.lax.while_loop(lambda c: c[0] < n, body, (0, make(0.0)))[1])

  n = jnp.array([3, 50, 0, 10])
  np.testing.assert_array_equal(jax.jit(jax.vmap(lane))(n), n)
  assert Counted.most <= 16


def test_loops_on_devices_free_their_own() -> None:
  mesh = jax.make_mesh((4,), ("i",), axis_types=(jax.sharding.AxisType.Auto,))
  spec = jax.sharding.PartitionSpec("i")

  def per_device(x: Any) -> Any:
    step = lambda h, _: (make(used(h, 1.0)), None)
    return used(jax.lax.scan(step, make(x[0]), None, length=200)[0])[None]

  x = jax.device_put(jnp.arange(4.0), jax.sharding.NamedSharding(mesh, spec))
  got = jax.jit(jax.shard_map(per_device, mesh=mesh, in_specs=spec, out_specs=spec))(x)
  np.testing.assert_array_equal(got, 200 + np.arange(4.0))
  assert Counted.most <= 24


@pytest.mark.parametrize("manual", [None, {"a"}])
def test_loops_of_partitioned_programs_free_their_own(manual: set[str] | None) -> None:
  mesh = jax.make_mesh((2, 2), ("a", "b"), axis_types=(jax.sharding.AxisType.Auto,) * 2)
  x = jax.device_put(jnp.arange(8.0), jax.NamedSharding(mesh, jax.P(("a", "b"))))
  of_sum = cg.hold(lambda x: Counted(x.sum()))

  def loop(x: Any) -> Any:
    step = lambda h, _: (of_sum(x * 0 + used(h, 1.0) / x.size), None)
    return used(jax.lax.scan(step, of_sum(x), None, length=50)[0])

  if manual is None:
    assert jax.jit(loop)(x) == 78
  else:
    spec = jax.P("a")
    parts = jax.shard_map(
      lambda x: loop(x)[None], mesh=mesh, in_specs=spec, out_specs=spec, axis_names=manual
    )
    np.testing.assert_array_equal(jax.jit(parts)(x), [56, 72])
  assert Counted.most <= 12


# -- threads ---------------------------------------------------------------------------------------
def test_threads_that_make_and_drop_objects_lose_none() -> None:
  program = jax.jit(lambda h, x: (make(used(h, x)), used(make(x))))
  jax.block_until_ready(program(make(0.0), 1.0))
  failures: list[BaseException] = []

  def run(seed: int) -> None:
    try:
      rng = np.random.default_rng(seed)
      handle, expected = make(0.0), 0.0
      end = time.monotonic() + (3 if is_soak() else 1)
      while time.monotonic() < end:
        x = float(rng.integers(5))
        handle, value = program(handle, x)
        expected += x
        if rng.random() < 0.3:
          assert (used(handle), value) == (expected, x)
    except BaseException as error:  # noqa: BLE001 - shown by the test's thread
      failures.append(error)

  threads = [threading.Thread(target=run, args=(i,)) for i in range(4)]
  for thread in threads:
    thread.start()
  for thread in threads:
    thread.join()
  assert not failures, failures[0]
  # Moments without a program are few here, and are fewer without the GIL.
  assert Counted.most < max(1000 if FREE else 500, Counted.made / 4)


def test_the_table_frees_nothing_that_python_holds_itself() -> None:
  kept: list[weakref.ref[Any]] = []

  def remember(value: Any) -> Counted:
    made = Counted(value)
    kept.append(weakref.ref(made))
    return made

  handle = cg.hold(remember)(1.0)
  assert kept[0]() is not None
  del handle
  cg.held()
  assert kept[0]() is None
