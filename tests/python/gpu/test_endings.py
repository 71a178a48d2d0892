# SPDX-License-Identifier: Apache-2.0
"""Ctrl-C, exceptions and the end of the process, with programs in flight on a GPU."""

from __future__ import annotations

import json
import signal
import textwrap
from pathlib import Path

import pytest
from interpreters import Process, begin_program, finish, run_python

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("gpu")]

PRELUDE = """
import os, signal, sys, threading, time
signal.signal(signal.SIGINT, signal.default_int_handler)  # a background job's is ignored
import jax, jax.numpy as jnp, numpy as np
import callgate as cg

X = jnp.arange(1000.0)
same = lambda x: x
started = threading.Event()

def slow(x):
  started.set()
  time.sleep(2)
  return x

def in_thread(function, *arguments):
  started.clear()
  threading.Thread(
    target=lambda: jax.block_until_ready(function(*arguments)), daemon=True
  ).start()
  assert started.wait(20)

def tell(x):
  os.write(1, b"go\\n")  # whole, also where several devices' threads tell at once
  return x

def forever(step):
  def program(x):
    x = cg.call(tell, x, x, effect="io", name="tell")
    return jax.lax.while_loop(lambda x: x[0] >= 0, step, x)
  return jax.jit(program)(jnp.zeros(4))
"""


def script(body: str) -> str:
  return PRELUDE + textwrap.dedent(body)


# -- the end of the process ------------------------------------------------------------------------
# Each of these is under way when the process ends.
IN_FLIGHT = """
in_thread(jax.jit(lambda x: cg.call(slow, x, x, effect="io") + 1), X)

@cg.gate(out=same, arrays="buffer", style="inplace", aliases={0: 0})
def touch(out, x):
  slow(x)

in_thread(jax.jit(lambda x: touch(x * 2) + 1), X)

cg.install()
in_thread(jax.jit(lambda x: jax.pure_callback(slow, x, x) + 1), X)

started.clear()
own = jax.jit(lambda x: cg.call(slow, x, x, effect="io", thread="own") * 2)(X)
assert started.wait(20)
gate = cg.gate(slow, out=same, effect="io", thread="own")
several = [jax.jit(lambda x: gate(gate(x) + 1))(X + i) for i in range(4)]

twice = cg.elementwise("T x", "T y", "y = x * 2", name="twice")
y = jax.jit(lambda x: jax.lax.fori_loop(0, 200, lambda i, x: twice(x) * 0.5, x))(X)
"""
ENDINGS = {
  "end": ("", 0),
  "exit": ("sys.exit(3)", 3),
  "os._exit": ("os._exit(4)", 4),
  "exception": ("raise LookupError('mine')", 1),
}


@pytest.mark.parametrize("ending", ENDINGS)
def test_the_process_ends_as_it_was_told_to(ending: str) -> None:
  last, status = ENDINGS[ending]
  done = run_python(script(IN_FLIGHT + last), timeout=100)
  assert done.returncode == status, done.stderr
  assert done.stderr.count("Traceback") == (ending == "exception"), done.stderr
  assert ("LookupError: mine" in done.stderr) == (ending == "exception")


TAPS = """
os.environ["CALLGATE_EXIT_SECONDS"] = "60"
folder = %r
taps = {
  "small": (X, {}), "large": (jnp.arange(200_000.0), {}), "ordered": (X, {"ordered": True}),
  "on the device": (X, {"on_device": True}),
}

def program(name, options):
  path = f"{folder}/{name}.jsonl"
  write = lambda x: print(x.tolist(), file=open(path, "a"), flush=True)
  to = write if "on_device" in options else cg.channel(name, to=cg.sinks.JSONL(path))
  tap = lambda x: cg.tap(x[:1] if x.size < 2000 else x, to, **options)
  return jax.jit(lambda x: jax.lax.fori_loop(0, 10, lambda i, x: (tap(x), x + 1)[1], x))

for name, (x, options) in taps.items():
  run = program(name, options)
  for _ in range(3):
    run(x)
"""


@pytest.mark.parametrize("ending", ["end", "exit", "exception"])
def test_records_from_before_the_end_are_delivered(ending: str, tmp_path: Path) -> None:
  done = run_python(script(TAPS % str(tmp_path) + ENDINGS[ending][0]), timeout=100)
  assert done.returncode == ENDINGS[ending][1], done.stderr
  for name in ("small", "large", "ordered", "on the device"):
    records = [json.loads(line) for line in (tmp_path / f"{name}.jsonl").read_text().splitlines()]
    assert len(records) == 30


# -- Ctrl-C ----------------------------------------------------------------------------------------
STEPS = {
  "tap": "lambda x: cg.tap(x, lambda value: None) + 1",
  "check": "lambda x: (cg.check(jnp.all(x >= 0), 'below'), x + 1)[1]",
  "callback": "lambda x: (jax.debug.callback(lambda value: None, x), x + 1)[1]",
  "gate": "lambda x: cg.call(lambda value: value, x, x, effect='io')",
  "own thread": "lambda x: cg.call(lambda value: value, x, x, effect='io', thread='own')",
  "device arrays": "lambda x: cg.call(lambda value: value, x, x, effect='io', arrays='buffer')",
  "kernel": "lambda x: cg.elementwise('T x', 'T y', 'y = x + 1', name='add')(x)",
}


def begin(body: str) -> Process:
  return begin_program(script(body))


@pytest.mark.parametrize("step", STEPS.values(), ids=STEPS)
def test_ctrl_c_ends_a_program_at_its_next_call(step: str) -> None:
  process = begin(f"cg.install()\njax.block_until_ready(forever({step}))")
  process.send_signal(signal.SIGINT)
  _, errors = finish(process)
  assert "KeyboardInterrupt" in errors
  assert process.returncode in (1, 130, -signal.SIGINT)


@pytest.mark.parametrize("step", [STEPS["tap"], STEPS["gate"]], ids=["tap", "gate"])
def test_programs_after_ctrl_c_run_as_before_it(step: str) -> None:
  process = begin(
    f"""
    try:
      jax.block_until_ready(forever({step}))
    except KeyboardInterrupt:
      got = []
      with cg.channel("after", to=lambda x: got.append(x.tolist())) as channel:
        program = jax.jit(lambda x: cg.tap(cg.call(lambda x: x + 1, x, x, effect="io"), channel))
        print(program(jnp.zeros(2)).tolist())
      cg.barrier()
      print(got)
    """
  )
  process.send_signal(signal.SIGINT)
  printed, errors = finish(process)
  assert process.returncode == 0, errors
  assert printed.splitlines() == ["[1.0, 1.0]", "[[1.0, 1.0]]"]


def test_ctrl_c_in_a_gate_is_the_program_s() -> None:
  process = begin(
    """
    def wait(x):
      print("go", flush=True)
      time.sleep(50)
      return x

    try:
      jax.block_until_ready(jax.jit(lambda x: cg.call(wait, x, x, effect="io") + 1)(X))
    except KeyboardInterrupt:
      print(jax.jit(lambda x: cg.call(lambda x: x * 2, x, x))(jnp.ones(1)).tolist())
    """
  )
  process.send_signal(signal.SIGINT)
  printed, errors = finish(process)
  assert process.returncode == 0, errors
  assert printed.splitlines() == ["[2.0]"]


def test_on_several_devices_ctrl_c_leaves_nobody_waiting() -> None:
  process = begin(
    """
    if len(jax.devices()) < 2:
      print("go")
      print("one device", flush=True)
      sys.exit()
    mesh = jax.make_mesh((2,), ("d",), devices=jax.devices()[:2])

    @jax.jit
    @jax.shard_map(mesh=mesh, in_specs=jax.P("d"), out_specs=jax.P("d"))
    def program(x):
      x = cg.call(tell, x, x, effect="io", name="tell")
      def step(i, x):
        cg.tap(x, lambda value: None)
        return jax.lax.ppermute(x, "d", [(0, 1), (1, 0)]) + 1
      return jax.lax.fori_loop(0, 300, step, x)

    x = jax.device_put(jnp.ones(4), jax.NamedSharding(mesh, jax.P("d")))
    try:
      while True:
        print(np.asarray(program(x))[0], flush=True)
    except KeyboardInterrupt:
      print("ended", np.asarray(program(x))[0], flush=True)
    """
  )
  process.send_signal(signal.SIGINT)
  printed, errors = finish(process)
  if "one device" in printed:
    pytest.skip("needs 2 GPUs")
  assert process.returncode == 0, errors
  assert "ended 301.0" in printed
