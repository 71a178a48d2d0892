# SPDX-License-Identifier: Apache-2.0
"""Gates on threads of their own, on many threads at once, and against a busy GIL: nothing hangs."""

from __future__ import annotations

import concurrent.futures
import ctypes
import hashlib
import os
import textwrap
import threading
import time
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from interpreters import output_of
from property_checks import is_soak
from switch_interval import switch_interval

import callgate as cg


def wait(program: Any, *args: Any) -> Any:
  return jax.block_until_ready(program(*args))


# -- thread="own" ---
@pytest.mark.parametrize("size", [1, 300, 1500])
def test_a_gate_may_run_jax_programs_of_any_size(size: int) -> None:
  inner = jax.jit(lambda a: (a @ a).sum(axis=0))

  @cg.gate(out=lambda a: jax.ShapeDtypeStruct(a.shape[:1], a.dtype), thread="own")
  def product(a: Any) -> Any:
    return np.asarray(inner(a.copy()))

  a = np.random.default_rng(0).random((size, size), np.float32)
  with cg.errors():
    got = wait(jax.jit(lambda a: product(a) + 1), a)
  np.testing.assert_allclose(got, (a.astype(float) @ a).sum(axis=0) + 1, rtol=1e-4)


def test_gates_inside_gates_inside_gates() -> None:
  def level(depth: int) -> Any:
    if depth == 0:
      return jax.jit(lambda x: x + 1)
    below = level(depth - 1)
    gate = cg.gate(lambda x: np.asarray(below(x.copy())), out=lambda x: x, thread="own")
    return jax.jit(lambda x: gate(x) * 2)

  with cg.errors():
    assert wait(level(6), np.float32(1)) == 2 * 2**6


def let_programs_end() -> None:
  """While one of this thread's runs, JAX does not wait for the next, which then may call itself."""
  wait(jax.jit(lambda x: x + 3), np.float32(0))


class Again:
  """A gate's callable that calls the program which calls it."""

  def __init__(self) -> None:
    self.gate = cg.gate(self.on_host, out=lambda x: x, thread="own", name="recursive")
    self.program = jax.jit(lambda x: self.gate(x) * 2)
    self.inner = jax.jit(lambda x: x + 1)
    self.ended: list[BaseException | None] = []

  def on_host(self, x: Any) -> Any:
    if x.ravel()[0] > 5:
      return x
    try:
      y = np.asarray(self.program(np.asarray(self.inner(x.copy()))))
    except BaseException as error:
      self.ended.append(error)
      raise
    self.ended.append(None)
    return y


@pytest.mark.limit(60)
def test_a_gate_that_calls_its_own_program_s_first_call_is_a_recursion_error() -> None:
  let_programs_end()
  again = Again()
  calls_itself = np.full(1, 5, np.float32)
  named = pytest.raises(RecursionError, match=r"gate 'recursive'.*in, at File \".*test_threads")
  with named, cg.errors():
    wait(again.program, calls_itself)
  with cg.errors():
    assert wait(again.program, calls_itself) == 24  # compiled by now
  assert None in again.ended
  deadline = time.monotonic() + 30
  while len(again.ended) < 2 and time.monotonic() < deadline:
    time.sleep(0.01)
  assert sum(isinstance(error, RecursionError) for error in again.ended) == 1


@pytest.mark.limit(60)
def test_so_is_a_first_call_with_other_arguments_of_a_program_that_has_run() -> None:
  let_programs_end()
  programs: list[Any] = []

  def on_host(x: Any) -> Any:
    return np.asarray(programs[0](np.array(x) - 1)) if x[0] > 0 else x

  programs.append(jax.jit(cg.gate(on_host, out=lambda x: x, thread="own", name="other")))
  wait(programs[0], jnp.zeros(2))
  with pytest.raises(jax.errors.JaxRuntimeError, match="RecursionError: gate 'other', which has"):
    wait(programs[0], jnp.full(2, 5.0))  # and then NumPy's arrays, which jit's cache tells apart


def test_a_slow_first_call_of_a_gate_that_may_call_its_program_is_no_error() -> None:
  def on_host(x: Any) -> Any:
    if x > 0:
      return np.asarray(program(x - 1))
    time.sleep(3)  # the runtime asks every second what the thread is at
    return x

  program = jax.jit(cg.gate(on_host, out=lambda x: x, thread="own", name="slow"))
  assert wait(program, np.float32(0)) == 0


def test_a_gate_that_works_on_at_one_place_does_not_wait() -> None:
  begin = time.thread_time()
  hashlib.pbkdf2_hmac("sha256", b"", b"", 200_000)
  in_a_second = 200_000 / (time.thread_time() - begin)

  def on_host(x: Any) -> Any:
    both = program, hashlib.pbkdf2_hmac
    # In C, while the runtime asks twice: it does every second.
    both[1]("sha256", b"", b"", int(2.5 * in_a_second))
    return x

  program = jax.jit(cg.gate(on_host, out=lambda x: x, thread="own", name="busy"))
  assert wait(program, np.float32(7)) == 7


@pytest.mark.limit(60)
def test_a_gate_that_calls_itself_for_ever_is_an_error() -> None:
  def on_host(x: Any) -> Any:
    return np.asarray(program(x - 1)) if x > 0 else x

  gate = cg.gate(on_host, out=lambda x: x, thread="own", name="deeper")
  program = jax.jit(gate)
  assert wait(program, np.float32(0)) == 0
  assert wait(program, np.float32(20)) == 0
  # JAX raises either for a program that has run before.
  deep = pytest.raises(
    (jax.errors.JaxRuntimeError, ValueError), match="gate 'deeper': expected at most 24"
  )
  with deep:
    wait(program, np.float32(1e6))


@pytest.mark.parametrize("options", [{}, {"timeout": 60}, {"effect": "ordered"}])
def test_a_loop_of_thousands_of_steps_calls_no_gate_within_itself(options: Any) -> None:
  gate = cg.gate(lambda x: x + 1, out=lambda x: x, thread="own", **options)
  program = jax.jit(lambda x: jax.lax.fori_loop(0, 3000, lambda i, c: gate(c), x))
  np.testing.assert_array_equal(program(jnp.zeros(8)), 3000)


@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="XLA has one thread on one core")
def test_eight_independent_gates_at_once_do_not_hang_on_two_cores() -> None:
  printed = output_of(
    """
    import os
    os.sched_setaffinity(0, list(os.sched_getaffinity(0))[:2])
    import threading
    import jax, jax.numpy as jnp, numpy as np
    import callgate as cg

    together = threading.Barrier(8)
    inner = jax.jit(lambda x: (x @ x).sum())

    @cg.gate(out=jax.ShapeDtypeStruct((), np.float32), thread="own", effect="io")
    def meet(x):
      together.wait(60)  # passes only when all eight run at the same time
      return np.asarray(inner(x.copy()))

    program = jax.jit(lambda x: [meet(x + i) for i in range(8)])
    for _ in range(3):
      out = jax.block_until_ready(program(jnp.ones((200, 200))))
    print([float(v) for v in out] == [200.0**3 * (1 + i) ** 2 for i in range(8)])
    """,
    timeout=100,
  )
  assert printed.strip() == "True"


def test_own_threads_see_every_lane_and_step_in_order() -> None:
  seen: list[tuple[int, ...]] = []

  @cg.gate(out=lambda x: x, thread="own", effect="ordered")
  def record(x: Any) -> Any:
    seen.append((int(x),))
    return x

  program = jax.jit(lambda xs: jax.lax.scan(lambda c, x: (c, record(x)), 0, xs)[1])
  np.testing.assert_array_equal(wait(program, jnp.arange(20)), np.arange(20))
  cg.barrier()
  assert seen == [(i,) for i in range(20)]


# -- timeout and stalls ---
def test_a_timeout_fails_the_program_with_a_report_and_the_runtime_goes_on() -> None:
  release = threading.Event()

  def wait_in_this_function(x: Any) -> Any:
    release.wait(60)
    return x

  slow = cg.gate(wait_in_this_function, out=lambda x: x, name="slow one", timeout=0.2)
  start = time.monotonic()
  with pytest.raises(jax.errors.JaxRuntimeError) as caught:
    wait(jax.jit(lambda x: slow(x) + 1), jnp.zeros((2, 3)))
  assert time.monotonic() - start < 30
  text = str(caught.value)
  for part in ("gate 'slow one'", "(float32[2,3])", "wait_in_this_function", "release.wait(60)"):
    assert part in text
  with cg.errors():
    assert wait(jax.jit(cg.gate(lambda x: x + x, out=lambda x: x)), np.float32(2)) == 4
  release.set()


def test_a_timeout_is_raised_as_gate_timeout_error() -> None:
  release = threading.Event()
  slow = cg.gate(lambda x: (release.wait(60), x)[1], out=lambda x: x, timeout=0.2)
  with pytest.raises(cg.GateTimeoutError), cg.errors():
    wait(jax.jit(lambda x: slow(x) + 1), jnp.zeros(3))
  release.set()


def test_a_call_within_its_timeout_is_left_alone() -> None:
  quick = cg.gate(lambda x: x + 1, out=lambda x: x, timeout=30)
  with cg.errors():
    np.testing.assert_array_equal(wait(jax.jit(quick), jnp.arange(3.0)), [1, 2, 3])


def test_further_work_of_a_timed_out_call_is_harmless() -> None:
  release, done = threading.Event(), threading.Event()
  values: list[Any] = []

  @cg.gate(out=lambda x: x, style="inplace", timeout=0.2)
  def late(out: Any, x: Any) -> None:
    release.wait(60)
    out[...] = x + 1  # into memory of its own: the program's is long gone
    values.append(float(x.sum()))
    done.set()

  with pytest.raises(jax.errors.JaxRuntimeError):
    wait(jax.jit(lambda x: late(x * 2) * 2), jnp.ones(1 << 20))
  others = [jnp.full(1 << 20, i) for i in range(5)]
  release.set()
  assert done.wait(60)
  assert values == [2.0 * (1 << 20)]
  assert [float(o[-1]) for o in others] == [0, 1, 2, 3, 4]


STALL = """
  import time
  import jax, numpy as np
  import callgate as cg
  {setup}

  def sleep_in_here(x):
    time.sleep(0.6)
    return x

  gate = cg.gate(sleep_in_here, out=lambda x: x, name="sleepy")
  print(float(jax.jit(gate)(np.float32(5))))
"""


@pytest.mark.parametrize(
  ("setup", "environment"),
  [("", {"CALLGATE_STALL_SECONDS": "0.1"}), ("cg.config(stall_seconds=0.1)", {})],
)
def test_a_stall_is_reported_and_the_program_succeeds(setup: str, environment: Any) -> None:
  from interpreters import run_python

  done = run_python(STALL.format(setup=setup), **environment)
  assert (done.returncode, done.stdout.strip()) == (0, "5.0")
  for part in ("gate 'sleepy'", "(float32[])", "in sleep_in_here", "Thread"):
    assert part in done.stderr


def test_without_a_limit_nothing_is_reported() -> None:
  from interpreters import run_python

  done = run_python(STALL.format(setup=""))
  assert (done.returncode, done.stdout.strip()) == (0, "5.0")
  assert "sleepy" not in done.stderr


# -- many threads ---
@pytest.mark.parametrize("thread", ["xla", "own"])
def test_many_python_threads_call_gates_at_once(thread: str) -> None:
  gate = cg.gate(lambda x: x + x, out=lambda x: x, effect="io", thread=thread)
  program = jax.jit(lambda x: gate(x) + 1)

  def work(seed: int) -> None:
    for i in range(50):
      assert wait(program, np.float32(seed + i)) == 2 * (seed + i) + 1

  with concurrent.futures.ThreadPoolExecutor(8) as pool:
    list(pool.map(work, range(8)))


def test_programs_dispatched_without_waiting_all_finish() -> None:
  gate = cg.gate(lambda x: x + 1, out=lambda x: x)
  programs = [jax.jit(lambda x, k=k: gate(x) * k) for k in range(8)]
  results = [p(jnp.full((256, 256), float(i))) for i in range(10) for p in programs]
  expected = [(i + 1) * k for i in range(10) for k in range(8)]
  assert [float(r[0, 0]) for r in results] == expected


def test_a_long_c_call_that_holds_the_gil_is_waited_for() -> None:
  gate = cg.gate(lambda x: x + 1, out=lambda x: x, effect="io")
  program = jax.jit(lambda x: gate(x) + 1)
  wait(program, np.float32(0))
  usleep = ctypes.PyDLL(None).usleep  # PyDLL keeps the GIL
  stop = threading.Event()

  def hold() -> None:
    while not stop.is_set():
      usleep(20_000)

  holder = threading.Thread(target=hold)
  holder.start()
  try:
    results = [program(np.float32(i)) for i in range(10)]
    assert [float(r) for r in results] == [i + 2 for i in range(10)]
  finally:
    stop.set()
    holder.join()


# Waits with a timeout, against a callable that holds the GIL for a quarter of a second at a time:
# 50 times for a consumer, which is long behind when the time is over.
TIMEOUTS = {
  "barrier": "cg.barrier(timeout=0.1)",
  "flush": "channel.flush(timeout=0.1)",
  "close": "channel.close(timeout=0.1)",
  "a stream's record": "cg.open_stream(address).read(0.1)",
  "a feed's end": "feed.close(0.1)",
  "a gate": "with cg.errors(): jax.block_until_ready(late(1.0))",
}


@pytest.mark.parametrize("call", TIMEOUTS.values(), ids=TIMEOUTS)
def test_a_timeout_ends_a_wait_though_a_callable_holds_the_gil(call: str, tmp_path: Any) -> None:
  printed = output_of(
    textwrap.dedent(
      f"""
      import ctypes, itertools, os, threading, time
      import jax, numpy as np
      import callgate as cg
      usleep = ctypes.PyDLL(None).usleep  # PyDLL keeps the GIL
      calls, began = [], threading.Event()
      def hold(value):
        calls.append(value)
        began.set()
        usleep(250_000)
      def items():
        yield 1.0
        for value in range(50):
          hold(value)
        yield 1.0
      def slowly(value):
        for _ in range(50):
          hold(value)
        return value
      late = jax.jit(lambda x: cg.call(slowly, x, x, thread="own", timeout=0.1))
      address = "unix:" + {str(tmp_path / "socket")!r}
      source = cg.channel("source", to=cg.sinks.Stream(address))
      channel = cg.channel("t", to=hold)
      if "feed" in {call!r}:
        feed = cg.feed(items())
      elif "late" not in {call!r}:
        program = jax.jit(lambda: jax.lax.fori_loop(0, 50, lambda i, c: (cg.tap(i, "t"), c)[1], 0))
        jax.block_until_ready(program())
      if "late" not in {call!r}:
        began.wait()
      try:
        result = ""
        {call}
      except TimeoutError as error:
        result = "over"
      except Exception as error:
        result = "over" if "0.1" in str(error) else repr(error)
      print(result, len(calls) < 50, flush=True)
      os._exit(0)
      """
    )
  )
  says = "" if ".read(" in call or "feed" in call else "over"
  assert printed == f"{says} True\n"


def test_a_gate_sees_its_own_thread_local_state() -> None:
  local = threading.local()

  @cg.gate(out=lambda x: x, effect="io")
  def count(x: Any) -> Any:
    local.calls = getattr(local, "calls", 0) + 1
    return np.float32(local.calls)

  program = jax.jit(lambda x: jax.lax.fori_loop(0, 10, lambda _, c: count(c), x))
  assert wait(program, np.float32(0)) == 10


# -- soak ---
@pytest.mark.soak
def test_a_mix_of_everything_for_some_seconds() -> None:
  pure = cg.gate(lambda x: x + 1, out=lambda x: x)
  own = cg.gate(lambda x: np.asarray(jnp.sin(x.copy())), out=lambda x: x, thread="own")

  def sometimes(x: Any) -> Any:
    if x.flat[0] > 0.9:
      raise OverflowError("too much")
    return x

  failing = cg.gate(sometimes, out=lambda x: x, effect="io")
  programs = [
    jax.jit(lambda x: pure(x) * 2),
    jax.jit(lambda x: own(x) + pure(x)),
    jax.jit(lambda x: jax.lax.fori_loop(0, 5, lambda _, c: pure(c), x)),
    jax.jit(jax.vmap(lambda x: failing(x) + 1)),
    jax.jit(lambda x: own(pure(x))),
  ]
  deadline = time.monotonic() + (4 if is_soak() else 1)
  counts: list[int] = []

  def work(seed: int) -> None:
    random = np.random.default_rng(seed)
    done = 0
    while time.monotonic() < deadline:
      x = random.random((4, int(random.integers(1, 3))), np.float32)
      try:
        with cg.errors():
          wait(programs[random.integers(len(programs))], x)
      except OverflowError:
        assert x[:, 0].max() > 0.9
      done += 1
    counts.append(done)

  with switch_interval(1e-4), concurrent.futures.ThreadPoolExecutor(6) as pool:
    list(pool.map(work, range(6)))
  assert len(counts) == 6
  assert min(counts) > 0
