# SPDX-License-Identifier: Apache-2.0
"""The end of the process: whatever runs in gates, it ends with an exit code and never a crash."""

from __future__ import annotations

import signal
import subprocess
import textwrap
import time

import pytest
from interpreters import run, run_python, start

PRELUDE = """
import os, sys, threading, time
import jax, jax.numpy as jnp, numpy as np
import callgate as cg

started = threading.Event()

def sleep(x):
  started.set()
  time.sleep({seconds})
  return x

def spin(x):
  started.set()
  end = time.monotonic() + {seconds}
  while time.monotonic() < end:
    pass
  return x

def run(function, thread, **options):
  gate = cg.gate(function, out=lambda x: x, effect="io", thread=thread, **options)
  return jax.jit(lambda x: gate(x) + 1)
"""
WAYS = {
  "dispatched": "y = program(jnp.zeros((300, 300)))",
  "from a daemon thread": (
    "threading.Thread(target=lambda: jax.block_until_ready(program(np.float32(0))), daemon=True)"
    ".start()"
  ),
}


def finish(
  body: str, *, seconds: float = 0.2, **environment: str
) -> subprocess.CompletedProcess[str]:
  source = PRELUDE.format(seconds=seconds) + textwrap.dedent(body)
  return run_python(source, timeout=60, **environment)


@pytest.mark.parametrize(
  ("way", "what", "thread"),
  [
    ("dispatched", "sleep", "xla"),
    ("dispatched", "spin", "own"),
    ("from a daemon thread", "sleep", "own"),
    ("from a daemon thread", "spin", "xla"),
  ],
)
def test_the_process_ends_normally_while_a_gate_runs(way: str, what: str, thread: str) -> None:
  done = finish(f"program = run({what}, {thread!r})\n{WAYS[way]}\nstarted.wait(20)\n")
  assert done.returncode == 0, done.stderr
  assert "Traceback" not in done.stderr


@pytest.mark.parametrize(("what", "thread"), [("spin", "xla"), ("spin", "own"), ("sleep", "own")])
def test_a_gate_that_does_not_end_is_abandoned_after_a_while(what: str, thread: str) -> None:
  done = finish(
    f"program = run({what}, {thread!r})\n{WAYS['from a daemon thread']}\nstarted.wait(20)\n",
    seconds=30,
    CALLGATE_EXIT_SECONDS="0.1",
  )
  assert done.returncode == 0, done.stderr
  assert "1 call(s) still ran" in done.stderr


@pytest.mark.parametrize(
  ("thread", "end", "code", "text"),
  [
    ("xla", "sys.exit(7)", 7, ""),
    ("own", "raise KeyError('of main')", 1, "KeyError: 'of main'"),
  ],
)
def test_the_programs_own_exit_code_is_kept(thread: str, end: str, code: int, text: str) -> None:
  done = finish(
    f"program = run(sleep, {thread!r})\n{WAYS['dispatched']}\nstarted.wait(20)\n{end}\n"
  )
  assert done.returncode == code, done.stderr
  assert text in done.stderr


def test_a_gate_that_fails_during_the_exit_is_told_by_the_status() -> None:
  done = finish(
    """
    def fail(x):
      sleep(x)
      raise ValueError("late")
    program = run(fail, "own")
    y = program(jnp.zeros((300, 300)))
    started.wait(20)
    """
  )
  assert done.returncode == 1, done.stderr
  assert done.stderr.count("ValueError: late") == 1


def test_a_gate_called_after_the_runtime_closed_is_an_error_not_a_crash() -> None:
  done = finish(
    """
    import atexit
    from callgate import _attach
    program = run(lambda x: x, "xla")
    jax.block_until_ready(program(np.float32(0)))
    atexit.unregister(_attach.end)

    @atexit.register
    def late():
      try:
        jax.block_until_ready(program(np.float32(0)))
      except jax.errors.JaxRuntimeError as error:
        print("refused:", "process is ending" in str(error))

    atexit.register(_attach.end)
    """
  )
  assert done.returncode == 0, done.stderr
  assert done.stdout.strip() == "refused: True"


# sys.exit in a fork's child crashes with JAX alone: it must end, and without a wait of ours.
@pytest.mark.parametrize(
  ("child_ends", "codes"), [("os._exit(3)", {3}), ("sys.exit(3)", {3, -11, -6})]
)
def test_a_forks_child_ends(child_ends: str, codes: set[int]) -> None:
  done = finish(
    f"""
    import warnings
    warnings.simplefilter("ignore")  # JAX and Python warn about forks of processes with threads
    program = run(sleep, "own", timeout=20)
    jax.block_until_ready(program(np.float32(0)))  # a worker and the watchdog live
    child = os.fork()
    if child == 0:
      {child_ends}
    deadline = time.monotonic() + 30
    while time.monotonic() < deadline:
      pid, status = os.waitpid(child, os.WNOHANG)
      if pid:
        print(os.waitstatus_to_exitcode(status))
        break
      time.sleep(0.05)
    else:
      os.kill(child, 9)
      print("the child hangs")
    """,
    seconds=0.01,
  )
  assert done.returncode == 0, done.stderr
  assert "abandoned" not in done.stderr
  assert int(done.stdout) in codes, done.stderr


@pytest.mark.parametrize(("what", "thread"), [("spin", "xla"), ("spin", "own"), ("sleep", "own")])
def test_ctrl_c_during_a_gate_ends_in_keyboard_interrupt(what: str, thread: str) -> None:
  source = PRELUDE.format(seconds=0.4) + textwrap.dedent(
    f"""
    program = run({what}, {thread!r})
    threading.Thread(target=lambda: (started.wait(), print("go", flush=True)), daemon=True).start()
    jax.block_until_ready(program(jnp.zeros((300, 300))))
    while True:
      time.sleep(1)  # where the signal is seen if it came while only other threads ran Python
    """
  )
  process = start(source, environment={"JAX_PLATFORMS": "cpu"})
  try:
    assert process.stdout is not None
    assert process.stdout.readline() == "go\n"
    time.sleep(0.1)
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=40)
  finally:
    process.kill()
  # 1 where JAX wraps the gate's KeyboardInterrupt; Python ends itself by SIGINT for its own.
  assert process.returncode in (1, 130, -signal.SIGINT), errors
  assert "KeyboardInterrupt" in errors


def test_exit_with_a_gate_in_reference_cycles_and_programs_alive() -> None:
  done = finish(
    """
    class Holder: pass
    holder = Holder()
    holder.me = holder
    holder.program = run(lambda x: (holder, x)[1], "xla")
    jax.block_until_ready(holder.program(np.float32(0)))
    """
  )
  assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize("fast", [True, False])
@pytest.mark.parametrize("end", ["", "jax.block_until_ready(last)"])
def test_a_failed_program_that_is_under_way_at_the_end_is_shown_once(fast: bool, end: str) -> None:
  done = run_python(
    f"""
    import jax, jax.numpy as jnp, numpy as np, callgate as cg
    cg.config(fast_dispatch={fast})

    @cg.gate(out=lambda x: x, effect="io", name="shy")
    def shy(x):
      if x == 2:
        raise ValueError("of the last program")
      return x

    @jax.jit
    def program(x, a):  # which XLA runs on a thread of its own
      for _ in range(20):
        a = jnp.tanh(a @ a)
      return shy(x + 0 * a[0, 0])

    for n in range(3):
      last = program(np.float32(n), jnp.full((200, 200), 0.01))
    {end}
    """
  )
  assert done.returncode == 1
  assert done.stderr.count("ValueError: of the last program") == 1, done.stderr
  assert "ignored" not in done.stderr


@pytest.mark.parametrize("fails", [False, True])
@pytest.mark.parametrize("turn", range(2))  # most such processes waited for ever, not all
def test_a_pure_program_over_devices_that_is_under_way_at_the_end(fails: bool, turn: int) -> None:
  del turn
  done = run_python(
    f"""
    import jax, jax.numpy as jnp, callgate as cg

    @cg.gate(out=lambda x: x)
    def same(x):
      if {fails}:
        raise ValueError("of a pure gate")
      return x

    mesh = jax.make_mesh((2,), ("d",))
    x = jax.device_put(jnp.ones(4), jax.NamedSharding(mesh, jax.P("d")))
    program = jax.jit(same)
    last = [program(x) for _ in range(3)]
    """,
    XLA_FLAGS="--xla_force_host_platform_device_count=2",
    timeout=30,
  )
  assert done.returncode == fails, done.stderr
  assert done.stderr.count("Traceback") == fails or "of a pure gate" in done.stderr


@pytest.mark.parametrize(("end", "code"), [("", 1), ("sys.exit(3)", 3), ("cg.barrier()", 1)])
def test_a_failed_shard_that_nobody_asked_for_is_shown_at_the_end(end: str, code: int) -> None:
  done = run_python(
    f"""
    import sys, jax, numpy as np, callgate as cg
    from jax.sharding import NamedSharding, PartitionSpec as P

    @cg.gate(out=lambda x: x, sharding="shard", effect="io", name="shy")
    def shy(x):
      if x[0] == 6:
        raise ValueError("of the last shard")
      return x

    mesh = jax.make_mesh((4,), ("d",))
    x = jax.device_put(np.arange(8, dtype=np.int32), NamedSharding(mesh, P("d")))
    print(int(jax.jit(lambda x: shy(x).sum())(x)))
    {end}
    """,
    XLA_FLAGS="--xla_force_host_platform_device_count=4",
  )
  assert done.stdout == "15\n"
  assert done.returncode == code, done.stderr
  assert done.stderr.count("ValueError: of the last shard") == 1
  assert "gate 'shy'" in done.stderr
  assert "integer and bool results, which have no NaN, are 0" in done.stderr


# A failing call of an effect, in a program that is large enough to run on a thread of XLA.
FAILING = """
import sys, jax, jax.numpy as jnp, numpy as np, callgate as cg
from jax.experimental import io_callback

def fail(x):
  raise ValueError(f"no {x[0]:.0f}")

CALLS = {
  "io": cg.gate(fail, out=lambda x: x, effect="io", name="io"),
  "ordered": cg.gate(fail, out=lambda x: x, effect="ordered", name="ordered"),
  "installed": lambda x: io_callback(fail, x, x),
}
cg.install()

@jax.jit
def program(x):
  y = jax.lax.fori_loop(0, 100, lambda i, y: jnp.sin(y @ y) * 1e-3, jnp.ones((64, 64)) + x[0])
  return CALLS[sys.argv[1]](x), y

def catch(wait, number=1.0):
  try:
    wait(program(jnp.full(3, number)))
  except Exception as error:
    print(type(error).__name__)
"""


@pytest.mark.parametrize("call", ["io", "ordered", "installed"])
def test_an_error_that_the_program_has_caught_is_not_shown_at_the_end(call: str) -> None:
  code = """
    catch(jax.block_until_ready)
    catch(lambda y: y[1].block_until_ready())
    catch(lambda y: float(y[0][0]))
  """
  done = run(FAILING + textwrap.dedent(code), call)
  assert done.stdout.split() == ["JaxRuntimeError"] * 3
  assert "lifecycle" not in done.stderr
  assert done.returncode == 0, done.stderr


def test_an_error_of_a_block_that_the_program_has_caught_is_not_shown_at_the_end() -> None:
  code = """
    try:
      with cg.errors():
        jax.block_until_ready(program(jnp.ones(3)))
    except ValueError as error:
      print(error)
  """
  done = run(FAILING + textwrap.dedent(code), "io")
  assert (done.stdout, done.stderr, done.returncode) == ("no 1\n", "", 0)


def test_an_error_that_only_callgate_has_waited_for_is_shown_at_the_end() -> None:
  done = run(f"{FAILING}\ncatch(jax.block_until_ready)\ny = program(jnp.full(3, 2.0))", "io")
  assert done.stdout.split() == ["JaxRuntimeError"]
  assert done.returncode == 1
  assert (done.stderr.count("no 2"), done.stderr.count("no 1")) == (1, 0)
