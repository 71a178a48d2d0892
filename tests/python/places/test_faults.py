# SPDX-License-Identifier: Apache-2.0
"""Workers that end, hang, can't start or raise; and what is left when the parent ends."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import textwrap
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import interpreters
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import worker_functions

import callgate as cg
from callgate._core.public import core
from callgate._places.remote import Description, WorkerGate

INT = jax.ShapeDtypeStruct((), np.int32)


def error_of(program: Any, *args: Any) -> BaseException:
  with pytest.raises(BaseException) as caught, cg.errors():
    jax.block_until_ready(program(*args))
  return caught.value


def gone(pid: int) -> bool:
  """True if a process has ended, and its parent knows."""
  try:
    with open(f"/proc/{pid}/stat", encoding="utf-8") as file:
      return file.read().rsplit(")", 1)[1].split()[0] == "Z"
  except FileNotFoundError:
    return True


def wait_until(holds: Callable[[], bool], seconds: float = 10) -> None:
  end = time.monotonic() + seconds
  while not holds():
    assert time.monotonic() < end, "it took too long"
    time.sleep(0.02)


# -- exceptions
def test_the_caller_gets_the_exception(two: cg.Workers, engine: str) -> None:
  def fail(x: Any) -> Any:
    raise KeyError("name", 3)

  error = error_of(jax.jit(cg.gate(fail, out=lambda x: x, run_on=two)), 1.0)
  assert type(error) is KeyError
  assert error.args == ("name", 3)
  if engine == "callgate":
    assert "in fail" in str(error.__cause__)
    assert 'raise KeyError("name", 3)' in str(error.__cause__)
  assert sum("callgate: raised in gate" in note for note in error.__notes__) == 1


def test_the_first_lane_that_fails_is_told(two: cg.Workers, engine: str) -> None:
  def fail(x: Any) -> Any:
    if x >= 5:
      raise ValueError(f"lane {int(x)}")
    return x

  program = jax.jit(jax.vmap(cg.gate(fail, out=lambda x: x, run_on=two)))
  assert str(error_of(program, jnp.arange(40.0))) == "lane 5"
  np.testing.assert_array_equal(program(jnp.zeros(3)), jnp.zeros(3))


def test_an_exception_that_does_not_pickle_is_told_in_words(two: cg.Workers) -> None:
  def fail(x: Any) -> Any:
    raise worker_functions.Unpicklable(1, 2)

  error = error_of(jax.jit(cg.gate(fail, out=lambda x: x, run_on=two)), 1.0)
  assert isinstance(error, cg.WorkerError)
  assert "Unpicklable" in str(error)
  assert "1 and 2" in str(error)


@pytest.mark.parametrize(
  ("result", "said"),
  [
    (lambda x: x[:1], "expected float32[3], got float32[1]"),
    (lambda x: x.astype(np.float64), "expected float32[3], got float64[3]"),
    (lambda x: "text", "expected float32[3], got "),
  ],
)
def test_results_are_checked_as_elsewhere(
  result: Any, said: str, two: cg.Workers, engine: str
) -> None:
  error = error_of(jax.jit(cg.gate(result, out=lambda x: x, run_on=two)), jnp.zeros(3))
  assert type(error) is not TypeError
  assert isinstance(error, TypeError)
  assert said in str(error)


def test_a_structure_that_is_wrong_is_told(two: cg.Workers, engine: str) -> None:
  gate = cg.gate(lambda x: {"b": x}, out=lambda x: {"a": x}, run_on=two)
  assert "expected results of structure" in str(error_of(jax.jit(gate), 1.0))


def test_jax_tells_the_traceback_of_the_worker(two: cg.Workers) -> None:
  def fail(x: Any) -> Any:
    raise ValueError("in the worker")

  with pytest.raises((ValueError, jax.errors.JaxRuntimeError), match="in the worker") as caught:
    jax.block_until_ready(jax.jit(cg.gate(fail, out=lambda x: x, run_on=two))(1.0))
  assert "in fail" in str(caught.value) or "in fail" in str(caught.value.__cause__)


def test_several_devices_get_poisoned_results(two: cg.Workers) -> None:
  def fail(x: Any) -> Any:
    raise ValueError("on a device")

  sharding = jax.NamedSharding(jax.make_mesh((2,), ("d",)), jax.P("d"))
  gate = cg.gate(fail, out=lambda x: x, run_on=two, sharding="shard")
  got = jax.jit(gate, out_shardings=sharding)(jax.device_put(jnp.ones(2), sharding))
  assert np.isnan(np.asarray(got)).all()
  with pytest.raises(ValueError, match="on a device"):
    cg.barrier()


# -- what can't travel
def test_a_closure_that_does_not_pickle_is_named() -> None:
  lock = threading.Lock()

  def locked(x: Any) -> Any:
    with lock:
      return x

  gate = cg.gate(locked, out=lambda x: x, run_on="processes")
  with pytest.raises(TypeError, match=r"closure variable 'lock' \(a lock\) can't be pickled"):
    jax.jit(gate).lower(1.0)


def test_an_open_file_is_named_and_no_copy_goes() -> None:
  with open(__file__, encoding="utf-8") as file:
    gate = cg.gate(lambda x: file.readline() and x, out=lambda x: x, run_on="processes")
    message = r"variable 'file' \(a TextIOWrapper\) can't be pickled: .*open file .*test_faults"
    with pytest.raises(TypeError, match=message):
      jax.jit(gate).lower(1.0)


def test_a_module_that_the_worker_lacks_is_an_import_error(two: cg.Workers) -> None:
  def load(x: Any) -> Any:
    import missing_in_workers  # pyright: ignore

    return missing_in_workers.f(x)

  error = error_of(jax.jit(cg.gate(load, out=lambda x: x, run_on=two)), 1.0)
  assert type(error) is ModuleNotFoundError
  assert "missing_in_workers" in str(error)


def test_a_function_whose_module_fails_there_is_told(tmp_path: Any) -> None:
  (tmp_path / "only_here.py").write_text(
    "import os\nif 'CALLGATE_WORKER' in os.environ: raise ImportError('not in workers')\n"
    "def f(x): return x\n"
  )
  sys.path.insert(0, str(tmp_path))
  try:
    import only_here  # pyright: ignore

    with cg.workers(1) as workers:
      error = error_of(jax.jit(cg.gate(only_here.f, out=lambda x: x, run_on=workers)), 1.0)
  finally:
    sys.path.remove(str(tmp_path))
  assert type(error) is ImportError
  assert str(error) == "not in workers"
  assert any("could not load the function" in note for note in error.__notes__)


# -- ends of workers
@pytest.mark.parametrize(
  ("how", "said"),
  [
    (signal.SIGSEGV, "ended by SIGSEGV"),
    (signal.SIGKILL, "ended by SIGKILL, probably by the system because memory ran out"),
    (0 - 255, "ended with exit code 255"),
  ],
)
def test_a_worker_that_ends_is_told_and_replaced(how: int, said: str, two: cg.Workers) -> None:
  die = jax.jit(cg.gate(worker_functions.die, out=lambda x: x, run_on=two))
  where = jax.jit(cg.gate(worker_functions.pid, out=INT, run_on=two))
  before = two.replaced
  error = error_of(die, float(how))
  assert isinstance(error, cg.WorkerError)
  assert said in str(error)
  assert "called with (float32[])" in str(error)
  assert "last words" in error.stderr
  assert "last words" in str(error)
  assert error.worker in (0, 1)
  assert f"worker {error.worker} of 2 (process {error.pid})" in str(error)
  assert (error.exit_code is None) == (how > 0)
  assert error.signal == (signal.Signals(how).name if how > 0 else "")
  assert int(where(1.0)) != error.pid
  assert two.replaced == before + 1
  wait_until(lambda: len(two.pids) == 2)


def test_lanes_of_a_worker_that_ended_run_again(two: cg.Workers, tmp_path: Any) -> None:
  mark = tmp_path / "died"

  def once(x: Any) -> Any:
    if x == 7 and not mark.exists():
      mark.touch()
      os._exit(1)
    return 2 * x

  program = jax.jit(jax.vmap(cg.gate(once, out=lambda x: x, run_on=two, retries=1)))
  with cg.errors():
    np.testing.assert_array_equal(program(jnp.arange(20.0)), 2 * jnp.arange(20.0))
  assert mark.exists()


def test_retries_come_to_an_end(two: cg.Workers) -> None:
  die = cg.gate(worker_functions.die, out=lambda x: x, run_on=two, retries=2)
  before = two.replaced
  assert isinstance(error_of(jax.jit(die), -1.0), cg.WorkerError)
  assert two.replaced == before + 3


def test_effects_do_not_run_again(two: cg.Workers) -> None:
  with pytest.raises(cg.GateDefinitionError, match="expected effect='pure', got effect='io'"):
    cg.gate(worker_functions.die, effect="io", run_on=two, retries=1)


def test_a_worker_that_dies_between_calls_is_replaced(two: cg.Workers) -> None:
  where = jax.jit(cg.gate(worker_functions.pid, out=INT, run_on=two))
  jax.block_until_ready(where(1.0))
  wait_until(lambda: len(two.pids) == 2)
  old = two.pids
  for pid in old:
    os.kill(pid, signal.SIGKILL)
  with cg.errors():
    assert int(where(1.0)) not in old


def test_a_worker_whose_files_a_function_has_closed_is_replaced(two: cg.Workers) -> None:
  def close_all(x: Any) -> Any:
    os.closerange(3, 1000)
    return x

  before = set(two.pids)
  assert jax.jit(cg.gate(close_all, out=lambda x: x, run_on=two))(2.0) == 2
  wait_until(lambda: len(set(two.pids) - before) == 1)
  program = jax.jit(jax.vmap(cg.gate(lambda x: x + 1, out=lambda x: x, run_on=two)))
  np.testing.assert_array_equal(program(jnp.arange(20.0)), np.arange(20.0) + 1)


def test_a_call_that_hangs_is_ended(two: cg.Workers) -> None:
  sleep = jax.jit(cg.gate(worker_functions.sleep, out=lambda x: x, run_on=two, timeout=0.3))
  assert sleep(0.0) == 0
  begin = time.perf_counter()
  error = error_of(sleep, 60.0)
  assert time.perf_counter() - begin < 5
  assert isinstance(error, cg.GateTimeoutError)
  assert "longer than its timeout, 0.3 s" in str(error)
  assert "in sleep" in str(error)  # where it stood
  assert sleep(0.0) == 0


def test_a_worker_that_can_not_start_is_told() -> None:
  def begin() -> None:
    raise LookupError("no licence")

  workers = cg.workers(2, initializer=begin)
  gate = jax.jit(cg.gate(lambda x: x, out=lambda x: x, run_on=workers))
  error = error_of(gate, 1.0)
  assert type(error) is LookupError
  assert any("could not start" in note for note in error.__notes__)
  assert type(error_of(gate, 1.0)) is LookupError  # tried again
  workers.close()


def test_a_worker_that_ends_while_it_starts_is_told() -> None:
  def begin() -> None:
    print("no room", file=sys.stderr, flush=True)
    os._exit(5)

  with cg.workers(1, initializer=begin) as workers:
    error = error_of(jax.jit(cg.gate(lambda x: x, out=lambda x: x, run_on=workers)), 1.0)
  assert isinstance(error, cg.WorkerError)
  assert "could not start: it ended with exit code 5" in str(error)
  assert "no room" in error.stderr


# -- ends of pools and of the parent
def test_the_child_of_a_function_that_forks_does_not_answer() -> None:
  """It ends with 1 if it raises (for an odd number), else with 0."""

  def fork(x: Any) -> Any:
    import os
    import warnings

    warnings.simplefilter("ignore")
    if (child := os.fork()) == 0:
      if x % 2:
        raise RuntimeError("the child's")
      return x - 1
    return x + os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])

  with cg.workers(1) as workers:
    gate = cg.gate(fork, out=jax.ShapeDtypeStruct((), np.float32), run_on=workers)
    assert [float(gate(x)) for x in (10.0, 20.0, 11.0, 21.0)] == [10, 20, 12, 22]
    assert workers.replaced == 0


def test_a_timeout_before_the_function_is_loaded_tells_the_time_that_loading_has() -> None:
  workers = cg.workers(2)
  remote = WorkerGate(
    "gate 'slow'", Description("slow", len, "return", "numpy", False, ()), workers, 0.5
  )
  what = {"kind": 4, "text": ": it had not", "raised": b"", "worker": 1, "pid": 7, "code": 0}
  error = remote.failed({**what, "signal": 9, "said": b"", "arguments": "f32[]"})
  assert isinstance(error, cg.GateTimeoutError)
  expected = "worker 1 of 2 (process 7) had not loaded the function after 30 s, and was killed"
  assert str(error) == f"gate 'slow' called with f32[]: {expected}"


def test_close_ends_all_processes_and_further_calls() -> None:
  workers = cg.workers(2)
  where = jax.jit(cg.gate(worker_functions.pid, out=INT, run_on=workers))
  jax.block_until_ready(where(1.0))
  pids = workers.pids
  assert len(pids) == 2
  workers.close()
  assert all(map(gone, pids))
  workers.close()
  error = error_of(where, 1.0)
  assert isinstance(error, cg.WorkerError)
  assert "closed; call them before close()" in str(error)


def test_close_ends_what_runs() -> None:
  workers = cg.workers(1)
  sleep = jax.jit(cg.gate(worker_functions.sleep, out=lambda x: x, run_on=workers))
  jax.block_until_ready(sleep(0.0))
  errors: list[BaseException] = []
  thread = threading.Thread(target=lambda: errors.append(error_of(sleep, 100.0)))
  thread.start()
  time.sleep(0.3)
  core(workers).end(0.2)
  thread.join(10)
  assert isinstance(errors[0], cg.WorkerError)


PROGRAM = """
import os, sys, time
import jax
import callgate as cg
workers = cg.workers({count})
double = jax.jit(cg.gate(lambda x: 2 * x, out=lambda x: x, run_on=workers))
sleep = jax.jit(cg.gate(lambda x: (time.sleep(float(x)), x)[1], out=lambda x: x, run_on=workers))
def ready():
  assert double(1.0) == 2
  while len(workers.pids) < {count}: time.sleep(0.01)
  print(*workers.pids, flush=True)
ready()
"""


@contextlib.contextmanager
def running(code: str, count: int = 1) -> Iterator[tuple[interpreters.Process, list[int]]]:
  """A process of the program, then `code`, and the workers that it has."""
  text = PROGRAM.format(count=count) + textwrap.dedent(code)
  process = interpreters.start(text, environment={"JAX_PLATFORMS": "cpu"})
  try:
    assert process.stdout is not None
    pids = [int(pid) for pid in process.stdout.readline().split()]
    assert len(pids) == count
    yield process, pids
  finally:
    process.kill()
    process.communicate()


def shared_memory() -> set[str]:
  """The named memory, but for semaphores: workers use none, other tests make theirs meanwhile."""
  return {name for name in os.listdir("/dev/shm") if not name.startswith("sem.")}


@pytest.mark.parametrize("code", ["", "sys.exit(3)", "raise ValueError", "workers.close()"])
def test_nothing_is_left_at_exit(code: str) -> None:
  before = shared_memory()
  with running(code, count=1 if code else 2) as (process, pids):
    _, said = process.communicate(timeout=30)
    wait_until(lambda: all(map(gone, pids)))
    assert process.returncode == {"sys.exit(3)": 3, "raise ValueError": 1}.get(code, 0), said
  assert shared_memory() <= before


@pytest.mark.parametrize("code", ["time.sleep(100)", "sleep(100.0).block_until_ready()"])
def test_nothing_is_left_after_kill_9(code: str) -> None:
  before = shared_memory()
  with running(code, count=2 if "sleep(100.0)" in code else 1) as (process, pids):
    time.sleep(0.3)
    process.kill()
    process.wait()
    wait_until(lambda: all(map(gone, pids)))
  assert shared_memory() <= before


def test_a_parent_that_is_killed_beside_a_forked_child_leaves_no_workers() -> None:
  code = """
    child = os.fork()
    if child == 0: time.sleep(100); os._exit(0)
    print(child, flush=True); time.sleep(100)
  """
  with running(code) as (process, pids):
    assert process.stdout is not None
    child = int(process.stdout.readline())
    try:
      process.kill()
      process.wait()
      wait_until(lambda: all(map(gone, pids)))
    finally:
      os.kill(child, signal.SIGKILL)


def test_a_forked_child_refuses_and_leaves_the_workers_alone() -> None:
  code = """
    child = os.fork()
    if child == 0:
      try:
        double(1.0).block_until_ready()
      except BaseException as error:
        print("refused:", "forked" in str(error), flush=True)
        os._exit(0)
      os._exit(1)
    assert os.waitpid(child, 0)[1] == 0
    child = os.fork()
    if child == 0:
      workers.close()
      os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
    assert double(2.0) == 4
    print("still there", flush=True)
  """
  with running(code) as (process, _):
    out, said = process.communicate(timeout=60)
    assert "refused: True" in out, said
    assert "still there" in out, said
