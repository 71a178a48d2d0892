# SPDX-License-Identifier: Apache-2.0
"""Objects that live in workers: what uses them runs there, and they live as long as elsewhere."""

from __future__ import annotations

import gc
import os
import signal
import textwrap
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import worker_functions
from interpreters import same_path, succeed
from programs import CACHED
from scipy.linalg import lu_factor, lu_solve
from transformation_table import assert_chains_agree, groups, reference
from waiting import until
from worker_functions import Tallied

import callgate as cg
from callgate._places.workers import name_of

FLOAT, INT = (jax.ShapeDtypeStruct((), d) for d in (np.float32, np.int32))


@pytest.fixture(scope="module")
def one() -> Iterator[cg.Workers]:
  with cg.workers(1) as workers:
    yield workers


@pytest.fixture
def boxes(one: cg.Workers) -> Iterator[Any]:
  """Makes objects that the only worker counts."""
  yield cg.hold(Tallied, name="test tallied", run_on=one)
  gc.collect()
  assert cg.held().get("test tallied", 0) == 0
  until(lambda: living(one) == 0, "freed")


def living(workers: cg.Workers) -> int:
  return int(cg.call(worker_functions.tallied, INT, run_on=workers))


def used(handle: cg.Handle, plus: Any = 0.0) -> Any:
  return cg.use(worker_functions.value_of, handle, plus, out=FLOAT)


def home(handle: cg.Handle) -> Any:
  return cg.use(worker_functions.pid, handle, out=INT)


def error_of(program: Any, *args: Any) -> BaseException:
  with pytest.raises(BaseException) as caught, cg.errors():
    jax.block_until_ready(program(*args))
  return caught.value.with_traceback(None)  # whose frames would keep handles


# -- transformations
@pytest.mark.parametrize("chains", groups(2))
def test_transformations_agree_with_jax(chains: Any, two: cg.Workers) -> None:
  def by_objects(effect: Any) -> Any:
    del effect
    make = cg.hold(lambda x: {"sum": np.sum(x, dtype=np.float32)}, run_on=two)
    call = jax.custom_jvp(
      lambda x: cg.use(lambda held, x: np.sin(x) * (1 + held["sum"]), make(x), x, out=x)
    )
    call.defjvp(lambda p, t: (call(*p), jax.jvp(reference, p, t)[1]))
    return call

  assert_chains_agree(chains, make=by_objects)
  assert "by_objects" not in str(cg.held())


# -- uses
def test_an_object_lives_in_the_worker_that_made_it(two: cg.Workers, engine: str) -> None:
  make = cg.hold(Tallied, run_on=two)
  handle = make(3.0)
  assert handle.place is two
  assert repr(handle) == f"Handle({name_of(two)})"
  assert used(handle, 1.0) == 4
  assert jax.jit(used)(handle) == 3
  assert jax.jit(lambda: used(handle))() == 3
  assert jax.jit(lambda x: used(make(x)))(5.0) == 5
  places = {int(jax.jit(home)(handle)) for _ in range(10)}
  assert len(places) == 1
  assert places <= ({os.getpid()} if engine == "jax" else set(two.pids))


def test_lanes_are_spread_and_found_again(two: cg.Workers, engine: str) -> None:
  make = cg.hold(Tallied, run_on=two)
  handles = jax.jit(jax.vmap(make))(jnp.arange(16.0))
  np.testing.assert_array_equal(jax.vmap(used)(handles), np.arange(16.0))
  order = jnp.array([3, 15, 0, 7, 8, 1])
  chosen = jax.tree.map(lambda words: words[order], handles)
  got = jax.jit(jax.vmap(used))(chosen, jnp.arange(6.0))
  np.testing.assert_array_equal(got, order + jnp.arange(6.0))
  nested = jax.jit(jax.vmap(jax.vmap(lambda x: used(make(x)))))
  np.testing.assert_array_equal(nested(jnp.arange(6.0).reshape(2, 3)), np.arange(6.0).reshape(2, 3))


def test_lanes_run_at_once_where_their_objects_are(two: cg.Workers, tmp_path: Any) -> None:
  folders = [tmp_path / name for name in ("made", "used")]
  for folder in folders:
    folder.mkdir()
  # Two objects that are made by two workers: who makes one waits for who makes the other.
  meet = lambda x, folder: worker_functions.meet(x, folder=folder)
  make = cg.hold(lambda x: meet(x, str(folders[0])), run_on=two)
  handles = jax.jit(jax.vmap(make))(jnp.zeros(2))
  use = lambda pid, folder: np.int32([pid, meet(0, folder)])
  pairs = jax.jit(
    jax.vmap(
      lambda h: cg.use(use, h, out=jax.ShapeDtypeStruct((2,), np.int32), folder=str(folders[1]))
    )
  )(handles)
  assert set(pairs[:, 0].tolist()) == set(two.pids)
  np.testing.assert_array_equal(pairs[:, 0], pairs[:, 1])


def test_lanes_of_an_ordered_use_run_in_their_order(two: cg.Workers, tmp_path: Any) -> None:
  path = tmp_path / "lanes"
  make = cg.hold(Tallied, run_on=two)
  handles = jax.jit(jax.vmap(make))(jnp.arange(12.0))

  def write(box: Tallied) -> None:
    with path.open("a") as file:
      file.write(f"{int(box.value)} ")

  shuffled = jax.tree.map(lambda words: words[jnp.arange(11, -1, -1)], handles)
  jax.jit(jax.vmap(lambda h: cg.use(write, h, out=None, effect="ordered")))(shuffled)
  cg.barrier()
  assert path.read_text().split() == [str(i) for i in range(11, -1, -1)]


def test_objects_make_objects_where_they_are(two: cg.Workers, engine: str) -> None:
  make = cg.hold(Tallied, run_on=two)
  pair = cg.hold(lambda box, x: Tallied(box.value + x), run_on=two)
  first = make(3.0)
  second = jax.jit(pair)(first, 4.0)
  assert used(second) == 7
  assert int(home(first)) == int(home(second))


def test_a_whole_batch_is_a_list_of_objects(one: cg.Workers) -> None:
  def total(objects: list[Tallied], x: Any) -> Any:
    return np.array([sum(o.value for o in objects) + v for v in x], np.float32)

  handles = jax.vmap(cg.hold(Tallied, run_on=one))(jnp.arange(3.0))
  got = jax.vmap(lambda h, x: cg.use(total, h, x, out=FLOAT, vmap="whole"))(
    handles, jnp.arange(3.0)
  )
  np.testing.assert_array_equal(got, [3, 4, 5])


def test_branches_and_carries(two: cg.Workers, engine: str) -> None:
  make = cg.hold(Tallied, run_on=two)

  @jax.jit
  def program(flag: Any, x: Any) -> Any:
    handle = jax.lax.cond(flag, make, lambda x: make(10 * x), x)
    step = lambda h, x: (make(used(h, x)), None)
    return used(jax.lax.scan(step, handle, jnp.arange(4.0))[0])

  assert (program(True, 2.0), program(False, 2.0)) == (8, 26)


def test_results_in_place(two: cg.Workers, engine: str) -> None:
  def write(out: Any, box: Tallied, x: Any) -> None:
    out[...] = box.value * x

  handle = cg.hold(Tallied, run_on=two)(3.0)
  x = jnp.arange(4.0)
  got = jax.jit(lambda h, x: cg.use(write, h, x, out=x, style="inplace"))(handle, x)
  np.testing.assert_array_equal(got, 3 * x)


# -- how long they live
def test_objects_end_in_the_worker_when_nothing_names_them(boxes: Any, one: cg.Workers) -> None:
  handle = boxes(1.0)
  assert living(one) == 1
  del handle
  gc.collect()
  assert cg.held().get("test tallied", 0) == 0
  until(lambda: living(one) == 0, "freed")


def test_objects_end_in_an_idle_worker(boxes: Any, one: cg.Workers, tmp_path: Any) -> None:
  path = tmp_path / "ended"
  handle = cg.hold(lambda: worker_functions.Marks(str(path)), run_on=one)()
  del handle
  cg.held()
  until(path.exists, "freed")  # no other call tells the worker


def test_steps_of_a_loop_free_what_they_make(boxes: Any, one: cg.Workers) -> None:
  @jax.jit
  def program(x: Any) -> Any:
    return jax.lax.fori_loop(0, 500, lambda _, x: used(boxes(x), 1.0), x)

  assert program(0.0) == 500
  assert int(cg.call(worker_functions.most_tallied, INT, run_on=one)) < 20


def test_a_keyword_of_a_maker_in_a_loop(one: cg.Workers, engine: str) -> None:
  make = cg.hold(lambda *, zeta: Tallied(zeta), run_on=one)
  here = cg.hold(lambda *, zeta: Tallied(zeta))
  for each in (make, here):
    program = jax.jit(
      lambda x, each=each: jax.lax.fori_loop(0, 3, lambda _, x: used(each(zeta=x), 1.0), x)
    )
    assert program(1.0) == 4


# -- what programs hold
def test_the_next_process_finds_programs_in_the_persistent_cache(tmp_path: Any) -> None:
  code = """
    import jax, jax.numpy as jnp, numpy as np
    import callgate as cg
    from worker_functions import Tallied, value_of
    others, workers = cg.workers(1), cg.workers(1)
    FLOAT = jax.ShapeDtypeStruct((), np.float32)
    used = lambda h, x: cg.use(value_of, h, x, out=FLOAT)
    double = cg.gate(lambda x: 2 * x, out=lambda x: x, run_on=others)
    def steps(make):
      again = lambda h, x: (make(used(h, x)), used(h, x))
      return lambda x: jax.lax.scan(again, make(x), jnp.arange(3.0))[1]
    first, second = (cg.hold(Tallied, run_on=group) for group in (workers, others))
    PROGRAMS = {
      "steps": (steps(first), 1.0),
      "steps elsewhere": (steps(second), 1.0),
      "a handle": (lambda h: used(h, 2.0), second(5.0)),
      "started": (lambda x: double.start(x).result() + used(first(x), x), 2.0),
    }
  """
  program = textwrap.dedent(code) + CACHED
  results = [
    "steps: {}: [1.0, 2.0, 4.0]", "steps elsewhere: {}: [1.0, 2.0, 4.0]", "a handle: {}: 7.0",
    "started: {}: 8.0",
  ]  # fmt: skip
  for hits in (0, 1):
    printed = succeed(program, tmp_path, environment={"JAX_PLATFORMS": "cpu", **same_path()})
    assert printed.splitlines() == [line.format(hits) for line in results]


# -- what fails
def test_a_worker_that_died_takes_its_objects_along() -> None:
  with cg.workers(1) as workers:
    make = cg.hold(Tallied, name="test gone", run_on=workers)
    handle = make(1.0)
    assert used(handle) == 1
    pid = workers.pids[0]
    os.kill(pid, signal.SIGKILL)
    until(lambda: workers.replaced == 1, "replaced")
    error = error_of(jax.jit(used), handle)
    assert isinstance(error, cg.WorkerError)
    for said in ("made by test gone", "worker 0 of 1", f"process {pid}", "SIGKILL"):
      assert said in str(error), said
    assert error.signal == "SIGKILL"
    assert used(make(2.0)) == 2


def test_a_use_that_ends_its_worker_says_with_what() -> None:
  with cg.workers(1) as workers:
    handle = cg.hold(Tallied, name="test fatal", run_on=workers)(1.0)
    fatal = lambda box: os._exit(3)
    error = error_of(jax.jit(lambda h: cg.use(fatal, h, out=FLOAT)), handle)
    assert isinstance(error, cg.WorkerError)
    assert error.exit_code == 3
    assert "made by test fatal" in "".join(error.__notes__)


def test_errors_of_makers_and_users_are_theirs(boxes: Any, one: cg.Workers, engine: str) -> None:
  def fail(*given: Any) -> Any:
    raise KeyError("mine")

  assert error_of(jax.jit(cg.hold(fail, run_on=one)), 1.0).args == ("mine",)
  handle = cg.hold(Tallied, name="test noted", run_on=one)(1.0)
  error = error_of(jax.jit(lambda h: cg.use(fail, h, out=FLOAT)), handle)
  assert error.args == ("mine",)
  assert "made by test noted" in "".join(error.__notes__) + str(error.__cause__)


def test_objects_of_two_workers_do_not_meet(two: cg.Workers, tmp_path: Any) -> None:
  make = cg.hold(lambda x: worker_functions.meet(x, folder=str(tmp_path)), run_on=two)
  handles = jax.jit(jax.vmap(make))(jnp.zeros(2))
  a, b = (jax.tree.map(lambda words, i=i: words[i], handles) for i in range(2))
  error = error_of(jax.jit(lambda a, b: cg.use(max, a, b, out=INT)), a, b)
  assert isinstance(error, cg.HandleError)
  assert "objects that live in one worker" in str(error)
  assert "worker 0 of 2" in str(error)
  assert "worker 1 of 2" in str(error)


@pytest.mark.parametrize("other", ["own", "processes"])
def test_a_use_elsewhere_is_refused(other: Any, two: cg.Workers) -> None:
  handle = cg.hold(Tallied, run_on=two)(1.0)
  with pytest.raises(cg.GateDefinitionError, match=r"run_on: expected <callgate.workers\(2\)>"):
    cg.use(worker_functions.value_of, handle, 0.0, out=FLOAT, run_on=other)


def test_places_that_do_not_fit_are_refused(two: cg.Workers, one: cg.Workers) -> None:
  here, there, elsewhere = (cg.hold(Tallied, run_on=p)(1.0) for p in ("xla", two, one))
  with pytest.raises(cg.GateDefinitionError, match="its objects live in this process"):
    cg.use(worker_functions.value_of, here, 0.0, out=FLOAT, run_on=two)
  for pair in ((here, there), (there, elsewhere)):
    with pytest.raises(cg.GateDefinitionError, match="of objects in one place, got"):
      cg.use(lambda a, b: a.value, *pair, out=FLOAT)
  with pytest.raises(cg.GateDefinitionError, match="retries: expected no retries="):
    cg.use(worker_functions.value_of, there, 0.0, out=FLOAT, retries=1)


def test_an_object_that_jax_s_callbacks_made_is_none_of_the_workers(two: cg.Workers) -> None:
  make = cg.hold(Tallied, run_on=two)
  with cg.config(engine="jax"):
    here = make(1.0)
    assert used(here) == 1
  error = error_of(jax.jit(used), here)
  assert isinstance(error, cg.HandleError)
  assert "which lives in this process" in str(error)
  there = make(2.0)
  with cg.config(engine="jax"):
    error = error_of(jax.jit(used), there)
  assert isinstance(error, cg.HandleError)
  assert "which lives in worker" in str(error)


# -- solvers
def test_a_solver_factorises_and_solves_in_a_worker(two: cg.Workers, engine: str) -> None:
  solver = cg.linear_solver(
    factor=lu_factor, solve=lu_solve, run_on=two, cast=True,
    solve_transposed=lambda lu, b: lu_solve(lu, b, trans=1),
  )  # fmt: skip
  rng = np.random.default_rng(0)
  a, b = (
    jnp.asarray(rng.normal(size=(3, 4, 4)) + 4 * np.eye(4)),
    jnp.asarray(rng.normal(size=(3, 4))),
  )
  x = np.linalg.solve(a, b[..., None])
  np.testing.assert_allclose(jax.jit(jax.vmap(solver))(a, b), x[..., 0], rtol=1e-4)
  loss = lambda a, b: jnp.sum(jnp.sin(solver(a, b)))
  got = jax.jit(jax.vmap(jax.grad(loss, (0, 1))))(a, b)
  of_b = np.linalg.solve(np.swapaxes(a, 1, 2), np.cos(x))
  want = -of_b * np.swapaxes(x, 1, 2), of_b[..., 0]
  for x, y in zip(got, want, strict=True):
    np.testing.assert_allclose(x, y, rtol=1e-3, atol=1e-5)
  assert not any("factor" in name for name in cg.held())
