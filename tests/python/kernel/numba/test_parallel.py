# SPDX-License-Identifier: Apache-2.0
"""Numba kernels and threads: none takes the GIL, parallel loops are safe and pass exceptions on."""

# Numba has no types, so what its decorators return fits every overload.
# pyright: reportCallIssue=false, reportFunctionMemberAccess=false, reportArgumentType=false
from __future__ import annotations

import ctypes
import textwrap
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from interpreters import printed_by
from switch_interval import switch_interval

import callgate as cg

nb = pytest.importorskip("numba")

like_x = lambda x, *_, **__: x


@pytest.fixture(scope="module", autouse=True)
def own_cache(tmp_path_factory: pytest.TempPathFactory) -> Any:
  with pytest.MonkeyPatch.context() as patch:
    patch.setenv("CALLGATE_CACHE_DIR", str(tmp_path_factory.mktemp("cache")))
    yield


# -- the GIL -------------------------------------------------------------------------------------
class Timespec(ctypes.Structure):
  _fields_ = (("seconds", ctypes.c_int64), ("nanoseconds", ctypes.c_int64))


class Semaphore:
  """POSIX's, for code without the GIL (`wait`, `post`) and for a thread that keeps it."""

  _library, _with_gil = ctypes.CDLL(None), ctypes.PyDLL(None)
  wait, post = _library.sem_wait, _library.sem_post
  wait.argtypes = post.argtypes = (ctypes.c_uint64,)

  def __init__(self) -> None:
    self._memory = ctypes.create_string_buffer(64)
    self.address = ctypes.addressof(self._memory)
    assert self._library.sem_init(self._memory, 0, 0) == 0

  def post_with_gil(self) -> None:
    self._with_gil.sem_post(self._memory)

  def wait_with_gil(self, seconds: float) -> bool:
    limit = Timespec(int(time.time() + seconds), 0)
    return self._with_gil.sem_timedwait(self._memory, ctypes.byref(limit)) == 0


def runs_while_another_thread_holds_the_gil(work: Any, seconds: float) -> bool:
  """True if `work`, as the body of a kernel, ends while a thread sits in C with the GIL held.

  The kernel says that it has begun, and waits; the thread then takes the GIL for good, lets the
  kernel go on, and waits, in C and without giving the GIL away, for the kernel's end.
  """
  begun, go_on, ended = Semaphore(), Semaphore(), Semaphore()
  one, two, three = begun.address, go_on.address, ended.address
  post, wait = Semaphore.post, Semaphore.wait

  @cg.numba(out=like_x, effect="io")
  def kernel(out: Any, x: Any) -> None:
    post(one)
    wait(two)
    work(out, x)
    post(three)

  verdict: list[bool] = []

  def hold() -> None:
    Semaphore.wait(begun.address)
    go_on.post_with_gil()
    verdict.append(ended.wait_with_gil(seconds))

  x = jnp.arange(1000.0)
  program = jax.jit(kernel).lower(x).compile()
  thread = threading.Thread(target=hold)
  with switch_interval(1000):
    thread.start()
    got = program(x)
    got.block_until_ready()
    thread.join()
  np.testing.assert_array_equal(got, 2 * x)
  return verdict[0]


@nb.njit
def doubled(out: Any, x: Any) -> None:
  for i in range(x.size):
    out[i] = 2 * x[i]


@nb.njit(parallel=True)
def doubled_in_parallel(out: Any, x: Any) -> None:
  for i in nb.prange(x.size):
    out[i] = 2 * x[i]


@nb.njit
def doubled_by_python(out: Any, x: Any) -> None:
  with nb.objmode():
    out[:] = 2 * x


def test_a_kernel_runs_while_another_thread_holds_the_gil() -> None:
  assert runs_while_another_thread_holds_the_gil(doubled, 60)


def test_a_parallel_kernel_runs_while_another_thread_holds_the_gil() -> None:
  assert runs_while_another_thread_holds_the_gil(doubled_in_parallel, 60)


def test_the_test_of_the_gil_fails_for_code_that_takes_it() -> None:
  assert not runs_while_another_thread_holds_the_gil(doubled_by_python, 2)


# -- parallel loops ------------------------------------------------------------------------------
@nb.njit
def positive(value: Any) -> Any:
  if value < 0:
    raise ValueError("negative", value)
  return value


@cg.numba(out=lambda x: (x, jax.ShapeDtypeStruct((), x.dtype)), parallel=True, fastmath=True)
def checked(outs: Any, x: Any) -> None:
  copy, total = outs
  for i in nb.prange(x.size):
    copy[i] = positive(x[i])
  sum = np.float32(0)
  for i in nb.prange(x.size):
    sum += x[i]
  total[()] = sum


def test_parallel_loops_and_their_reductions_give_what_numpy_gives() -> None:
  x = jnp.arange(1000.0)
  copy, total = jax.jit(checked)(x)
  np.testing.assert_array_equal(copy, x)
  assert total == x.sum()


def test_an_exception_in_a_parallel_loop_reaches_the_caller() -> None:
  for position in (0, 500, 999):
    with pytest.raises(ValueError) as caught, cg.errors():
      jax.jit(checked)(jnp.ones(1000).at[position].set(-position - 1))
    assert caught.value.args == ("negative", -position - 1)
  assert jax.jit(checked)(jnp.ones(10))[1] == 10


def test_bounds_are_checked_in_parallel_loops_too() -> None:
  @cg.numba(out=like_x, parallel=True, boundscheck=True)
  def shifted(out: Any, x: Any) -> None:
    for i in nb.prange(x.size):
      out[i + 1] = x[i]

  with pytest.raises(IndexError), cg.errors():
    jax.jit(shifted)(jnp.ones(100))


def test_a_parallel_loop_in_a_loop_fails_in_the_round_that_raises() -> None:
  @cg.numba(out=like_x, parallel=True)
  def rounds(out: Any, x: Any) -> None:
    for round in range(5):
      for i in nb.prange(x.size):
        out[i] = positive(x[i] - round)

  with pytest.raises(ValueError) as caught, cg.errors():
    jax.jit(rounds)(jnp.full(100, 2.0))
  assert caught.value.args == ("negative", -1.0)


def test_numba_s_own_parallel_functions_are_left_as_they_were() -> None:
  assert jax.jit(checked)(jnp.ones(10))[1] == 10

  @nb.njit(parallel=True)
  def total(x: Any) -> Any:
    sum = 0.0
    for i in nb.prange(x.size):
      sum += x[i]
    return sum

  assert total(np.ones(100)) == 100
  from numba.np.ufunc import parallel

  assert parallel.build_gufunc_kernel.__module__ == "numba.np.ufunc.parallel"


TWO_PROGRAMS = textwrap.dedent("""
  import callgate as cg, jax, jax.numpy as jnp, numba as nb, numpy as np, sys
  from concurrent.futures import ThreadPoolExecutor

  @cg.numba(out=lambda x: x, parallel=True)
  def cumulated(out, x):
    for i in nb.prange(x.shape[0]):
      out[i, 0] = x[i, 0]
      for j in range(1, x.shape[1]):
        out[i, j] = out[i, j - 1] + x[i, j]

  x = jnp.arange(40000.0).reshape(200, 200) % 7
  want = np.cumsum(x, 1)
  program = lambda k: jax.jit(lambda x: cumulated(x + k) - cumulated(jnp.full_like(x, k)))
  programs = [program(0), program(1)]
  def run(program):
    for _ in range(50):
      np.testing.assert_array_equal(program(x), want)
  with ThreadPoolExecutor(2) as pool:
    list(pool.map(run, programs))
  print(nb.threading_layer())
""")


@pytest.mark.parametrize("layer", ["default", "workqueue"])
def test_two_programs_with_parallel_kernels_run_at_once(layer: str) -> None:
  used = printed_by(TWO_PROGRAMS, NUMBA_THREADING_LAYER=layer, NUMBA_NUM_THREADS="2").strip()
  assert used == (layer if layer != "default" else used)


@pytest.mark.parametrize("method", ["each", "whole", "broadcast"])
def test_lanes_of_parallel_and_of_thread_safe_kernels_agree(method: Any) -> None:
  def scaled(out: Any, a: Any, x: Any) -> None:
    flat, rows = out.reshape(-1, 3), x.reshape(-1, 3)
    for i in nb.prange(flat.shape[0]):
      for j in range(3):
        flat[i, j] = 2 * rows[i, j]

  x = jnp.arange(24.0).reshape(8, 3)
  a = jnp.ones((8, 3))
  for options in ({"parallel": True}, {"thread_safe": True}, {}):
    kernel = cg.numba(scaled, out=lambda a, x: x, vmap=method, **options)
    np.testing.assert_array_equal(jax.jit(jax.vmap(kernel))(a, x), 2 * x)


def test_one_kernel_is_compiled_from_many_threads_at_once() -> None:
  kernel = cg.numba(lambda out, x: doubled(out, x), out=like_x)
  barrier = threading.Barrier(4)

  def run(dtype: str) -> Any:
    barrier.wait()
    return jax.jit(kernel)(jnp.arange(4, dtype=dtype))

  with ThreadPoolExecutor(4) as pool:
    for got in pool.map(run, ["float32", "int32", "float32", "int32"]):
      assert got.tolist() == [0, 2, 4, 6]
