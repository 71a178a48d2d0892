# SPDX-License-Identifier: Apache-2.0
"""The kinds of programs that tools/interrupts.py sends SIGINT to."""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

begun = threading.Event()
Run = Callable[[], object]
CALLS = ("first", "later", "compiled")
WAITS: dict[str, Callable[[Any], object]] = {
  "block": lambda y: y.block_until_ready(),
  "jax.block": lambda y: _jax().block_until_ready([y]),
  "get": lambda y: _jax().device_get(y),
  "array": lambda y: _numpy().asarray(y),
  "print": lambda y: print(y, file=sys.stderr),
  "float": lambda y: float(y.ravel()[0]),
  "item": lambda y: y.ravel()[0].item(),
  "iteration": lambda y: list(y.ravel()),
  "barrier": lambda y: _callgate().barrier(),
  "effects": lambda y: _jax().effects_barrier(),
}


def _jax() -> Any:
  import jax

  return jax


def _numpy() -> Any:
  import numpy

  return numpy


def _callgate() -> Any:
  import callgate

  return callgate


class Loop:
  """Runs steps without an end, the first of which says that the program has begun."""

  def __init__(self, step: Callable[[Any, Any], Any], x: Any) -> None:
    self.step, self.x, self.call, self.wait = step, x, "first", "block"
    self._program: Any = None

  def _new(self) -> Any:
    import jax
    import numpy as np

    def program(x: Any, steps: Any) -> Any:
      _tell(x)
      return jax.lax.fori_loop(0, steps, self.step, x)

    program, short = jax.jit(program), np.int32(1)
    if self.call == "compiled":
      program = program.lower(self.x, short).compile()
    if self.call != "first":
      jax.block_until_ready([program(self.x, short) for _ in range(2)])
    return program

  def prepare(self) -> None:
    """Before the signal: a program that has run before, unless this is to be its first call."""
    if self._program is None or self.call == "first":
      self._program = self._new()

  def __call__(self) -> None:
    import numpy as np

    WAITS[self.wait]((self._program or self._new())(self.x, np.int32(2**31 - 1)))


def loop(step: Callable[[Any, Any], Any], x: Any = 0.0) -> Loop:
  import numpy as np

  return Loop(step, np.asarray(x, np.float32))


def _tell(x: Any) -> None:
  """In a program: says that it has begun."""
  import callgate as cg

  cg.tap(x, lambda _: begun.set(), name="interrupts.tell")


def gates(folder: Path) -> Run:
  import callgate as cg

  gate = cg.gate(lambda x: x, out=lambda x: x, effect="io", name="interrupts.gate")
  return loop(lambda i, x: gate(x))


def own_thread(folder: Path) -> Run:
  import callgate as cg

  gate = cg.gate(lambda x: x, out=lambda x: x, effect="io", thread="own", name="interrupts.own")
  return loop(lambda i, x: gate(x))


def named_thread(folder: Path) -> Run:
  """An object that one thread makes, uses and drops in each step."""
  import callgate as cg

  place = cg.thread("interrupts")
  make = cg.hold(lambda x: [x], run_on=place, name="interrupts.made")
  return loop(lambda i, x: cg.use(lambda made, x: x + 1, make(x), x, out=x))


def taps(folder: Path) -> Run:
  import callgate as cg

  return loop(lambda i, x: cg.tap(x, lambda value: None) + 1)


def heavy(folder: Path) -> Run:
  """A step that JAX does not run on the calling thread, with a tap."""
  import jax.numpy as jnp
  import numpy as np

  import callgate as cg

  def step(i: Any, x: Any) -> Any:
    cg.tap(x[0], lambda value: None)
    return jnp.sin(x @ jnp.eye(64)) + 1

  return loop(step, np.ones(64))


def devices(folder: Path) -> Run:
  """Over four devices, where a program goes on to its end without what need not run."""
  import jax
  import numpy as np
  from jax.sharding import PartitionSpec as P

  import callgate as cg

  mesh = jax.make_mesh((4,), ("d",))
  pause = cg.gate(lambda x: (time.sleep(0.002), x)[1], out=lambda x: x, effect="io", name="pause")

  def body(x: Any) -> Any:
    _tell(x)
    return jax.lax.fori_loop(0, 200, lambda i, x: pause(x), x)

  program = jax.jit(jax.shard_map(body, mesh=mesh, in_specs=P("d"), out_specs=P("d")))
  x = jax.device_put(np.zeros(4, np.float32), jax.NamedSharding(mesh, P("d")))
  return lambda: jax.block_until_ready(program(x))


def checks(folder: Path) -> Run:
  import callgate as cg

  return loop(lambda i, x: (cg.check(x >= 0, "below"), x + 1)[1])


def kernels(folder: Path) -> Run:
  import callgate as cg

  add = cg.cpp("void add(cg::In<float> x, cg::Out<float> y) { y[0] = x[0] + 1; }", out=lambda x: x)
  return loop(lambda i, x: add(x))


def feeds(folder: Path) -> Run:
  import itertools

  import numpy as np

  import callgate as cg

  feed = cg.feed(itertools.repeat(np.float32(1)), name="interrupts.feed")
  return loop(lambda i, x: x + feed.next())


def knobs(folder: Path) -> Run:
  import callgate as cg

  knob = cg.knob("interrupts.knob", 1.0)
  return loop(lambda i, x: x + knob.read())


def stops(folder: Path) -> Run:
  """A `while_loop` that asks whether to stop."""
  import jax

  import callgate as cg

  def wait(i: Any, x: Any) -> Any:
    def looking(state: Any) -> Any:
      return (state[0] < 1_000_000) & ~cg.stop_requested()

    return jax.lax.while_loop(looking, lambda state: (state[0] + 1, state[1] + 1), (0, x))[1]

  return loop(wait)


def stoppable_scans(folder: Path) -> Run:
  import callgate as cg

  def step(carry: Any, _: Any) -> Any:
    return carry + 1, None

  return loop(lambda i, x: cg.scan(step, x, length=1_000_000, stoppable=True)[0])


def bars(folder: Path) -> Run:
  import jax
  import jax.numpy as jnp

  import callgate as cg

  bar = cg.Progress("steps", total=1e9, at=lambda x: x, file=(folder / "bars").open("w"))

  def program(x: Any) -> Any:
    _tell(x)
    return cg.while_loop(lambda x: x >= 0, lambda x: jnp.abs(jnp.sin(x)), x, progress=bar)

  jitted = jax.jit(program)
  return lambda: jax.block_until_ready(jitted(0.5))


def breakpoints(folder: Path) -> Run:
  """Breakpoints at which nobody stops."""
  import callgate as cg

  return loop(lambda i, x: cg.breakpoint(x < 0, out="x", x=x) + 1)


def stopped_breakpoints(folder: Path) -> Run:
  """The program stands in a debugger, which waits for somebody to attach."""
  import callgate as cg

  os.environ["XDG_RUNTIME_DIR"] = str(folder)
  return loop(lambda i, x: cg.breakpoint(i >= 10, out="x", x=x) + 1)


def recordings(folder: Path) -> Run:
  import callgate as cg

  run = gates(folder)

  def recorded() -> None:
    with cg.record(folder / "recorded.cgr", overwrite=True):
      run()

  return recorded


def replays(folder: Path) -> Run:
  """Answered from a file, which a pure gate may be without an end."""
  import jax
  import numpy as np

  import callgate as cg

  gate = cg.gate(lambda x: x, out=lambda x: x, name="interrupts.replayed")
  with cg.record(folder / "replayed.cgr"):
    jax.block_until_ready(jax.jit(gate)(np.float32(0)))
  run = loop(lambda i, x: gate(x))

  def replayed() -> None:
    with cg.replay(folder / "replayed.cgr", partial=True):
      run()

  return replayed


def checkpoints(folder: Path) -> Run:
  import jax
  import jax.numpy as jnp

  import callgate as cg

  def body(carry: Any, _: Any) -> Any:
    return carry + 1, None

  saves = cg.Checkpoints(folder / "run", every=100_000, keep=2)

  def program(carry: Any) -> Any:
    _tell(carry[0])
    return cg.scan(body, carry, length=2**31 - 1, save=saves)[0]

  jitted = jax.jit(program)
  return lambda: jax.block_until_ready(jitted(jnp.zeros(1000)))


def serve(folder: Path) -> Run:
  """With the live page of the program's own."""
  import callgate as cg

  cg.serve(control=True, file=folder / "address")
  knob = cg.knob("interrupts.served", 1.0)
  return loop(lambda i, x: cg.tap(x, lambda value: None, name="interrupts.tap") + knob.read())


KINDS: dict[str, Callable[[Path], Run]] = {
  kind.__name__.replace("_", "-"): kind
  for kind in (
    gates, own_thread, named_thread, taps, heavy, devices, checks, kernels, feeds, knobs, stops,
    stoppable_scans, bars, breakpoints, stopped_breakpoints, recordings, replays, checkpoints,
    serve,
  )
}  # fmt: skip

# Kinds whose loop is not `loop`'s.
OTHERS = {"bars", "devices", "recordings", "replays", "checkpoints"}
