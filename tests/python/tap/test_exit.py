# SPDX-License-Identifier: Apache-2.0
"""The end of a process with taps in it: everything is delivered, or said not to be."""

from __future__ import annotations

import signal
import subprocess
import textwrap

from interpreters import run_python, start
from waiting import CROWDED

PRELUDE = """
import os, signal, sys, threading, time
signal.signal(signal.SIGINT, signal.default_int_handler)  # a background job's is ignored
import jax, jax.numpy as jnp, numpy as np
import callgate as cg

seen = []
def slow(value):
  time.sleep(0.002)
  seen.append(int(value))

def sender(to):
  body = lambda i, c: (cg.tap(i, to), c)[1]
  return jax.jit(lambda n: jax.lax.fori_loop(0, n, body, 0))
"""
# Runs after callgate has closed: atexit calls in reverse order of registration.
REPORT = """
import atexit
def report():
  import sys
  module = sys.modules["__main__"]
  print("delivered", len(module.seen), flush=True)
atexit.register(report)
"""


def finish(body: str, **environment: str) -> subprocess.CompletedProcess[str]:
  return run_python(REPORT + PRELUDE + textwrap.dedent(body), timeout=90, **environment)


def test_at_a_normal_end_everything_is_delivered():
  done = finish("sender(slow)(200)")
  assert done.returncode == 0, done.stderr
  assert (done.stdout.strip(), done.stderr) == ("delivered 200", "")


def test_after_an_exception_everything_is_delivered():
  done = finish("sender(slow)(200)\nraise KeyError('of main')")
  assert done.returncode == 1
  assert done.stdout.strip() == "delivered 200"
  assert done.stderr.rstrip().endswith("KeyError: 'of main'")


def test_open_channels_are_closed_and_their_consumers_too():
  done = finish(
    """
    class Sink:
      def write(self, records):
        seen.extend(records)
      def close(self):
        print("closed", len(seen), flush=True)
    channel = cg.channel("t", to=Sink())
    sender("t")(100)
    """
  )
  assert (done.returncode, done.stderr) == (0, "")
  assert done.stdout.split("\n")[:2] == ["closed 100", "delivered 100"]


def test_after_ctrl_c_everything_that_ran_is_delivered():
  source = (
    REPORT
    + PRELUDE
    + textwrap.dedent(
      """
    jax.block_until_ready(sender(slow)(300))
    print("go", flush=True)
    while True:
      time.sleep(0.1)
    """
    )
  )
  process = start(source, environment={"JAX_PLATFORMS": "cpu", "CALLGATE_EXIT_SECONDS": "60"})
  try:
    assert process.stdout is not None
    assert process.stdout.readline() == "go\n"
    process.send_signal(signal.SIGINT)
    out, errors = process.communicate(timeout=60)
  finally:
    process.kill()
  assert "KeyboardInterrupt" in errors
  assert out.strip() == "delivered 300"


def test_ctrl_c_frees_a_program_that_waits_for_a_stuck_consumer():
  source = PRELUDE + textwrap.dedent(
    """
    def stuck(value):
      print("go", flush=True)
      time.sleep(1000)
    channel = cg.channel("t", capacity=1024, to=stuck)
    jax.block_until_ready(sender("t")(10_000))
    time.sleep(1000)
    """
  )
  process = start(source, environment={"JAX_PLATFORMS": "cpu", "CALLGATE_EXIT_SECONDS": "0.5"})
  try:
    assert process.stdout is not None
    assert process.stdout.readline() == "go\n"
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=60)
  finally:
    process.kill()
  assert "KeyboardInterrupt" in errors
  assert "not delivered at the end of the program: channel 't'" in errors


def test_a_consumer_that_hangs_is_left_behind_with_a_report():
  done = finish(
    """
    def stuck(value):
      time.sleep(1000)
    jax.block_until_ready(sender(stuck)(5))
    """,
    CALLGATE_EXIT_SECONDS="0.3",
  )
  assert done.returncode == 0, done.stderr
  assert "not delivered at the end of the program: taps to functions: 5 record(s)" in done.stderr


def test_records_for_a_channel_that_was_never_open_are_reported():
  done = finish("jax.block_until_ready(sender('nobody')(3))")
  assert done.returncode == 0
  assert "channel 'nobody', which was not open: 3 record(s)" in done.stderr


def test_exceptions_of_consumers_are_shown_at_the_end():
  done = finish(
    """
    def bad(value):
      raise ValueError("nobody asked")
    jax.block_until_ready(sender(bad)(1))
    """
  )
  assert done.returncode == 1
  assert "ValueError: nobody asked" in done.stderr
  assert "of tap 'bad', record 0" in done.stderr


def test_exceptions_of_consumers_that_somebody_asked_for_are_no_failure_of_the_process():
  done = finish(
    """
    def bad(value):
      raise ValueError("expected")
    sender(bad)(1)
    try:
      cg.barrier()
    except ValueError:
      pass
    """
  )
  assert (done.returncode, done.stderr) == (0, "")


def test_a_sink_that_raises_fails_the_process_and_another_status_stays():
  channel = """
    class Bad:
      def write(self, records):
        raise OSError("disk full")
    channel = cg.channel("c", to=Bad())
    jax.block_until_ready(sender("c")(1))
    """
  assert finish(channel).returncode == 1
  assert finish(textwrap.dedent(channel) + "sys.exit(3)").returncode == 3


def test_a_tap_after_callgates_end_is_reported():
  """Handlers that were registered before the import run after callgate's own."""
  done = run_python(
    """
    import jax, atexit
    def late():
      jax.block_until_ready(to_function(2))
      jax.block_until_ready(to_channel(3))
    atexit.register(late)
    import callgate as cg
    def sender(to):
      body = lambda i, c: (cg.tap(i, to), c)[1]
      return jax.jit(lambda n: jax.lax.fori_loop(0, n, body, 0))
    def seen(value): print("seen", value)
    to_function, to_channel = sender(seen), sender("t")
    channel = cg.channel("t", to=cg.sinks.Stats())
    jax.block_until_ready([to_function(1), to_channel(1)])
    """
  )
  assert done.returncode == 0
  assert done.stdout.splitlines() == ["seen 0"]
  assert "tap '__main__.seen': 2 record(s)" in done.stderr
  assert "channel 't': 3 record(s)" in done.stderr
  assert "registered before callgate was imported" in done.stderr


# Waits for a consumer that does not return, or for somebody who does not come.
BLOCKING = {
  "flush": "channel.flush()",
  "close": "channel.close()",
  "remove": "channel.remove(stuck)",
  "barrier": "cg.barrier()",
  "errors": "with cg.errors(): pass",
  "a full channel": "jax.block_until_ready(sender(channel.name)(100_000))",
  "a gate's thread": "jax.block_until_ready(asleep(1.0))",
  "records": "next(other.records())",
  "a stream's end": "next(iter(cg.open_stream(address)))",
  "a stream's records": "cg.open_stream(address).read(1000)",
  "a stream's server": "cg.open_stream(crowded)",
  "a feed's item": "cg.feed(map(time.sleep, [1000])).next()",
}


# Each call is in a thread of its own, with a channel of its own.
BLOCKED = """
def stuck(value):
  called.release()
  time.sleep(1000)
called = threading.Semaphore(0)
address = f"unix:{folder}/socket"
asleep = jax.jit(lambda x: cg.call(lambda y: time.sleep(1000), x, x, thread="own"))
source = cg.channel("source", to=cg.sinks.Stream(address))
threads = {}
for text in calls:
  channel = cg.channel(text, capacity=4096, to=stuck)
  jax.block_until_ready(sender(text)(3))
  called.acquire()
  names = {**globals(), "channel": channel, "other": cg.channel(f"other: {text}")}
  exec(f"def wait():\\n  try:\\n    {text}\\n  except BaseException:\\n    pass", names)
  threads[text] = threading.Thread(target=names["wait"], daemon=True)
  threads[text].start()
  while (frame := sys._current_frames().get(threads[text].ident)) is None or (
    frame.f_code is names["wait"].__code__
  ):
    assert threads[text].is_alive(), text
    time.sleep(0.001)
"""


def test_daemon_threads_in_calls_that_wait_do_not_abort_the_exit(tmp_path):
  names = f"folder, calls = {str(tmp_path)!r}, {list(BLOCKING.values())!r}\n"
  done = finish(names + CROWDED + BLOCKED, CALLGATE_EXIT_SECONDS="0.3")
  assert done.returncode == 0, done.stderr
  assert "terminate called" not in done.stderr
  assert "Traceback" not in done.stderr
