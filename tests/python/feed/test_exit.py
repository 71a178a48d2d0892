# SPDX-License-Identifier: Apache-2.0
"""Feeds at the end of a process, in a fork's child and under Ctrl-C: nothing hangs."""

from __future__ import annotations

import signal
import textwrap

import pytest
from interpreters import run_python, start

PRELUDE = """
import itertools, os, sys, threading, time
import jax, jax.numpy as jnp, numpy as np
import callgate as cg
asked = threading.Event()
def hang():
  yield np.float32(0)
  asked.set()
  threading.Event().wait()
"""


@pytest.mark.parametrize(
  "body",
  [
    "feed = cg.feed(map(float, itertools.count()))",
    "feed = cg.feed(hang()); asked.wait()",
    "with cg.feed(map(float, itertools.count())) as feed: feed.next()",
  ],
)
def test_the_process_ends_with_feeds_open(body: str) -> None:
  done = run_python(PRELUDE + body, timeout=60, CALLGATE_EXIT_SECONDS="0.5")
  assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize("body", ["p = jax.jit(feed.next); p(); p()", "feed.next()", "next(feed)"])
def test_a_feed_keeps_no_device_beyond_the_end(body: str) -> None:
  """JAX ends with 255 where something does, if it is asked to look."""
  made = "feed = cg.feed(map(float, itertools.count()))\n"
  flag = {"JAX_DEBUG_LEAKED_CLIENTS_ON_CLEAR_BACKENDS": "1"}
  done = run_python(PRELUDE + made + body, timeout=60, **flag)
  assert (done.returncode, done.stderr) == (0, "")


def test_the_process_ends_though_a_program_waits_for_an_item_that_never_comes() -> None:
  body = """
feed = cg.feed(hang())
read = jax.jit(lambda: jax.lax.scan(lambda c, _: (c, feed.next()), 0, length=3)[1])
threading.Thread(target=lambda: jax.block_until_ready(read()), daemon=True).start()
asked.wait()
while not feed.stats()["waited"]:
  time.sleep(0.01)
"""
  done = run_python(PRELUDE + body, timeout=90, CALLGATE_EXIT_SECONDS="0.5")
  assert done.returncode == 0, done.stderr


def test_ctrl_c_ends_a_program_that_waits_for_an_item() -> None:
  source = PRELUDE + textwrap.dedent(
    """
    import signal
    signal.signal(signal.SIGINT, signal.default_int_handler)
    feed = cg.feed(hang())
    read = jax.jit(lambda: jax.lax.scan(lambda c, _: (c, feed.next()), 0, length=3)[1])
    def tell():
      while not feed.stats()["waited"]:
        time.sleep(0.01)
      print("go", flush=True)
    threading.Thread(target=tell, daemon=True).start()
    jax.block_until_ready(read())
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
  assert process.returncode in (1, 130, -signal.SIGINT), errors
  assert "KeyboardInterrupt" in errors
