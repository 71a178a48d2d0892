# SPDX-License-Identifier: Apache-2.0
"""`callgate.cpp`: what a C++ function's types say, its views, attributes, templates, context."""

from __future__ import annotations

import threading
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
import quick_cpp
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from interpreters import run_python
from property_checks import examples

import callgate as cg

SAME = lambda x, *_: x


def cpp(source: str, function: str | None = None, **options: Any) -> cg.Kernel:
  options.setdefault("flags", ("-O0",))
  options.setdefault("out", SAME)
  return cg.cpp(source, function, **options)


def floats(*shape: int) -> Any:
  return jax.ShapeDtypeStruct(shape, np.float32)


# -- operands and results ------------------------------------------------------------------------
SAXPY = """
  void saxpy(float a, cg::In<float, 1> x, cg::In<float, 1> y, cg::Out<float, 1> z) {
    for (int64_t i = 0; i < x.size(); ++i) z[i] = a * x[i] + y[i];
  }
"""


@pytest.mark.parametrize("jit", [False, True])
def test_saxpy_takes_scalars_as_operands_and_arguments_by_name(jit: bool, engine: str) -> None:
  del engine
  saxpy = cpp(SAXPY, out=lambda a, x, y: x)
  x, y = jnp.arange(5.0), jnp.ones(5)
  want = 2.5 * np.arange(5.0) + 1
  call = jax.jit(saxpy) if jit else saxpy
  np.testing.assert_allclose(call(2.5, x, y), want)
  np.testing.assert_allclose(saxpy(y=y, a=jnp.float32(2.5), x=x), want)
  np.testing.assert_allclose(saxpy(2.5, y=y, x=np.arange(5.0, dtype=np.float32)), want)
  assert saxpy.parameters == ("a", "x", "y")


def test_views_know_rank_extents_strides_size_and_index() -> None:
  shape = cpp(
    """
    void shape(cg::In<double, 3> x, cg::In<int8_t> any, cg::Out<int64_t, 1> z) {
      int64_t found[] = {x.rank(), x.extent(0), x.extent(2), x.stride(0), x.stride(1), x.stride(2),
                         x.size(), x.empty(), any.rank(), any.size(), any.empty(), x.extents()[1],
                         x.end() - x.begin(), int64_t(x(1, 2, 3)), int64_t(x[23]), any(1)};
      std::copy(found, found + 16, z.data());
    }
    """,
    out=jax.ShapeDtypeStruct((16,), np.int64),
  )
  with jax.enable_x64(True):
    x = jnp.arange(24.0).reshape(2, 3, 4)
    got = shape(x, jnp.array([5, 6], jnp.int8))
  assert got.tolist() == [3, 2, 4, 12, 4, 1, 24, 0, 1, 2, 0, 3, 24, 23, 23, 6]


def test_inout_is_one_memory_and_leaves_the_callers_array_alone(engine: str) -> None:
  del engine
  add = cpp("void add(cg::InOut<float> x, cg::In<float, 0> y) { for (auto& e : x) e += y(); }")
  x = jnp.zeros((2, 2))
  assert add(x, 3.0).tolist() == [[3, 3], [3, 3]]
  assert jax.jit(lambda x: add(add(x, 1.0), x[0, 0]))(x).tolist() == [[1, 1], [1, 1]]
  assert x.tolist() == [[0, 0], [0, 0]]


def test_inout_with_donation_works_in_the_callers_buffer() -> None:
  add = cpp("void add(cg::InOut<float, 1> x) { for (auto& e : x) e += 1; }")
  x = jnp.arange(1000.0)
  address = x.unsafe_buffer_pointer()
  y = jax.jit(add, donate_argnums=0)(x)
  assert y.unsafe_buffer_pointer() == address
  assert y[-1] == 1000
  vmapped = jax.vmap(add)(jnp.zeros((3, 2)))
  assert vmapped.tolist() == [[1, 1]] * 3


def test_aliases_make_an_in_and_an_out_one_memory() -> None:
  same = cpp(
    """
    void same(cg::In<float, 1> x, cg::Out<float, 1> y, cg::Out<bool, 0> one) {
      one() = (const void*)x.data() == (const void*)y.data();
      if (!one()) std::copy(x.begin(), x.end(), y.begin());
    }
    """,
    out=lambda x: (x, jax.ShapeDtypeStruct((), bool)),
    aliases={0: 0},
  )
  y, one = jax.jit(lambda x: same(x + 1))(jnp.zeros(3))
  assert one
  assert y.tolist() == [1, 1, 1]


def test_several_results_make_a_pytree_and_some_may_be_empty() -> None:
  split = cpp(
    """
    void split(cg::In<float, 1> x, cg::Out<float, 0> sum, cg::Out<int32_t> none,
               cg::Out<float> y) {
      sum() = 0;
      for (float e : x) sum() += e;
      for (int64_t i = 0; i < y.size(); ++i) y[i] = x[x.size() - 1 - i];
      if (!none.empty()) throw cg::Error("not empty");
    }
    """,
    out=lambda x: {"a": floats(), "b": (jax.ShapeDtypeStruct((0,), np.int32), x)},
  )
  got = jax.jit(split)(jnp.arange(4.0))
  assert got["a"] == 6
  assert got["b"][0].shape == (0,)
  assert got["b"][1].tolist() == [3, 2, 1, 0]


def test_ins_and_outs_take_any_number_of_arrays(engine: str) -> None:
  del engine
  scale = cpp(
    """
    void scale(float a, cg::Ins<float> xs, cg::In<float, 1> last, cg::Outs<float> zs) {
      for (int k = 0; k < xs.size(); ++k)
        for (int64_t i = 0; i < xs[k].size(); ++i) zs[k][i] = a * xs[k][i] + last[0];
    }
    """,
    out=lambda a, xs, last: xs,
  )
  xs = [jnp.ones(3), jnp.full((2, 2), 2.0)]
  got = scale(10.0, xs, jnp.ones(1))
  assert [g.tolist() for g in got] == [[11] * 3, [[21, 21]] * 2]
  assert scale(1.0, [], jnp.ones(1)) == []
  three = jax.vmap(scale, (None, 0, None))(1.0, [jnp.ones((4, 3))] * 3, jnp.ones(1))
  assert [g.shape for g in three] == [(4, 3)] * 3


@examples(7)
@given(hnp.array_shapes(min_dims=0, max_dims=5, min_side=0, max_side=3))
def test_views_of_any_rank_see_every_element_in_order(shape: tuple[int, ...]) -> None:
  x = jnp.arange(np.prod(shape), dtype=jnp.float32).reshape(shape)
  np.testing.assert_array_equal(jax.jit(REVERSE)(x).ravel(), np.asarray(x).ravel()[::-1])


REVERSE = cpp(
  """
  void reverse(cg::In<float> x, cg::Out<float> y) {
    for (int64_t i = 0; i < x.size(); ++i) y[x.size() - 1 - i] = x[i];
  }
  """
)

DTYPES = [
  *("bool", "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64"),
  *("float16", "bfloat16", "float32", "float64", "complex64", "complex128"),
  *("float8_e4m3fn", "float8_e5m2", "float8_e4m3b11fnuz", "float8_e4m3fnuz"),
  *("float8_e5m2fnuz", "float8_e3m4", "float8_e4m3"),
]


def test_a_dtype_that_c_plus_plus_lacks_is_named() -> None:
  twice = cpp(TWICE)
  with pytest.raises(
    cg.GateDefinitionError, match=r"T: C\+\+ kernels have no type for float6_e2m3fn"
  ):
    jax.eval_shape(twice, jax.ShapeDtypeStruct((3,), ml_dtypes.float6_e2m3fn))


# -- templates -----------------------------------------------------------------------------------
def test_ranks_defaults_and_values_are_template_parameters() -> None:
  kernel = cpp(
    """
    #include <concepts>
    namespace deep { namespace {
    template <std::floating_point T, int R, bool kNegate, int kShift = 2>
      requires(R >= 0)
    [[gnu::noinline]] inline void f(cg::In<T, R> x, const T a, cg::Out<T, R> y) noexcept(false) {
      for (int64_t i = 0; i < x.size(); ++i) y[i] = (kNegate ? -a : a) * x[i] + R * 100 + kShift;
    }
    }}
    """
  )
  x = jnp.ones((2, 2))
  assert kernel(x, 3.0, kNegate=True)[0, 0] == 199
  assert kernel(x, 3.0, kNegate=False, kShift=7)[0, 0] == 210
  assert kernel(x[0], 3.0, kNegate=False)[0] == 105
  with pytest.raises(cg.GateDefinitionError, match=r"'int kNegate' by keyword \(kNegate=...\)"):
    kernel(x, 3.0)
  with pytest.raises(cg.GateDefinitionError, match="'kNegate': expected an integer, got 'yes'"):
    kernel(x, 3.0, kNegate="yes")
  with pytest.raises(
    cg.GateDefinitionError, match="template parameter 'T': expected a dtype, got 3"
  ):
    kernel(x, 3.0, kNegate=True, T=3)
  with pytest.raises(cg.CompileError, match=r"for f<int32_t, 1, 1, 2>: .*reported an error"):
    kernel(jnp.arange(3), 3, kNegate=True)


def test_a_template_parameter_that_no_array_tells_is_given_by_keyword() -> None:
  zeros = cpp(
    """
    template <typename Acc, typename T>
    void total(cg::In<T, 1> x, cg::Out<T, 0> y) { Acc a = 0; for (T e : x) a += e; y() = T(a); }
    """,
    out=lambda x: jax.ShapeDtypeStruct((), x.dtype),
  )
  x = jnp.full(3000, 1.0, jnp.float16)
  assert zeros(x, Acc="float32") == 3000
  assert zeros(x, Acc=np.float16) == 2048  # where float16 stops counting by ones
  with pytest.raises(cg.GateDefinitionError, match="'typename Acc' by keyword"):
    zeros(x)


def test_element_types_are_deduced_after_variadic_operands_and_in_complex() -> None:
  kernel = cpp(
    """
    template <class S, class T>
    void magnitude(cg::Ins<S> xs, cg::In<std::complex<T>, 1> z, cg::Out<T, 1> y) {
      for (int64_t i = 0; i < z.size(); ++i) y[i] = std::abs(z[i]) + xs.size() + xs[0][0];
    }
    """,
    out=lambda xs, z: jax.ShapeDtypeStruct(z.shape, z.real.dtype if hasattr(z, "real") else "f4"),
  )
  got = kernel([jnp.arange(3), jnp.arange(2)], jnp.array([3 + 4j, 1j]))
  assert got.tolist() == [7, 3]


def test_an_alias_in_a_templates_parameters_is_an_error_that_says_what_to_write() -> None:
  kernel = cpp(
    """
    template <class T> using Result = cg::Out<T, 1>;
    template <class T> void f(cg::In<T, 1> x, Result<T> y) { y[0] = x[0]; }
    """,
    out=lambda x, y: x,
  )
  with pytest.raises(cg.GateDefinitionError, match=r"parameter 'y': expected its type .* cg::Out<"):
    kernel(jnp.ones(3), 1.0)


def test_aliases_of_types_in_a_plain_function_are_the_compilers_to_read() -> None:
  kernel = cpp(
    """
    using Vector = cg::In<float, 1>;
    using Number = int32_t;
    void f(Vector x, Number n, cg::Out<float, 1> y) { y[0] = x[0] + float(n); }
    """
  )
  assert kernel(jnp.ones(1), 4).tolist() == [5]


TWICE = """
  template <class T> void twice(cg::In<T> x, cg::Out<T> y) {
    for (int64_t i = 0; i < x.size(); ++i) y[i] = x[i] + x[i];
  }
"""


def test_threads_that_trace_at_once_share_one_variant() -> None:
  kernel = cpp(TWICE)
  results: list[Any] = []
  threads = [
    threading.Thread(target=lambda: results.append(kernel(jnp.ones(2, jnp.int16)).tolist()))
    for _ in range(6)
  ]
  for thread in threads:
    thread.start()
  for thread in threads:
    thread.join()
  assert results == [[2, 2]] * 6


# -- which function ------------------------------------------------------------------------------
TWO = """
  // void none(cg::In<float> x) {}
  const char* text = "void none(cg::In<float, 1> x) {"; const char raw[] = R"(void none(cg::In<)";
  void declared(cg::In<float, 1> x, cg::Out<float, 1> y);
  void helper(int) {}
  namespace inner { void one(cg::In<float, 1> x, cg::Out<float, 1> y) { y[0] = x[0] + 1'000; } }
  static void two(cg::In<float, 1> x, cg::Out<float, 1> y) { y[0] = x[0] + 2; }
"""


def test_a_function_is_chosen_by_name_with_or_without_its_namespace() -> None:
  x = jnp.zeros(1)
  assert cpp(TWO, "two")(x).tolist() == [2]
  assert cpp(TWO, "one")(x).tolist() == cpp(TWO, "inner::one")(x).tolist() == [1000]
  with pytest.raises(cg.GateDefinitionError, match=r"expected function=.*: inner::one, two"):
    cpp(TWO)
  with pytest.raises(cg.GateDefinitionError, match=r"expected a function `void three\(...\)`"):
    cpp(TWO, "three")
  with pytest.raises(cg.GateDefinitionError, match="found none that takes callgate's views"):
    cpp("void f(float* x) {}")
  with pytest.raises(cg.GateDefinitionError, match="one function 'f', found 2"):
    cpp("void f(cg::In<float> x) {} void f(cg::In<int> x) {}", "f")


def test_a_source_may_use_the_namespace_and_have_exported_kernels_of_its_own() -> None:
  kernel = cpp(
    """
    using namespace cg;
    void other(In<float, 1> x, Out<float, 1> y) { y[0] = -x[0]; }
    CALLGATE_KERNEL(other, x, y);
    void mine(In<float, 1> x, String how, Out<float, 1> y) { y[0] = x[0] * float(how.size()); }
    """,
    "mine",
    out=lambda x: x,
  )
  assert kernel(jnp.ones(1), "four").tolist() == [4]


def test_names_count_and_are_the_modules() -> None:
  source = "void named(cg::In<float> x, cg::Out<float> y) {}"
  first, second = cg.cpp(source, out=SAME), cg.cpp(source, out=SAME)
  assert first.name == f"{__name__}.named"
  assert second.name == f"{first.name}#1"
  with pytest.raises(ValueError, match="taken by another live"):
    cg.cpp(source, out=SAME, name=first.name)
  with pytest.raises(cg.GateDefinitionError, match="without brackets"):
    cg.cpp(source, out=SAME, name="a[b]")


# -- attributes ----------------------------------------------------------------------------------
ATTRIBUTES = """
  void f(cg::Attr<int32_t> n, cg::In<double, 1> x, cg::String how, cg::Numbers<float> w, cg::Dict d,
         cg::Out<double, 1> y) {
    for (int64_t i = 0; i < x.size(); ++i) y[i] = n * x[i];
    for (float v : w) y[0] += v;
    y[1] = how == "négative" ? -1 : double(std::string_view(how).size());
    y[2] = d.get<double>("scale") + double(d.get<int64_t>("n")) + d.dict("deep").get<bool>("yes");
    y[3] = double(d.numbers<int64_t>("list").size() + d.string("name").size() + d.size());
    y[4] = d.get<float>("f") + d.contains("missing");
  }
"""


def attributed(**options: Any) -> cg.Kernel:
  return cpp("#include <string_view>\n" + ATTRIBUTES, out=lambda x: x, **options)


def test_attributes_are_numbers_strings_arrays_and_dicts(engine: str) -> None:
  del engine
  kernel = attributed()
  values = {"scale": 0.5, "n": 3, "deep": {"yes": True}, "list": [], "name": "abc"}
  with jax.enable_x64(True):
    x = jnp.ones(5)

    @jax.jit
    def program(x: Any) -> Any:
      return kernel(4, x, "négative", [1, 2.5], {**values, "f": np.float32(7)})

    assert program(x).tolist() == [7.5, -1, 4.5, 9, 7]
    again = kernel(n=4, x=x, how="four", w=np.zeros(0), d={**values, "f": np.float32(7)})
    assert again.tolist() == [4, 4, 4.5, 9, 7]


WRONG_ATTRIBUTES = {
  "a float": ({"n": 1.5}, r"attribute 'n': expected a number that int32 holds, got 1.5"),
  "too large": ({"n": 2**31}, r"attribute 'n': expected a number that int32 holds, got 2147483648"),
  "no number": ({"n": "1"}, r"attribute 'n': expected a number that int32 holds, got '1'"),
  "no string": ({"how": 3}, r"attribute 'how': expected a string, got 3"),
  "a scalar": ({"w": 3}, r"attribute 'w': expected a one-dimensional array of numbers"),
  "a matrix": ({"w": np.ones((2, 2))}, r"attribute 'w': expected a one-dimensional array"),
  "overflow": ({"w": [1e60]}, r"attribute 'w': expected .* numbers that float32 holds"),
  "complex": ({"w": [1j]}, r"attribute 'w': expected .* numbers that float32 holds"),
  "no dict": ({"d": [1]}, r"attribute 'd': expected a dict, got \[1\]"),
  "keys": ({"d": {1: 2}}, r"attribute 'd': expected strings as keys, got 1"),
  "an entry": ({"d": {"a": {"b": object}}}, r"attribute 'd.a.b': expected a number, a string, an"),
}


@pytest.mark.parametrize("case", WRONG_ATTRIBUTES)
def test_a_wrong_attribute_is_an_error_that_names_it(case: str) -> None:
  wrong, message = WRONG_ATTRIBUTES[case]
  values: dict[str, Any] = {"n": 1, "how": "", "w": [], "d": {}, **wrong}
  kernel = attributed()
  with jax.enable_x64(True), pytest.raises(cg.GateDefinitionError, match=message):
    kernel(x=jnp.ones(5), **values)


def test_an_unsigned_attribute_of_64_bits_arrives_whole() -> None:
  kernel = cpp(
    """
    void f(cg::Attr<uint64_t> a, cg::Numbers<uint64_t> b, cg::Dict d, cg::Out<uint64_t, 1> y) {
      y[0] = a; y[1] = b[0]; y[2] = d.get<uint64_t>("c");
    }""",
    out=lambda **_: jax.ShapeDtypeStruct((3,), np.uint64),
  )
  large = [2**63, 2**64 - 1, 2**63 + 1]
  with jax.enable_x64(True):
    for a, b, c in (large, [2**63 - 1, 0, 1]):
      given = {"a": a, "b": [b], "d": {"c": np.uint64(c)}}
      assert kernel(**given).tolist() == [a, b, c]
      assert jax.jit(lambda given=given: kernel(**given))().tolist() == [a, b, c]


def test_a_traced_attribute_is_an_error_that_tells_of_operands() -> None:
  kernel = cpp("void f(cg::Attr<float> a, cg::Out<float, 0> y) { y() = a; }", out=lambda: floats())
  assert kernel(2) == 2
  with pytest.raises(cg.GateDefinitionError, match=r"'a'.*traced array.*an operand by value"):
    jax.jit(kernel)(2.0)


def test_a_dict_without_the_entry_or_of_another_type_fails_by_name() -> None:
  kernel = cpp(
    'void f(cg::Dict d, cg::Out<float, 0> y) { y() = float(d.get<int64_t>("n")); }', out=floats()
  )
  assert kernel({"n": 3}) == 3
  with pytest.raises(cg.KernelError, match="attribute 'n' is missing"), cg.errors():
    kernel({"m": 3})
  with pytest.raises(cg.KernelError, match="attribute 'n': expected a number"), cg.errors():
    kernel({"n": 3.0})


def test_attributes_have_every_dtype(engine: str) -> None:
  del engine
  numbers = range(len(DTYPES))
  each = lambda text: ", ".join(text.replace("#", str(n)) for n in numbers)
  kernel = cpp(
    f"""
    template <class T> void fill(cg::Attr<T> one, cg::Numbers<T> v, cg::In<T, 1> x,
                                 cg::Out<T, 1> y) {{
      for (int64_t i = 0; i < x.size(); ++i)
        y[i] = v[i] == one.value() ? one.value() : T(x[i] + x[i]);
    }}
    template <{each("class T#")}>
    void f({each("cg::Attr<T#> one#, cg::Numbers<T#> v#, cg::In<T#, 1> x#")},
           {each("cg::Out<T#, 1> y#")}) {{
      {each("fill(one#, v#, x#, y#)")};
    }}
    """,
    "f",
    out=lambda *xs, **_: list(xs),
  )
  with jax.enable_x64(True):
    xs = [jnp.zeros(3).astype(np.dtype(getattr(ml_dtypes, name, name))) for name in DTYPES]
    found = jax.jit(lambda xs: kernel(*(v for x in xs for v in (1, [1, 0, 1], x))))(xs)
    for name, x, got in zip(DTYPES, xs, found, strict=True):
      assert got.dtype == x.dtype, name
      np.testing.assert_array_equal(np.asarray(got).astype(complex), [1, 0, 1], err_msg=name)


def test_attributes_that_compare_equal_in_python_make_their_own_programs() -> None:
  kind = cpp(
    """
    void f(cg::Dict d, cg::Attr<float> zero, cg::Out<float, 1> y) {
      auto is = [&](auto value) {
        try {
          return float(d.get<decltype(value)>("n") == value);
        } catch (const cg::Error&) { return 0.0f; }
      };
      y[0] = is(int64_t(1)), y[1] = is(1.0), y[2] = is(true), y[3] = std::signbit(zero.value());
    }
    """,
    out=floats(4),
  )
  assert kind({"n": 1}, 0.0).tolist() == [1, 0, 0, 0]
  assert kind({"n": 1.0}, 0.0).tolist() == [0, 1, 0, 0]
  assert kind({"n": True}, -0.0).tolist() == [0, 0, 1, 1]


@examples(7)
@given(
  st.floats(width=32, allow_nan=False, allow_subnormal=False),
  st.text(max_size=20),
  st.lists(st.integers(-(2**63), 2**63 - 1), max_size=5),
)
def test_any_attribute_arrives_as_it_was_given(number: float, text: str, ints: list[int]) -> None:
  got = jax.jit(lambda: ECHO(number, text, ints))()
  data = text.encode()
  assert got[0] == np.float32(number)
  assert bytes(np.asarray(got[1][: len(data)])) == data
  want = [n & 0xFF for n in ints]
  assert got[2][: len(ints)].tolist() == want


ECHO = cpp(
  """
  void echo(cg::Attr<float> a, cg::String s, cg::Numbers<int64_t> n, cg::Out<float, 0> x,
            cg::Out<uint8_t, 1> y, cg::Out<uint8_t, 1> z) {
    x() = a;
    std::copy(s.begin(), s.end(), y.data());
    for (int64_t i = 0; i < n.size(); ++i) z[i] = uint8_t(n[i]);
  }
  """,
  out=lambda: (
    floats(),
    jax.ShapeDtypeStruct((100,), np.uint8),
    jax.ShapeDtypeStruct((5,), np.uint8),
  ),
)


# -- the context ---------------------------------------------------------------------------------
def test_the_context_gives_threads_scratch_memory_and_the_device(engine: str) -> None:
  kernel = cpp(
    """
    void f(cg::Context& context, cg::In<float, 1> x, cg::Out<float, 1> y,
           cg::Out<int32_t, 1> info) {
      float* copy = context.scratch<float>(x.size());
      context.parallel_for(0, x.size(), 10, [&](int64_t i) { copy[i] = x[i] * 2; });
      context.parallel_ranges(0, x.size(), 1, [&](int64_t first, int64_t last) {
        std::copy(copy + first, copy + last, y.data() + first);
      });
      info[0] = context.threads();
      info[1] = context.device();
      info[2] = reinterpret_cast<uintptr_t>(copy) % 64;
      info[3] = context.user_data() == nullptr;
      info[4] = reinterpret_cast<uintptr_t>(context.scratch<double>(0)) != 0;
    }
    """,
    out=lambda x: (x, jax.ShapeDtypeStruct((5,), np.int32)),
  )
  y, info = jax.jit(kernel)(jnp.arange(1000.0))
  np.testing.assert_array_equal(y, 2 * np.arange(1000.0))
  threads, device, *rest = info.tolist()
  assert threads >= 1
  assert device == (jax.devices()[0].id if engine == "callgate" else -1)
  assert rest == [0, 1, 1]


def test_an_exception_in_a_parallel_loop_is_the_kernels() -> None:
  kernel = cpp(
    """
    void f(const cg::Context& context, cg::In<float, 1> x, cg::Out<float, 1> y) {
      context.parallel_for(0, x.size(), 1, [&](int64_t i) {
        if (x[i] < 0) throw cg::Error("x[%d] is negative", int(i));
        y[i] = std::sqrt(x[i]);
      });
    }
    """
  )
  assert kernel(jnp.full(4, 4.0)).tolist() == [2] * 4
  with pytest.raises(cg.KernelError, match=r"x\[63\] is negative"), cg.errors():
    jax.jit(kernel)(jnp.ones(64).at[63].set(-1))


# -- OpenMP ---
def test_openmp_without_its_flag_is_said() -> None:
  source = """
    extern "C" int omp_get_thread_num();
    void doubled(cg::In<float, 1> x, cg::Out<float, 1> y) {
      #pragma omp parallel for
      for (int64_t i = 0; i < x.size(); ++i) y[i] = 2 * x[i];
    }
  """
  x = jnp.arange(4.0)
  with pytest.warns(UserWarning, match=r"'#pragma omp': without flags=\['-fopenmp'\]"):
    silent = cg.cpp(source, out=lambda x: x)
  assert silent(x).tolist() == [0, 2, 4, 6]
  assert cg.cpp(source, out=lambda x: x, flags=["-fopenmp"])(x).tolist() == [0, 2, 4, 6]


def test_a_call_of_openmp_without_its_flag_is_said() -> None:
  program = """
    import callgate as cg, jax.numpy as jnp
    source = '''
      extern "C" int omp_get_thread_num();
      void threads(cg::In<float, 1> x, cg::Out<float, 1> y) { y[0] = omp_get_thread_num(); }
    '''
    try:
      cg.cpp(source, out=lambda x: x)(jnp.ones(1))
    except cg.CompileError as error:
      print(error)
  """
  # A process of its own: other libraries bring OpenMP for all of theirs.
  done = run_python(program)
  assert "It uses OpenMP; pass flags=['-fopenmp']" in done.stdout, done


def test_a_source_uses_vectors_limits_and_algorithms_of_numbers_as_they_are(
  monkeypatch: pytest.MonkeyPatch,
) -> None:
  monkeypatch.setenv("CXX", quick_cpp.plain())
  total = cg.cpp(
    """
    void total(cg::In<float, 1> x, cg::Out<float, 0> y) {
      std::vector<float> kept(x.data(), x.data() + x.size());
      kept.push_back(std::numeric_limits<float>::min());
      y[0] = std::accumulate(kept.begin(), kept.end(), 0.0f);
    }""",
    out=jax.ShapeDtypeStruct((), np.float32),
  )
  assert total(np.arange(4, dtype=np.float32)) == 6
