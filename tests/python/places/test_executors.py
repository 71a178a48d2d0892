# SPDX-License-Identifier: Apache-2.0
"""Gates that executors run: lanes in pieces, results in their places, failures as they were."""

from __future__ import annotations

import concurrent.futures
import multiprocessing
import os
import random
import shutil
import subprocess
import sys
import threading
import time
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import interpreters
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import worker_functions
from interpreters import succeed
from transformation_table import PAIRS, assert_chains_agree, on_host, reference
from waiting import until

import callgate as cg

INT = jax.ShapeDtypeStruct((), np.int32)
FLOAT = jax.ShapeDtypeStruct((), np.float32)
KINDS = ("threads", "processes", "loky")


@pytest.fixture(scope="module", params=KINDS)
def executor(request: pytest.FixtureRequest) -> Iterator[Any]:
  if request.param == "threads":
    made = concurrent.futures.ThreadPoolExecutor(2)
  elif request.param == "processes":
    spawn = multiprocessing.get_context("spawn")
    made = concurrent.futures.ProcessPoolExecutor(2, mp_context=spawn)
  else:
    made = pytest.importorskip("loky").get_reusable_executor(2, timeout=600)
  with made:
    yield made


def test_transformations_agree_with_jax(executor: Any) -> None:
  make = lambda effect: cg.gate(on_host, like=reference, effect=effect, run_on=executor)
  assert_chains_agree(random.Random(1).sample(PAIRS, 12), make=make)
  assert_chains_agree(random.Random(2).sample(PAIRS, 4), "io", make)
  assert_chains_agree(random.Random(3).sample(PAIRS, 4), "ordered", make)


def test_a_gates_time_is_in_its_statistics() -> None:
  with concurrent.futures.ThreadPoolExecutor(1) as threads, cg.config(timing=True):
    gate = cg.gate(lambda x: x, out=lambda x: x, run_on=threads)
    jax.block_until_ready(jax.jit(gate)(1.0))
    assert cg.stats()[gate.name]["python_seconds"] > 0


@pytest.mark.parametrize("lanes", [0, 1, 2, 33])
def test_lanes_come_back_in_their_places(lanes: int, executor: Any) -> None:
  gate = cg.gate(lambda x, y: (x + y, -x), out=lambda x, y: (x, x), run_on=executor)
  x = jnp.arange(lanes, dtype=jnp.float32)
  for _ in range(2):
    both = jax.jit(jax.vmap(gate, (0, None)))(x, 2.0)
    np.testing.assert_array_equal(both[0], x + 2)
    np.testing.assert_array_equal(both[1], -x)


def test_pytrees_static_arguments_and_results_in_place(executor: Any) -> None:
  tree = cg.gate(
    lambda t, *, k: {"sum": t["a"] + k * t["b"]}, out=lambda t, *, k: {"sum": t["a"]},
    run_on=executor,
  )  # fmt: skip
  given = {"a": jnp.arange(3.0), "b": jnp.ones(3)}
  np.testing.assert_array_equal(jax.jit(lambda t: tree(t, k=2))(given)["sum"], [2, 3, 4])

  def write(out: Any, x: Any) -> None:
    out[...] = x * 3

  triple = cg.gate(write, out=lambda x: x, style="inplace", run_on=executor)
  np.testing.assert_array_equal(jax.jit(jax.vmap(triple))(jnp.arange(4.0)), 3 * jnp.arange(4.0))


def test_the_first_lane_that_fails_is_told(executor: Any) -> None:
  def fail(x: Any) -> Any:
    if x >= 3:
      raise ValueError(f"lane {int(x)}")
    return x

  program = jax.jit(jax.vmap(cg.gate(fail, out=lambda x: x, run_on=executor)))
  with pytest.raises(ValueError, match=r"^lane 3\n"), cg.errors():
    jax.block_until_ready(program(jnp.arange(20.0)))
  np.testing.assert_array_equal(program(jnp.zeros(2)), jnp.zeros(2))


def test_results_are_checked_as_elsewhere(executor: Any) -> None:
  gate = cg.gate(lambda x: x[:1], out=lambda x: x, run_on=executor)
  with pytest.raises(TypeError, match=r"expected float32\[3\], got float32\[1\]"), cg.errors():
    jax.block_until_ready(jax.jit(gate)(jnp.zeros(3)))


def test_a_call_that_hangs_fails(executor: Any) -> None:
  gate = cg.gate(worker_functions.sleep, out=lambda x: x, run_on=executor, timeout=0.2)
  with pytest.raises(cg.GateTimeoutError, match=r"longer than its timeout, 0.2 s"), cg.errors():
    jax.block_until_ready(jax.jit(gate)(1.5))


def test_so_many_pieces_are_in_flight() -> None:
  running, most, lock = 0, 0, threading.Lock()

  def count(x: Any) -> Any:
    nonlocal running, most
    with lock:
      running += 1
      most = max(most, running)
    time.sleep(0.02)
    with lock:
      running -= 1
    return x

  with concurrent.futures.ThreadPoolExecutor(8) as threads:
    gate = cg.gate(count, out=lambda x: x, run_on=threads, in_flight=3)
    jax.block_until_ready(jax.jit(jax.vmap(gate))(jnp.arange(30.0)))
  assert most == 3


def test_an_executor_that_is_shut_down_cancels_what_waits_there() -> None:
  begun, go_on = threading.Event(), threading.Event()
  executor = concurrent.futures.ThreadPoolExecutor(1)

  def wait(x: Any) -> Any:
    begun.set()
    go_on.wait(60)
    return x

  def shut_down() -> None:
    begun.wait(60)
    until(lambda: executor._work_queue.qsize() > 0, "a piece waits")
    executor.shutdown(wait=False, cancel_futures=True)
    go_on.set()

  closer = threading.Thread(target=shut_down)
  closer.start()
  gate = cg.gate(wait, out=FLOAT, run_on=executor)
  with pytest.raises(concurrent.futures.CancelledError), cg.errors():
    jax.block_until_ready(jax.jit(jax.vmap(gate))(jnp.arange(2.0)))
  closer.join()


@pytest.mark.parametrize("start", ["spawn", "forkserver"])  # the latter is Python 3.14's default
def test_processes_of_an_executor_are_others_and_one_that_breaks_is_told(start: Any) -> None:
  context = multiprocessing.get_context(start)
  with concurrent.futures.ProcessPoolExecutor(1, mp_context=context) as executor:
    where = cg.gate(worker_functions.pid, out=INT, run_on=executor)
    assert int(jax.jit(where)(1.0)) not in (0, os.getpid())
    gate = cg.gate(worker_functions.die, out=lambda x: x, run_on=executor)
    with pytest.raises(concurrent.futures.process.BrokenProcessPool), cg.errors():
      jax.block_until_ready(jax.jit(gate)(-1.0))


FORKSERVER = """
import concurrent.futures, multiprocessing, sys
import jax, jax.numpy as jnp, numpy as np
import callgate as cg

SCALE = 3.0

@cg.gate(out=lambda x: x)
def scaled(x):
  return x * np.float32(SCALE)

def there(value):  # a program of the child's own
  seen = []
  program = jax.jit(lambda x: (cg.tap(x, to=lambda v: seen.append(float(v))), scaled(x))[1])
  result = float(program(value))
  cg.barrier()
  return result, seen

if __name__ == "__main__":
  multiprocessing.set_start_method("forkserver")
  if "preload" in sys.argv:
    multiprocessing.set_forkserver_preload(["callgate"])
  assert float(jax.jit(scaled)(1.0)) == 3
  with concurrent.futures.ProcessPoolExecutor(2) as executor:
    print(list(executor.map(there, [1.0, 2.0])))
    gate = cg.gate(scaled.function, out=lambda x: x, run_on=executor)
    print(jax.jit(jax.vmap(gate))(jnp.arange(4.0)).tolist())
"""


@pytest.mark.parametrize("preload", ["", "preload"])
def test_programs_run_in_children_of_a_forkserver(preload: str, tmp_path: Path) -> None:
  script = tmp_path / "program.py"
  script.write_text(FORKSERVER, encoding="utf-8")
  said = succeed(script, preload).splitlines()
  assert said == ["[(3.0, [1.0]), (6.0, [2.0])]", "[0.0, 3.0, 6.0, 9.0]"]


def test_dask_runs_lanes(tmp_path: Path) -> None:
  distributed = pytest.importorskip("distributed")
  cluster = distributed.LocalCluster(
    n_workers=2, threads_per_worker=1, dashboard_address=None, host="127.0.0.1"
  )
  with cluster, distributed.Client(cluster) as client, client.get_executor() as executor:
    meet = cg.gate(worker_functions.meet, out=INT, run_on=executor)
    program = jax.jit(jax.vmap(lambda x: meet(x, folder=str(tmp_path))))
    got = np.asarray(program(jnp.zeros(8)))
    assert len(set(got.tolist())) == 2
    assert os.getpid() not in got


# -- Ray
@pytest.fixture(scope="module")
def actors() -> Iterator[Any]:
  pytest.importorskip("ray")
  each = {"num_cpus": 0, "runtime_env": {"env_vars": {"PYTHONPATH": os.pathsep.join(sys.path)}}}
  with warnings.catch_warnings():
    warnings.filterwarnings("ignore", ".*os.fork")  # JAX's: Ray starts its processes so
    executor = cg.executors.ray(2, each=each)
  with executor:
    yield executor


@pytest.mark.limit(300)
def test_ray_runs_lanes_in_all_actors(actors: Any, tmp_path: Path) -> None:
  meet = cg.gate(worker_functions.meet, out=INT, run_on=actors)
  program = jax.jit(jax.vmap(lambda x: meet(x, folder=str(tmp_path))))
  got = np.asarray(program(jnp.zeros(8)))
  assert len(set(got.tolist())) == 2
  assert os.getpid() not in got


@pytest.mark.limit(300)
def test_ray_agrees_with_jax(actors: Any) -> None:
  make = lambda effect: cg.gate(on_host, like=reference, effect=effect, run_on=actors)
  assert_chains_agree(random.Random(4).sample(PAIRS, 8), make=make)
  large = cg.gate(lambda x: x * 2, out=lambda x: x, run_on=actors)
  x = jnp.arange(200_000.0)
  np.testing.assert_array_equal(jax.jit(large)(x), 2 * x)
  np.testing.assert_array_equal(jax.jit(lambda x: large.start(x).result())(x), 2 * x)


@pytest.mark.limit(300)
def test_exceptions_of_functions_in_ray_are_their_own(actors: Any) -> None:
  def fail(x: Any) -> Any:
    raise KeyError("lost", float(x))

  with pytest.raises(KeyError) as caught, cg.errors():
    jax.block_until_ready(jax.jit(cg.gate(fail, out=lambda x: x, run_on=actors))(3.0))
  assert caught.value.args == ("lost", 3.0)


@pytest.mark.limit(300)
def test_an_actor_that_ends_is_told_and_comes_again(actors: Any, tmp_path: Path) -> None:
  ray = pytest.importorskip("ray")
  die = cg.gate(worker_functions.die, out=lambda x: x, run_on=actors)
  with pytest.raises(ray.exceptions.RayError), cg.errors():
    jax.block_until_ready(jax.jit(die)(-1.0))
  once = cg.gate(
    worker_functions.die_once, out=lambda x, **_: x, run_on=actors, effect="pure", retries=3
  )
  assert jax.jit(lambda x: once(x, path=str(tmp_path / "died")))(2.0) == 2


def test_a_closed_executor_takes_nothing(tmp_path: Path) -> None:
  pytest.importorskip("ray")
  code = """
import os, sys, callgate as cg
each = {"num_cpus": 0, "runtime_env": {"env_vars": {"PYTHONPATH": os.pathsep.join(sys.path)}}}
with cg.executors.ray(1, each=each) as executor:
  assert executor.submit(max, 1, 2).result() == 2
  assert "ray(1)" in repr(executor)
import ray
assert not ray.is_initialized()
try:
  executor.submit(max, 1, 2)
except RuntimeError as error:
  print("refused:", error)
"""
  assert "refused: <callgate.executors.ray(1)>" in succeed(
    code, environment={"JAX_PLATFORMS": "cpu"}, new=True
  )


# -- MPI
MPIRUN = shutil.which("mpirun", path=f"{Path(sys.executable).parent}:{os.environ.get('PATH', '')}")
needs_mpi = pytest.mark.skipif(MPIRUN is None, reason="there is no MPI on this machine")


def mpirun(ranks: int, folder: Path, code: str) -> str:
  """Runs a script in so many ranks, and returns its output."""
  pytest.importorskip("mpi4py")
  script = folder / "ranks.py"
  script.write_text(code)
  done = subprocess.run(
    [str(MPIRUN), "--allow-run-as-root", "--oversubscribe", "-n", str(ranks), sys.executable,
     str(script)],
    env={**os.environ, **interpreters.same_path(), "JAX_PLATFORMS": "cpu"},
    capture_output=True, text=True, timeout=240, check=False,
  )  # fmt: skip
  assert done.returncode == 0, done.stderr
  return done.stdout


@needs_mpi
@pytest.mark.limit(300)
def test_two_ranks_of_mpi_meet(tmp_path: Path) -> None:
  (tmp_path / "met").mkdir()
  code = f"""
import jax, jax.numpy as jnp, numpy as np
import callgate as cg, worker_functions
from mpi4py.futures import MPICommExecutor
from mpi4py import MPI

with MPICommExecutor(MPI.COMM_WORLD, root=0) as executor:
  if executor is not None:
    meet = cg.gate(
      worker_functions.meet, out=jax.ShapeDtypeStruct((), np.int32), run_on=executor, in_flight=8
    )
    folder = {str(tmp_path / "met")!r}
    pids = jax.jit(jax.vmap(lambda x: meet(x, folder=folder)))(jnp.zeros(8))
    print("ranks", len(set(pids.tolist())))
"""
  assert "ranks 2" in mpirun(3, tmp_path, code)


@needs_mpi
@pytest.mark.limit(300)
def test_gates_of_all_ranks_call_mpi(tmp_path: Path) -> None:
  code = """
import jax, numpy as np
import callgate as cg
from mpi4py import MPI

jax.distributed.initialize(cluster_detection_method="mpi4py")
total = cg.gate(MPI.COMM_WORLD.allreduce, out=lambda x: x, effect="ordered")
x = np.arange(3.0, dtype=np.float32) + jax.process_index()
sums = jax.jit(lambda x: total(x) + 10 * total(x * x))(x)
print(f"{jax.process_count()} ranks {sums.tolist()}\\n", end="", flush=True)
"""
  x, y = np.arange(3.0), np.arange(3.0) + 1
  sums = (x + y + 10 * (x * x + y * y)).tolist()
  assert mpirun(2, tmp_path, code).count(f"2 ranks {sums}") == 2


# -- options
@pytest.mark.parametrize(
  ("options", "said"),
  [
    ({"run_on": "thread"}, "run_on: expected 'xla', 'own', 'processes'"),
    ({"run_on": None}, "run_on: expected 'xla'"),
    ({"run_on": "processes", "thread": "own"}, "because of thread='own', got 'processes'"),
    ({"retries": 1}, "retries: expected run_on="),
    ({"affinity": "lane"}, "affinity: expected run_on="),
    ({"in_flight": 2}, "in_flight: expected run_on="),
    ({"run_on": "processes", "style": "context"}, "expected style='return' or 'inplace'"),
    ({"run_on": "processes", "arrays": "cupy"}, "arrays: expected one of 'numpy'"),
    ({"run_on": "processes", "collective": True}, "expected collective=False"),
    ({"run_on": "processes", "affinity": "worker"}, "affinity: expected one of 'lane'"),
  ],
)
def test_options_that_do_not_fit_are_refused(options: dict[str, Any], said: str) -> None:
  with pytest.raises(cg.GateDefinitionError) as caught:
    cg.gate(lambda x: x, out=lambda x: x, **options)
  assert said in str(caught.value)
