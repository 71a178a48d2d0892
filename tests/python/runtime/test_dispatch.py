# SPDX-License-Identifier: Apache-2.0
"""Programs with effects take JAX's C++ dispatch; waiting, order and errors are kept.

Each guarantee is tested with calls on that path, which is from a program's second call on. A big
operand has XLA's CPU client run a program on a thread of its own, a small one on the caller's.
"""

from __future__ import annotations

import contextlib
import re
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from interpreters import Module, output_of, run
from jax.experimental import io_callback, serialize_executable

import callgate as cg
from callgate._jax import cpp_path

one_device = pytest.mark.skipif(
  jax.local_device_count() != 1,
  reason="JAX's tokens order programs of several devices; test_on_one_device runs it",
)
EFFECTS = ("io", pytest.param("ordered", marks=one_device))
BIG = 300  # of a matrix whose product XLA doesn't take for cheap


@contextlib.contextmanager
def python_dispatches() -> Iterator[list[str]]:
  """The programs that JAX's Python dispatch runs meanwhile."""
  from jax._src.interpreters import pxla

  seen: list[str] = []
  original = pxla.ExecuteReplicated.__call__

  def call(self: Any, *args: Any) -> Any:
    seen.append(self.name)
    return original(self, *args)

  pxla.ExecuteReplicated.__call__ = call
  try:
    yield seen
  finally:
    pxla.ExecuteReplicated.__call__ = original


def noting(log: list[float], effect: str, *, seconds: float = 0.0, fails: float = -1.0) -> Any:
  """A gate that notes its scalar, and raises where it is `fails`."""

  def note(x: np.ndarray) -> np.ndarray:
    time.sleep(seconds)
    if x == fails:
      raise KeyError("refused")
    log.append(float(x))
    return x

  return cg.gate(note, out=lambda x: x, effect=effect)


def heavy(gate: Callable[[Any], Any]) -> Any:
  """A program that runs on XLA's thread, and gives a small result."""
  return jax.jit(lambda x, m: gate(x) + 0 * (m @ m)[0, 0])


MATRIX = np.zeros((BIG, BIG), np.float32)


@pytest.mark.parametrize("effect", EFFECTS)
def test_calls_after_the_first_leave_python(effect: str) -> None:
  log: list[float] = []
  program = jax.jit(noting(log, effect))
  compiled = program.lower(1.0).compile()
  eager = noting(log, effect)
  x = jnp.float32(1)
  for f in (program, compiled, eager):
    jax.block_until_ready((f(x), f(x)))
    log.clear()
    with python_dispatches() as seen:
      for _ in range(5):
        f(x)
      jax.effects_barrier()
    assert (len(log), seen) == (5, [])


def test_a_tap_leaves_python_too() -> None:
  seen_by_tap: list[float] = []
  program = jax.jit(lambda x: cg.tap(x, lambda v: seen_by_tap.append(float(v))) + 1)
  program(1.0), program(1.0)
  with python_dispatches() as seen:
    for value in (2.0, 3.0, 4.0):
      program(value)
  cg.barrier()
  assert seen == []
  assert seen_by_tap == [1.0, 1.0, 2.0, 3.0, 4.0]


RESULTS: dict[str, tuple[Callable[[Any], Any], Any]] = {  # what is made of a scalar, and is for 2
  "nothing": (lambda x: None, None),
  "an empty tuple": (lambda x: (), ()),
  "a large array": (lambda x: jnp.full(2000, x), np.full(2000, 2.0)),
  "an empty array": (lambda x: jnp.zeros(0), np.zeros(0)),
  "a tree": (lambda x: {"a": (x, None), "b": [x + 1]}, {"a": (2.0, None), "b": [3.0]}),
  "a key": (lambda x: jax.random.key(x.astype(int)), jax.random.key(2)),
}


@pytest.mark.parametrize("out", RESULTS)
@pytest.mark.parametrize("effect", EFFECTS)
def test_whatever_a_program_returns_it_is_waited_for(effect: str, out: str) -> None:
  log: list[float] = []
  gate = noting(log, effect, seconds=0.02)
  make, expected = RESULTS[out]
  program = jax.jit(lambda x, m: make(gate(x) + 0 * (m @ m)[0, 0]))
  compiled = program.lower(jnp.float32(0), MATRIX).compile()
  for f in (program, compiled):
    f(jnp.float32(0), MATRIX)
    with python_dispatches() as seen:
      for value in (0, 1, 2):
        got = f(jnp.float32(value), MATRIX)
      jax.effects_barrier()
    assert len(seen) <= (3 if out == "a key" else 0), seen  # which the C++ path doesn't take
    assert jax.tree.structure(got) == jax.tree.structure(expected)
    same = jax.tree.map(lambda a, b: bool((a == b).all()), got, expected)
    assert jax.tree.all(same), got
    assert log == [0, 0, 1, 2]
    log.clear()


@pytest.mark.skipif(jax.local_device_count() != 1, reason="JAX loads it for all devices")
@pytest.mark.parametrize("effect", ["io", "ordered"])
def test_a_program_that_was_serialized_is_waited_for(effect: str) -> None:
  log: list[float] = []
  gate = noting(log, effect, seconds=0.02)
  compiled = jax.jit(lambda x, m: gate(x) + 0 * (m @ m)[0, 0]).lower(1.0, MATRIX).compile()
  loaded = serialize_executable.deserialize_and_load(*serialize_executable.serialize(compiled))
  for value in (1.0, 2.0, 3.0):
    loaded(value, MATRIX)
  jax.effects_barrier()
  assert log == [1, 2, 3]
  assert float(loaded(4.0, MATRIX)) == 4


def test_facts_of_a_compiled_program_are_its_own_alone() -> None:
  gate = cg.gate(lambda x: x, out=lambda x: x, effect="io")
  compiled = jax.jit(lambda x: (gate(x), {"b": x})).lower(jnp.float32(1)).compile()
  expected = jax.tree.structure((0, {"b": 0}))
  assert jax.tree.structure(compiled.out_info) == expected
  assert len(jax.tree.leaves(compiled.output_shardings)) == 2
  assert compiled.output_formats is not None


@pytest.mark.parametrize("effect", EFFECTS)
def test_both_barriers_wait_for_calls_whose_results_were_dropped(effect: str) -> None:
  for barrier in (jax.effects_barrier, cg.barrier):
    log: list[float] = []
    program = heavy(noting(log, effect, seconds=0.05))
    for value in range(5):
      program(float(value), MATRIX)
    barrier()
    assert log == [0, 1, 2, 3, 4]


def test_a_barrier_waits_for_other_threads_dropped_results() -> None:
  log: list[float] = []
  program = heavy(noting(log, "io", seconds=0.1))
  jax.block_until_ready((program(0.0, MATRIX), program(0.0, MATRIX)))
  log.clear()
  thread = threading.Thread(target=lambda: [program(float(i), MATRIX) for i in range(3)] and None)
  thread.start()
  thread.join()
  cg.barrier()
  assert sorted(log) == [0, 1, 2]


def test_calls_whose_results_were_donated_are_waited_for() -> None:
  log: list[float] = []
  gate = noting(log, "io", seconds=0.02)
  program = jax.jit(lambda x, m: gate(x) + 1 + 0 * (m @ m)[0, 0], donate_argnums=0)
  x = jnp.float32(0)
  for _ in range(5):
    x = program(x, MATRIX)
  jax.effects_barrier()
  assert log == [0, 1, 2, 3, 4]
  assert float(x) == 5


@pytest.mark.parametrize("effect", ["pure", *EFFECTS])
@pytest.mark.parametrize("small", [True, False])
def test_a_failure_is_a_jax_runtime_error_however_it_was_dispatched(
  effect: str, small: bool
) -> None:
  log: list[float] = []
  gate = noting(log, effect, fails=3.0)
  program = jax.jit(gate) if small else heavy(gate)
  rest = () if small else (MATRIX,)
  compiled = program.lower(1.0, *rest).compile()
  for f in (program, compiled):
    for _ in range(3):
      with pytest.raises(jax.errors.JaxRuntimeError, match="refused"):
        jax.block_until_ready(f(jnp.float32(3), *rest))
      with contextlib.suppress(jax.errors.JaxRuntimeError):
        jax.effects_barrier()
      assert float(f(jnp.float32(1), *rest)) == 1
    with pytest.raises(KeyError, match="refused"), cg.errors():
      jax.block_until_ready(f(jnp.float32(3), *rest))


def test_an_error_of_the_users_own_while_tracing_stays_what_it_is() -> None:
  @jax.jit
  def program(x: jax.Array) -> jax.Array:
    raise ValueError("callgate is in this text")

  for _ in range(2):
    with pytest.raises(ValueError, match="in this text") as raised:
      program(1.0)
    assert type(raised.value) is ValueError


@pytest.mark.parametrize("effect", EFFECTS)
def test_the_barrier_raises_what_a_dropped_call_failed_with(effect: str) -> None:
  log: list[float] = []
  program = heavy(noting(log, effect, seconds=0.05, fails=3.0))
  jax.block_until_ready(program(1.0, MATRIX))
  for _ in range(2):
    program(3.0, MATRIX)
    with pytest.raises(jax.errors.JaxRuntimeError, match="refused"):
      jax.effects_barrier()
    jax.effects_barrier()  # told once
    program(3.0, MATRIX)
    with pytest.raises(KeyError, match="refused"):
      cg.barrier()
  program(2.0, MATRIX)
  cg.barrier()
  assert log == [1.0, 2.0]


@one_device
def test_ordered_calls_keep_their_order_across_programs() -> None:
  log: list[float] = []
  slow, fast = heavy(noting(log, "ordered", seconds=0.05)), jax.jit(noting(log, "ordered"))
  of_large = noting(log, "ordered")
  large = jax.jit(lambda x: jnp.full(2000, of_large(x)))
  taps = jax.jit(lambda x: cg.tap(x, lambda v: None, ordered=True) + 0)
  compiled = jax.jit(noting(log, "ordered")).lower(1.0).compile()
  x = jnp.float32(0)
  for _ in range(2):
    slow(x, MATRIX), fast(x), large(x), taps(x), compiled(x)
  jax.effects_barrier()
  log.clear()
  for i in range(0, 40, 4):
    slow(jnp.float32(i), MATRIX)
    fast(jnp.float32(i + 1))
    large(jnp.float32(i + 2))
    taps(x)
    compiled(jnp.float32(i + 3))
  jax.effects_barrier()
  assert log == list(range(40))


@one_device
def test_ordered_calls_keep_their_order_with_operands_that_are_still_to_come() -> None:
  log: list[float] = []
  program = jax.jit(noting(log, "ordered"))
  late = jax.jit(lambda m: (m @ m @ m @ m @ m)[0, 0])
  m = jnp.zeros((800, 800))
  program(late(m)), program(0.0)
  jax.effects_barrier()
  log.clear()
  for i in range(5):
    program(late(m))
    program(jnp.float32(i + 1))
  jax.effects_barrier()
  assert log == [0, 1, 0, 2, 0, 3, 0, 4, 0, 5]


@one_device
def test_ordered_calls_go_on_after_one_that_failed() -> None:
  log: list[float] = []
  program = heavy(noting(log, "ordered", seconds=0.02, fails=3.0))
  jax.block_until_ready(program(0.0, MATRIX))
  for value in (1.0, 3.0, 2.0, 4.0):
    program(value, MATRIX)
  with contextlib.suppress(jax.errors.JaxRuntimeError):
    jax.effects_barrier()
  assert log == [0.0, 1.0, 2.0, 4.0]


@one_device
def test_ordered_calls_in_loops_and_branches_and_with_donated_operands() -> None:
  log: list[float] = []
  gate = noting(log, "ordered")

  def f(x: jax.Array) -> tuple[jax.Array, jax.Array]:
    x = jax.lax.fori_loop(0, 3, lambda i, c: gate(c) + 1, x)
    x = jax.lax.cond(x > 4, lambda c: gate(c) + 1, lambda c: gate(c) - 1, x)
    return x, gate(x)

  program = jax.jit(f, donate_argnums=0)
  a, b = program(jnp.float32(0))
  c, d = program(a)
  jax.effects_barrier()
  assert log == [0, 1, 2, 3, 2, 2, 3, 4, 5, 6]
  assert (float(b), float(c), float(d)) == (2, 6, 6)


def test_ordered_gates_and_jaxs_ordered_callbacks_in_one_program() -> None:
  log: list[float] = []
  gate = noting(log, "ordered")

  @jax.jit
  def program(x: jax.Array) -> jax.Array:
    x = gate(x)
    return x + io_callback(lambda v: v, jax.ShapeDtypeStruct((), np.float32), x, ordered=True)

  assert [float(program(float(i))) for i in range(3)] == [0, 2, 4]
  jax.effects_barrier()
  assert log == [0, 1, 2]


@one_device
def test_compiling_does_not_change_the_lowered_program() -> None:
  log: list[float] = []
  lowered = jax.jit(noting(log, "ordered"), donate_argnums=0).lower(jnp.float32(1))
  before = lowered.as_text()
  first, second = lowered.compile(), lowered.compile()
  assert lowered.as_text() == before
  assert [float(f(jnp.float32(2))) for f in (first, second)] == [2, 2]


@pytest.mark.parametrize("effect", EFFECTS)
def test_the_option_goes_back_to_jaxs_dispatch(effect: str) -> None:
  log: list[float] = []
  program = jax.jit(noting(log, effect))
  with cg.config(fast_dispatch=False):
    program(1.0)
    with python_dispatches() as seen:
      program(2.0), program(3.0)
      jax.effects_barrier()
    assert len(seen) == 2
  program(4.0), program(5.0)
  with python_dispatches() as seen:
    program(6.0)
    jax.effects_barrier()
  assert seen == []
  assert log == [1, 2, 3, 4, 5, 6]


def test_little_is_kept_for_calls_that_nobody_waits_for() -> None:
  gate = cg.gate(lambda x: x, out=lambda x: x, effect="io")
  programs = [jax.jit(lambda x, i=i: gate(x) + i) for i in range(20)]
  cg.barrier()
  for _ in range(100):
    for program in programs:
      program(1.0)
  assert len(cpp_path._signs) == len(programs)
  cg.barrier()
  assert not cpp_path.pending()


@pytest.mark.skipif(jax.local_device_count() == 1, reason="this is it")
def test_on_one_device() -> None:
  done = run(
    Module("pytest"), "-q", "-p", "no:cacheprovider", __file__,
    environment={"CALLGATE_TEST_DEVICES": "1"},
  )  # fmt: skip
  assert done.returncode == 0, done.stdout + done.stderr
  assert re.search(r"\b4\d passed, 1 skipped", done.stdout), done.stdout


AHEAD = """
import jax, jax.numpy as jnp
import callgate as cg

def follow(x):  # programs without a gate, which wait for the one with it
  for _ in range(40):
    x = jnp.tanh(x)
  return x

io, pure = {"effect": "io"}, {"effect": "pure"}
for options, after in (
  (io, None), (io | {"arrays": "jax"}, None), (io | {"run_on": "own"}, follow),
  ({"effect": "ordered"}, None), (pure | {"arrays": "jax"}, None),
  (pure | {"arrays": "jax"}, follow), (pure | {"run_on": "own"}, None),
  (pure | {"run_on": cg.thread("one")}, follow),
):
  gate = cg.gate(lambda x: jnp.sin(jnp.asarray(x)), like=lambda x: x, **options)

  @jax.jit
  def step(x):
    return gate(x + 0 * jnp.tanh(jnp.arange(65536.0) + x.sum()).sum())  # too much to run at once

  x = jnp.ones(4)
  for _ in range(100 if after is None else 10):
    x = step(x)  # XLA has 32 programs under way, and those of the gate's function
    x = x if after is None else after(x)
  assert 0 < x[0] < 0.2, x
"""


def test_a_loop_runs_ahead_of_gates_whose_functions_run_programs() -> None:
  assert output_of(AHEAD, timeout=100) == ""


FORKS = """
import os, time, warnings
warnings.simplefilter("ignore")
import jax, jax.numpy as jnp
import callgate as cg

def slow(x):
  time.sleep(0.2)
  return x
gate = cg.gate(slow, out=lambda x: x, effect="io")
program = jax.jit(lambda x, m: gate(x) + 0 * (m @ m)[0, 0])
m = jnp.zeros((300, 300))
for i in range(4):
  program(1.0, m)
child = os.fork()
if child == 0:
  jax.effects_barrier()
  os._exit(3)
print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
cg.barrier()
"""


def test_a_forks_child_waits_for_nothing_of_its_parents() -> None:
  assert output_of(FORKS, timeout=60).strip() == "3"


SEVERAL = """
import jax, jax.numpy as jnp, numpy as np, time, threading
import callgate as cg

log = []
def note(x):
  time.sleep(0.01)
  log.append(float(x.ravel()[0]))
  return x
gate = cg.gate(note, out=lambda x: x, effect="ordered")
program = jax.jit(gate)
devices = jax.devices()
assert len(devices) == 4
xs = [jax.device_put(jnp.float32(i), d) for i, d in enumerate(devices)]
for _ in range(3):
  for x in xs:
    program(x)
mesh = jax.sharding.Mesh(np.array(devices), "d")
split = jax.device_put(jnp.arange(4.0), jax.NamedSharding(mesh, jax.P("d")))
whole = jax.jit(lambda x: gate(x) + 1)
whole(split), program(xs[1]), whole(split), program(xs[2])
jax.effects_barrier()
print(log)
"""


def test_on_several_devices_the_order_is_kept_by_jaxs_tokens() -> None:
  flags = "--xla_force_host_platform_device_count=4"
  printed = output_of(SEVERAL, XLA_FLAGS=flags)
  assert printed.strip() == str([0.0, 1.0, 2.0, 3.0] * 3 + [0.0, 1.0, 0.0, 2.0])
