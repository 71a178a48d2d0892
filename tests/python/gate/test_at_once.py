# SPDX-License-Identifier: Apache-2.0
"""Gates on several threads: calls in turn, lanes at once, views and counts.

With `CALLGATE_SOAK=1` the threads make ten million calls.
"""

from __future__ import annotations

import os
import threading
import time
import warnings
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
import pytest
from free_threaded import FREE
from interpreters import output_of, printed_by
from property_checks import is_soak

import callgate as cg
from callgate._gate import turns

without_gil = pytest.mark.skipif(not FREE, reason="Python runs with the GIL")
two_cores = pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="there is one CPU")
THREADS = 4
CALLS = 10_000_000 // THREADS if is_soak() else 500
X = np.arange(3, dtype=np.float32)


def on_threads(work: Callable[[int], None], count: int = THREADS) -> None:
  """Runs `work(number)` on threads that begin together, and raises what one of them raised."""
  begin, raised = threading.Barrier(count), list[BaseException]()

  def run(number: int) -> None:
    begin.wait(30)
    try:
      work(number)
    except BaseException as error:  # noqa: BLE001 - the caller raises it
      raised.append(error)

  threads = [threading.Thread(target=run, args=(number,)) for number in range(count)]
  for thread in threads:
    thread.start()
  for thread in threads:
    thread.join()
  if raised:
    raise raised[0]


class Overlap:
  """A function that counts its calls, and how many run at the same time."""

  def __init__(self) -> None:
    self.lock, self.running, self.most, self.calls = threading.Lock(), 0, 0, 0

  def __call__(self, x: Any) -> Any:
    with self.lock:
      self.calls += 1
      self.running += 1
      self.most = max(self.most, self.running)
    time.sleep(0.002)
    with self.lock:
      self.running -= 1
    return x


# -- the import ---
@without_gil
def test_the_package_leaves_the_gil_off() -> None:
  source = """
    import sys, threading
    import callgate as cg, jax, numpy as np
    for name in cg.__all__:
      getattr(cg, name, None)
    assert jax.jit(cg.gate(lambda x: x, out=lambda x: x))(np.float32(1)) == 1
    print(sys._is_gil_enabled())
  """
  assert printed_by(source, new=True).split() == ["False"]


# -- serial= ---
@pytest.mark.parametrize("effect", ["pure", "io", "ordered"])
def test_calls_of_a_serial_gate_take_turns(effect: Any) -> None:
  body = Overlap()
  gate = cg.gate(body, out=lambda x: x, effect=effect, serial=True)

  def work(number: int) -> None:
    program = jax.jit(lambda x: gate(x) + number)
    for _ in range(5):
      assert float(program(np.float32(1))) == 1 + number

  on_threads(work)
  assert (body.most, body.calls) == (1, 5 * THREADS)


def test_calls_of_a_pure_gate_overlap() -> None:
  body, meet = Overlap(), threading.Barrier(2)

  def function(x: Any) -> Any:
    meet.wait(30)  # raises if the other call does not come meanwhile
    return body(x)

  gate = cg.gate(function, out=lambda x: x)
  on_threads(lambda number: jax.block_until_ready(jax.jit(lambda x: gate(x) + number)(X)), 2)
  assert body.calls == 2


@pytest.mark.parametrize("serial", [None, False])
def test_calls_with_an_effect_take_turns_by_default_without_the_gil(serial: Any) -> None:
  body = Overlap()
  gate = cg.gate(body, out=lambda x: x, effect="io", serial=serial)
  on_threads(lambda number: jax.block_until_ready(jax.jit(lambda x: gate(x) + number)(X)))
  assert body.calls == THREADS
  assert body.most == 1 or not FREE or serial is False


def test_a_serial_gate_is_called_within_its_own_call() -> None:
  @cg.gate(out=lambda x: x, serial=True)
  def down(x: Any) -> Any:
    return x if x <= 0 else np.asarray(down(x - 1))

  with cg.config(engine="jax"):
    assert float(down(np.float32(3))) == 0


def test_started_calls_of_a_serial_gate_take_turns() -> None:
  body = Overlap()
  gate = cg.gate(body, out=lambda x: x, serial=True)

  @jax.jit
  def program(x: Any) -> Any:
    return sum(ticket.result() for ticket in [gate.start(x + i) for i in range(4)])

  assert float(program(np.float32(1))) == 1 + 2 + 3 + 4
  assert (body.most, body.calls) == (1, 4)


def test_a_forked_child_has_turns_of_its_own() -> None:
  source = """
    import os, threading, time
    import callgate as cg, jax, numpy as np
    held, go = threading.Event(), threading.Event()

    def function(x):
      held.set()
      go.wait(30)
      return x

    gate = cg.gate(function, out=lambda x: x, serial=True)
    with cg.config(engine="jax"):
      thread = threading.Thread(target=lambda: gate(np.float32(1)))
      thread.start()
      held.wait(30)
      child = os.fork()
      if child == 0:
        go.set()
        assert gate._core.on_host(np.float32(2)) == 2
        os._exit(7)
      print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
      go.set()
      thread.join()
  """
  with warnings.catch_warnings():
    assert output_of(source).split() == ["7"]


# -- parallel= ---
@without_gil
@two_cores
def test_lanes_of_a_parallel_gate_run_at_once() -> None:
  meet = threading.Barrier(2)

  def function(x: Any) -> Any:
    if x < 2:
      meet.wait(30)  # raises if the other lane does not come meanwhile
    return x * 2

  # Two threads share four parts a thread: lanes 0 and 8 of 16 are of two parts.
  gate = cg.gate(function, out=lambda x: x, parallel=True)
  values = np.full(16, 5, np.float32)
  values[[0, 8]] = 1
  np.testing.assert_array_equal(jax.jit(jax.vmap(gate))(values), 2 * values)


@pytest.fixture
def parallel(monkeypatch: pytest.MonkeyPatch) -> Any:
  """Makes a parallel gate, without the warning of a Python with the GIL."""
  monkeypatch.setattr(turns, "warn_of_gil", lambda: None)
  return lambda function, **options: cg.gate(
    function, out=lambda x: x, parallel=True, name=options.pop("name", None), **options
  )


def test_a_parallel_gate_has_the_values_and_counts_of_another(parallel: Any) -> None:
  gate = parallel(lambda x: np.sin(x) + 1, name="parallel sine")
  x = np.random.default_rng(0).random((7, 5, 3), np.float32)
  program = jax.jit(jax.vmap(jax.vmap(gate), in_axes=1, out_axes=1))
  np.testing.assert_allclose(program(x), np.sin(x) + 1, rtol=1e-6)
  assert gate.stats()["calls"] == 35
  assert program(x[:0]).shape == (0, 5, 3)


def test_the_first_lane_that_raises_is_the_error(parallel: Any) -> None:
  def function(x: Any) -> Any:
    if x in (20, 41):
      raise ValueError(f"at {x}")
    return x

  program = jax.jit(jax.vmap(parallel(function, name="raising lanes")))
  for _ in range(20):
    with pytest.raises(ValueError, match="at 20") as caught, cg.errors():
      jax.block_until_ready(program(np.arange(64.0, dtype=np.float32)))
    assert any("lane 20" in note for note in caught.value.__notes__)
  np.testing.assert_array_equal(program(np.zeros(64, np.float32)), np.zeros(64))


def test_lanes_on_shards_and_in_recordings(parallel: Any, tmp_path: Any) -> None:
  gate = parallel(lambda x: x + 1, name="recorded lanes")
  program = jax.jit(jax.vmap(gate))
  x = np.arange(16, dtype=np.float32)
  mesh = jax.make_mesh((4,), ("d",), axis_types=(jax.sharding.AxisType.Auto,))
  placed = jax.device_put(x, jax.NamedSharding(mesh, jax.P("d")))
  np.testing.assert_array_equal(program(placed), x + 1)
  with cg.record(tmp_path / "run.cgr"):
    np.testing.assert_array_equal(program(x), x + 1)
  with cg.replay(tmp_path / "run.cgr") as replayed:
    np.testing.assert_array_equal(program(x), x + 1)
  assert replayed.answered == 16


@pytest.mark.parametrize(
  ("options", "expected"),
  [
    ({"effect": "io"}, "effect='pure', got effect='io'"),
    ({"run_on": "own"}, "run_on='xla', got run_on='own'"),
    ({"vmap": "whole"}, "vmap='each', got vmap='whole'"),
    ({"serial": True}, "serial=None, got serial=True"),
    ({"timeout": 1.0}, "timeout=None, got timeout=1.0"),
    ({"collective": True}, "collective=False, got collective=True"),
  ],
)
def test_options_that_exclude_parallel_lanes(options: Any, expected: str) -> None:
  with pytest.raises(cg.GateDefinitionError, match=f"parallel=True: expected {expected}"):
    cg.gate(lambda x: x, out=lambda x: x, parallel=True, **options)


@pytest.mark.skipif(FREE, reason="Python runs without the GIL")
def test_with_the_gil_a_warning_says_once_that_lanes_take_turns() -> None:
  turns.warn_of_gil.cache_clear()
  with pytest.warns(UserWarning, match="parallel=True has no effect.*GIL"):
    gate = cg.gate(lambda x: x, out=lambda x: x, parallel=True)
  cg.gate(lambda x: x, out=lambda x: x, parallel=True)  # warnings are errors in tests
  np.testing.assert_array_equal(jax.jit(jax.vmap(gate))(X), X)


# -- views and counts ---
@pytest.mark.parametrize("style", ["return", "inplace"])
def test_calls_on_threads_have_their_own_views(style: Any) -> None:
  """One call site, many threads: values and counts are exact, and no view counts as escaped."""

  def doubled(x: Any) -> Any:
    return x * 2

  def double(out: Any, x: Any) -> None:
    np.multiply(x, 2, out=out)

  gate = cg.gate(
    {"return": doubled, "inplace": double}[style], out=lambda x: x, style=style,
    name=f"at once {style}",
  )  # fmt: skip
  program = jax.jit(lambda x: gate(x) + 1)
  program(X)

  def work(number: int) -> None:
    x = np.full(3, number, np.float32)
    for _ in range(CALLS):
      assert np.asarray(program(x))[2] == 2 * number + 1

  before = gate.stats()["calls"]
  on_threads(work)
  assert gate.stats()["calls"] - before == THREADS * CALLS
  assert gate.stats()["errors"] == 0


def test_each_view_that_a_thread_keeps_is_found() -> None:
  kept: list[list[Any]] = [[] for _ in range(THREADS)]

  @cg.gate(out=lambda x: x)
  def keeps(x: Any) -> Any:
    number = int(x[0])
    if x[1] == 1:
      kept[number].append(x)
    return x.copy()

  program = jax.jit(keeps)
  found = [0] * THREADS

  def work(number: int) -> None:
    for i in range(20):
      try:
        with cg.errors():
          jax.block_until_ready(program(np.array([number, i == 7, 0], np.float32)))
      except cg.EscapedViewError:
        found[number] += 1
        kept[number].clear()

  on_threads(work)
  assert found == [1] * THREADS


def test_a_tape_gets_the_calls_of_all_threads(tmp_path: Any) -> None:
  gate = cg.gate(lambda x: x * 2, out=lambda x: x, name="taped at once")
  programs = [jax.jit(lambda x, i=i: gate(x) + i) for i in range(THREADS)]

  def work(number: int) -> None:
    for i in range(20):
      assert float(programs[number](np.float32(i))) == 2 * i + number

  with cg.record(tmp_path / "run.cgr"):
    on_threads(work)
  with cg.replay(tmp_path / "run.cgr") as replayed:
    on_threads(work)
  assert replayed.answered == 20 * THREADS


def test_objects_of_programs_on_threads_are_freed() -> None:
  boxes = cg.hold(lambda x: [float(x)], name="boxes at once")
  number_of = jax.ShapeDtypeStruct((), np.float32)

  @jax.jit
  def program(x: Any) -> Any:
    return cg.use(lambda box: np.float32(box[0]), boxes(x), out=number_of) + 1

  def work(number: int) -> None:
    for i in range(60):
      assert float(program(np.float32(number * 100 + i))) == number * 100 + i + 1

  on_threads(work)
  assert "boxes at once" not in cg.held()
