# SPDX-License-Identifier: Apache-2.0
"""Kernels of every kind, shown with C++: wrong calls, failures, vmap, derivatives, effects."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from interpreters import output_of

import callgate as cg


def cpp(source: str, function: str | None = None, **options: Any) -> cg.Kernel:
  options.setdefault("flags", ("-O0",))
  return cg.cpp(source, function, **options)


def same(x: Any, *_: Any) -> Any:
  return x


# -- wrong calls ---------------------------------------------------------------------------------
SAXPY = cpp(
  """
  void saxpy(float a, cg::In<float, 1> x, cg::Attr<int> n, cg::In<float, 1> y,
             cg::Out<float, 1> z) {
    for (int64_t i = 0; i < x.size(); ++i) z[i] = a * x[i] + n * y[i];
  }
  """,
  out=lambda a, x, n, y: x,
  name="wrong.saxpy",
)
V = jnp.ones(3)
WRONG: dict[str, tuple[Callable[[], Any], str]] = {
  "dtype": (
    lambda: SAXPY(1.0, V, 1, jnp.arange(3)),
    r"argument 'y': expected float32 of rank 1, got int32\[3\]",
  ),
  "rank": (
    lambda: SAXPY(1.0, jnp.ones((2, 3)), 1, V),
    r"argument 'x': expected float32 of rank 1, got float32\[2,3\]",
  ),
  "scalar": (
    lambda: SAXPY(V, V, 1, V),
    r"argument 'a': expected float32 of rank 0, got float32\[3\]",
  ),
  "too few": (lambda: SAXPY(1.0, V, 1), r"expected argument 'y', got none"),
  "too many": (lambda: SAXPY(1.0, V, 1, V, V), r"expected 4 arguments \(a, x, n, y\), got 5"),
  "keyword": (
    lambda: SAXPY(1.0, V, 1, V, w=V),
    r"got argument 'w' which it doesn't have; expected a, x, n, y",
  ),
  "twice": (lambda: SAXPY(1.0, V, 1, V, a=2.0), r"got argument 'a' twice"),
  "attribute": (
    lambda: SAXPY(1.0, V, 1.5, V),
    r"attribute 'n': expected a number that int32 holds, got 1.5",
  ),
  "tree": (lambda: SAXPY(1.0, [V, V], 1, V), r"argument 'x': expected one array, got 2"),
  "complex number": (
    lambda: SAXPY(1j, V, 1, V),
    r"argument 'a': expected a number that float32 holds, got 1j",
  ),
  "text": (lambda: SAXPY("a", V, 1, V), r"argument 'a': expected an array, got 'a'"),
}


@pytest.mark.parametrize("jit", [False, True])
@pytest.mark.parametrize("case", WRONG)
def test_a_wrong_call_is_an_error_that_names_kernel_and_argument(case: str, jit: bool) -> None:
  call, message = WRONG[case]
  with pytest.raises(cg.GateDefinitionError, match=rf"kernel 'wrong\.saxpy': {message}"):
    jax.jit(call)() if jit else call()
  assert SAXPY(1.0, V, 1, V).tolist() == [2] * 3


def test_python_numbers_are_never_cut_to_an_integer_parameter() -> None:
  kernel = cpp("void f(int8_t n, cg::Out<int8_t, 0> y) { y() = n; }", out=same)
  assert kernel(3) == 3
  for number in (3.5, 300, float("nan")):
    with pytest.raises(cg.GateDefinitionError, match="argument 'n': expected a number that int8"):
      kernel(number)


def test_results_that_out_declares_wrongly_name_the_parameter() -> None:
  source = "void f(cg::In<float, 1> x, cg::Out<float, 1> y, cg::Out<int32_t, 0> n) {}"
  one = cpp(source, out=same)
  with pytest.raises(cg.GateDefinitionError, match=r"expected 2 results \(y, n\), got 1 from out"):
    one(V)
  two = cpp(source, like=lambda x: (x, x))
  with pytest.raises(
    cg.GateDefinitionError, match=r"result 1 \('n'\): expected int32 of rank 0, got .* from like"
  ):
    jax.jit(two)(V)


def test_64_bit_parameters_say_that_they_need_x64() -> None:
  kernel = cpp("void f(cg::In<double, 1> x, double a, cg::Out<float, 0> y) {}", out=jnp.float32(0))
  with pytest.raises(cg.GateDefinitionError, match=r"'x'.*\(float64 needs jax_enable_x64\)"):
    kernel(np.ones(3), np.float32(1))
  with pytest.raises(cg.GateDefinitionError, match=r"'a': float64 needs jax_enable_x64"):
    kernel(np.ones(3), 1.0)


# -- failures ------------------------------------------------------------------------------------
FAIL = cpp(
  """
  #include <stdexcept>
  #include <string>
  void fail(cg::In<int32_t, 0> how, cg::Out<int32_t, 0> y) {
    switch (how()) {
      case 0: y() = 7; return;
      case 1: throw cg::Error("expected %d, got %s", 3, "four");
      case 2: throw std::out_of_range("too far");
      case 3: throw std::string("no exception of C++'s own");
      case 4: throw 5;
      default: throw std::runtime_error(std::string(100000, 'x') + "end");
    }
  }
  """,
  out=same,
  name="kernels.fail",
)
MESSAGES = {
  1: "expected 3, got four",
  2: "too far",
  3: "not a std::exception",
  4: "not a std::exception",
}


@pytest.mark.parametrize("how", MESSAGES)
@pytest.mark.parametrize("jit", [False, True])
def test_a_kernels_exception_is_a_kernel_error(how: int, jit: bool) -> None:
  call = jax.jit(FAIL) if jit else FAIL
  with pytest.raises(cg.KernelError) as caught, cg.errors():
    jax.block_until_ready(call(how))
  assert caught.value.kernel == "kernels.fail"
  assert MESSAGES[how] in caught.value.message
  assert call(0) == 7


def test_without_a_block_jax_raises_with_the_kernels_text_and_the_call_site() -> None:
  with pytest.raises(jax.errors.JaxRuntimeError, match=r"kernels\.fail") as caught:
    jax.block_until_ready(jax.jit(FAIL)(2))
  assert "too far" in str(caught.value)
  assert "kernel/test_kernel.py" in str(caught.value)
  assert isinstance(cg.last_error(), cg.KernelError)


def test_a_very_long_message_arrives_whole() -> None:
  with pytest.raises(cg.KernelError) as caught, cg.errors():
    jax.block_until_ready(FAIL(9))
  assert caught.value.message == "x" * 100000 + "end"


@pytest.mark.parametrize("thread_safe", [False, True])
def test_the_first_failing_lane_fails_the_program(thread_safe: bool) -> None:
  kernel = cpp(
    """
    void f(cg::In<int32_t, 0> lane, cg::Out<int32_t, 0> y) {
      if (lane() == 13 || lane() == 3) throw cg::Error("lane %d failed", lane());
      y() = lane() * 2;
    }
    """,
    out=same,
    thread_safe=thread_safe,
  )
  program = jax.jit(jax.vmap(kernel))
  with pytest.raises(cg.KernelError, match=r"lane 1?3 failed") as caught, cg.errors():
    jax.block_until_ready(program(jnp.arange(16)))
  said, lane = caught.value.message, caught.value.lane
  assert said == f"{lane} failed"
  assert f"'{kernel.name}' in {lane}, called at" in caught.value.__notes__[0]
  assert f"in {lane}: lane" in str(caught.value)
  if not thread_safe:
    assert lane == "lane 3"
  with pytest.raises(cg.KernelError) as caught, cg.errors():
    jax.block_until_ready(jax.jit(jax.vmap(jax.vmap(kernel)))(jnp.arange(16).reshape(2, 8)))
  assert caught.value.lane in ("lane (0, 3)", "lane (1, 5)")
  np.testing.assert_array_equal(program(jnp.arange(3)), [0, 2, 4])


def test_a_failure_inside_scan_while_and_cond_ends_the_program() -> None:

  def scan(how: Any) -> Any:
    return jax.lax.scan(lambda c, h: (c, FAIL(h)), 0, how)[1]

  def loop(how: Any) -> Any:
    return jax.lax.fori_loop(0, 3, lambda i, c: c + FAIL(how[i]), 0)

  def branch(how: Any) -> Any:
    return jax.lax.cond(how[2] > 1, FAIL, lambda h: h, how[2])

  for program in (scan, loop, branch):
    with pytest.raises(cg.KernelError, match="too far"), cg.errors():
      jax.block_until_ready(jax.jit(program)(jnp.array([0, 0, 2])))
    assert jax.jit(program)(jnp.array([0, 0, 0])) is not None


def test_on_several_devices_results_are_poisoned_and_the_error_waits_for_the_block() -> None:
  kernel = cpp(
    """
    void f(cg::Context& context, cg::In<float, 1> x, cg::Out<float, 1> y) {
      if (x[0] == 2) throw cg::Error("device %d", int(context.device()));
      y[0] = x[0] + float(context.device());
    }
    """,
    out=same,
  )
  mesh = jax.sharding.Mesh(np.array(jax.devices()[:4]), "a")
  parts = jax.P("a")
  f = lambda x: jax.lax.psum(kernel(x), "a") * 0 + kernel(x)
  program = jax.jit(jax.shard_map(f, mesh=mesh, in_specs=parts, out_specs=parts))
  good = split(np.float32([10, 0, 0, 0]))
  assert program(good).tolist() == [10, 1, 2, 3]
  results: list[Any] = []
  with pytest.raises(cg.KernelError) as caught, cg.errors():
    results.append(np.asarray(program(split(np.arange(4, dtype=np.float32)))))
  assert np.isnan(results).all()  # the sum spreads what one device failed with
  assert caught.value.message == "device 2"
  assert program(good).tolist() == [10, 1, 2, 3]


# -- vmap ----------------------------------------------------------------------------------------
DOT = """
  void dot(cg::In<float, 1> x, cg::In<float, 1> y, cg::Attr<int> times, cg::Out<float, 0> z) {
    z() = 0;
    for (int64_t i = 0; i < x.size(); ++i) z() += times * x[i] * y[i];
  }
"""
ROWS = """
  void dot(cg::In<float> x, cg::In<float> y, cg::Attr<int> times, cg::Out<float> z) {
    int64_t n = x.extent(x.rank() - 1);
    for (int64_t k = 0; k < z.size(); ++k) {
      z[k] = 0;
      for (int64_t i = 0; i < n; ++i)
        z[k] += times * x[(x.rank() > 1 ? k * n : 0) + i] * y[(y.rank() > 1 ? k * n : 0) + i];
    }
  }
"""
X, Y = jnp.arange(24.0).reshape(2, 4, 3), jnp.arange(12.0).reshape(4, 3)[::-1]


def scalar_out(x: Any, *_: Any, **__: Any) -> Any:
  return jax.ShapeDtypeStruct((), x.dtype)


def own_rule(size: int, batched: Any, x: Any, y: Any, times: int) -> Any:
  x = x if batched[0] else jnp.broadcast_to(x, (size, *x.shape))
  y = y if batched[1] else jnp.broadcast_to(y, (size, *y.shape))
  return times * jnp.einsum("...i,...i->...", x, y), True


METHODS: dict[str, dict[str, Any]] = {
  "each": {"source": DOT},
  "each on threads": {"source": DOT, "thread_safe": True},
  "whole": {"source": ROWS, "vmap": "whole"},
  "broadcast": {"source": ROWS, "vmap": "broadcast"},
  "own rule": {"source": DOT, "vmap": own_rule},
}


@pytest.mark.parametrize("method", METHODS)
def test_every_batching_gives_what_einsum_gives(method: str, engine: str) -> None:
  del engine
  kernel = cpp(**METHODS[method], out=scalar_out)

  def dot(x: Any, y: Any) -> Any:
    return kernel(x, y, 2)

  turned = Y[:, :2].repeat(3, 0)[:3]
  one, mixed, nested, empty = jax.jit(
    lambda: (
      jax.vmap(dot)(X[0], Y),
      jax.vmap(dot, (0, None))(X[0], Y[0]),
      jax.vmap(jax.vmap(dot, (0, None)), (0, 1))(X, turned),
      jax.vmap(dot)(X[0][:0], Y[:0]),
    )
  )()
  np.testing.assert_allclose(one, 2 * np.einsum("ki,ki->k", X[0], Y), rtol=1e-6)
  np.testing.assert_allclose(mixed, 2 * np.einsum("ki,i->k", X[0], Y[0]), rtol=1e-6)
  np.testing.assert_allclose(nested, 2 * np.einsum("aki,ia->ak", X, turned), rtol=1e-6)
  assert empty.shape == (0,)


def test_a_fixed_rank_under_whole_is_an_error_that_says_what_to_do() -> None:
  kernel = cpp(DOT, out=scalar_out, vmap="whole")
  with pytest.raises(cg.GateDefinitionError, match=r"'x': expected .*vmap='whole'.*cg::dynamic"):
    jax.jit(jax.vmap(lambda x, y: kernel(x, y, 1)))(X[0], Y)


def test_lanes_of_a_thread_safe_kernel_run_at_once() -> None:
  source = """
    #include <atomic>
    #include <chrono>
    #include <thread>
    std::atomic<int> inside{0};
    // Waits for another lane to come in, at most two seconds.
    void meet(cg::In<float, 0> x, cg::Out<int32_t, 0> met, cg::Out<int32_t, 0> threads,
              cg::Context& context) {
      threads() = context.threads();
      met() = 0;
      ++inside;
      for (int i = 0; i < 2000 && met() == 0 && context.threads() > 1; ++i) {
        if (inside > 1) met() = 1;
        std::this_thread::sleep_for(std::chrono::milliseconds(1));
      }
    }
  """
  shape = jax.ShapeDtypeStruct((), np.int32)
  kernel = cpp(source, out=(shape, shape), thread_safe=True)
  met, threads = jax.jit(jax.vmap(kernel))(jnp.zeros(4))
  if threads[0] == 1:
    pytest.skip("XLA has one thread here")
  assert met.tolist() == [1] * 4


# -- derivatives ---------------------------------------------------------------------------------
POWER = """
  template <class T> void power(cg::In<T, 1> x, cg::Attr<double> n, cg::Out<T, 1> y) {
    for (int64_t i = 0; i < x.size(); ++i) y[i] = std::pow(x[i], T(n));
  }
"""
P = jnp.array([0.5, 1.25, 2.0])


def powers() -> dict[str, cg.Kernel]:
  made = {
    "like": cpp(POWER, like=lambda x, n: x**n),
    "like, other names": cpp(POWER, like=lambda base, /, exponent: base**exponent),
    "jvp": cpp(POWER, out=same),
    "vjp": cpp(POWER, out=same),
    "finite-difference": cpp(POWER, out=same, gradient="finite-difference"),
  }
  jvp, vjp = made["jvp"], made["vjp"]

  @jvp.defjvp
  def _(primals: Any, tangents: Any, n: float) -> Any:
    (x,), (dx,) = primals, tangents
    return jvp(x, n), n * jvp(x, n - 1) * dx

  vjp.defvjp(
    lambda x, n: (vjp(x, n), x),
    lambda x, ct, n: (ct * n * vjp(x, n - 1),),
  )
  return made


POWERS = powers()


@pytest.mark.parametrize("kind", POWERS)
def test_every_kind_of_derivative_gets_the_static_values(kind: str, engine: str) -> None:
  del engine
  kernel = POWERS[kind]
  rtol = 1e-3 if kind == "finite-difference" else 1e-5

  @jax.jit
  def program(x: Any) -> Any:
    found = {
      "value": kernel(x, 3),
      "gradient": jax.grad(lambda x: kernel(x, n=3).sum())(x),
      "by lanes": jax.vmap(jax.grad(lambda x: kernel(x, 2).sum()))(jnp.stack([x, -x])),
    }
    if kind != "vjp":
      found["tangent"] = jax.jvp(lambda x: kernel(x, 3), (x,), (jnp.ones(3),))[1]
    if kind == "jvp":
      found["second"] = jax.jacfwd(jax.grad(lambda x: kernel(x, 3).sum()))(x)
    return found

  want = {
    "value": P**3, "gradient": 3 * P**2, "by lanes": jnp.stack([2 * P, -2 * P]),
    "tangent": 3 * P**2, "second": np.diag(6 * P),
  }  # fmt: skip
  for name, got in program(P).items():
    np.testing.assert_allclose(
      got, want[name], rtol=1e-6 if name == "value" else rtol, err_msg=name
    )


@pytest.mark.parametrize(("name", "bound"), [("float32", 1e-3), ("float64", 2e-9)])
def test_the_error_of_finite_differences_is_bounded(name: str, bound: float) -> None:
  # Central differences of width eps^(1/3) err by some eps^(2/3): 2.4e-5 and 3.7e-11, times the
  # third derivative and the values, which are below 30 here.
  with jax.enable_x64(True):
    x = jnp.linspace(0.5, 2, 7, dtype=name)
    jacobian = jax.jacrev(lambda x: POWERS["finite-difference"](x, 4))(x)
    assert jacobian.dtype == name
    error = np.abs(np.asarray(jacobian) - np.diag(4 * np.asarray(x) ** 3)).max()
  assert 0 < error < bound


def test_linear_kernels_transpose_by_their_rule_and_count_the_calls_arguments() -> None:
  source = """
    void gather(cg::Attr<int> scale, cg::In<int32_t, 1> at, cg::In<float, 1> x,
                cg::Out<float, 1> y) {
      for (int64_t i = 0; i < at.size(); ++i) y[i] = scale * x[at[i]];
    }
  """
  gather = cpp(source, out=lambda at, x: jax.ShapeDtypeStruct(at.shape, x.dtype), linear=2)

  @gather.deftranspose
  def _(ct: Any, scale: int, at: Any, x: Any) -> Any:
    return jnp.zeros(x.shape, x.dtype).at[at].add(scale * ct)

  at, x = jnp.array([2, 0, 2]), jnp.arange(4.0)
  assert gather(3, at, x).tolist() == [6, 0, 6]
  assert jax.jit(jax.grad(lambda x: gather(3, at, x).sum()))(x).tolist() == [3, 0, 6, 0]
  both = jax.vmap(jax.grad(lambda x: (gather(1, at, x) ** 2).sum()))(jnp.stack([x, 2 * x]))
  assert both.tolist() == [[0, 0, 8, 0], [0, 0, 16, 0]]
  transposed = jax.linear_transpose(lambda x: gather(3, at, x), x)
  assert transposed(jnp.ones(3))[0].tolist() == [3, 0, 6, 0]
  for wrong in (0, 3):
    with pytest.raises(cg.GateDefinitionError, match=r"linear: .*1 \('at'\), 2 \('x'\); got"):
      cpp(source, out=same, linear=wrong)


def test_without_a_rule_differentiating_says_how_to_define_one() -> None:
  kernel = cpp(DOT, out=scalar_out)
  with pytest.raises(cg.GateDefinitionError, match=r"kernel '.*dot.*' has no derivative"):
    jax.grad(lambda x: kernel(x, Y[0], 1))(Y[0])


# -- check, benchmark ----------------------------------------------------------------------------
def test_check_compares_with_like_and_shows_the_mismatch() -> None:
  wrong = cpp(DOT, like=lambda x, y, times: times * jnp.dot(x, y) + (x[0] > 5))
  wrong.check(Y[-1], Y[0], 2)
  wrong.check(y=Y[0], x=Y[-1], times=2)
  with pytest.raises(AssertionError, match=r"kernel '.*dot.*', result"):
    wrong.check(Y[0], Y[0], 2)
  with pytest.raises(cg.GateDefinitionError, match="needs like="):
    cpp(DOT, out=scalar_out).check(Y[0], Y[0], 2)


def test_benchmark_prints_and_returns_what_it_measured(capsys: Any) -> None:
  kernel = cpp(DOT, like=lambda x, y, times: times * jnp.dot(x, y), name="measured.dot")
  result = kernel.benchmark(Y[0], Y[0], times=2, seconds=0.02)
  assert result.bytes == 3 * 4 + 3 * 4 + 4
  assert 0 < result.seconds < 10
  assert result.like_seconds is not None
  assert result.ratio == result.like_seconds / result.seconds
  assert result.gigabytes_per_second == pytest.approx(28e-9 / result.seconds)
  printed = capsys.readouterr().out
  assert printed.startswith("kernel 'measured.dot': ")
  assert "GB/s" in printed
  assert "times as fast as like" in printed
  alone = cpp(DOT, out=scalar_out).benchmark(Y[0], Y[0], 2, seconds=0.02)
  assert alone.ratio is None
  assert "like" not in capsys.readouterr().out


# -- effects -------------------------------------------------------------------------------------
# A kernel that writes down its calls in an array of the test's: the first element counts them.
NOTE = """
  #include <atomic>
  void note(cg::Attr<int64_t> log, cg::In<float, 0> x, cg::Out<float, 0> y) {
    auto* calls = reinterpret_cast<int64_t*>(log.value());
    calls[++calls[0]] = int64_t(x());
    y() = x() + 1;
  }
"""


class Log:
  """The notes of kernels."""

  def __init__(self, effect: Any) -> None:
    self.calls = np.zeros(1000, np.int64)
    kernel = cpp(NOTE, out=lambda x: x, effect=effect)
    kernel.defvjp(lambda log, x: (kernel(log, x), None), lambda _, ct: (ct,))
    self.note = lambda x: kernel(self.address, x)

  @property
  def address(self) -> int:
    return self.calls.ctypes.data

  def take(self) -> list[int]:
    jax.effects_barrier()
    cg.barrier()
    taken = self.calls[1 : 1 + self.calls[0]].tolist()
    self.calls[:] = 0
    return taken


def discard(note: Any) -> Callable[[Any], Any]:
  def program(x: Any) -> Any:
    note(x)
    return x

  return program


PROGRAMS: dict[str, tuple[Callable[[Any], Callable[[Any], Any]], list[int]]] = {
  "once": (lambda note: note, [3]),
  "unused": (discard, [3]),
  "twice the same": (lambda note: lambda x: note(x) + note(x), [3, 3]),
  "scan": (
    lambda note: lambda x: jax.lax.scan(lambda c, i: (note(c), i), x, jnp.arange(3))[0],
    [3, 4, 5],
  ),
  "vmap": (lambda note: lambda x: jax.vmap(note)(x + jnp.arange(3.0)), [3, 4, 5]),
  "vmap unused": (lambda note: lambda x: jax.vmap(discard(note))(x + jnp.arange(3.0)), [3, 4, 5]),
  "cond taken": (lambda note: lambda x: jax.lax.cond(x > 0, note, lambda y: y, x), [3]),
  "cond not taken": (lambda note: lambda x: jax.lax.cond(x < 0, note, lambda y: y, x), []),
  "while": (lambda note: lambda x: jax.lax.while_loop(lambda c: c < 6, note, x), [3, 4, 5]),
  "grad": (lambda note: jax.grad(note), [3]),
  "nested jit": (lambda note: lambda x: jax.jit(note)(jax.jit(note)(x)), [3, 4]),
}


@pytest.mark.parametrize("effect", ["io", "ordered"])
@pytest.mark.parametrize("program", PROGRAMS)
def test_effects_happen_exactly_once(program: str, effect: Any) -> None:
  make, want = PROGRAMS[program]
  log = Log(effect)
  with jax.enable_x64(False):
    call = jax.jit(make(log.note))
    for _ in range(2):  # compiled, then from jit's cache
      call(jnp.float32(3))
      got = log.take()
      assert (got if effect == "ordered" else sorted(got)) == want


def test_ordered_kernels_run_in_program_order_beside_others() -> None:
  first, second = Log("ordered"), Log("ordered")
  second.calls = first.calls

  @jax.jit
  def program(x: Any) -> Any:
    for i in range(5):
      (first if i % 2 else second).note(x + i)
    return x

  for _ in range(3):
    program(jnp.float32(0))
    assert first.take() == [0, 1, 2, 3, 4]


# -- threads -------------------------------------------------------------------------------------
def test_a_kernel_runs_while_another_thread_holds_the_interpreter() -> None:
  """The GIL's switch is off, so a kernel that needed it would wait for the loop to end."""
  code = """
    import sys, threading, jax, jax.numpy as jnp, callgate as cg
    kernel = cg.cpp('''
      void add(cg::In<float, 1> x, cg::Out<float, 1> y) {
        for (int64_t i = 0; i < x.size(); ++i) y[i] = x[i] + 1;
      }''', out=lambda x: x, flags=["-O0"])
    # Large enough that XLA runs it on a thread of its own.
    program = jax.jit(lambda x: jax.lax.fori_loop(0, 200, lambda _, c: kernel(c), x))
    x = jnp.zeros(1 << 16)
    program(x).block_until_ready()
    sys.setswitchinterval(1000)
    y = program(x)
    rounds = 0
    while not y.is_ready():  # pure Python: this thread never gives the GIL up
      rounds += 1
    sys.setswitchinterval(0.005)
    print(float(y[0]))
  """
  assert output_of(code).strip() == "200.0"


# -- turns ---
# How many calls have been inside at once, at most; each gives others time to come in.
EACH = """
  #include <algorithm>
  #include <atomic>
  #include <thread>
  static std::atomic<int> inside{0}, most{0};
  void each(cg::In<float> x, cg::Out<int32_t> z) {
    int now = ++inside;
    for (int before = most; before < now && !most.compare_exchange_weak(before, now);) {}
    for (int i = 0; i < 300; ++i) std::this_thread::yield();
    std::fill(z.data(), z.data() + z.size(), most);
    --inside;
  }
"""


def counts(x: Any) -> Any:
  return jax.ShapeDtypeStruct(x.shape, np.int32)


def split(x: Any) -> Any:
  mesh = jax.sharding.Mesh(np.array(jax.devices()[:4]), ("a",))
  spec = jax.sharding.PartitionSpec("a")
  return jax.device_put(x, jax.sharding.NamedSharding(mesh, spec))


def on_threads(*calls: Callable[[], Any]) -> list[Any]:
  """The calls' results, each on a thread of its own, 20 times, all at once."""
  barrier, results = threading.Barrier(len(calls), timeout=60), list[Any]()

  def run(call: Callable[[], Any]) -> None:
    call()  # compiles
    barrier.wait()
    results.extend(np.asarray(call()) for _ in range(20))

  threads = [threading.Thread(target=run, args=(call,)) for call in calls]
  for thread in threads:
    thread.start()
  for thread in threads:
    thread.join()
  return results


def test_devices_take_turns_in_a_kernel_that_is_not_thread_safe() -> None:
  kernel = cpp(EACH, out=counts, sharding="i -> i")
  program, x = jax.jit(kernel), split(np.zeros(4, np.float32))
  assert max(program(x).max() for _ in range(8)) == 1
  lanes = cpp(EACH, out=counts, sharding="shard")
  assert jax.jit(jax.vmap(lanes))(split(np.zeros((8, 2), np.float32))).max() == 1


def test_programs_take_turns_in_a_kernel_that_is_not_thread_safe() -> None:
  kernel = cpp(EACH, out=counts)
  x = np.zeros(3, np.float32)
  one, other = jax.jit(kernel), jax.jit(lambda x: kernel(x) + 0)
  results = on_threads(lambda: one(x), lambda: other(x), lambda: one(x), lambda: other(x))
  assert np.max(results) == 1


# Libraries of several sources or types meet at an address that they are given.
TYPED = """
  #include <atomic>
  #include <thread>
  template <class T> void typed(cg::In<T> x, cg::Attr<int64_t> there, cg::Out<int32_t> z) {
    auto& inside = *reinterpret_cast<std::atomic<int32_t>*>(int64_t(there));
    z[0] = ++inside;
    for (int i = 0; i < 300; ++i) std::this_thread::yield();
    --inside;
  }
"""


@pytest.mark.parametrize("what", ["variants", "one source", "linked libraries"])
def test_kernels_that_may_share_a_library_share_its_turn(what: str) -> None:
  inside = np.zeros(1, np.int32)
  out = {"out": lambda x, there: counts(x)}
  if what == "variants":
    first = second = cpp(TYPED, **out)
  elif what == "one source":
    first, second = cpp(TYPED, **out), cpp(TYPED, **out)
  else:
    first = cpp(TYPED, libraries=["m"], **out)
    second = cpp(TYPED.replace("typed", "other"), libraries=["m"], **out)
  one = jax.jit(lambda x: first(x, inside.ctypes.data))
  other = jax.jit(lambda x: second(x, inside.ctypes.data))
  x, y = np.zeros(1, np.float32), np.zeros(1, np.int32)
  assert np.max(on_threads(lambda: one(x), lambda: other(y))) == 1


def test_a_thread_safe_kernel_runs_on_all_devices_at_once() -> None:
  # Each call waits for all the others, at most ten seconds.
  source = """
    #include <atomic>
    #include <chrono>
    #include <thread>
    static std::atomic<int> came{0};
    void meet(cg::In<float> x, cg::Out<int32_t> z) {
      ++came;
      for (int i = 0; i < 10000 && came < 4; ++i)
        std::this_thread::sleep_for(std::chrono::milliseconds(1));
      z[0] = came;
    }
  """
  kernel = cpp(source, out=counts, sharding="i -> i", thread_safe=True)
  assert jax.jit(kernel)(split(np.zeros(4, np.float32))).tolist() == [4] * 4


# -- what a kernel says, in any encoding ---
NOT_UTF8 = r"""
  #include <stdexcept>
  void fails(cg::In<float> x, cg::Out<float> z) {
    throw std::runtime_error("na\xefve \xff\xfe, caf\xc3\xa9");
  }
"""


@pytest.mark.parametrize("how", ["jit", "devices", "engine"])
def test_a_kernels_error_may_be_in_any_encoding(how: str) -> None:
  kernel = cpp(NOT_UTF8, out=same, sharding="i -> i")
  x = split(np.zeros(4, np.float32)) if how == "devices" else np.zeros(4, np.float32)
  engine = cg.config(engine="jax" if how == "engine" else "callgate")
  with engine, pytest.raises(cg.KernelError) as error, cg.errors():
    jax.block_until_ready(jax.jit(kernel)(x))
  assert error.value.message == r"na\xefve \xff\xfe, café"
  if how == "jit":
    with pytest.raises(jax.errors.JaxRuntimeError, match=r"na\\xefve"):
      jax.block_until_ready(jax.jit(kernel)(x))


# -- reports ---
def test_a_kernel_that_takes_long_is_reported(capfd: pytest.CaptureFixture[str]) -> None:
  kernel = cpp(
    """
    #include <chrono>
    #include <thread>
    void slow(cg::In<float> x, cg::Out<float> z) {
      std::this_thread::sleep_for(std::chrono::milliseconds(400));
      z[0] = 5;
    }
    """,
    out=same,
    name="a slow kernel",
  )
  with cg.config(stall_seconds=0.05):
    assert jax.jit(kernel)(np.zeros(1, np.float32))[0] == 5
  said = capfd.readouterr().err
  for part in ("kernel 'a slow kernel' called with (float32[1])", "stall_seconds", "MainThread"):
    assert part in said
