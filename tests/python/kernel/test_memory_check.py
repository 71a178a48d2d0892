# SPDX-License-Identifier: Apache-2.0
"""`callgate.config(check_memory=True)`: what it finds in kernels, and what it leaves alone."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import callgate as cg


@pytest.fixture(autouse=True)
def checked() -> Iterator[None]:
  with cg.config(check_memory=True):
    yield


def like_x(x: Any) -> Any:
  return x


def kernel(body: str, **options: Any) -> cg.Kernel:
  """A kernel of float arrays x and z whose body is given."""
  given: dict[str, Any] = {"out": like_x, **options}
  head = "void k(cg::In<float> x, cg::Out<float> z) { int64_t n = x.size(); (void)n; "
  return cg.cpp(head + body + " }", **given)


X = np.arange(12, dtype=np.float32).reshape(3, 4)


def error_of(program: Callable[..., Any], *args: Any) -> str:
  with pytest.raises(cg.KernelError) as info, cg.errors():
    jax.block_until_ready(program(*args))
  return info.value.message


def test_a_correct_kernel_passes_and_its_results_are_right() -> None:
  twice = kernel("for (int64_t i = 0; i < n; ++i) z[i] = 2 * x[i];")
  np.testing.assert_array_equal(jax.jit(twice)(X), 2 * X)
  np.testing.assert_array_equal(jax.vmap(twice)(X), 2 * X)


def test_the_option_is_off_again_after_the_block() -> None:
  lazy = kernel("z[0] = 1;")
  assert "not written completely" in error_of(jax.jit(lazy), X)
  with cg.config(check_memory=False):
    assert np.asarray(jax.jit(lazy)(X))[0, 0] == 1


@pytest.mark.parametrize(
  ("body", "found"),
  [
    (
      "for (int64_t i = 0; i <= n; ++i) z.data()[i] = 1;",
      "'z' (result 0, float32[3,4]) wrote outside it: 4 bytes, the first of them 0 bytes after "
      "its end, where element 12 would be",
    ),
    (
      "for (int64_t i = -1; i < n; ++i) z.data()[i] = 1;",
      "before its start, where element -1 would be",
    ),
    (
      "for (int64_t i = 0; i < n; ++i) z[i] = 1; const_cast<float*>(x.data())[6] = 0;",
      "'x' (operand 0, float32[3,4]) is an input and was written to, the first time at element "
      "[1,2]",
    ),
    (
      "for (int64_t i = 0; i < n; i += 2) z[i] = 1;",
      "'z' (result 0, float32[3,4]) was not written completely: 6 of 12 elements were not "
      "written, the first is [0,1]",
    ),
    (
      "for (int64_t i = 0; i < n; ++i) z[i] += x[i];",
      "'z' (result 0, float32[3,4]) depends on memory that was never written",
    ),
    (
      "for (int64_t i = 0; i < n; ++i) z[i] = x.data()[i + 1];",
      "outside the arrays; the first such element is [2,3]",
    ),
  ],
  ids=["after", "before", "input", "unwritten", "uninitialised", "read-outside"],
)
def test_a_kernels_fault_is_an_error_that_names_it(body: str, found: str) -> None:
  wrong = kernel(body)
  text = error_of(jax.jit(wrong), X)
  assert text.startswith("memory check: ")
  assert found in text
  x = X.copy()
  text = error_of(jax.jit(jax.vmap(wrong)), x)
  assert "float32[4]" in text  # a lane's own array
  np.testing.assert_array_equal(x, X)


def test_the_error_names_the_kernel_and_the_program_stays_usable() -> None:
  wrong = kernel("z[0] = x[0];", name="half a kernel")
  program = jax.jit(lambda x: wrong(x) + 1)
  for _ in range(2):
    with pytest.raises(cg.KernelError, match="kernel 'half a kernel'") as info, cg.errors():
      jax.block_until_ready(program(X))
    assert info.value.kernel == "half a kernel"
  assert float(program(X[:1, :1])[0, 0]) == 1


@pytest.mark.parametrize("dtype", ["bool", "int8", "uint8", "int32", "float16", "bfloat16"])
def test_elements_of_any_dtype_are_told_written_from_unwritten(dtype: str) -> None:
  source = """template <typename T> void fill(cg::In<int32_t, 0> count, cg::Out<T, 1> z) {
    for (int64_t i = 0; i < count[0]; ++i) z[i] = T(float(i % 2));
  }"""
  fill = cg.cpp(source, out=jax.ShapeDtypeStruct((300,), jnp.dtype(dtype)))
  assert np.asarray(fill(np.int32(300))).astype(float).sum() == 150
  assert "1 of 300 elements were not written, the first is [299]" in error_of(fill, np.int32(299))


def test_a_kernel_with_effects_runs_once_and_is_checked_for_what_one_run_tells() -> None:
  source = """
    static int calls = 0;
    void count(cg::In<float, 1> x, cg::Out<int32_t, 0> z, cg::Out<int8_t, 1> small) {
      z[0] = ++calls;
      if (x[0] < 0) x.size() > 0 ? small.data()[small.size()] = 1 : 0;
    }"""
  out = (jax.ShapeDtypeStruct((), jnp.int32), jax.ShapeDtypeStruct((5,), jnp.int8))
  count = cg.cpp(source, out=out, effect="io")
  program = jax.jit(count)
  assert [int(program(np.ones(1, np.float32))[0]) for _ in range(3)] == [1, 2, 3]
  assert "'small' (result 1, int8[5]) wrote outside" in error_of(program, -np.ones(1, np.float32))


def test_an_inout_is_worked_on_in_place_and_may_stay_as_it_is() -> None:
  scale = cg.cpp(
    "void scale(float a, cg::InOut<float, 1> x) { for (int64_t i = 1; i < x.size(); ++i) "
    "x[i] *= a; }",
    out=lambda a, x: x,
  )
  x = jnp.arange(4.0) + 1
  np.testing.assert_array_equal(jax.jit(scale)(3.0, x), [1, 6, 9, 12])
  np.testing.assert_array_equal(x, [1, 2, 3, 4])
  beyond = cg.cpp("void beyond(cg::InOut<float, 1> x) { x.data()[x.size()] = 1; }", out=lambda x: x)
  assert "'x' (result 0, float32[4]) wrote outside" in error_of(jax.jit(beyond), x)


def test_variadic_parameters_are_named_with_their_position() -> None:
  copies = cg.cpp(
    "void copies(cg::Ins<float, 1> xs, cg::Outs<float, 1> zs) { for (int k = 0; k < xs.size(); "
    "++k) for (int64_t i = 0; i < xs[k].size() + (k == 1); ++i) zs[k].data()[i] = 0; }",
    out=lambda xs: xs,
  )
  xs = [jnp.ones(2), jnp.ones(3), jnp.ones(4)]
  assert "'zs'[1] (result 1, float32[3]) wrote outside" in error_of(jax.jit(copies), xs)


def test_scratch_memory_is_guarded_and_filled() -> None:
  source = """void sums(cg::Context& context, cg::In<float, 1> x, cg::Out<float, 1> z) {
    float* sums = context.scratch<float>(x.size());
    %s
    for (int64_t i = 0; i < x.size(); ++i) { sums[i] += x[i]; z[i] = sums[i]; }
  }"""
  cleared = cg.cpp(source % "std::fill(sums, sums + x.size(), 0.0f);", out=like_x)
  dirty = cg.cpp(source % "", out=like_x)
  beyond = cg.cpp(source % "std::fill(sums, sums + x.size() + 1, 0.0f);", out=like_x)
  x = jnp.arange(5.0)
  np.testing.assert_array_equal(jax.jit(cleared)(x), x)
  assert "depends on memory that was never written" in error_of(jax.jit(dirty), x)
  assert "scratch memory of 20 bytes: wrote outside" in error_of(jax.jit(beyond), x)


def test_loops_on_several_threads_and_lanes_in_parallel_are_checked() -> None:
  source = """void twice(cg::Context& context, cg::In<float, 1> x, cg::Out<float, 1> z) {
    context.parallel_for(0, x.size() + %d, 8, [&](int64_t i) { z.data()[i] = 2 * x.data()[i]; });
  }"""
  x = np.arange(4000, dtype=np.float32).reshape(8, 500)
  right = cg.cpp(source % 0, out=like_x, thread_safe=True)
  wrong = cg.cpp(source % 1, out=like_x, thread_safe=True)
  np.testing.assert_array_equal(jax.jit(jax.vmap(right))(x), 2 * x)
  assert "wrote outside" in error_of(jax.jit(jax.vmap(wrong)), x)


def test_a_kernels_own_exception_comes_before_what_it_left_undone() -> None:
  throws = kernel('throw cg::Error("no luck with %lld", (long long)n);')
  assert error_of(jax.jit(throws), X) == "no luck with 12"


def test_jaxs_engine_is_checked_too() -> None:
  wrong = kernel("z[0] = 1;")
  with cg.config(engine="jax"), pytest.raises(Exception, match="not written completely"):
    jax.block_until_ready(jax.jit(wrong)(X))


def test_empty_arrays_pass() -> None:
  twice = kernel("for (int64_t i = 0; i < n; ++i) z[i] = 2 * x[i];")
  assert jax.jit(lambda x: twice(x))(np.zeros((0, 3), np.float32)).shape == (0, 3)


def test_another_value_than_a_bool_is_an_error() -> None:
  with pytest.raises(cg.GateDefinitionError, match="check_memory: expected a bool, got 1"):
    cg.config(check_memory=1)  # pyright: ignore[reportArgumentType]


def test_a_loop_that_copies_one_element_too_many_is_found() -> None:
  # It puts behind y the bytes behind x: guards that were the same would hide it.
  source = """
    template <class T> void copy(cg::In<T, 1> x, cg::Out<T, 1> y, cg::Attr<int64_t> past) {
      int64_t n = x.size() + past;
      for (int64_t i = 0; i < n; ++i) y.data()[i] = x.data()[i];
    }"""
  copy = cg.cpp(source, out=lambda x, past: x)
  for dtype in ("bool", "int8", "bfloat16", "float32", "int32", "complex64"):
    x, size = np.ones(5, jnp.dtype(dtype)), jnp.dtype(dtype).itemsize
    assert np.asarray(jax.jit(lambda x: copy(x, 0))(x)).tolist() == x.tolist()
    for past in (1, 384 // size):
      assert (
        f"'y' (result 0, {dtype}[5]) wrote outside it: {past * size} bytes, the first of them 0 "
        "bytes after its end, where element 5 would be"
      ) in error_of(jax.jit(lambda x, past=past: copy(x, past)), x)
