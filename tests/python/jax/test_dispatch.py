# SPDX-License-Identifier: Apache-2.0
"""Entries of callgate._jax about dispatch, profiles and many processes do what they say."""

from __future__ import annotations

import contextlib
import gc
import sys
import threading
import weakref
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from interpreters import output_of
from jax.interpreters import mlir
from meanwhile import Meanwhile

import callgate as cg
from callgate import _part
from callgate._jax import (
  cpp_path,
  dispatch,
  distributed,
  early,
  execution,
  profiling,
  running,
  tracing,
)
from callgate._part import Wait

X = np.arange(4, dtype=np.float32)


class Held:
  """A gate that waits in its call; its program, which has run once, is on JAX's C++ path."""

  def __init__(self, effect: Any) -> None:
    self.begun, self.go = threading.Event(), threading.Event()
    self.go.set()
    gate = cg.gate(self.call, out=lambda x: x, effect=effect, thread="own")
    self.program = jax.jit(lambda x: gate(x @ x.T).sum())
    self.x = jnp.ones((300, 300))
    for _ in range(2):
      self.program(self.x).block_until_ready()
    jax.effects_barrier()

  def call(self, x: np.ndarray) -> np.ndarray:
    self.begun.set()
    assert self.go.wait(60)
    if self.fails:
      raise KeyError("refused")
    return x

  fails = False

  def start(self) -> Any:
    self.begun.clear()
    self.go.clear()
    out = self.program(self.x)
    assert self.begun.wait(60)
    return out


# -- waiting ---------------------------------------------------------------------------------------
@pytest.mark.parametrize("effect", ["io", "ordered"])
def test_programs_with_effects_are_waited_for(effect: Any) -> None:
  held = Held(effect)
  assert Wait(60).poll(dispatch.programs_have_ended)  # those of earlier tests, too
  assert cpp_path.have_ended()
  held.start()
  assert not dispatch.programs_have_ended()
  assert not dispatch.wait_for_effects(Wait(0.01))
  own = running.own_programs()
  assert own
  assert set(map(id, cpp_path.own_signs())) <= set(map(id, own))
  assert cpp_path.pending() == bool(cpp_path.own_signs())
  watched: list[int] = []
  threading.Timer(0.05, held.go.set).start()
  assert dispatch.wait_for_effects(Wait(60, look=lambda: watched.append(1)))
  running.wait_for(own)
  dispatch.effects_barrier_alone()
  assert not cpp_path.own_signs()
  assert dispatch.wait_for_effects(Wait(None))


def test_nobody_waits_for_a_forgotten_program() -> None:
  held = Held("io")
  for forget in (cpp_path.forget, dispatch.forget_effects, cpp_path.after_fork):
    out = held.start()
    forget()
    assert not cpp_path.pending()
    jax.effects_barrier()
    held.go.set()
    out.block_until_ready()


def test_a_failure_is_taken_once_by_the_thread_that_dispatched() -> None:
  held = Held("io")
  held.start()
  held.fails = True
  held.go.set()
  cpp_path.wait()
  seen: list[Any] = []
  other = threading.Thread(target=lambda: seen.append(cpp_path.take_failures()))
  other.start()
  other.join()
  assert ["refused" in str(error) for error in cpp_path.take_failures()] == [True]
  assert [cpp_path.take_failures(), *seen] == [[], []]
  cpp_path.wait(threading.get_ident())


def test_the_barrier_calls_what_comes_after_it_unless_it_is_alone() -> None:
  calls: list[str] = []
  note = lambda: calls.append("after")
  _part.on("effects barrier", note)
  try:
    dispatch.effects_barrier_alone()
    assert calls == []
    jax.effects_barrier()
  finally:
    _part.off("effects barrier", note)
  assert calls == ["after"]


def test_programs_that_ask_for_it_have_their_dispatches_told() -> None:
  held, told = Held("io"), list[bool]()
  _part.on("program dispatched", told.append)
  try:
    held.program(held.x).block_until_ready()
  finally:
    _part.off("program dispatched", told.append)
  held.program(held.x).block_until_ready()
  assert told == [True]


# -- programs --------------------------------------------------------------------------------------
def test_programs_call_what_they_keep_before_each_execution() -> None:
  source = """
    import jax, numpy as np, jax.numpy as jnp
    from jax.interpreters import mlir
    import callgate
    from callgate._jax import execution, lowering, tracing

    class Asked(execution.Watcher):
      def before(self, devices):
        print("asked", len(devices))

    class Waits(execution.Watcher):
      waits = True

    p = tracing.Primitive("test asks")
    p.def_abstract_eval(lambda aval: aval)

    def rule(context, x):
      execution.watch(context, Asked())
      execution.watch(context, Waits())
      return [x]

    mlir.register_lowering(p, rule, cacheable=False)
    compiled = jax.jit(lambda x: p.bind(x @ x)).lower(jnp.ones((400, 400))).compile()
    print(execution.is_watched(compiled))
    print(execution.is_watched(jax.jit(jnp.sin).lower(1.0).compile()))
    for _ in range(3):
      print(compiled(jnp.ones((400, 400))).is_ready())
  """
  lines = output_of(source).splitlines()
  assert lines == ["True", "False", *["asked 1", "True"] * 3]


def test_a_stop_learns_the_number_of_an_execution_whose_arguments_were_accepted() -> None:
  source = """
    import jax, numpy as np
    from jax.interpreters import mlir
    import callgate
    from callgate import _callgate
    from callgate._jax import execution, tracing

    class Told(execution.Watcher):
      stop = _callgate.Stop("test stop")

      def before(self, devices):
        print("before")

    run_dispatched = _callgate.run_dispatched

    def told(stops, run, *args, **kwargs):
      print("begins", [stop is Told.stop for stop in stops])
      out = run_dispatched(stops, run, *args, **kwargs)
      print("runs")
      return out

    _callgate.run_dispatched = told
    p = tracing.Primitive("test numbered")
    p.def_abstract_eval(lambda aval: aval)

    def rule(context, x):
      execution.watch(context, Told())
      return [x]

    mlir.register_lowering(p, rule, cacheable=False)
    compiled = jax.jit(p.bind).lower(np.float32(1)).compile()
    for _ in range(2):
      compiled(np.float32(1)).block_until_ready()
    gone = jax.numpy.float32(1)
    gone.delete()
    try:
      compiled(gone)
    except RuntimeError:
      print("refused")
  """
  expected = ["before", "begins [True]", "runs"] * 2
  assert output_of(source).splitlines() == [*expected, "before", "refused"]


def test_a_compiled_program_with_ordered_effects_gets_tokens_from_its_second_call_on() -> None:
  seen: list[float] = []
  gate = cg.gate(lambda x: seen.append(float(x)) or x, out=lambda x: x, effect="ordered")
  compiled = jax.jit(gate).lower(np.float32(0)).compile()
  for i in range(4):
    compiled(np.float32(i))
    for token in dispatch.own_tokens():
      token.block_until_ready()
  dispatch.wait_for_own(gate.effect)
  jax.effects_barrier()
  assert seen == [0, 1, 2, 3]


def test_a_failure_leaves_what_comes_in_order_to_run() -> None:
  def call(x: np.ndarray) -> np.ndarray:
    if x == 1:
      raise KeyError("refused")
    return x

  gate = cg.gate(call, out=lambda x: x, effect="ordered")
  program = jax.jit(gate)
  for forgotten in (False, True):
    with pytest.raises(jax.errors.JaxRuntimeError, match="refused"):
      jax.block_until_ready(program(np.float32(1)))
    if forgotten:
      dispatch.forget_failed_tokens()
    assert program(np.float32(3)) == 3
    with contextlib.suppress(jax.errors.JaxRuntimeError):
      jax.effects_barrier()
    assert dispatch.forget_failed_tokens() is None
    jax.effects_barrier()


def test_objects_that_a_module_keeps_live_as_long_as_the_lowered_program() -> None:
  class Kept:
    pass

  p, kept = tracing.Primitive("test kept"), Kept()
  watch = weakref.ref(kept)
  p.def_abstract_eval(lambda aval: aval)

  def rule(context: Any, x: Any) -> Any:
    if (one := watch()) is not None:
      dispatch.keep_with_program(context, one)
    dispatch.mark_host_callbacks(context)
    return [x]

  mlir.register_lowering(p, rule, cacheable=False)
  lowered = jax.jit(p.bind).lower(X)
  del kept
  gc.collect()
  assert watch() is not None
  np.testing.assert_array_equal(lowered.compile()(X), X)
  del lowered
  jax.clear_caches()
  gc.collect()
  assert watch() is None


def test_a_first_call_that_executes_is_found_in_its_threads_frames() -> None:
  held = Held("io")
  found: list[Any] = []

  def look(x: np.ndarray) -> np.ndarray:
    frames = sys._current_frames()
    found.extend(function for function, _ in dispatch.first_calls(frames.values()))
    return x

  gate = cg.gate(look, out=lambda x: x)

  def outer(x: Any) -> Any:
    return gate(x)

  jax.jit(outer)(np.float32(1)).block_until_ready()
  assert [function.__name__ for function in found] in ([], ["outer"])
  assert dispatch.is_jitted(held.program)
  assert not dispatch.is_jitted(outer)


def test_files_may_be_left_out_of_the_users_code() -> None:
  source = """
    import jax, pathlib, sys, tempfile
    from callgate._jax import dispatch, sources
    folder = pathlib.Path(tempfile.mkdtemp())
    sys.path.insert(0, str(folder))
    for name in ("kept", "left_out"):
      (folder / f"{name}.py").write_text("def twice(x):\\n  return 2 * x\\n")
    dispatch.exclude_from_tracebacks(str(folder / "left_out.py"))
    import kept, left_out
    for module in (kept, left_out):
      line = sources.source_of(jax.make_jaxpr(lambda x: module.twice(x))(1.0).eqns[0])
      print(module.__name__ + ".py" in line)
  """
  assert output_of(source).split() == ["True", "False"]


# -- devices ---------------------------------------------------------------------------------------
def test_devices_and_arrays_of_the_backends_are_told() -> None:
  x = jnp.arange(3.0)
  assert dispatch.has_backend()
  assert any(one is x for one in dispatch.live_arrays())
  assert dispatch.local_devices() == {"cpu": jax.devices("cpu")}
  assert dispatch.cpu_devices("a test") == jax.devices("cpu")
  assert output_of("from callgate._jax import dispatch; print(dispatch.has_backend())") == "False\n"


def test_an_array_is_put_on_a_device_without_a_copy() -> None:
  device = jax.devices()[1]
  put = dispatch.fast_device_put(device)
  value = np.zeros(1024, np.float32)
  sharding = jax.sharding.SingleDeviceSharding(device)
  with jax.transfer_guard("disallow"):
    made = put(jax.typeof(value), sharding, [value])
  assert made.committed
  assert made.device == device
  np.testing.assert_array_equal(made, value)


# -- the profiler, many processes ------------------------------------------------------------------
def test_a_profile_is_told_of_when_it_begins(tmp_path: Any, monkeypatch: Any) -> None:
  from jax._src.lib import _profiler

  begun: list[int] = []
  monkeypatch.setattr(_profiler, "ProfilerSession", _profiler.ProfilerSession)
  profiling.at_start(lambda: begun.append(1))
  assert not profiling.is_running()
  with jax.profiler.trace(str(tmp_path)):
    assert profiling.is_running()
    with profiling.Span("test", number=3):
      pass
  assert (begun, profiling.is_running()) == ([1], False)


def test_processes_share_texts_by_a_coordinator() -> None:
  source = """
    import jax, socket
    from callgate._jax import distributed
    assert distributed.distributed_client() is None
    distributed.after_distributed_start(lambda: print("joined"))
    with socket.socket() as one:
      one.bind(("localhost", 0))
      port = one.getsockname()[1]
    jax.distributed.initialize(f"localhost:{port}", 1, 0)
    print(distributed.distributed_place())
    store = distributed.CommonStore(distributed.distributed_client())
    print(store.put("a/b", "x"), store.put("a/b", "y"), store.put("a/b", "z", overwrite=True))
    print(store.get("a/b"), store.get("none"), store.get("none", 0.01), store.under("a/"))
    store.remove("a/")
    print(store.under("a/"))
  """
  assert output_of(source).splitlines() == [
    "joined",
    "(0, 1)",
    "True False True",
    "z None None {'b': 'z'}",
    "{}",
  ]
  assert distributed.distributed_client() is None


def test_callgates_functions_are_in_jaxs_dispatch() -> None:
  """Their effects are tested above; `import callgate` has called them once."""
  for start in (
    cpp_path.start,
    cpp_path.note_loaded,
    cpp_path.run,
    cpp_path.make_cpp_call,
    cpp_path.RunsPrograms,
    dispatch.remember_effects,
    early.adopt,
    execution.start,
    dispatch.run_after_failures,
    dispatch.forget_waiters,
  ):
    assert callable(start)


def test_two_users_of_a_program_may_go_at_once() -> None:
  one, other = (weakref.ref(type("User", (), {})) for _ in range(2))
  meanwhile = Meanwhile(lambda: cpp_path._unload(-1, other))

  class Users(set[Any]):
    def __len__(self) -> int:
      meanwhile()
      return super().__len__()

  cpp_path._programs[-1] = program = cpp_path._Program(None, True, False)
  program.users = Users((one, other))
  cpp_path._unload(-1, one)
  meanwhile.end()
  assert -1 not in cpp_path._programs
