# SPDX-License-Identifier: Apache-2.0
"""Programs that are asked to stop: those that were dispatched before, on all devices alike."""

from __future__ import annotations

import itertools
import threading
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from interpreters import output_of
from transformation_table import EFFECT_PAIRS, assert_chains_agree, groups, reference

import callgate as cg
from callgate import _callgate

MANY = 200_000_000  # steps, which take longer than any test may


def counting(on_step: Any = None) -> Any:
  """A program that counts until it is asked to stop; `on_step` gets each count."""

  def step(count: Any) -> Any:
    if on_step is not None:
      cg.tap(count, on_step)
    return count + 1

  return jax.jit(
    lambda n: jax.lax.while_loop(lambda i: (i < n) & ~cg.stop_requested(), step, jnp.int32(0))
  )


def test_a_consumer_ends_a_loop(engine: str) -> None:
  program = counting(lambda count: cg.stop("enough") if count == 5 else None)
  count = int(program(MANY))
  assert 5 < count < MANY
  assert cg.stop_reason() == "enough"


def test_later_programs_begin_unasked(engine: str) -> None:
  program = counting()
  assert program(10) == 10
  cg.stop()
  assert program(10) == 10
  cg.stop("again")
  assert program(10) == 10
  assert cg.stop_reason() == "again"


def test_a_program_that_waits_for_its_turn_stops_too() -> None:
  program = counting()
  jax.block_until_ready(program(1))
  go = threading.Event()
  many = cg.gate(lambda _: (go.wait(), np.int32(MANY))[1], out=jax.ShapeDtypeStruct((), jnp.int32))
  late = jax.jit(lambda x: many((x @ x).sum()))(jnp.ones((600, 600)))  # too long to run inline
  queued = [program(late) for _ in range(3)]
  cg.stop("all of these")
  go.set()
  assert [int(count) for count in queued] == [0, 0, 0]
  assert program(10) == 10


def test_a_request_from_another_thread() -> None:
  begun = threading.Event()
  program = counting(lambda _: begun.set())

  def ask() -> None:
    begun.wait()
    cg.stop("from a thread")

  thread = threading.Thread(target=ask)
  thread.start()
  assert 0 < int(program(MANY)) < MANY
  thread.join()


def test_a_request_from_a_signal() -> None:
  code = """
    import os, signal, threading
    import jax, jax.numpy as jnp
    import callgate as cg

    signal.signal(signal.SIGUSR1, lambda *_: cg.stop("signal"))
    count = lambda n: jax.lax.while_loop(lambda i: (i < n) & ~cg.stop_requested(), step, 0)

    def step(i):
      cg.tap(i, lambda i: os.kill(os.getpid(), signal.SIGUSR1) if i == 3 else None)
      return i + 1

    done = []
    thread = threading.Thread(target=lambda: done.append(int(jax.jit(count)(200_000_000))))
    thread.start()
    thread.join()
    print(done[0] < 200_000_000, cg.stop_reason())
  """
  assert output_of(code).split() == ["True", "signal"]


def test_a_request_from_a_signal_where_the_main_thread_runs_the_program() -> None:
  code = """
    import os, signal
    import jax
    import callgate as cg

    signal.signal(signal.SIGTERM, lambda *_: cg.stop("signal"))
    knob = cg.knob("limit", 0)
    signal.signal(signal.SIGUSR1, lambda *_: knob.set(1))

    def asking(number):
      def step(i):
        cg.tap(i, lambda i: os.kill(os.getpid(), number) if i == 3 else None)
        return i + 1
      return step

    stops = lambda i: ~cg.stop_requested()
    print(jax.jit(lambda: jax.lax.while_loop(stops, asking(signal.SIGTERM), 0))() > 3)
    sets = lambda i: knob.read() == 0
    print(jax.jit(lambda: jax.lax.while_loop(sets, asking(signal.SIGUSR1), 0))() > 3)
  """
  assert output_of(code).split() == ["True", "True"]


def test_a_dispatch_that_is_refused_is_none() -> None:
  def count(x: Any, n: Any) -> Any:
    return cg.scan(lambda c, _: (c + x, None), n, length=10, stoppable=True)[::2]

  one = lambda: jnp.ones(4).sum()
  program, donating = jax.jit(count), jax.jit(count, donate_argnums=0)
  run = lambda: [int(f(one(), one())[1]) for f in (program, donating)]
  assert run() == [10, 10]
  deleted = jnp.ones(4).sum()
  deleted.delete()
  cg.stop("before the refused ones")
  with pytest.raises(RuntimeError, match="deleted"):
    program(deleted, one())
  with pytest.raises((RuntimeError, ValueError), match="donate"):
    donating(x := one(), x)
  for _ in range(3):
    assert run() == [10, 10]
    cg.stop("between")


def test_compiled_programs_count_from_their_dispatch() -> None:
  begun = threading.Event()
  program = counting(lambda _: begun.set()).lower(1).compile()
  assert program(3) == 3
  cg.stop()
  assert program(3) == 3
  cg.barrier()
  begun.clear()
  thread = threading.Thread(target=lambda: (begun.wait(), cg.stop()))
  thread.start()
  assert int(program(MANY)) < MANY
  thread.join()


def test_devices_stop_at_the_same_step() -> None:
  devices = jax.devices()[:4]
  mesh = jax.make_mesh((4,), ("d",), devices=devices)
  begun = threading.Event()

  def on_part(x: Any) -> Any:
    def step(state: Any) -> Any:
      count, x = state
      cg.tap(count, lambda _: begun.set())
      return count + 1, x + jax.lax.psum(x, "d") * 0

    condition = lambda state: (state[0] < MANY) & ~cg.stop_requested()
    count, x = jax.lax.while_loop(condition, step, (jnp.int32(0), x))
    return x + count

  program = jax.jit(jax.shard_map(on_part, mesh=mesh, in_specs=jax.P("d"), out_specs=jax.P("d")))
  x = jax.device_put(jnp.zeros(4), jax.NamedSharding(mesh, jax.P("d")))
  for _ in range(3):
    cg.barrier()
    begun.clear()
    thread = threading.Thread(target=lambda: (begun.wait(), cg.stop()))
    thread.start()
    counts = np.asarray(program(x))
    thread.join()
    assert counts[0] > 0
    assert (counts == counts[0]).all()


def test_devices_agree_through_jaxs_callbacks(monkeypatch: pytest.MonkeyPatch) -> None:
  mesh = jax.make_mesh((4,), ("d",), devices=jax.devices()[:4])
  looks = itertools.count()
  monkeypatch.setattr(_callgate, "stop_requests", lambda: next(looks) % 2)

  def on_part(x: Any) -> Any:
    step = lambda x, _: (x + jax.lax.psum(x, "d"), None)
    last, _, steps = cg.scan(step, x, length=3, stoppable=True)
    return 0 * last + steps

  with cg.config(engine="jax"):
    asked = lambda x: x + cg.stop_requested()
    for f in (asked, on_part):
      program = jax.jit(jax.shard_map(f, mesh=mesh, in_specs=jax.P("d"), out_specs=jax.P("d")))
      x = jax.device_put(jnp.zeros(4), jax.NamedSharding(mesh, jax.P("d")))
      got = np.asarray(program(x))
      assert (got == got[0]).all()


def test_partitioned_programs_stop() -> None:
  mesh = jax.make_mesh((8,), ("d",))
  x = jax.device_put(jnp.arange(8.0), jax.NamedSharding(mesh, jax.P("d")))
  begun = threading.Event()

  def step(x: Any, _: Any) -> Any:
    cg.tap(x, lambda _: begun.set())
    return x + x.sum() * 0 + 1, None

  program = jax.jit(lambda x: cg.scan(step, x, length=1_000_000, stoppable=True))
  thread = threading.Thread(target=lambda: (begun.wait(), cg.stop()))
  thread.start()
  last, _, steps = program(x)
  thread.join()
  assert 0 < int(steps) < 1_000_000
  np.testing.assert_array_equal(last, np.arange(8.0) + int(steps))


# -- loops that are stoppable ----------------------------------------------------------------------
def test_a_scan_gives_what_was_reached(engine: str) -> None:
  def step(carry: Any, x: Any) -> Any:
    cg.tap(carry["n"], lambda n: cg.stop() if n == 4 else None)
    carry = {"n": carry["n"] + 1, "sum": carry["sum"] + x}
    return carry, (x, {"key": jax.random.key(carry["n"]), "twice": 2 * x})

  program = jax.jit(lambda c, xs: cg.scan(step, c, xs, stoppable=True))
  count = 1_000_000
  carry, (ys, more), steps = program({"n": 0, "sum": 0.0}, jnp.arange(1.0, count + 1))
  steps = int(steps)
  assert 4 < steps < count
  assert carry["n"] == steps
  np.testing.assert_array_equal(ys, np.where(np.arange(count) < steps, np.arange(1, count + 1), 0))
  np.testing.assert_array_equal(more["twice"], 2 * ys)
  assert (jax.random.key_data(more["key"])[steps:] == 0).all()


@pytest.mark.parametrize("unroll", [1, 7, True])
def test_a_stop_in_a_step_is_seen_before_the_next_one(engine: str, unroll: int | bool) -> None:
  def stop_at(n: Any) -> Any:
    if n == 4:
      cg.stop("in step 4")
    return n + 1

  same = cg.gate(stop_at, out=jax.ShapeDtypeStruct((), jnp.int32), effect="io")
  step = lambda n, _: (same(n), n)
  program = jax.jit(lambda n: cg.scan(step, n, length=10, unroll=unroll, stoppable=True))
  last, ys, steps = program(jnp.int32(0))
  assert (int(last), int(steps)) == (5, 5)
  np.testing.assert_array_equal(ys, [0, 1, 2, 3, 4, 0, 0, 0, 0, 0])


def test_a_loop_that_has_stopped_looks_no_more(monkeypatch: pytest.MonkeyPatch) -> None:
  looks, counted = 0, _callgate.stop_requests

  def stop_requests() -> int:
    nonlocal looks
    looks += 1
    if looks == 5:  # the first is at the dispatch
      cg.stop()
    return counted()

  monkeypatch.setattr(_callgate, "stop_requests", stop_requests)
  with cg.config(engine="jax"):
    step = lambda n, _: (n + 1, None)
    steps = jax.jit(lambda n: cg.scan(step, n, length=100, stoppable=True))(0)[2]
    assert int(steps) == 3
  assert looks == 5


def test_unasked_it_is_jaxs_scan(engine: str) -> None:
  def step(carry: Any, x: Any) -> Any:
    return carry * x + 1, (carry, {"x": x})

  xs = jnp.linspace(0.5, 1.5, 7)
  expected = jax.lax.scan(step, 2.0, xs, reverse=True)
  *got, steps = cg.scan(step, 2.0, xs, reverse=True, stoppable=True)
  assert int(steps) == 7
  jax.tree.map(np.testing.assert_array_equal, tuple(got), expected)


def test_derivatives_and_lanes_and_bars() -> None:
  def loss(x: Any, **options: Any) -> Any:
    return cg.scan(lambda c, t: (jnp.sin(c) * t, c), x, jnp.arange(1.0, 4.0), **options)[0]

  stoppable = lambda x: loss(x, stoppable=True)
  for transform in (jax.grad, jax.jacfwd, jax.hessian, lambda f: jax.grad(jax.checkpoint(f))):
    np.testing.assert_allclose(transform(stoppable)(0.3), transform(loss)(0.3), rtol=1e-6)
  xs = jnp.linspace(0, 1, 5)
  np.testing.assert_allclose(jax.vmap(stoppable)(xs), jax.vmap(loss)(xs), rtol=1e-6)
  with_bar = lambda x: loss(x, stoppable=True, progress=True)
  np.testing.assert_allclose(jax.jit(jax.grad(with_bar))(0.3), jax.grad(loss)(0.3), rtol=1e-6)


def test_the_body_is_traced_once_for_each_type() -> None:
  traced = 0

  def step(carry: Any, x: Any) -> Any:
    nonlocal traced
    traced += 1
    return carry + x, x

  jax.jit(lambda xs: cg.scan(step, 0.0, xs, stoppable=True))(jnp.arange(3.0))
  assert traced <= 2


def test_under_default_shard_map(engine: str) -> None:
  mesh = jax.make_mesh((4,), ("d",), devices=jax.devices()[:4])

  def on_part(x: Any) -> Any:
    step = lambda c, t: (c * t, c)
    return cg.scan(step, x, jnp.arange(1.0, 4.0), stoppable=True)[:2]

  specs = jax.P("d"), jax.P(None, "d")
  program = jax.shard_map(on_part, mesh=mesh, in_specs=jax.P("d"), out_specs=specs)
  x = jax.device_put(jnp.arange(4.0), jax.NamedSharding(mesh, jax.P("d")))
  last, ys = jax.jit(program)(x)
  np.testing.assert_array_equal(last, 6 * np.arange(4.0))
  np.testing.assert_array_equal(ys[2], 2 * np.arange(4.0))
  grad = jax.jit(jax.grad(lambda x: program(x)[0].sum()))(x)
  np.testing.assert_array_equal(grad, np.full(4, 6.0))


@pytest.mark.parametrize("chains", groups(13, pairs=EFFECT_PAIRS))
def test_pairs_of_transformations(chains: Any) -> None:
  def make(effect: Any) -> Any:
    del effect
    return lambda x: jnp.where(cg.stop_requested(), 0.0, reference(x))

  assert_chains_agree(chains, make=make)


def test_wrong_options_are_refused() -> None:
  with pytest.raises(cg.GateDefinitionError, match="stop: reason: expected a string, got 3"):
    cg.stop(3)  # pyright: ignore[reportArgumentType]
  with pytest.raises(cg.GateDefinitionError, match=r"scan: stoppable: expected .*, got 'yes'"):
    cg.scan(lambda c, x: (c, x), 0, jnp.arange(2), stoppable="yes")  # pyright: ignore[reportArgumentType]
  assert not cg.stop_requested()


def test_an_exported_program_stops(tmp_path: Any) -> None:
  program = jax.jit(
    lambda n: jax.lax.while_loop(lambda i: (i < n) & ~cg.stop_requested(), lambda i: i + 1, 0)
  )
  exported = jax.export.export(program, disabled_checks=cg.export_checks())(
    jax.ShapeDtypeStruct((), jnp.int32)
  )
  path = tmp_path / "program"
  path.write_bytes(exported.serialize())
  code = f"""
    import threading, time
    import jax
    import callgate as cg
    program = jax.export.deserialize(open({str(path)!r}, "rb").read())
    assert int(program.call(3)) == 3

    def ask():
      while not done:
        time.sleep(0.01)
        cg.stop()
    done = []
    thread = threading.Thread(target=ask)
    thread.start()
    print(int(program.call(2_000_000_000)) < 2_000_000_000)
    done.append(1)
    thread.join()
  """
  assert output_of(code).strip() == "True"


# -- carries -------------------------------------------------------------------------------------
@pytest.mark.parametrize("init", [1, 1.0, 1j])
def test_a_carry_of_a_python_number_gets_the_type_that_jax_gives_it(init: Any) -> None:
  def step(c: Any, x: Any) -> Any:
    return c * jnp.float16(2) + x, c

  xs = jnp.arange(3, dtype=jnp.float16)
  got, want = cg.scan(step, init, xs, stoppable=True), jax.lax.scan(step, init, xs)
  for a, b in zip(jax.tree.leaves(got[:2]), jax.tree.leaves(want), strict=True):
    np.testing.assert_array_equal(a, b)
    assert a.dtype == b.dtype


@pytest.mark.parametrize("body", [lambda c, x: (c.astype(int), x), lambda c, x: ((c, c), x)])
def test_a_carry_of_another_type_is_jaxs_error(body: Any) -> None:
  with pytest.raises(TypeError, match="scan body function carry input and carry output must have"):
    cg.scan(body, jnp.float32(1), jnp.arange(3), stoppable=True)
