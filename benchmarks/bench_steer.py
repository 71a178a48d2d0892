# SPDX-License-Identifier: Apache-2.0
"""The cost of steering a program: a look at a knob, a stop, a breakpoint, a check, a checkpoint.

Every contestant is one step of a compiled loop that carries an f32 scalar (f32[1024] where it is
saved) and does nothing else beside an addition. JAX's own way is a pure callback that reads a
Python number. Recordings are of a gate's calls, and a sample holds their file's opening and end.
Unit: microseconds per step.
"""

from __future__ import annotations

import contextlib
import functools
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import callgate as cg
from benchmarks import harness
from benchmarks.peers import adapters

PLAIN = "loop only (one addition)"
KNOB = "callgate knob, read"
STOP = "callgate stop_requested"
BREAKPOINT = "callgate breakpoint that does not stop"
BREAKPOINT_OUT = "callgate breakpoint that does not stop, with a result"
OFF = "callgate check, switched off"
SAVE = "callgate Checkpoints, a step that saves nothing"
SAVED = "callgate Checkpoints, 4 KiB saved in each step"
GATE = "callgate gate"
RECORDED = "the same, recorded"
REPLAYED = "the same, answered from the recording"
HANDLER = "C++ FFI handler, empty"
PEER = "jax pure_callback that reads a number"

TARGETS = (
  harness.Target("a read of a knob, microseconds", KNOB, at_most=0.15),
  harness.Target("stop_requested(), microseconds", STOP, at_most=0.15),
  harness.Target("pure_callback over a read", PEER, KNOB, at_least=100.0),
)

Body = Callable[[Any], Any]


def run(options: harness.Options) -> harness.Report:
  """Measures one execution of each loop."""
  # A program's dispatch, about 0.1 ms where it steers, is to be little of it.
  many, some, few = options.pick(20_000, 200), options.pick(2_000, 200), options.pick(100, 20)
  contestants = [
    harness.Contestant(
      name, functools.partial(_program, make, few if slow else many, name in (SAVE, SAVED))
    )
    for name, make, slow in CONTESTANTS
  ]
  contestants += [
    harness.Contestant(HANDLER, functools.partial(_handler, many)),
    *(harness.Contestant(name, functools.partial(_gate, name, some)) for name in GATES),
  ]
  rows = harness.measure(contestants, rounds=options.rounds_or(50))
  for saves in _saves:
    saves.close()
    shutil.rmtree(saves.folder)
  title = f"One step of a compiled loop of up to {many} that is steered"
  settings = {"steps": many}
  return harness.Report("steer", title, "us", rows, PLAIN, TARGETS, settings, quick=options.quick)


def _program(make: Callable[[int], Callable[[Any], Any]], steps: int, saved: bool) -> harness.Work:
  program, x = jax.jit(make(steps)), jnp.zeros(1024 if saved else ())
  harness.check(np.all(np.asarray(program(x)) == steps), "the loop's result is another")

  def thunk() -> None:
    jax.block_until_ready(program(x))

  return harness.Work(thunk, steps)


def _loop(body: Body) -> Callable[[int], Callable[[Any], Any]]:
  return lambda steps: lambda x: jax.lax.fori_loop(0, steps, lambda _, c: body(c), x)


def _knob() -> Callable[[int], Callable[[Any], Any]]:
  knob = cg.knob("benchmark", 1.0)
  return _loop(lambda c: c + knob.read())


def _by_jax() -> Callable[[int], Callable[[Any], Any]]:
  scalar, value = jax.ShapeDtypeStruct((), jnp.float32), np.float32(1)
  return _loop(lambda c: c + jax.pure_callback(lambda _: value, scalar, c))


def _stop(steps: int) -> Callable[[Any], Any]:
  def going(state: Any) -> Any:
    return (state[0] < steps) & ~cg.stop_requested()

  return lambda x: jax.lax.while_loop(going, lambda s: (s[0] + 1, s[1] + 1), (0, x))[1]


def _breakpoint(c: Any) -> Any:
  cg.breakpoint(c < 0, c=c)
  return c + 1


def _breakpoint_out(c: Any) -> Any:
  return cg.breakpoint(c < 0, out="c", c=c) + 1


def _check(c: Any) -> Any:
  cg.check(c < 0, "switched off")
  return c + 1


def _off(steps: int) -> Callable[[Any], Any]:
  cg.config(checks=False)  # of this process, which has no other check
  return _loop(_check)(steps)


def _saving(every: int) -> Callable[[int], Callable[[Any], Any]]:
  saves = cg.Checkpoints(tempfile.mkdtemp(prefix="callgate-benchmark-"), every=every, keep=1)
  _saves.append(saves)
  return lambda steps: lambda x: cg.scan(lambda c, _: (c + 1, None), x, length=steps, save=saves)[0]


def _handler(steps: int) -> harness.Work:
  handler = adapters.raw_noop(jax.ShapeDtypeStruct((), jnp.float32))
  program = jax.jit(lambda x: jax.lax.fori_loop(0, steps, lambda _, c: handler(c), x))
  return harness.Work(lambda: jax.block_until_ready(program(0.0)), steps)


def _gate(name: str, steps: int) -> harness.Work:
  """A loop of calls, of which all are in a recording, or come from one."""
  gate = cg.gate(lambda x: x, out=lambda x: x, effect="io", name=f"benchmark: {name}")
  program = jax.jit(lambda x: jax.lax.fori_loop(0, steps, lambda _, c: gate(c) + 1, x))
  path = str(Path(tempfile.mkdtemp(prefix="callgate-benchmark-"), "calls.cgr"))

  def thunk() -> Any:
    with GATES[name](path):
      return jax.block_until_ready(program(0.0))

  with cg.record(path, overwrite=True):
    harness.check(program(0.0) == steps, "the loop's result is another")
  return harness.Work(thunk, steps)


GATES: dict[str, Callable[[str], contextlib.AbstractContextManager[Any]]] = {
  GATE: lambda _: contextlib.nullcontext(),
  RECORDED: lambda path: cg.record(path, overwrite=True),
  REPLAYED: cg.replay,
}
_saves: list[cg.Checkpoints] = []
CONTESTANTS: tuple[tuple[str, Callable[[int], Callable[[Any], Any]], bool], ...] = (
  (PLAIN, _loop(lambda c: c + 1), False),
  (KNOB, lambda steps: _knob()(steps), False),
  (STOP, _stop, False),
  (BREAKPOINT, _loop(_breakpoint), False),
  (BREAKPOINT_OUT, _loop(_breakpoint_out), False),
  (OFF, _off, False),
  (SAVE, lambda steps: _saving(2**30)(steps), False),
  (SAVED, lambda steps: _saving(1)(steps), True),
  (PEER, lambda steps: _by_jax()(steps), True),
)
