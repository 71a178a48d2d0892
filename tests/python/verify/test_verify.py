# SPDX-License-Identifier: Apache-2.0
"""`verify` finds each planted fault under its name, and none where gates and kernels are right."""

from __future__ import annotations

import concurrent.futures
import ctypes
import shutil
import signal
import subprocess
import sys
import threading
import time
import types
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.linalg
import scipy.optimize
from free_threaded import FREE

import callgate as cg

NAMES = (
  "shapes", "like", "vmap", "jvp", "vjp", "second_order", "linear", "effects", "shards", "export",
  "pickle", "escape", "writes", "threads",
)  # fmt: skip
X = np.array([0.5, 2.0, 1.5], np.float32)
Made = tuple[Any, tuple[Any, ...]]


def same(x: Any) -> Any:
  return x


def twice(x: Any) -> Any:
  return 2 * x


def squared(x: Any) -> Any:
  return x * x


def asked(made: Any, *args: Any, **kwargs: Any) -> cg.VerifyReport:
  return made.verify(*args, seconds=200, **kwargs)


# --- faults ---------------------------------------------------------------------------------------
def wrong_shape() -> Made:
  return cg.gate(lambda x: x[1:], out=same), (X,)


def wrong_shape_of_other_sizes() -> Made:
  return cg.gate(lambda x: x[:3], out=same), (X,)


def reference_of_another_shape() -> Made:
  return cg.gate(twice, out=same, like=lambda x: x[1:]), (X,)


def wrong_like() -> Made:
  return cg.gate(twice, like=lambda x: 2 * x + 0.01), (X,)


def lanes_mixed() -> Made:
  made = cg.gate(twice, out=same)
  made.defvmap(lambda size, batched, x: (made(x[::-1]), True))
  return made, (X,)


def wrong_jvp() -> Made:
  made = cg.gate(np.sin, out=same)
  made.defjvp(lambda primals, tangents: (made(*primals), tangents[0] * jnp.sin(primals[0])))
  return made, (X,)


def wrong_vjp() -> Made:
  made = cg.gate(np.sin, out=same)
  made.defvjp(lambda x: (made(x), x), lambda x, ct: (ct * jnp.cos(x) * 1.1,))
  return made, (X,)


def wrong_second_order() -> Made:
  inner = cg.gate(np.cos, out=same)
  inner.defjvp(lambda primals, tangents: (inner(*primals), tangents[0] * jnp.sin(primals[0])))
  made = cg.gate(np.sin, out=same)
  made.defjvp(lambda primals, tangents: (made(*primals), tangents[0] * inner(primals[0])))
  return made, (X,)


def affine() -> Made:
  made = cg.gate(lambda x: x + 1, out=same, linear=True)
  made.deftranspose(lambda ct, x: ct)
  return made, (X,)


def not_pure() -> Made:
  calls = list[int]()

  def count(x: Any) -> Any:
    calls.append(0)
    return x + len(calls)

  return cg.gate(count, out=same), (X,)


def wrongly_split() -> Made:
  return cg.gate(np.cumsum, out=same, sharding="i -> i", name="verify.cumsum"), (X,)


def not_picklable() -> Made:
  lock = threading.Lock()

  def locked(x: Any) -> Any:
    with lock:
      return x + 1

  return cg.gate(locked, out=same), (X,)


class Forgets:
  """Multiplies, by a factor that its pickle has not."""

  def __init__(self, factor: float = 1) -> None:
    self.factor = np.float32(factor)

  def __call__(self, x: Any) -> Any:
    return self.factor * x

  def __reduce__(self) -> Any:
    return Forgets, ()


def pickled_as_another() -> Made:
  return cg.gate(Forgets(3), out=same, name="verify.forgets"), (X,)


class Keeps:
  """Keeps the argument of its last call."""

  def __call__(self, x: Any) -> Any:
    self.x = x
    return 2 * x


def keeps_a_view() -> Made:
  return cg.gate(Keeps(), out=same), (X,)


def writes() -> Made:
  def add(x: Any) -> Any:
    x += 1
    return x

  return cg.gate(add, out=same), (X,)


def writes_through_ctypes() -> Made:
  def add(x: Any) -> Any:
    address, _ = x.__array_interface__["data"]
    ctypes.c_float.from_address(address).value += 1
    return x.copy()

  return cg.gate(add, out=same), (X,)


def not_thread_safe() -> Made:
  state = types.SimpleNamespace(x=None)

  def careless(x: Any) -> Any:
    state.x = x.copy()
    time.sleep(0.002)
    return 2 * state.x

  return cg.gate(careless, out=same), (X,)


def not_thread_safe_without_a_pause() -> Made:
  state = types.SimpleNamespace(x=None)

  def careless(x: Any) -> Any:
    state.x = x.copy()
    for _ in range(1000):
      state.x = state.x + 0
    return 2 * state.x

  return cg.gate(careless, out=same), (X,)


def values_beside_wrong_tangents() -> Made:
  made = cg.gate(twice, out=same)
  made.defjvp(lambda primals, tangents: (made(primals[0]) + 1, 2 * tangents[0]))
  return made, (X,)


def values_beside_wrong_cotangents() -> Made:
  made = cg.gate(twice, out=same)
  made.defvjp(lambda x: (made(x) + 1, ()), lambda _, ct: (2 * ct,))
  return made, (X,)


def raises() -> Made:
  def fail(x: Any) -> Any:
    raise ValueError("no such x")

  return cg.gate(fail, out=same), (X,)


FAULTS: dict[Callable[[], Made], tuple[str, str]] = {
  wrong_shape: ("shapes", r"expected float32\[3\], got float32\[2\]"),
  wrong_shape_of_other_sizes: ("shapes", r"called with \(float32\[4\]\)"),
  reference_of_another_shape: ("shapes", "like: result 0"),
  wrong_like: ("like", "Mismatched elements"),
  lanes_mixed: ("vmap", "in_axes=0, lane by lane: result 0, at .*: expected .*, got"),
  wrong_jvp: ("jvp", "result 0, at .*: expected .* by finite differences, got"),
  wrong_vjp: ("vjp", "expected .*, got .* by finite differences"),
  wrong_second_order: ("second_order", "expected .* by finite differences, got"),
  affine: ("linear", r"f\(2x \+ v\) is not 2 f\(x\) \+ f\(v\): result 0, at \[0\]: expected"),
  not_pure: ("effects", "effect='pure': expected the same results"),
  wrongly_split: ("shards", r"arguments split as \(\w+\('shard',\)\) over 4 devices"),
  not_picklable: ("pickle", "lock"),
  pickled_as_another: ("pickle", r"the pickle's: result 0, at \[0\]: expected"),
  keeps_a_view: ("escape", "EscapedViewError: .* was kept after the call"),
  writes: ("writes", "read-only"),
  writes_through_ctypes: ("writes", "InputWriteError"),
  not_thread_safe: ("threads", "from two threads at once: result [0-9]+, at .*: expected .*, got"),
  not_thread_safe_without_a_pause: ("threads", "from two threads at once: result"),
  values_beside_wrong_tangents: ("jvp", "the results that jax.jvp gives beside the derivative"),
  values_beside_wrong_cotangents: ("vjp", "the results that jax.vjp gives beside the derivative"),
  raises: ("shapes", "ValueError: no such x"),
}


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.__name__)
def test_a_fault_is_found_under_its_name(fault: Callable[[], Made]) -> None:
  made, args = fault()
  name, message = FAULTS[fault]
  report = asked(made, *args)
  assert [one.name for one in report.results] == list(NAMES)
  # A wrong reference gives wrong derivatives, and an affine call those of another.
  others = {"like": set[str](), "linear": {"jvp", "vjp"}}.get(name, set[str]())
  assert {*report.failed} - others == {name}, str(report)
  assert not report.ok
  with pytest.raises(cg.VerifyError, match=rf"(?s){name}: .*{message}") as raised:
    report.raise_for_failed()
  assert raised.value.failed == report.failed
  assert isinstance(raised.value, AssertionError)
  assert f"{name:12}  FAILED" in str(report)


def test_an_argument_that_cannot_travel_fails_the_export() -> None:
  made = cg.gate(lambda x, *, lock: x + 1, out=lambda x, *, lock: x)
  report = asked(made, X, lock=threading.Lock())
  assert report.failed == ("export",), str(report)


# --- no faults ------------------------------------------------------------------------------------
def pure() -> Made:
  return cg.gate(np.sort, like=lambda x: jnp.sort(x)), (X,)


def fixed_shapes() -> Made:
  return cg.gate(lambda x, y: np.cross(x, y), out=jax.ShapeDtypeStruct((3,), np.float32)), (X, X)


def many_kinks() -> Made:
  x = np.random.default_rng(0).normal(size=(64, 64)).astype(np.float32)
  sort = lambda x: np.sort(x, axis=-1)
  return cg.gate(sort, like=lambda x: jnp.sort(x, axis=-1)), (x,)


def infinite_slope() -> Made:
  return cg.gate(np.sqrt, like=lambda x: jnp.sqrt(x)), (np.float32([0, 1, 2]),)


def infinite_slope_in_reverse() -> Made:
  made = cg.gate(np.sqrt, out=same)
  made.defvjp(lambda x: (made(x), x), lambda x, ct: (ct / (2 * jnp.sqrt(x)),))
  return made, (np.float32([0, 1, 2]),)


def three_vectors() -> Made:
  return cg.gate(lambda x, y: np.cross(x, y), like=jnp.cross), (X, np.float32([3, 1, 2]))


def inplace() -> Made:
  def call(out: Any, x: Any) -> None:
    np.square(x, out=out)

  return cg.gate(call, like=squared, style="inplace"), (X,)


def with_context() -> Made:
  def call(context: Any, out: Any, x: Any) -> None:
    out[...] = x + 1

  return cg.gate(call, out=same, style="context"), (X,)


def io() -> Made:
  seen = list[float]()

  def call(x: Any) -> Any:
    seen.append(float(x.sum()))
    return x + 1

  return cg.gate(call, out=same, effect="io"), (X,)


def io_without_results() -> Made:
  seen = list[float]()
  return cg.gate(lambda x: seen.append(float(x.sum())) or (), effect="io"), (X,)


def ordered() -> Made:
  return cg.gate(twice, like=twice, effect="ordered"), (X,)


def counter() -> Made:
  calls = list[int]()

  def count(x: Any) -> Any:
    calls.append(0)
    return x + len(calls)

  return cg.gate(count, out=same, effect="io"), (X,)


def whole() -> Made:
  return cg.gate(lambda x, y: x * y, like=lambda x, y: x * y, vmap="broadcast"), (X, X)


def whole_of_one() -> Made:
  return cg.gate(np.exp, like=jnp.exp, vmap="whole"), (X,)


def with_vmap_rule() -> Made:
  made = cg.gate(twice, out=same)
  made.defvmap(lambda size, batched, x: (made(x), True))
  return made, (X,)


def with_jvp() -> Made:
  cosine = cg.gate(np.cos, like=jnp.cos)
  made = cg.gate(np.sin, out=same)
  made.defjvp(lambda primals, tangents: (made(*primals), tangents[0] * cosine(primals[0])))
  return made, (X,)


def with_vjp() -> Made:
  made = cg.gate(lambda x, n: x ** np.float32(n), out=lambda x, n: x)
  made.defvjp(
    lambda x, n: (made(x, n), (x, n)),
    lambda kept, ct: (ct * kept[1] * kept[0] ** (kept[1] - 1), np.zeros((), jax.dtypes.float0)),
  )
  return made, (X, np.int32(3))


def linear() -> Made:
  made = cg.gate(
    lambda x, w: x @ w, out=lambda x, w: jax.ShapeDtypeStruct(w.shape[1:], x.dtype), linear=0
  )
  made.deftranspose(lambda ct, x, w: w @ ct)
  return made, (X, np.arange(9, dtype=np.float32).reshape(3, 3))


def linear_without_transpose() -> Made:
  return cg.gate(twice, out=same, linear=True), (X,)


def by_differences() -> Made:
  return cg.gate(np.tanh, out=same, gradient="finite-difference"), (X,)


def with_kinks() -> Made:
  x = np.array([0.0, -1.0, 2.0, 0.0], np.float32)
  return cg.gate(lambda x: np.maximum(x, 0), like=lambda x: jnp.maximum(x, 0)), (x,)


def integers() -> Made:
  return cg.gate(np.sort, out=same), (np.array([3, 1, 2], np.int32),)


def structures() -> Made:
  def call(x: Any) -> Any:
    return {"sum": x["a"] + x["b"][0], "first": x["a"][:1]}

  return cg.gate(call, like=call), ({"a": X, "b": (X, np.float32(1))},)


def complex_numbers() -> Made:
  x = np.array([1 + 2j, -1j, 0.5, 2], np.complex64)
  return cg.gate(np.fft.fft, like=jnp.fft.fft, cast=True), (x,)


def own_thread() -> Made:
  return cg.gate(squared, like=squared, run_on="own"), (X,)


def keeps_copies() -> Made:
  return cg.gate(Keeps(), like=twice, copy=True), (X,)


def of_jax_arrays() -> Made:
  return cg.gate(jnp.sin, like=jnp.sin, arrays="jax"), (X,)


def split_dimensions() -> Made:
  rule = "i [k], [k] j -> i j"
  made = cg.gate(np.matmul, like=jnp.matmul, sharding=rule, name="verify.matmul")
  return made, (np.ones((8, 3), np.float32), np.ones((3, 4), np.float32))


class Scaler:
  """An object with a gate as its method."""

  @cg.gate(out=same)
  def scaled(self, x: Any) -> Any:
    return 3 * x


def method() -> Made:
  return Scaler.scaled, (Scaler(), X)


def aliased() -> Made:
  def add(out: Any, x: Any) -> None:
    out += 1

  return cg.gate(add, out=same, style="inplace", aliases={0: 0}), (X,)


def in_workers() -> Made:
  return cg.gate(twice, like=twice, run_on="processes"), (X,)


def empty() -> Made:
  return cg.gate(twice, like=twice), (np.zeros(0, np.float32),)


def without_arguments() -> Made:
  return cg.gate(lambda: np.float32(1), out=jnp.float32(0)), ()


def keys() -> Made:
  def draw(words: Any) -> Any:
    return np.float32(np.random.default_rng(words).random())

  return cg.gate(draw, out=jax.ShapeDtypeStruct((), np.float32)), (jax.random.key(3),)


def with_key_in_like() -> Made:
  def draw(words: Any, x: Any) -> Any:
    key = jax.random.wrap_key_data(jnp.asarray(words))
    return np.asarray(x * jax.random.uniform(key, x.shape))

  def like(key: Any, x: Any) -> Any:
    return x * jax.random.uniform(key, x.shape)

  return cg.gate(draw, like=like, run_on="own"), (jax.random.key(3), X)


def half() -> Made:
  return cg.gate(twice, like=twice), (np.ones(4, jnp.bfloat16),)


def numba_kernel() -> Made:
  pytest.importorskip("numba")

  def running(out: Any, x: Any) -> None:
    total = np.float32(0)
    for i in range(x.size):
      total += x[i]
      out[i] = total

  return cg.numba(running, like=lambda x: jnp.cumsum(x)), (X,)


def elementwise_kernel() -> Made:
  if shutil.which("c++") is None:
    pytest.skip("needs a C++ compiler")
  return cg.elementwise("T x, T y", "T z", "z = x * y + x", like=lambda x, y: x * y + x), (X, X)


def cpp_kernel() -> Made:
  if shutil.which("c++") is None:
    pytest.skip("needs a C++ compiler")
  source = """
    void scaled(float factor, cg::In<float, 1> x, cg::Out<float, 1> y) {
      for (int64_t i = 0; i < x.size(); ++i) y[i] = factor * x[i];
    }"""
  return cg.cpp(source, like=lambda factor, x: factor * x, sharding="shard"), (2.0, X)


def torch_function() -> Made:
  torch = pytest.importorskip("torch")
  return cg.torch(lambda x, y: torch.sin(x) * y), (X, X)


def solver() -> Made:
  made = cg.linear_solver(
    factor=scipy.linalg.lu_factor,
    solve=scipy.linalg.lu_solve,
    solve_transposed=lambda lu, b: scipy.linalg.lu_solve(lu, b, trans=1),
  )
  return made, (np.array([[4, 1, 0], [1, 3, 1], [0, 2, 5]], np.float32), X)


def symmetric_solver() -> Made:
  made = cg.linear_solver(
    factor=scipy.linalg.cho_factor, solve=scipy.linalg.cho_solve, symmetric=True
  )
  return made, (np.array([[4, 1, 0], [1, 3, 1], [0, 1, 5]], np.float32), X)


def root() -> Made:
  def solve(theta: Any, x0: Any) -> Any:
    if FREE:  # SciPy's solver isn't thread-safe there
      return np.cbrt(theta) + 0 * x0
    return scipy.optimize.root(lambda x: x**3 - theta, x0, tol=1e-10).x

  return cg.root(lambda x, theta: x**3 - theta, solver=solve, cast=True), (
    np.array([8, 27], np.float32),
    np.array([2, 2], np.float32),
  )


RIGHT = (
  pure, fixed_shapes, many_kinks, infinite_slope, infinite_slope_in_reverse, three_vectors,
  inplace, with_context, io, io_without_results, ordered,
  counter, whole, whole_of_one, with_vmap_rule, with_jvp, with_vjp, linear,
  linear_without_transpose, by_differences, with_kinks, integers, structures, complex_numbers,
  own_thread, keeps_copies, of_jax_arrays, split_dimensions, method, aliased, in_workers, empty,
  without_arguments, keys, with_key_in_like, half, numba_kernel, elementwise_kernel,
  cpp_kernel, torch_function, solver, symmetric_solver, root,
)  # fmt: skip
# The questions that have to be asked, beside those that every one is.
ASKED = {
  pure: "like vmap jvp vjp second_order",
  with_jvp: "vmap jvp vjp second_order",
  with_vjp: "vmap vjp second_order",
  linear: "linear jvp vjp",
  linear_without_transpose: "linear jvp",
  by_differences: "jvp vjp",
  with_kinks: "like jvp",
  many_kinks: "like jvp vjp",
  infinite_slope: "like jvp",
  split_dimensions: "shards",
  cpp_kernel: "like shards",
  numba_kernel: "like jvp vjp",
  torch_function: "vmap jvp vjp second_order",
  solver: "vmap jvp vjp second_order",
  root: "jvp vjp second_order",
}


@pytest.mark.parametrize("right", RIGHT, ids=lambda right: right.__name__)
def test_no_fault_is_found_where_there_is_none(right: Callable[[], Made]) -> None:
  made, args = right()
  report = asked(made, *args)
  assert report.ok, str(report)
  by_name = {one.name: one for one in report.results}
  assert tuple(by_name) == NAMES
  wanted = ["shapes", *ASKED.get(right, "").split()]
  assert not [name for name in wanted if by_name[name].skipped], str(report)
  assert not [one for one in report.results if not one.ok or bool(one.skipped) == bool(one.message)]
  report.raise_for_failed()


# --- reports --------------------------------------------------------------------------------------
def test_the_report_is_a_table() -> None:
  made = cg.gate(twice, out=jax.ShapeDtypeStruct((3,), np.float32), name="verify.table")
  lines = str(asked(made, X)).splitlines()
  assert lines[0] == "gate 'verify.table': 8 questions asked, 0 failed"
  assert lines[1].split(maxsplit=2)[:2] == ["shapes", "ok"]
  assert lines[2].split() == ["like", "skipped", "no", "like="]
  assert len({line.index(word) for line in lines[1:] for word in ("ok ", "skipped") if word in line
              and not line.strip().startswith(word)}) == 1  # fmt: skip


def test_questions_that_would_begin_late_are_skipped() -> None:
  report = cg.gate(twice, out=same).verify(X, seconds=1e-9)
  assert {one.skipped for one in report.results} == {"out of time (seconds=1e-09)"}
  assert report.ok
  for wrong in (0, -1, "10", None):
    with pytest.raises(cg.GateDefinitionError, match="verify: seconds"):
      cg.gate(twice, out=same).verify(X, seconds=wrong)


def test_wrong_arguments_are_a_failure_and_no_exception() -> None:
  report = asked(cg.gate(twice, out=same), X, X)
  assert report.failed == ("shapes",)
  assert {one.skipped for one in report.results[1:]} == {"not asked after the failure of 'shapes'"}


def test_objects_are_not_compared() -> None:
  report = asked(cg.hold(dict))
  assert all("handles of objects" in one.skipped for one in report.results)


def test_lanes_have_the_same_values_where_the_function_takes_no_others() -> None:
  def of_one_sum(x: Any) -> Any:
    if not np.isclose(x.sum(), 1):
      raise ValueError("expected numbers that add up to 1")
    return np.log(x)

  report = asked(cg.gate(of_one_sum, out=same), np.array([0.25, 0.75], np.float32))
  assert report.ok, str(report)
  message = next(one.message for one in report.results if one.name == "vmap")
  assert message == "as calls lane by lane, with 2 in_axes, with the same values in all lanes"


def test_what_takes_longest_is_asked_last_and_reported_in_its_place(monkeypatch: Any) -> None:
  from callgate._verify import verify

  order = list[str]()
  for name in NAMES:
    monkeypatch.setitem(verify.QUESTIONS, name, lambda _, name=name: order.append(name) or "")
  report = asked(cg.gate(twice, out=same, sharding="i -> i"), X)
  assert order == [*(name for name in NAMES if name != "shards"), "shards"]
  assert [one.name for one in report.results] == list(NAMES)


def test_async_functions_are_not_called() -> None:
  async def call(x: Any) -> Any:
    return 2 * x

  report = asked(cg.gate(call, out=same), X)
  assert {one.skipped for one in report.results} == {"an async function is started, not called"}


def test_an_executors_gate_needs_no_pickle_and_jaxs_callbacks_no_export() -> None:
  with concurrent.futures.ThreadPoolExecutor(1) as pool:
    report = asked(cg.gate(twice, out=same, run_on=pool), X)
  assert report.ok, str(report)
  assert dict(skipped(report))["pickle"] == "its executor belongs to this process"
  with cg.config(engine="jax"):
    report = asked(cg.gate(twice, out=same), X)
  assert report.ok, str(report)
  assert {"effects", "export"} <= dict(skipped(report)).keys()


def skipped(report: cg.VerifyReport) -> list[tuple[str, str]]:
  return [(one.name, one.skipped) for one in report.results if one.skipped]


def test_the_gate_and_its_arguments_stay_as_they_are() -> None:
  made = cg.gate(np.sort, like=lambda x: jnp.sort(x), name="verify.stays")
  program, x = jax.jit(made), X.copy()
  before = program(x)
  threads = threading.active_count()
  with cg.config(check_writes=False):
    assert asked(made, x).ok
    from callgate._runtime import config

    assert config._values["check_writes"] is False
  assert threading.active_count() == threads
  assert made.name == "verify.stays"
  assert (x == X).all()
  assert (program(x) == before).all()
  assert cg.last_error() is None or "verify.stays" not in str(cg.last_error())


def test_the_end_of_this_process_ends_those_of_questions() -> None:
  from callgate._verify import travel

  with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as process:
    travel._running.add(process)
    try:
      travel.end_processes()
      assert process.wait(60) == -signal.SIGKILL
    finally:
      travel._running.discard(process)


# --- all of a module ------------------------------------------------------------------------------
def test_a_modules_gates_are_verified_by_name() -> None:
  module = types.ModuleType("of_gates")
  vars(module).update(
    sort=cg.gate(np.sort, like=lambda x: jnp.sort(x)),
    wrong=cg.gate(twice, like=squared),
    alone=cg.gate(twice, out=same),
    _private=cg.gate(twice, out=same),
    other=np.sort,
  )
  reports = cg.verify_all(module, 200, sort=(X,), wrong=(X,))
  assert list(reports) == ["alone", "sort", "wrong"]
  assert reports["sort"].ok
  assert "like" in reports["wrong"].failed
  skipped = {one.skipped for one in reports["alone"].results}
  assert skipped == {"no arguments given: verify_all(module, alone=(x,))"}
  assert reports["alone"].ok
  with pytest.raises(cg.GateDefinitionError, match=r"of of_gates, got 'srt'\. Did you mean 'sort'"):
    cg.verify_all(module, srt=(X,))
  with pytest.raises(cg.GateDefinitionError, match="verify_all: sort: expected a tuple"):
    cg.verify_all(module, sort=X)
  assert cg.verify_all(module, seconds=200, sort=(X,))["sort"].ok
  assert "_private" in cg.verify_all(types.SimpleNamespace(**vars(module)), 1e-9, _private=(X,))
