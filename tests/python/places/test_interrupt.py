# SPDX-License-Identifier: Apache-2.0
"""Ctrl-C while a program waits for workers: KeyboardInterrupt at the caller, and no harm."""

from __future__ import annotations

import os
import pathlib
import signal
import textwrap

from interpreters import begin_program, finish, output_of, same_path
from waiting import until

# `wait_for_ctrl_c` runs in a worker, and tells this process's thread when it does.
PROGRAM = """
import os, pathlib, signal, sys, tempfile, threading, time
signal.signal(signal.SIGINT, signal.default_int_handler)  # a background job's is ignored
import jax, jax.numpy as jnp, numpy as np
import callgate as cg
from worker_functions import Tallied, tallied

folder = pathlib.Path(tempfile.mkdtemp())
begun, ended = folder / "begun", folder / "ended"
FLOAT, INT = (jax.ShapeDtypeStruct((), d) for d in (np.float32, np.int32))
workers = cg.workers(1)

def wait_for_ctrl_c(*given):
  begun.touch()
  try:
    while True:
      time.sleep(1000)
  finally:
    ended.touch()

def interrupt():  # as a terminal does
  while not begun.exists():
    time.sleep(0.005)
  begun.unlink()
  for pid in (*workers.pids, os.getpid()):
    os.kill(pid, signal.SIGINT)

make = cg.hold(Tallied, run_on=workers)
value = jax.jit(lambda h: cg.use(lambda box: box.value, h, out=FLOAT))
count = jax.jit(lambda: cg.call(tallied, INT, run_on=workers, effect="io"))
slow = cg.gate(wait_for_ctrl_c, out=lambda x: x, run_on=workers, effect="io", name="slow")
box = make(3.0)
assert value(box) == 3

@jax.jit
def started(x):
  tickets = [slow.start(x) for _ in range(3)]  # more than there are workers
  return tickets[0].result() + tickets[1].result()

# Waits for calls in a worker.
waits = {
  "use": jax.jit(lambda x: cg.use(wait_for_ctrl_c, box, x, out=x)),
  "use of lanes": jax.jit(jax.vmap(lambda x: cg.use(wait_for_ctrl_c, box, x, out=x))),
  "hold": jax.jit(cg.hold(wait_for_ctrl_c, run_on=workers)),
  "gate": jax.jit(slow),
  "start": started,
}
"""


def test_ctrl_c_is_the_callers_keyboard_interrupt_and_objects_stay() -> None:
  """A worker that can't be interrupted is replaced, and its objects are gone."""
  code = """
    pids = workers.pids
    for name, wait in waits.items():
      thread = threading.Thread(target=interrupt)
      thread.start()
      try:
        jax.block_until_ready(wait(jnp.arange(4.0) if "lanes" in name else 1.0))
      except KeyboardInterrupt:
        print(name, flush=True)
      thread.join()
      assert value(box) == 3
      assert ended.exists(), "the function was not interrupted, but its worker ended"
      ended.unlink()
    assert not begun.exists(), "a started call that had to wait ran after all"
    cg.barrier()
    assert workers.pids == pids
    assert cg.held() == {"Tallied": 1}
    assert count() == 1

    def ignore(box, x):
      signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGUSR2])
      wait_for_ctrl_c()

    threading.Thread(target=interrupt).start()
    try:
      jax.block_until_ready(jax.jit(lambda x: cg.use(ignore, box, x, out=x))(1.0))
    except KeyboardInterrupt:
      print("interrupted", flush=True)
    assert workers.replaced == 1
    try:
      with cg.errors():
        value(box).block_until_ready()
    except cg.WorkerError as error:
      print("was lost with worker" in str(error), value(make(4.0)), flush=True)
  """
  printed = output_of(PROGRAM + textwrap.dedent(code), **same_path())
  *waits, last = printed.splitlines()
  assert waits == ["use", "use of lanes", "hold", "gate", "start", "interrupted"]
  assert last == "True 4.0"


def test_nothing_is_left_of_a_program_that_ctrl_c_ends() -> None:
  shared = lambda: {name for name in os.listdir("/dev/shm") if not name.startswith("sem.")}
  before = shared()
  code = """
    class Go:  # printed once the worker runs
      def __call__(self):
        while not begun.exists():
          time.sleep(0.005)
        print("go", *workers.pids, sep="\\n", flush=True)
    threading.Thread(target=Go(), daemon=True).start()
    jax.block_until_ready(waits["use"](1.0))
  """
  process = begin_program(PROGRAM + textwrap.dedent(code), environment=same_path())
  assert process.stdout is not None
  pid = int(process.stdout.readline())
  process.send_signal(signal.SIGINT)
  _, said = finish(process)
  assert "KeyboardInterrupt" in said
  assert "WorkerError" not in said
  assert process.returncode in (1, 130, -signal.SIGINT)
  until(lambda: not pathlib.Path(f"/proc/{pid}").exists(), "gone")
  assert shared() <= before
