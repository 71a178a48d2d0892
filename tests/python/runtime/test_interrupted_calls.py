# SPDX-License-Identifier: Apache-2.0
"""The main thread calls a program or waits for it, and a signal comes: what the call raises."""

from __future__ import annotations

import signal
import textwrap

import pytest
from interpreters import begin_program, finish, run_python

# `interrupted(start, wait)` starts a program, waits for it, and sends a signal once it runs: what
# the two raised. A cheap body runs on the thread that calls the program.
PRELUDE = """
import os, signal, sys, threading, time
signal.signal(signal.SIGINT, signal.default_int_handler)  # a background job's is ignored
import jax, jax.numpy as jnp, numpy as np
import callgate as cg

begun = threading.Event()

def make(kind):
  def step(i, x):
    cg.tap(i, lambda i: begun.set() if i == 1000 else None)
    if kind == "gate":
      return cg.call(lambda value: value, x, x, effect="io")
    if kind == "named thread":
      return cg.use(lambda made, x: x + 1, made_there(x), x, out=x)
    return jnp.sin(x @ jnp.eye(64)) + 1 if kind == "heavy" else jnp.sin(x) + 1
  return jax.jit(lambda x, n: jax.lax.fori_loop(0, n, step, x))

made_there = cg.hold(lambda x: [x], run_on=cg.thread("interrupted"), name="made there")
x = np.ones(64, np.float32)
ready = jax.jit(jnp.sin)(x)
[ready[0].item(), float(ready[0]), *map(float, ready)]  # compiled: no interrupt comes in between

def started(kind, call):
  program = make(kind)
  if call == "compiled":
    program = program.lower(x, 2).compile()
  if call != "first":
    jax.block_until_ready([program(x, 2) for _ in range(2)])
  return lambda: program(x, 2**31 - 1)

def interrupted(start, wait=jax.block_until_ready, number=signal.SIGINT):
  begun.clear()
  def send():
    begun.wait()
    os.kill(os.getpid(), number)
  sender = threading.Thread(target=send)
  sender.start()
  outcome = "nothing"
  try:
    try:
      wait(start())
    except Exception as error:
      outcome = type(error).__name__
      len([])
  except BaseException as error:
    outcome = type(error).__name__ if outcome == "nothing" else outcome + ", then another"
  sender.join()
  return outcome
"""
WAITS = {
  "block": "lambda y: y.block_until_ready()", "jax.block": "jax.block_until_ready",
  "list": "lambda y: jax.block_until_ready([y, y])", "array": "np.asarray", "get": "jax.device_get",
  "print": "lambda y: print(y, file=sys.stderr)", "item": "lambda y: y[0].item()",
  "float": "lambda y: float(y[0])", "barrier": "lambda y: cg.barrier()",
  "effects": "lambda y: jax.effects_barrier()",
  "iteration": "lambda y: [float(one) for one in y]",
}  # fmt: skip


def outcomes(source: str, **environment: str) -> list[str]:
  done = run_python(PRELUDE + textwrap.dedent(source), **environment)
  assert done.returncode == 0, done.stderr
  return done.stdout.splitlines()


def test_the_exception_at_an_interrupted_call_is_keyboard_interrupt() -> None:
  got = outcomes(
    """
    for kind in ("cheap", "heavy", "gate", "named thread"):
      for call in ("first", "later", "compiled"):
        print(interrupted(started(kind, call)))
    def in_errors(y):
      with cg.errors():
        y.block_until_ready()
    def started_in_errors():
      with cg.errors():
        return started("gate", "later")()
    print(interrupted(started_in_errors), interrupted(started("heavy", "later"), in_errors))
    """
  )
  assert got == ["KeyboardInterrupt"] * 12 + ["KeyboardInterrupt KeyboardInterrupt"]


def test_each_wait_for_an_interrupted_program_raises_keyboard_interrupt() -> None:
  waits = "".join(
    f"print(interrupted(started('heavy', 'later'), {one}))\n" for one in WAITS.values()
  )
  assert outcomes(waits) == ["KeyboardInterrupt"] * len(WAITS)


def test_over_several_devices_it_is_keyboard_interrupt_too() -> None:
  source = """
    from jax.sharding import PartitionSpec as P
    mesh = jax.make_mesh((4,), ("d",))
    def step(i, x):
      cg.tap(i, lambda i: begun.set() if i == 20 else None)
      return cg.call(lambda value: (time.sleep(0.002), value)[1], x, x, effect="io")
    body = lambda x: jax.lax.fori_loop(0, 200, step, x)
    program = jax.jit(jax.shard_map(body, mesh=mesh, in_specs=P("d"), out_specs=P("d")))
    x = jax.device_put(x, jax.NamedSharding(mesh, P("d")))
    for _ in range(3):
      print(interrupted(lambda: program(x)))
  """
  flags = "--xla_force_host_platform_device_count=4"
  assert outcomes(source, XLA_FLAGS=flags) == ["KeyboardInterrupt"] * 3


@pytest.mark.parametrize("kind", ["cheap", "heavy"])
def test_an_uncaught_interrupt_ends_the_process_by_the_signal_with_one_traceback(kind: str) -> None:
  source = PRELUDE + textwrap.dedent(
    f"""
    start = started("{kind}", "later")
    threading.Thread(target=lambda: (begun.wait(), os.write(1, b"go\\n")), daemon=True).start()
    begun.clear()
    start().block_until_ready()
    """
  )
  process = begin_program(source, environment={"JAX_PLATFORMS": "cpu"})
  process.send_signal(signal.SIGINT)
  _, errors = finish(process)
  assert process.returncode in (-signal.SIGINT, 130), errors
  assert errors.count("Traceback") == 1, errors
  assert errors.splitlines()[-1] == "KeyboardInterrupt"
  assert "start().block_until_ready()" in errors or "in <module>" in errors


def test_the_call_raises_the_exception_of_the_users_handler() -> None:
  got = outcomes(
    """
    class Mine(Exception): pass
    class Handler:
      def __call__(self, *_):
        raise Mine
    def leave(*_):
      sys.exit(3)
    for name, handler in {"SIGTERM": leave, "SIGINT": Handler(), "SIGUSR1": leave}.items():
      number = getattr(signal, name)
      signal.signal(number, handler)
      print(interrupted(started("gate", "first"), number=number))
      print(interrupted(started("gate", "later"), number=number))
    def looking(x):
      def step(carry, _):
        cg.tap(carry[0], lambda i: begun.set() if i == 1000 else None)
        return (carry[0] + 1, carry[1] + 1), None
      return cg.scan(step, (0, x), length=2**31 - 1, stoppable=True)[0]
    program = jax.jit(looking)
    print(interrupted(lambda: program(1.0), number=signal.SIGTERM))
    print(interrupted(lambda: program(1.0), number=signal.SIGINT))
    """
  )
  assert got == ["SystemExit"] * 2 + ["Mine"] * 2 + ["SystemExit"] * 3 + ["Mine"]


def test_an_interrupt_in_a_hook_of_the_runtimes_is_raised_at_the_call() -> None:
  """The hook that keeps a gate's exception is Python code, which meets the signal."""
  got = outcomes(
    """
    from callgate._core import failures
    def fail(x):
      raise ValueError("no")
    program = jax.jit(lambda x: cg.call(fail, x, x))
    original = failures.describe_failure
    def describe(*args):
      signal.raise_signal(signal.SIGINT)
      return original(*args)
    for _ in range(2):
      failures.describe_failure = original
      interrupted(lambda: begun.set(), lambda _: time.sleep(10))
      failures.describe_failure = describe
      try:
        jax.block_until_ready(program(x))
      except KeyboardInterrupt:
        print("KeyboardInterrupt")
    """
  )
  assert got == ["KeyboardInterrupt"] * 2
