# SPDX-License-Identifier: Apache-2.0
"""Calls that programs start and wait for: overlap, transformations, errors, coroutines."""

from __future__ import annotations

import asyncio
import functools
import itertools
import sys
import threading
import time
import warnings
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from interpreters import output_of, run
from meanwhile import Meanwhile
from property_checks import is_soak
from transformation_table import F, assert_chains_agree, groups, on_host, reference

import callgate as cg
from callgate._futures import job

ZERO = jnp.float32(0)


def meeting(count: int) -> cg.Gate[..., Any]:
  """A gate that adds one as soon as so many calls of it are under way at once, or fails."""
  barrier = threading.Barrier(count)

  def meet(x: Any) -> Any:
    barrier.wait(60)
    return x + 1

  return cg.gate(meet, out=ZERO)


def started(effect: Any) -> F:
  gate = cg.gate(on_host, like=reference, effect=effect)
  return lambda x: gate.start(x).result()


@pytest.mark.parametrize("chains", groups(3, 9))
def test_pairs_of_transformations_agree_with_jax(chains: Any) -> None:
  assert_chains_agree(chains, make=started)


def test_messages_call_a_started_gate_a_gate() -> None:
  gate = cg.gate(lambda x: np.float32(1), out=ZERO, effect="io", name="score")
  start = lambda x: gate.start(jax.lax.stop_gradient(x)).result()
  loop = lambda x: jax.lax.while_loop(
    lambda c: c[1] < 2, lambda c: (c[0] * start(c[0]), c[1] + 1), (x, 0)
  )[0]
  said = r"calls gate 'score\.start', of effect .* move the call out of the loop"
  with pytest.raises(cg.GateDefinitionError, match=said):
    jax.linearize(loop, 1.0)
  report = str(cg.explain(jax.jit(start), 1.0))
  assert "gate 'score.start'" in report
  assert "hold" not in report


def test_io_gates_start_once_for_each_execution() -> None:
  seen = list[float]()
  gate = cg.gate(lambda x: seen.append(float(x)) or np.float32(x), out=ZERO, effect="io")
  program = jax.jit(
    lambda xs: jax.lax.scan(lambda c, x: (c + gate.start(x).result(), None), 0.0, xs)[0]
  )
  assert program(jnp.arange(5.0)) == 10
  assert sorted(seen) == list(range(5))


first, second = (cg.gate(lambda x: x + 1, out=ZERO, name=f"test {i}") for i in range(2))


# -- overlap ---------------------------------------------------------------------------------------
def test_two_calls_of_a_program_overlap(engine: str) -> None:
  gate = meeting(2)

  @jax.jit
  def program(x: Any) -> Any:
    a, b = gate.start(x), gate.start(2 * x)
    return a.result() + b.result()

  assert program(1.0) == 5


def test_lanes_overlap() -> None:
  gate = meeting(6)
  program = jax.jit(jax.vmap(lambda x: gate.start(x).result()))
  np.testing.assert_array_equal(program(jnp.arange(6.0)), np.arange(1.0, 7.0))


def test_the_ticket_of_lanes_is_waited_for_outside_of_their_vmap(engine: str) -> None:
  double = cg.gate(lambda x: 2 * x, out=ZERO)
  program = jax.jit(lambda xs: jax.vmap(jax.vmap(double.start))(xs).result())
  np.testing.assert_array_equal(program(jnp.ones((2, 3))), 2 * np.ones((2, 3)))


def test_a_step_of_a_loop_waits_for_the_call_that_the_last_one_started() -> None:
  gate = meeting(2)

  def step(ticket: cg.Ticket, x: Any) -> Any:
    following = gate.start(x)
    return following, ticket.result()

  @jax.jit
  def program(xs: Any) -> Any:
    last, ys = jax.lax.scan(step, gate.start(jnp.float32(-1)), xs)
    return ys, last.result()

  ys, last = program(jnp.arange(5.0))
  np.testing.assert_array_equal(ys, [0, 1, 2, 3, 4])
  assert last == 5


def test_calls_that_are_started_outside_of_programs_overlap() -> None:
  gate = meeting(2)
  a, b = gate.start(1.0), gate.start(2.0)
  assert a.result() + b.result() == 5


def test_an_argument_that_is_no_array_is_refused_in_the_gates_name() -> None:
  with pytest.raises(cg.GateDefinitionError, match=r"^gate 'test 0': argument .*, got str"):
    first.start("text")


# -- coroutines ------------------------------------------------------------------------------------
async def fetch(x: Any) -> Any:
  await asyncio.sleep(0.01)
  return np.float32(x)


def test_coroutines_run_beside_each_other_on_one_thread() -> None:
  threads = set[str]()
  arrived = 0

  async def meet(x: Any) -> Any:
    nonlocal arrived
    arrived += 1
    threads.add(threading.current_thread().name)
    async with asyncio.timeout(60):
      while arrived < 20:
        await asyncio.sleep(0.001)
    return x * 2

  gate = cg.gate(meet, out=ZERO)
  program = jax.jit(jax.vmap(lambda x: gate.start(x).result()))
  np.testing.assert_array_equal(program(jnp.arange(20.0)), 2 * np.arange(20.0))
  assert threads == {"callgate async"}


def test_a_coroutine_has_a_loop_with_tasks_and_processes() -> None:
  async def ask(x: Any) -> Any:
    assert asyncio.get_event_loop() is asyncio.get_running_loop()
    process = await asyncio.create_subprocess_exec(
      "printf", str(float(x) * 2), stdout=asyncio.subprocess.PIPE
    )
    async with asyncio.TaskGroup() as group:
      said = group.create_task(process.communicate())
      group.create_task(asyncio.sleep(0))
    return np.float32(said.result()[0])

  gate = cg.gate(ask, out=ZERO, timeout=60)
  program = jax.jit(jax.vmap(lambda x: gate.start(x).result()))
  np.testing.assert_array_equal(program(jnp.arange(3.0)), 2 * np.arange(3.0))


def test_a_thread_without_an_event_loop_gets_none_of_callgate() -> None:
  gate = cg.gate(fetch, out=ZERO)
  with warnings.catch_warnings():
    warnings.simplefilter("error")  # for `get_event_loop`, which Python 3.14 lets raise
    assert gate.start(1.0).result() == 1
  with pytest.raises(RuntimeError, match="no running event loop"):
    asyncio.get_running_loop()


def test_a_coroutine_that_stops_the_event_loop_stops_no_other() -> None:
  async def stop(x: Any) -> Any:
    asyncio.get_running_loop().stop()
    await asyncio.sleep(0.001)
    return x

  gate = cg.gate(stop, out=ZERO, timeout=20)
  program = jax.jit(lambda: sum(t.result() for t in [gate.start(float(i)) for i in range(3)]))
  assert program() == 3
  assert gate.start(1.0).result() == 1


def test_a_call_of_a_coroutine_without_start_is_refused_with_the_way() -> None:
  gate = cg.gate(fetch, out=ZERO, name="test fetch")
  for call in (gate, jax.jit(gate), jax.vmap(gate)):
    with pytest.raises(cg.GateDefinitionError, match=r"gate 'test fetch' is an async.*gate\.start"):
      call(jnp.ones(1) if call is not gate else 1.0)
  assert gate.start(1.0).result() == 1


class Client:
  async def __call__(self, x: Any) -> Any:
    return np.float32(x)

  @cg.gate(out=ZERO)
  async def method(self, x: Any) -> Any:
    return np.float32(x)


@pytest.mark.parametrize(
  "make",
  [
    lambda: cg.gate(Client(), out=ZERO),
    lambda: cg.gate(functools.partial(fetch), out=ZERO),
    lambda: cg.gate(functools.partial(Client()), out=ZERO),
    lambda: Client().method,
  ],
  ids=["object", "partial", "partial object", "method"],
)
def test_all_that_return_coroutines_are_refused_without_start(make: Any) -> None:
  gate = make()
  for call in (gate, jax.jit(gate)):
    with pytest.raises(cg.GateDefinitionError, match=r"is an async function.*gate\.start"):
      call(1.0)
  assert gate.start(1.0).result() == 1


@pytest.mark.filterwarnings("ignore:coroutine")  # was never awaited
def test_a_decorated_coroutine_is_started_or_called_as_its_decorator_says() -> None:
  @functools.wraps(fetch)
  def waited_for(x: Any) -> Any:
    return asyncio.run(fetch(x))

  @functools.wraps(fetch)
  def passed_on(x: Any) -> Any:
    return fetch(x)

  whole = cg.gate(waited_for, out=ZERO)
  assert jax.jit(whole)(1.0) == 1
  assert whole.start(1.0).result() == 1
  only_started = cg.gate(passed_on, out=ZERO)
  assert only_started.start(1.0).result() == 1
  expected = r"got coroutine; use gate\.start\(\.\.\.\)"
  with pytest.raises(cg.ResultError, match=expected), cg.errors():
    jax.block_until_ready(jax.jit(only_started)(1.0))


def test_generators_are_refused_where_they_are_defined() -> None:
  def numbers(x: Any) -> Any:
    yield x

  async def later(x: Any) -> Any:
    yield x

  for function in (numbers, later):
    with pytest.raises(
      cg.GateDefinitionError, match=r"got a generator function; use callgate\.feed"
    ):
      cg.gate(function, out=ZERO)


# -- errors ----------------------------------------------------------------------------------------
def fail(x: Any) -> Any:
  raise KeyError("lost")


failing = cg.gate(fail, out=ZERO, name="test failing")


def test_the_error_of_a_call_is_raised_where_its_result_is_waited_for(engine: str) -> None:
  with pytest.raises(KeyError, match="lost"), cg.errors():
    jax.block_until_ready(jax.jit(lambda x: failing.start(x).result())(1.0))
  cg.barrier()


@pytest.mark.parametrize("barrier", [cg.barrier, jax.effects_barrier])
def test_a_dropped_ticket_is_waited_for_at_the_barrier(barrier: Any) -> None:
  done = list[float]()

  def slow(x: Any) -> Any:
    time.sleep(0.3)
    done.append(float(x))
    return x

  gate = cg.gate(slow, out=ZERO)
  jax.block_until_ready(jax.jit(lambda x: (gate.start(x), x)[1])(3.0))
  barrier()
  assert done == [3]
  jax.block_until_ready(jax.jit(lambda x: (failing.start(x), x)[1])(3.0))
  with pytest.raises(KeyError, match="lost") as caught:
    barrier()
  note = caught.value.__notes__[-1]
  assert "test failing" in note
  assert "not waited for" in note
  barrier()  # raised once


def test_a_barrier_gives_up_in_time() -> None:
  go = threading.Event()
  gate = cg.gate(lambda x: (go.wait(60), x)[1], out=ZERO)
  ticket = jax.block_until_ready(gate.start(1.0))  # the program has ended, the call has not
  with pytest.raises(TimeoutError, match="started calls still run"):
    cg.barrier(timeout=1)
  go.set()
  assert ticket.result() == 1


def test_a_call_that_finds_no_thread_is_an_error_and_leaves_nothing_to_wait_for(
  monkeypatch: pytest.MonkeyPatch,
) -> None:
  def submit(_: Any) -> bool:
    raise RuntimeError("Resource temporarily unavailable")

  gate = cg.gate(lambda x: x, out=ZERO)
  monkeypatch.setattr(job._callgate, "submit", submit)
  with pytest.raises(cg.GateError, match="the system has no thread for it"), cg.errors():
    jax.block_until_ready(gate.start(1.0).result())
  monkeypatch.undo()
  cg.barrier(timeout=60)
  assert gate.start(1.0).result() == 1


def test_a_queue_whose_threads_are_all_that_there_are_waits_for_them(
  monkeypatch: pytest.MonkeyPatch,
) -> None:
  queue, ran, submit = job.CallQueue(2), list[int](), job._callgate.submit
  go_on, done = threading.Event(), threading.Event()
  assert queue.submit(lambda: go_on.wait(60))
  monkeypatch.setattr(job._callgate, "submit", lambda _: (_ for _ in ()).throw(RuntimeError()))
  assert queue.submit(lambda: (ran.append(1), done.set()))
  monkeypatch.setattr(job._callgate, "submit", submit)
  go_on.set()
  assert done.wait(60)
  assert ran == [1]


# -- lanes that go apart ---------------------------------------------------------------------------
@pytest.mark.parametrize("effect", ["pure", "io"])
def test_lanes_that_go_apart_wait_each_in_its_own_branch(effect: Any, engine: str) -> None:
  ask = cg.gate(lambda x: np.asarray(x) + 1, out=lambda x: x, effect=effect)

  def branches(x: Any) -> Any:
    ticket = ask.start(x)
    return jax.lax.cond(x > 0, lambda t: t.result(), lambda t: -t.result(), ticket)

  def switch(x: Any) -> Any:
    ticket = ask.start(x)
    cases = [lambda t: t.result(), lambda t: 2 * t.result(), lambda t: jnp.float32(7)]
    return jax.lax.switch(jnp.int32(x) % 3, cases, ticket)

  def pipeline(n: Any) -> Any:  # whose first call all lanes share
    body = lambda s: (s[0] + 1, ask.start(s[2]), s[2] + s[1].result())
    first = (0.0, ask.start(0.0), 0.0)
    _, ticket, total = jax.lax.while_loop(lambda s: s[0] < n, body, first)
    return total + ticket.result()

  def scan(x: Any) -> Any:
    step = lambda s, _: ((ask.start(s[1] + x), s[1] + s[0].result()), None)
    (ticket, total), _ = jax.lax.scan(step, (ask.start(0.0), 0.0), length=3)
    return total + ticket.result()

  xs = np.arange(-1, 3, dtype=np.float32)
  functions = (branches, switch, pipeline, scan)
  found = jax.jit(lambda xs: [jax.vmap(f)(xs) for f in functions])(xs)
  one = jax.jit(lambda x: [f(x) for f in functions])
  wanted = zip(*(one(x) for x in xs), strict=True)
  for function, got, want in zip(functions, found, wanted, strict=True):
    assert got.tolist() == [float(x) for x in want], function


def test_a_second_wait_is_an_error_that_names_both_places() -> None:
  @jax.jit
  def program(x: Any) -> Any:
    ticket = failing_twice.start(x)
    a = ticket.result()
    return a, ticket.result()

  failing_twice = cg.gate(lambda x: x, out=ZERO, name="test twice")
  once = "'test twice': a ticket can be waited for once"
  with pytest.raises(cg.GateError, match=once) as caught, cg.errors():
    jax.block_until_ready(program(1.0))
  text = str(caught.value)
  assert text.endswith(". Keep the first wait's result")
  line = program.__wrapped__.__code__.co_firstlineno
  assert all(f"test_futures.py:{line + n}" in text for n in (2, 3, 4))


def test_a_call_that_takes_longer_than_its_timeout_fails() -> None:
  go = threading.Event()
  gate = cg.gate(lambda x: (go.wait(60), x)[1], out=ZERO, timeout=0.1, name="test late")
  late = r"'test late', started at .*test_futures"
  with pytest.raises(cg.GateTimeoutError, match=late), cg.errors():
    jax.block_until_ready(jax.jit(lambda x: gate.start(x).result())(1.0))
  go.set()
  cg.barrier()


def test_results_are_checked_as_a_calls() -> None:
  gate = cg.gate(lambda x: np.zeros(3), out=ZERO, name="test shape")
  with (
    pytest.raises(cg.ResultError, match=r"test shape.*expected float32\[\], got float64\[3\]"),
    cg.errors(),
  ):
    jax.block_until_ready(jax.jit(lambda x: gate.start(x).result())(1.0))


@pytest.mark.parametrize(
  ("options", "message"),
  [
    ({"style": "inplace"}, "start.. needs style='return'"),
    ({"effect": "ordered"}, "got 'ordered'"),
  ],
)
def test_gates_that_can_not_be_started_say_so(options: Any, message: str) -> None:
  gate = cg.gate(lambda *x: x[-1], out=ZERO, **options)
  with pytest.raises(cg.GateDefinitionError, match=message):
    gate.start(1.0)


def test_a_ticket_of_another_gate_is_refused() -> None:
  ticket = first.start(1.0)
  assert "test 0" in repr(ticket)
  with pytest.raises(
    cg.GateDefinitionError, match=r"'test 1': result..: expected a ticket of this"
  ):
    second.result(ticket)
  assert first.result(ticket) == 2


# -- derivatives -----------------------------------------------------------------------------------
def by_jvp() -> cg.Gate:
  gate = cg.gate(np.sin, out=lambda x: x)
  gate.defjvp(lambda p, t: (gate(*p), t[0] * jnp.cos(p[0])))
  return gate


def by_vjp() -> cg.Gate:
  gate = cg.gate(np.sin, out=lambda x: x)
  gate.defvjp(lambda x: (gate(x), x), lambda x, ct: (ct * jnp.cos(x),))
  return gate


@pytest.mark.parametrize("make", [by_jvp, by_vjp])
def test_start_and_result_have_the_derivatives_of_the_call(make: Any, engine: str) -> None:
  gate = make()

  def loss(x: Any) -> Any:
    ticket = gate.start(x)
    return jnp.sum(x * ticket.result())

  x = jnp.arange(3.0)
  want = jax.grad(lambda x: jnp.sum(x * jnp.sin(x)))(x)
  np.testing.assert_allclose(jax.jit(jax.grad(loss))(x), want, rtol=1e-5)
  np.testing.assert_allclose(jax.grad(loss)(x), want, rtol=1e-5)
  lanes = jax.jit(jax.vmap(jax.grad(loss)))(jnp.stack([x, x]))
  np.testing.assert_allclose(lanes, [want, want], rtol=1e-5)


def test_tangents_that_a_rule_gives_as_numbers_are_those_of_the_call(engine: str) -> None:
  doubled = cg.gate(lambda x: x + 1, out=ZERO)
  doubled.defjvp(lambda p, t: (doubled(*p), t[0] * 2))
  flat = cg.gate(np.sign, out=ZERO)
  flat.defjvp(lambda p, t: (flat(*p), 0.0))
  same = cg.gate(lambda x: x, out=ZERO, like=lambda x: x)
  for gate, slope in ((doubled, 2), (flat, 0), (same, 1)):
    for call in (gate, lambda x, gate=gate: gate.start(x).result()):
      forward = lambda x, call=call: jax.jvp(call, (x,), (1.0,))
      assert forward(3.0)[1] == jax.jit(forward)(3.0)[1] == slope
      assert jax.grad(call)(3.0) == jax.jit(jax.grad(call))(3.0) == slope
      assert jax.jvp(in_a_scan(call), (jnp.float32(3),), (jnp.float32(1),))[1] == slope**2


@pytest.mark.parametrize("rule", ["like", "jvp", "vjp"])
def test_a_started_call_is_made_once_under_each_derivative(rule: str) -> None:
  seen = list[float]()
  like = {"like": jnp.sin} if rule == "like" else {"out": lambda x: x}
  gate = cg.gate(lambda x: seen.append(float(x)) or np.sin(x), effect="io", **like)
  if rule == "jvp":
    gate.defjvp(lambda p, t: (gate(*p), t[0] * jnp.cos(p[0])))
  elif rule == "vjp":
    gate.defvjp(lambda x: (gate(x), x), lambda x, ct: (ct * jnp.cos(x),))
  later = lambda x: gate.start(x).result()
  mesh = jax.make_mesh((2,), ("d",), axis_types=(jax.sharding.AxisType.Auto,))
  of_devices = jax.shard_map(
    lambda x: later(x[0])[None], mesh=mesh, in_specs=jax.P("d"), out_specs=jax.P("d")
  )
  x, xs = jnp.float32(0.5), jnp.array([0.5, 1.5])
  programs = [
    (jax.value_and_grad(later), x, [0.5]),
    (jax.grad(jax.grad(later)), x, [0.5]),
    (jax.vmap(jax.grad(later)), xs, [0.5, 1.5]),
    (jax.grad(lambda xs: jax.vmap(later)(xs).sum()), xs, [0.5, 1.5]),
    (jax.grad(lambda xs: of_devices(xs).sum()), xs, [0.5, 1.5]),
    (jax.grad(jax.checkpoint(later)), x, [0.5]),
    (jax.grad(lambda x: jax.lax.cond(x > 0, later, lambda x: x, x)), x, [0.5]),
  ]
  for program, argument, calls in programs:
    for execute in (program, jax.jit(program)):
      jax.block_until_ready(execute(argument))
      jax.effects_barrier()
      assert sorted(seen) == calls
      seen.clear()


def test_a_rule_may_make_another_call() -> None:
  seen = list[float]()
  gate = cg.gate(lambda x: seen.append(float(x)) or np.float32(x), out=ZERO, effect="io")
  gate.defjvp(lambda p, t: (gate(*p), t[0] * gate(2 * p[0])))
  assert jax.grad(lambda x: gate.start(x).result())(3.0) == 6
  assert sorted(seen) == [3, 6]


def by_reference() -> cg.Gate:
  return cg.gate(np.sin, out=lambda x: x, like=jnp.sin)


def twice(f: F) -> F:
  return lambda x: f(f(x))


def in_a_scan(f: F) -> F:
  return lambda x: jax.lax.scan(lambda c, _: (f(c), None), x, length=2)[0]


def in_a_checkpoint(f: F) -> F:
  return jax.checkpoint(lambda x: jax.lax.fori_loop(0, 2, lambda _, c: f(c), x))


HIGHER = list(
  itertools.product([by_jvp, by_vjp, by_reference], [twice, in_a_scan, in_a_checkpoint])
)


@pytest.mark.parametrize(
  ("make", "around"), HIGHER if is_soak() else [HIGHER[i] for i in (1, 5, 6)]
)
def test_higher_derivatives_are_those_of_the_call(make: Any, around: Any) -> None:
  gate = make()
  later, reference = around(lambda x: gate.start(x).result()), around(jnp.sin)
  orders = [
    lambda f: jax.grad(jax.grad(f)),
    lambda f: jax.grad(jax.grad(jax.grad(f))),
    lambda f: jax.grad(lambda x: jax.vmap(jax.grad(f))(jnp.stack([x, 2 * x])).sum()),
  ]
  if make is not by_vjp:  # which has no forward mode
    orders.append(jax.hessian)
  found, wanted = jax.jit(lambda x: [[of(f)(x) for of in orders] for f in (later, reference)])(0.7)
  for order, got, want in zip(orders, found, wanted, strict=True):
    np.testing.assert_allclose(got, want, rtol=1e-4, err_msg=str(order))


def test_derivatives_of_lanes_that_share_an_argument() -> None:
  gate = cg.gate(lambda a, x: a * a * x, out=lambda a, x: x, like=lambda a, x: a * a * x)

  def loss(a: Any, xs: Any) -> Any:
    tickets = jax.vmap(gate.start, in_axes=(None, 0))(a, xs)
    return jnp.sum(tickets.result() ** 2)

  a, xs = jnp.float32(1.5), jnp.arange(3.0)
  reference = lambda a, xs: jnp.sum((a * a * xs) ** 2)
  np.testing.assert_allclose(jax.grad(loss)(a, xs), jax.grad(reference)(a, xs), rtol=1e-5)
  np.testing.assert_allclose(jax.hessian(loss)(a, xs), jax.hessian(reference)(a, xs), rtol=1e-5)


def test_without_a_derivative_the_gate_says_so() -> None:
  with pytest.raises(cg.GateDefinitionError, match="'test 0' has no derivative"):
    jax.grad(lambda x: first.start(x).result())(1.0)


# -- control flow ----------------------------------------------------------------------------------
def test_branches_start_or_wait(engine: str) -> None:
  double = cg.gate(lambda x: 2 * x, out=ZERO)

  @jax.jit
  def program(flag: Any, x: Any) -> Any:
    ticket = jax.lax.cond(flag, double.start, lambda x: double.start(10 * x), x)
    return jax.lax.cond(x > 0, lambda t: t.result(), lambda t: t.result() - 1, ticket)

  assert (program(True, 1.0), program(False, 1.0), program(True, -1.0)) == (2, 20, -3)


def test_pytrees_static_values_and_defaults_travel() -> None:
  def f(tree: Any, scale: float = 1.0, *, plus: int = 0) -> Any:
    return {"y": tree["x"] * np.float32(scale) + np.float32(plus)}

  gate = cg.gate(f, out=lambda tree, **_: {"y": tree["x"]})
  got = jax.jit(lambda x: gate.start({"x": x}, plus=3).result())(jnp.ones(2))
  np.testing.assert_array_equal(got["y"], [4, 4])


def test_nothing_is_left_of_what_was_waited_for() -> None:
  from callgate._futures import job

  double = cg.gate(lambda x: 2 * x, out=ZERO, name="test double")
  program = jax.jit(
    lambda x: jax.lax.fori_loop(0, 1000, lambda _, x: double.start(x / 2).result(), x)
  )
  assert program(3.0) == 3
  assert not job._open
  assert not any("test double" in name for name in cg.held())


def test_a_call_runs_programs_of_its_own() -> None:
  inner = jax.jit(lambda x: jnp.sum(x @ x))
  gate = cg.gate(lambda x: np.asarray(inner(x)), out=ZERO)
  got = jax.jit(lambda x: [gate.start(x).result() for _ in range(4)])(jnp.eye(64))
  assert [float(x) for x in got] == [64] * 4


def test_the_end_of_the_process_lets_calls_finish() -> None:
  code = """
import callgate as cg, jax, time
def slow(x):
  time.sleep(0.5)
  print("finished", flush=True)
  return x
gate = cg.gate(slow, out=jax.numpy.float32(0))
jax.jit(lambda x: (gate.start(x), x)[1])(1.0)
"""
  assert "finished" in output_of(code)


EXIT = """
import asyncio, sys, threading, time
import jax, jax.numpy as jnp, callgate as cg

begun = threading.Event()

def sleep(x):
  begun.set()
  time.sleep(60)
  return x

async def rest(x):
  begun.set()
  await asyncio.sleep(60)
  return x

gate = cg.gate(rest if sys.argv[1] == "coroutine" else sleep, out=lambda x: x, name="slow",
               **({"run_on": cg.thread("t")} if sys.argv[1] == "thread" else {}))
jax.jit(lambda x: (gate.start(x), x)[1])(1.0).block_until_ready()
begun.wait(20)
sys.exit(7)
"""


@pytest.mark.parametrize("where", ["pool", "coroutine", "thread"])
def test_the_end_of_the_process_gives_a_call_the_seconds_that_it_has(where: str) -> None:
  environment = {"JAX_PLATFORMS": "cpu", "CALLGATE_EXIT_SECONDS": "0.2"}
  done = run(EXIT, where, environment=environment, timeout=40)
  assert done.returncode == 7
  assert "1 started call(s) still ran 0.2 s after the end of the program" in done.stderr


def test_takes_on_several_threads_keep_their_results() -> None:
  first, second = (job.Job(name, "here", 0) for name in ("first", "second"))
  meanwhile = Meanwhile(lambda: job._keep(second, 1))

  class Size(int):
    def __radd__(self, other: int) -> int:  # of the sum of what is kept
      meanwhile()
      return other + int(self)

  before = list(job._taken)
  job._taken.clear()
  try:
    job._keep(first, Size(1))
    job._keep(first, Size(1))
    meanwhile.end()
    assert [each() for each, _ in job._taken] == [first, first, second]
  finally:
    job._taken.clear()
    job._taken.extend(before)


def test_a_result_that_is_pushed_out_while_a_lane_takes_it_is_refused() -> None:
  pushed_out = False

  class PushedOut(job.Job):
    def _is_done(self, interrupts: int) -> bool:
      done = super()._is_done(interrupts)
      if pushed_out:  # between the question and the answer
        self.forget()
      return done

  call = PushedOut("gate 'g'", "here", 0)
  call.start(lambda: np.float32(3))
  assert call.take("line 1", shared=True) == 3
  pushed_out = True
  with pytest.raises(cg.GateError, match="waited for once, got a second wait at line 2"):
    call.take("line 2", shared=True)


class Scaler:
  by = 3

  @cg.gate(out=lambda x: x)
  def scaled(self, x: Any) -> Any:
    return x * np.float32(self.by)


def test_a_method_of_an_object_is_started() -> None:
  scaler = Scaler()
  start = lambda x: Scaler.scaled.start(scaler, x).result()
  for call in (start, jax.jit(start), jax.vmap(start)):
    assert call(np.arange(3, dtype=np.float32)).tolist() == [0, 3, 6]


def test_a_bound_method_is_started_with_its_object(engine: Any) -> None:
  class Sub(Scaler):
    by = 4

  for one, by in ((Scaler(), 3), (Sub(), 4)):
    start = lambda x, one=one: one.scaled.start(x).result()
    for call in (start, jax.jit(start), jax.vmap(start)):
      assert call(np.arange(3, dtype=np.float32)).tolist() == [0, by, 2 * by]
  assert Scaler().scaled.start(x=np.float32(1)).result() == 3
  started = jax.jit(lambda by, x: Point(by).scaled.start(x).result())
  assert started(np.float32(3), np.arange(3, dtype=np.float32)).tolist() == [0, 3, 6]


class OfClass:
  by = 3

  @classmethod
  @cg.gate(out=lambda x: x)
  def scaled(cls, x: Any) -> Any:
    return x * np.float32(cls.by)


@pytest.mark.skipif(
  sys.version_info >= (3, 13), reason="classmethod does not ask the gate any more"
)
def test_a_classmethod_is_started_with_its_class() -> None:
  start = lambda x: OfClass.scaled.start(x).result()
  for call in (start, jax.jit(start)):
    assert call(np.arange(3, dtype=np.float32)).tolist() == [0, 3, 6]


class Point(NamedTuple):
  by: Any

  @cg.gate(out=lambda x: x)
  def scaled(self, x: Any) -> Any:
    return self.by * x


def test_a_method_of_an_object_that_is_a_pytree_is_started() -> None:
  start = lambda by, x: Point.scaled.start(Point(by), x).result()
  assert jax.jit(start)(np.float32(3), np.arange(3, dtype=np.float32)).tolist() == [0, 3, 6]


def test_a_hold_is_not_started() -> None:
  with pytest.raises(cg.GateDefinitionError, match=r"start\(\): expected a gate, .*start a gate"):
    cg.hold(dict).start()
