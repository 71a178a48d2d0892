# SPDX-License-Identifier: Apache-2.0
"""`cg.elementwise`: types, broadcasting, batching, the code of an element; NumPy is the oracle."""

from __future__ import annotations

import pathlib
import re
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from interpreters import printed_by
from jax import export
from property_checks import examples

import callgate as cg
from callgate._core.public import core

SAXPY = cg.elementwise("T x, T y", "T z", "z = 2 * x + y", name="test_elementwise.saxpy")


def saxpy(x: Any, y: Any) -> Any:
  return 2 * x + y


def array(*shape: int, dtype: Any = np.float32) -> Any:
  return (np.arange(np.prod(shape, dtype=int)) % 11 - 3).reshape(shape).astype(dtype)


# -- types ---------------------------------------------------------------------------------------
NATIVE = ["int8", "int16", "int32", "uint8", "uint16", "uint32", "float32", "complex64"]
SMALL = ["float16", "bfloat16", "float8_e4m3", "float8_e4m3fn", "float8_e4m3fnuz", "float8_e5m2"]
FLOAT8 = ["float8_e5m2fnuz", "float8_e4m3b11fnuz", "float8_e3m4"]


@pytest.mark.parametrize("name", NATIVE)
def test_a_letter_stands_for_any_dtype(name: str) -> None:
  x, y = array(3, 5, dtype=name), array(3, 5, dtype=name)[::-1]
  got = jax.jit(SAXPY)(x, y)
  assert got.dtype == np.dtype(name)
  np.testing.assert_array_equal(got, (x + x + y).astype(name))


@pytest.mark.parametrize("name", SMALL + FLOAT8)
def test_small_floats_are_computed_in_float(name: str) -> None:
  dtype = jnp.dtype(name)
  x, y = array(24, dtype=dtype) / 4, array(24, dtype=dtype)[::-1]
  x, y = x.astype(dtype), y.astype(dtype)
  got = jax.jit(SAXPY)(x, y)
  assert got.dtype == dtype
  want = (2 * x.astype(np.float32) + y.astype(np.float32)).astype(dtype)
  np.testing.assert_array_equal(np.asarray(got, np.float32), want.astype(np.float32))


def test_powers_of_two_round_as_ml_dtypes_has_it() -> None:
  dtype = ml_dtypes.float8_e8m0fnu
  down = cg.elementwise("float32 x", "float8_e8m0fnu y", "y = x")
  up = cg.elementwise("float8_e8m0fnu x", "float32 y", "y = x")
  x = np.exp2(np.linspace(-149, 127.9, 5000)).astype(np.float32)
  x = np.concatenate([x, np.array([0, -1, 1.5, 3, np.inf, np.nan, 3e38], np.float32)])
  np.testing.assert_array_equal(np.asarray(down(x)).view("u1"), x.astype(dtype).view("u1"))
  every = np.arange(256, dtype=np.uint8).view(dtype)
  np.testing.assert_array_equal(up(every), every.astype(np.float32))


def test_every_bfloat16_is_read_and_every_float_is_rounded_to_one() -> None:
  up = cg.elementwise("bfloat16 x", "float32 y", "y = x")
  down = cg.elementwise("float32 x", "bfloat16 y", "y = x")
  every = np.arange(2**16, dtype=np.uint16).view(ml_dtypes.bfloat16)
  np.testing.assert_array_equal(up(every), every.astype(np.float32))
  bits = np.random.default_rng(0).integers(0, 2**32, 10**5, dtype=np.uint32)
  x = np.concatenate([every.astype(np.float32), bits.view(np.float32)])
  with np.errstate(invalid="ignore"):
    want = x.astype(ml_dtypes.bfloat16).astype(np.float32)
  np.testing.assert_array_equal(np.asarray(down(x), np.float32), want)


def test_64_bit_types_are_as_exact_as_numpy_s() -> None:
  third = cg.elementwise("T x", "T z", "z = x * 0.1 + 1e-3")
  x = np.linspace(0, 1, 100)
  with jax.enable_x64(True):
    np.testing.assert_allclose(third(x), x * 0.1 + 1e-3, rtol=1e-15)
    np.testing.assert_allclose(third(x + 1j), (x + 1j) * 0.1 + 1e-3, rtol=1e-15)
    big = np.array([2**62, -(2**62)])
    np.testing.assert_array_equal(cg.elementwise("T x", "T z", "z = x + 1")(big), big + 1)
    np.testing.assert_array_equal(third(np.uint64([20])), [2])


def test_arguments_and_results_may_have_types_of_their_own() -> None:
  kernel = cg.elementwise("T x, U y", "bool below, float32 mean, U y2", """
    below = x < y;
    mean = (x + y) / 2.0;
    y2 = y * y
  """)  # fmt: skip
  x, y = array(6, dtype=np.int32), array(6, dtype=np.float16)[::-1]
  below, mean, square = jax.jit(kernel)(x, y)
  np.testing.assert_array_equal(below, x < y)
  np.testing.assert_array_equal(mean, (x + y) / np.float32(2))
  np.testing.assert_array_equal(square, y * y)
  assert (below.dtype, mean.dtype, square.dtype) == (np.bool_, np.float32, np.float16)


@pytest.mark.parametrize("dtype", ["bfloat16", "float32", "int8", "complex64"])
def test_a_python_scalar_takes_the_dtype_of_the_others(dtype: str) -> None:
  x = jnp.ones(3, dtype)
  for got in (SAXPY(x, 3), SAXPY(3, x), jax.jit(SAXPY)(x, 3), jax.jit(lambda x: SAXPY(x, 3))(x)):
    assert got.dtype == jnp.dtype(dtype)
  assert SAXPY(x, 3).tolist() == [5, 5, 5]


def test_python_scalars_alone_have_jax_s_default_dtypes() -> None:
  assert SAXPY(1, 2).dtype == np.int32
  assert SAXPY(1, 2.0).dtype == np.float32
  assert SAXPY(1, 2j) == 2 + 2j
  assert SAXPY(1, 2.0).shape == ()


def test_literals_are_floats_where_no_double_is_near() -> None:
  code = cg.elementwise("T x", "T y", "y = x * 0.5 + 1e-3 + 1.f + 3 + 0x1p-2 /* 2.5 */").code(1.0)
  assert "x * 0.5f + 1e-3f + 1.f + 3 + 0x1p-2 /* 2.5 */" in code
  kept = cg.elementwise("T x", "T y", "double w = 0.1; y = x * w").code(1.0)
  assert "double w = 0.1;" in kept
  assert "y = 0.5f * x" in cg.elementwise("T x", "T y", "y = 0.5 * x").code(jnp.ones(2, jnp.int8))


def test_a_dtype_that_no_argument_has_is_given_by_keyword() -> None:
  iota = cg.elementwise("", "T z", "z = i * 2")
  got = jax.jit(lambda: iota(size=(2, 3), T="float16"))()
  np.testing.assert_array_equal(got, 2 * np.arange(6, dtype=np.float16).reshape(2, 3))
  assert got.dtype == np.float16
  with pytest.raises(cg.GateDefinitionError, match=r"type T of 'z' is unknown.*T='float32'"):
    iota(size=3)
  with pytest.raises(cg.GateDefinitionError, match=r"T=float32, but argument 'x' is int32\[2\]"):
    SAXPY(np.arange(2), 1, T=jnp.float32)


# -- shapes --------------------------------------------------------------------------------------
SHAPES = st.lists(st.sampled_from([0, 1, 1, 2, 3, 5]), max_size=5)


@examples(20)
@given(full=SHAPES, data=st.data())
def test_arguments_broadcast_as_numpy_s(full: list[int], data: Any) -> None:
  shapes: list[tuple[int, ...]] = []
  for _ in range(2):
    kept = data.draw(st.lists(st.booleans(), min_size=len(full), max_size=len(full)))
    drop = data.draw(st.integers(0, len(full)))
    shapes.append(tuple(e if keep else 1 for e, keep in zip(full, kept, strict=True))[drop:])
  x, y = array(*shapes[0]), array(*shapes[1]) * 7
  np.testing.assert_array_equal(jax.jit(SAXPY)(x, y), saxpy(x, y))


def test_large_arrays_are_split_over_threads_at_any_place() -> None:
  x, y = array(301, 1, 257, 3), array(4, 1, 3)
  np.testing.assert_array_equal(jax.jit(SAXPY)(x, y), saxpy(x, y))
  flat = array(1_000_003)
  np.testing.assert_array_equal(jax.jit(SAXPY)(flat, flat), saxpy(flat, flat))


def test_many_arguments_each_lie_in_their_own_way() -> None:
  names = "abcdef"
  kernel = cg.elementwise(
    ", ".join(f"T {name}" for name in names), "T z", "z = " + " + ".join(names)
  )
  shapes = [(4, 5, 6), (5, 6), (4, 1, 6), (4, 5, 1), (1, 5, 1), ()]
  values = [array(*shape) + k for k, shape in enumerate(shapes)]
  np.testing.assert_array_equal(jax.jit(kernel)(*values), sum(values))


def test_a_program_holds_one_call_whatever_the_shapes() -> None:
  code = SAXPY.code(jax.ShapeDtypeStruct((3, 4), np.float32), jax.ShapeDtypeStruct((), np.float32))
  assert code == SAXPY.code(np.ones((9, 9, 9), np.float32), 1.0)
  assert code != SAXPY.code(np.ones(3, np.float32), np.ones(3, np.float32))


def test_shapes_that_don_t_broadcast_are_an_error_that_names_the_arguments() -> None:
  with pytest.raises(cg.GateDefinitionError, match=r"'x' \[3\], 'y' \[2\]"):
    SAXPY(np.ones(3, np.float32), np.ones(2, np.float32))


# -- the code of an element ----------------------------------------------------------------------
def test_the_code_knows_the_index_and_the_number_of_elements() -> None:
  kernel = cg.elementwise("T x", "int32 place, int32 n1, int32 n2", """
    place = i;
    n1 = n;
    n2 = _ind.size();
  """)  # fmt: skip
  place, n1, n2 = jax.jit(kernel)(np.zeros((40, 50), np.float32))
  np.testing.assert_array_equal(place, np.arange(2000).reshape(40, 50))
  assert (np.unique(n1), np.unique(n2)) == (2000, 2000)


def test_a_raw_argument_is_the_whole_array() -> None:
  reverse = cg.elementwise("T x, raw T table", "T z", "z = x * table[n - 1 - i]")
  x, table = array(7), array(7) + 1
  np.testing.assert_array_equal(jax.jit(reverse)(x, table), x * table[::-1])
  gather = cg.elementwise(
    "raw bfloat16 x, raw int32 at", "float32 z", "z = max(x(at[i], 1), 0) + x.extent(1) + x.size()"
  )
  x = jnp.asarray(array(5, 2), jnp.bfloat16)
  at = np.array([3, 0, 4], np.int32)
  want = np.maximum(np.asarray(x, np.float32)[at, 1], 0) + 12
  np.testing.assert_array_equal(jax.jit(lambda x, at: gather(x, at, size=3))(x, at), want)


def test_where_all_arguments_are_raw_size_gives_the_shape() -> None:
  twice = cg.elementwise("raw T x", "T z", "z = 2 * x[i]", name="test_elementwise.twice")
  x = array(2, 3)
  np.testing.assert_array_equal(twice(x, size=(2, 3)), 2 * x)
  with pytest.raises(cg.GateDefinitionError, match=r"expected size=, an integer or a shape.*none"):
    twice(x)
  with pytest.raises(cg.GateDefinitionError, match=r"got -1"):
    twice(x, size=-1)
  with pytest.raises(cg.GateDefinitionError, match=r"got size=3, but .* 'x', 'y' broadcast"):
    SAXPY(x, x, size=3)


def test_statements_run_before_and_after_each_run_of_elements() -> None:
  kernel = cg.elementwise(
    "T x", "T z", "z = x + shift; sum += 1",
    preamble="#include <cstdio>\nT half(T v) { return v / 2; }",
    loop_prep="T shift = half(3); [[maybe_unused]] int sum = 0;",
    after_loop='if (sum < 1) throw cg::Error("an empty run");',
  )  # fmt: skip
  x = array(50_000)
  np.testing.assert_array_equal(jax.jit(kernel)(x), x + 1.5)


def test_an_exception_in_the_code_fails_the_program_with_its_text() -> None:
  kernel = cg.elementwise(
    "float32 x", "float32 z", 'if (x < 0) throw cg::Error("element %d is below zero", int(i));'
  )
  assert jax.jit(kernel)(np.ones(3, np.float32)).tolist() == [0, 0, 0]
  with pytest.raises(cg.KernelError, match="element 2 is below zero"), cg.errors():
    jax.jit(kernel)(np.array([1, 1, -1], np.float32))


def test_max_and_min_keep_nan_and_take_unlike_types() -> None:
  kernel = cg.elementwise("T x", "T a, T b", "a = max(x, 0); b = min(1, x)")
  x = np.array([-1, 0.5, 2, np.nan, np.inf], np.float32)
  a, b = kernel(x)
  np.testing.assert_array_equal(a, np.maximum(x, 0))
  np.testing.assert_array_equal(b, np.minimum(x, 1))


CALLED = ["sin", "cos", "tan", "exp", "log", "tanh", "sinh", "cosh", "log1p", "expm1"]
CALLED += ["exp2", "log2", "log10", "cbrt"]
VECTORISED = ["sqrt", "floor"]


@pytest.fixture(scope="module")
def called() -> Any:
  """All functions that are calls of the C library's, as one kernel, which compiles faster."""
  results = ", ".join(f"T {name}_" for name in CALLED)
  code = "; ".join(f"{name}_ = x > 0 ? {name}(x) : out" for name in CALLED)
  return cg.elementwise("T x, T out", results, code)


@pytest.mark.parametrize("name", [*CALLED, *VECTORISED])
def test_functions_of_mathematics_agree_with_numpy_s(name: str, called: Any) -> None:
  if name in CALLED:
    kernel = lambda x, out: called(x, out)[CALLED.index(name)]
  else:
    kernel = cg.elementwise("T x, T out", "T z", f"z = x > 0 ? {name}(x) : out")
  x = np.concatenate([np.linspace(0.01, 9, 1237), [-1, np.nan]]).astype(np.float32)
  function = getattr(np, name)

  def reference(x: Any) -> Any:
    return np.where(x > 0, function(np.maximum(x, 1e-3, dtype=np.float64)), 5)

  np.testing.assert_allclose(kernel(x, 5), reference(x), rtol=5e-7, atol=1e-7)
  small = x.astype(ml_dtypes.bfloat16)
  want = reference(small.astype(np.float32)).astype(ml_dtypes.bfloat16)
  got = np.asarray(kernel(small, 5))
  steps = got.view(np.int16).astype(int) - want.view(np.int16)  # in units of the last place
  assert np.abs(steps).max() <= 1


def test_the_loops_are_vectorised(tmp_path: pathlib.Path) -> None:
  """By the compiler's own report, on the flags of the build."""
  import shlex
  import subprocess

  import quick_cpp

  from callgate._build import toolchain

  if "g++" not in pathlib.Path(toolchain.compiler()[0]).resolve().name:
    pytest.skip("the report is GCC's")
  ones = np.ones((4, 4), np.float32)
  kernel = cg.elementwise("T x, T y", "T z", "z = x > y ? x * y + 1 : 0.5 * y")
  flags = core(kernel).build_options["flags"]
  for y in (ones, ones[0], ones[:, :1]):
    unit = tmp_path / "unit.cc"
    unit.write_text(kernel.code(ones, y))
    command = [
      *shlex.split(quick_cpp.plain()),
      "-std=c++20",
      *flags,
      f"-I{toolchain.include_dir()}",
    ]
    command += ["-fopt-info-vec-optimized", "-c", str(unit), "-o", str(tmp_path / "unit.o")]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert "loop vectorized" in done.stdout + done.stderr


# -- batching ------------------------------------------------------------------------------------
@examples(9)
@given(
  x=st.sampled_from([(), (3,), (4, 1), (4, 3)]),
  y=st.sampled_from([(), (3,), (1, 3), (4, 3)]),
  axes=st.sampled_from([(0, None), (None, 0), (0, 0), (-1, 0)]),
  nested=st.sampled_from([None, (0, None), (None, 0), (0, 0)]),
)
def test_vmap_is_one_more_axis_to_broadcast(x: Any, y: Any, axes: Any, nested: Any) -> None:
  def batched(shape: tuple[int, ...], axis: int | None, size: int) -> tuple[int, ...]:
    if axis is None:
      return shape
    return (*shape, size) if axis == -1 else (size, *shape)

  x_shape, y_shape = batched(x, axes[0], 2), batched(y, axes[1], 2)
  f, want = jax.vmap(SAXPY, axes), jax.vmap(saxpy, axes)
  if nested is not None:
    x_shape, y_shape = batched(x_shape, nested[0], 5), batched(y_shape, nested[1], 5)
    f, want = jax.vmap(f, nested), jax.vmap(want, nested)
  a, b = array(*x_shape), 3 * array(*y_shape)
  np.testing.assert_array_equal(jax.jit(f)(a, b), jax.jit(want)(a, b))
  text = jax.jit(f).lower(a, b).as_text()
  assert text.count("callgate.kernel") == 1
  assert "batch = " not in text  # no loop over lanes: a plain call on larger arrays


@pytest.mark.parametrize("axes", [(0, None), (None, 0), (0, 0)])
def test_vmap_keeps_the_index_and_raw_arguments_to_a_lane(axes: Any, engine: str) -> None:
  kernel = cg.elementwise("T x, raw T t", "T z", "z = x + 10 * t[n - 1 - i] + i")
  x, t = array(4, 3), array(4, 3) + 1
  x, t = (a if axis == 0 else a[0] for a, axis in zip((x, t), axes, strict=True))
  want = jax.vmap(lambda x, t: x + 10 * t[::-1] + jnp.arange(3), axes)(x, t)
  np.testing.assert_array_equal(jax.vmap(kernel, axes)(x, t), want)


def test_a_macro_may_use_the_index() -> None:
  kernel = cg.elementwise("T x", "T z", "z = PLACE", preamble="#define PLACE (x + \\\n i)")
  x = array(2, 3)
  np.testing.assert_array_equal(jax.vmap(kernel)(x), x + np.arange(3))


def test_a_user_s_vmap_rule_goes_first() -> None:
  kernel = cg.elementwise("T x", "T z", "z = x")
  kernel.defvmap(lambda size, batched, x: (x + 100, True))
  assert jax.vmap(kernel)(jnp.zeros(2)).tolist() == [100, 100]


def test_an_alias_works_in_place_and_under_vmap() -> None:
  kernel = cg.elementwise("T x, T y", "T z", "z = x + y", aliases={0: 0})
  x, y = array(3), array(4, 3)
  np.testing.assert_array_equal(jax.jit(kernel, donate_argnums=0)(jnp.asarray(x), x), x + x)
  np.testing.assert_array_equal(jax.vmap(kernel, (None, 0))(x, y), x + y)
  with pytest.raises(cg.GateDefinitionError, match="'x' is raw"):
    cg.elementwise("raw T x, T y", "T z", "z = y", aliases={0: 0})


# -- programs ------------------------------------------------------------------------------------
def test_a_program_from_elsewhere_finds_its_variant(tmp_path: pathlib.Path) -> None:
  define = """
k = cg.elementwise("T x, T y", "T z", "z = x * y", name="pw.mul", jvp="dz = y * dx + x * dy")
f = lambda x, y: jax.value_and_grad(lambda x: k(x, y).sum())(x)
"""
  load = """
import sys, gc, callgate as cg, jax, numpy as np, pathlib
from jax import export
args = np.arange(3, dtype=np.float32), np.full((2, 1), 2, np.float32)
program = export.deserialize(bytearray(pathlib.Path(sys.argv[1]).read_bytes()))
for source in sys.argv[2:]:
  exec(source)
  try:
    value, grad = program.call(*args)
    print(float(value), grad.tolist())
  except Exception as error:
    print(error)
  del k, f
  jax.clear_caches()
  gc.collect()
"""
  here: dict[str, Any] = {"cg": cg, "jax": jax}
  exec(define, here)
  args = np.arange(3, dtype=np.float32), np.full((2, 1), 2, np.float32)
  program = export.export(jax.jit(here["f"]), disabled_checks=cg.export_checks())(*args)
  (tmp_path / "program").write_bytes(program.serialize())
  changed = define.replace("T x, T y", "float32 x, float32 y").replace("T z", "float32 z")
  first, *rest = printed_by(load, str(tmp_path / "program"), define, changed).splitlines()
  assert first == "12.0 [4.0, 4.0, 4.0]"
  assert re.search(r"'pw\.mul(\.dx)?\[T=float32:", "\n".join(rest))


# -- mistakes ------------------------------------------------------------------------------------
@pytest.mark.parametrize(
  ("inputs", "outputs", "message"),
  [
    ("T", "T z", "in_params: 'T': expected a type and a name"),
    ("T x,", "T z", "in_params: '': expected a type and a name"),
    ("cow T x", "T z", "'cow T x': expected a type and a name"),
    ("Float x", "T z", "expected a dtype's name, such as float32, or a letter.*got 'Float'"),
    ("float x", "T z", "'float' is ambiguous; use float32 or float64"),
    ("int4 x", "T z", "int4 has several elements in a byte"),
    ("T 2x", "T z", "'2x' is not one"),
    ("T _x", "T z", "'_x' is not one"),
    ("T for", "T z", "'for' is a C\\+\\+ keyword"),
    ("T i", "T z", "'i' is the element's index"),
    ("T x", "T x", "expected different names, got 'x' twice"),
    ("T x", "", "out_params: expected at least one result"),
    ("T x", "raw T z", "expected no raw result"),
  ],
)
def test_a_wrong_parameter_is_an_error_when_it_is_made(
  inputs: str, outputs: str, message: str
) -> None:
  with pytest.raises(cg.GateDefinitionError, match=message):
    cg.elementwise(inputs, outputs, "z = x")


@pytest.mark.parametrize(
  ("args", "message"),
  [
    (
      (array(2), array(2, dtype=np.int32)),
      r"two: argument 'x' is float32\[2\], but .*'y' is int32",
    ),
    ((array(2),), "expected argument 'y', got none"),
    ((array(2),) * 3, "expected 2 arguments \\(x, y\\), got 3"),
    ((array(2, dtype=np.int32), 0.5), "'y': expected T, which is int32 here, got 0.5"),
    ((array(2), 1j), "'y': expected T, which is float32 here, got 1j"),
    ((array(2, dtype=np.int8), 300), "int8 here, which can't hold 300"),
    ((array(2), "text"), "'y': expected an array, got 'text'"),
    ((array(2), [1.0, 2.0]), "'y': expected one array, got 2"),
    ((jnp.zeros(2, jnp.int4), 1), "'x': int4 has several elements in a byte"),
  ],
  ids=str,
)
def test_a_wrong_argument_is_an_error_that_names_it(args: Any, message: str) -> None:
  with pytest.raises(cg.GateDefinitionError, match=message):
    SAXPY(*args)


@pytest.mark.parametrize("value", [array(2, dtype=np.int32), 1.5, True + 1j])
def test_a_fixed_dtype_is_never_cast_to(value: Any) -> None:
  kernel = cg.elementwise("int8 x", "int8 z", "z = x")
  with pytest.raises(cg.GateDefinitionError, match=r"'x': expected .*int8.* got"):
    kernel(value)
  assert kernel(3).dtype == np.int8


def test_the_compiler_s_message_has_the_user_s_lines() -> None:
  kernel = cg.elementwise("T x", "T z", "\n  z = x + unknown;", name="test_elementwise.typo")
  with pytest.raises(cg.CompileError, match=r"typo', operation:2:\d+: error: .*unknown"):
    kernel(1.0)
