# SPDX-License-Identifier: Apache-2.0
"""Ctrl-C: programs end at their next call of callgate, and so does the process; others live on."""

from __future__ import annotations

import signal
import textwrap

import pytest
from interpreters import Process, begin_program, finish, run_python
from waiting import CROWDED

# A program that would run for minutes, and tells the test when it runs.
PRELUDE = """
import os, signal, sys, threading, time
signal.signal(signal.SIGINT, signal.default_int_handler)  # a background job's is ignored
import jax, jax.numpy as jnp, numpy as np
import callgate as cg

def tell(x):
  os.write(1, b"go\\n")  # whole, also where several devices' threads tell at once
  return x

def forever(step):
  def program(x):
    x = cg.call(tell, x, x, effect="io", name="tell")
    return jax.lax.fori_loop(0, 2**31 - 1, step, x)
  return jax.jit(program)(np.float32(0))

"""
STEPS = {
  "tap": "lambda i, x: cg.tap(x, lambda value: None) + 1",
  "check": "lambda i, x: (cg.check(jnp.all(x >= 0), 'below'), x + 1)[1]",
}


def begin(body: str, **environment: str) -> Process:
  source = PRELUDE + textwrap.dedent(body)
  return begin_program(source, environment={"JAX_PLATFORMS": "cpu", **environment})


@pytest.mark.parametrize("step", STEPS.values(), ids=STEPS)
def test_ctrl_c_ends_a_program_of_another_thread_with_the_process(step: str) -> None:
  process = begin(
    f"""
    threading.Thread(target=lambda: forever({step}), daemon=True).start()
    time.sleep(1000)
    """
  )
  process.send_signal(signal.SIGINT)
  _, errors = finish(process)
  assert "KeyboardInterrupt" in errors


def test_records_behind_an_interrupt_are_delivered_or_counted() -> None:
  process = begin(
    """
    def stuck(value):
      print("stuck", flush=True)
      time.sleep(1000)
    jax.block_until_ready(forever(lambda i, x: cg.tap(x, stuck) + 1))
    """
  )
  assert process.stdout is not None
  assert process.stdout.readline() == "stuck\n"
  process.send_signal(signal.SIGINT)
  _, errors = finish(process)
  assert "not delivered at the end of the program: taps to functions: " in errors


def test_a_program_that_begins_after_an_interrupt_runs_to_its_end() -> None:
  process = begin(
    f"""
    try:
      jax.block_until_ready(forever({STEPS["tap"]}))
    except (KeyboardInterrupt, jax.errors.JaxRuntimeError):
      pass  # the latter where it came within tell(), whose exception is XLA's then
    seen = []
    x = jax.jit(lambda x: jax.lax.fori_loop(0, 100, lambda i, x: cg.tap(x + 1, seen.append), x))(0)
    cg.barrier()
    print(int(x), len(seen), flush=True)
    """
  )
  process.send_signal(signal.SIGINT)
  out, errors = finish(process)
  assert out == "100 100\n", errors


def test_a_handler_that_only_takes_note_lets_programs_end_by_themselves() -> None:
  process = begin(
    """
    asked = []
    signal.signal(signal.SIGINT, lambda number, frame: asked.append(number))
    stop = threading.Event()
    def wait(value):
      tell(value)
      stop.wait()
      return value
    seen = []
    def program(x):
      x = cg.call(wait, x, x, effect="io")
      return jax.lax.fori_loop(0, 1000, lambda i, x: cg.tap(x + 1, seen.append), x)
    worker = threading.Thread(target=lambda: jax.block_until_ready(jax.jit(program)(0)))
    worker.start()
    while not asked:
      time.sleep(0.001)
    stop.set()
    worker.join()
    cg.barrier()
    print(len(asked), len(seen), flush=True)
    """
  )
  process.send_signal(signal.SIGINT)
  out, errors = finish(process)
  assert out == "1 1000\n", errors


def test_handlers_of_others_that_call_the_one_before_them_are_called_once() -> None:
  done = run_python(
    PRELUDE
    + textwrap.dedent(
      """
      import faulthandler
      def use(name):
        with cg.channel(name, to=lambda value: None):
          jax.jit(lambda x: cg.tap(x, name))(1.0)
      use("a")
      faulthandler.register(signal.SIGINT, chain=True)
      use("b")
      for name in "cd":
        try:
          os.kill(os.getpid(), signal.SIGINT)
          time.sleep(10)
        except KeyboardInterrupt:
          print("interrupted", flush=True)
        use(name)
      """
    )
  )
  assert (done.returncode, done.stdout) == (0, "interrupted\ninterrupted\n"), done.stderr
  assert done.stderr.count("Current thread") == 2


# Waits for a consumer that does not return, or for somebody who does not come.
WAITS = {
  "barrier": "cg.barrier()",
  "a barrier with a timeout": "cg.barrier(timeout=1000)",
  "flush": "channel.flush()",
  "close": "channel.close()",
  "remove": "channel.remove(stuck)",
  "the end of a block": "channel.__exit__(None, None, None)",
  "records": "next(other.records())",
  "errors": "with cg.errors(): pass",
  "a stream's record": "next(iter(cg.open_stream(address)))",
  "a stream's records": "cg.open_stream(address).read(1000)",
  "a stream's server": "cg.open_stream(crowded)",
  "a feed's first item": "cg.feed(map(time.sleep, [1000]))",
  "a feed's item": "[hanging.next() for _ in range(2)]",
  "a feed's end": "hanging.close(1000)",
}


# Each wait has a channel and a feed of its own. The signal comes when the main thread has gone into
# the wait, or is about to.
INTERRUPTED = """
called, asked, x = threading.Event(), threading.Event(), np.float32(0)

def stuck(value):
  called.set()
  time.sleep(1000)

def pulled():
  yield 1.0
  asked.set()
  time.sleep(1000)

def frames(frame):
  while frame is not None:
    yield frame
    frame = frame.f_back

def interrupt(wait, main=threading.main_thread().ident):
  while not any(f.f_code is wait.__code__ for f in frames(sys._current_frames()[main])):
    time.sleep(0.001)
  time.sleep(0.05)
  os.kill(os.getpid(), signal.SIGINT)

address = f"unix:{folder}/socket"
source = cg.channel("source", to=cg.sinks.Stream(address))

kept = []
for name, text in waits.items():
  called.clear()
  asked.clear()
  channel, other = cg.channel(f"of {name}", to=stuck), cg.channel(f"other of {name}")
  hanging = cg.feed(pulled())
  kept += [channel, other, hanging]
  asked.wait()
  jax.block_until_ready(jax.jit(lambda x: cg.tap(x, channel.name))(x))
  called.wait()
  exec(f"def wait():\\n  {text}")
  thread = threading.Thread(target=interrupt, args=(wait,), daemon=True)
  thread.start()
  try:
    wait()
    print("ended", name, flush=True)
  except (KeyboardInterrupt, jax.errors.JaxRuntimeError) as error:
    # The latter where the wait is a program's, whose call has raised it.
    print("interrupted" if "KeyboardInterrupt" in repr(error) else repr(error), name, flush=True)
  thread.join()
os._exit(0)
"""


def test_ctrl_c_ends_every_wait(tmp_path) -> None:
  source = f"{PRELUDE}\nfolder, waits = {str(tmp_path)!r}, {WAITS!r}\n{CROWDED}{INTERRUPTED}"
  done = run_python(source, timeout=60)
  assert done.stdout.splitlines() == [f"interrupted {name}" for name in WAITS], done.stderr
  assert done.returncode == 0


def test_one_keyboard_interrupt_follows_though_each_shard_raised_one() -> None:
  source = """
    import time
    import jax, jax.numpy as jnp
    import callgate as cg

    def stop(x):
      raise KeyboardInterrupt

    on = jax.NamedSharding(jax.make_mesh((4,), ("d",)), jax.P("d"))
    x = jax.device_put(jnp.arange(8.0), on)
    program = jax.jit(cg.gate(stop, out=lambda x: x, sharding="shard"))
    for run in range(2):
      try:
        program(x).block_until_ready()
        time.sleep(10)
      except KeyboardInterrupt:
        time.sleep(0.2)
        cg.barrier()
        print("stopped", flush=True)
  """
  flags = "--xla_force_host_platform_device_count=4"
  done = run_python(textwrap.dedent(source), timeout=60, XLA_FLAGS=flags)
  assert (done.returncode, done.stdout) == (0, "stopped\n" * 2), done.stderr
