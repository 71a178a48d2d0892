# SPDX-License-Identifier: Apache-2.0
"""Kernels from Numba functions: what they take and return, what is refused, and how they fail."""

# Numba has no types, so what its decorators return fits every overload.
# pyright: reportCallIssue=false, reportFunctionMemberAccess=false, reportArgumentType=false
from __future__ import annotations

import dis
import enum
import math
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from interpreters import printed_by
from property_checks import examples

import callgate as cg
from callgate._core.public import core
from callgate._kernel.numba import numba as numba_kernel

nb = pytest.importorskip("numba")

DTYPES = [
  "bool", "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64", "float32",
  "float64", "complex64", "complex128",
]  # fmt: skip
like_x = lambda x, *_, **__: x


@pytest.fixture(scope="module", autouse=True)
def own_cache(tmp_path_factory: pytest.TempPathFactory) -> Any:
  """No entry of an earlier run hides what Numba makes of these functions."""
  with pytest.MonkeyPatch.context() as patch:
    patch.setenv("CALLGATE_CACHE_DIR", str(tmp_path_factory.mktemp("cache")))
    yield


def running_maximum(out: Any, x: Any) -> None:
  largest = x[0]
  for i in range(x.size):
    largest = max(largest, x[i])
    out[i] = largest


X = jnp.array([2.0, 5.0, 3.0, 7.0])


# -- how functions are written -------------------------------------------------------------------
def test_a_function_with_a_parameter_more_writes_in_place(engine: str) -> None:
  kernel = cg.numba(running_maximum, out=like_x)
  assert jax.jit(kernel)(X).tolist() == [2, 5, 5, 7]
  assert kernel(X).tolist() == [2, 5, 5, 7]


def test_a_function_with_as_many_parameters_as_arguments_returns(engine: str) -> None:
  @cg.numba(out=lambda x, y: x)
  def outer_sum(x: Any, y: Any) -> Any:
    return x + y

  assert jax.jit(outer_sum)(X, X).tolist() == [4, 10, 6, 14]


def test_several_results_are_a_tuple_in_flat_order(engine: str) -> None:
  out = lambda x: {"high": x, "low": jax.ShapeDtypeStruct((), jnp.int32)}

  @cg.numba(out=out)
  def in_place(outs: Any, x: Any) -> None:
    high, low = outs
    high[:] = x + 1
    low[()] = x.size

  @cg.numba(out=out)
  def returning(x: Any) -> Any:
    return x + np.float32(1), np.int32(x.size)

  for kernel in (in_place, returning):
    got = jax.jit(kernel)(X)
    assert got["high"].tolist() == [3, 6, 4, 8]
    assert int(got["low"]) == 4


def test_a_style_that_the_count_leaves_open_is_told_by_what_is_returned() -> None:
  @cg.numba(out=like_x)
  def scaled(x: Any, by: Any = 2) -> Any:
    return x * np.float32(by)

  @cg.numba(out=like_x)
  def scaled_in_place(out: Any, x: Any, by: Any = 2) -> None:
    out[:] = x * by

  assert scaled(X).tolist() == [4, 10, 6, 14]
  assert scaled_in_place(X).tolist() == [4, 10, 6, 14]
  assert scaled_in_place(X, jnp.float32(3)).tolist() == [6, 15, 9, 21]


def test_a_function_in_place_may_return_its_result_too() -> None:
  @cg.numba(out=like_x)
  def doubled(out: Any, x: Any) -> Any:
    out[:] = 2 * x
    return out

  assert doubled(X).tolist() == [4, 10, 6, 14]


def test_a_style_can_be_named() -> None:
  kernel = cg.numba(lambda *xs: xs[0] + xs[1], out=lambda *xs: xs[0], style="return")
  assert kernel(X, X).tolist() == [4, 10, 6, 14]
  with pytest.raises(cg.GateDefinitionError, match="style: expected"):
    cg.numba(running_maximum, out=like_x, style="context")  # pyright: ignore


def test_starred_parameters_take_any_number_of_arrays() -> None:
  @cg.numba(out=lambda *xs: xs[0])
  def total(out: Any, *xs: Any) -> None:
    out[:] = 0
    for x in xs:
      out[:] += x

  @cg.numba(out=lambda x, *ys: x)
  def mixed(out: Any, x: Any, *ys: Any) -> None:
    out[:] = x
    if len(ys) > 0:  # known when it is compiled: the tuple's types may differ
      out[:] += ys[0]

  assert total(X, X, X).tolist() == [6, 15, 9, 21]
  assert mixed(X, jnp.arange(4), jnp.ones((2, 2))).tolist() == [2, 6, 5, 10]
  assert mixed(X).tolist() == X.tolist()


def test_arrays_may_be_given_by_keyword() -> None:
  kernel = cg.numba(lambda x, y: x - y, out=like_x)
  assert kernel(y=jnp.ones(4), x=X).tolist() == [1, 4, 2, 6]
  assert kernel(X, y=jnp.ones(4)).tolist() == [1, 4, 2, 6]
  with pytest.raises(cg.GateDefinitionError, match=r"keyword, twice.*expected x, y"):
    kernel(X, x=X)
  with pytest.raises(cg.GateDefinitionError, match="argument 'z', which it doesn't have"):
    kernel(X, z=X)


def test_arguments_of_rank_0_are_numbers() -> None:
  @cg.numba(out=lambda n, x: x)
  def rolled(out: Any, n: Any, x: Any) -> None:
    for i in range(x.size):
      out[i] = x[(i + n) % x.size]

  assert rolled(1, X).tolist() == [5, 3, 7, 2]


def test_an_aliased_result_holds_the_argument(engine: str) -> None:
  @cg.numba(out=lambda table, row: table, aliases={0: 0})
  def bump(out: Any, table: Any, row: Any) -> None:
    out[row] += 1

  assert jax.jit(bump, donate_argnums=0)(jnp.zeros(3), 1).tolist() == [0, 1, 0]


# -- arrays --------------------------------------------------------------------------------------
def reverse_two(outs: Any, x: Any, y: Any) -> None:
  b, a = outs
  for i in range(x.size):
    a[i] = x[i]
  for i in np.ndindex(y.shape):
    b[i] = y[i]


def reverse_four(outs: Any, x: Any, y: Any, z: Any, w: Any) -> None:
  # One assignment of arrays: Numba compiles them four times as long as loops over numbers.
  a, b, c, d = outs
  d[...] = x
  for i in np.ndindex(y.shape):
    c[i] = y[i]
  for i in np.ndindex(z.shape):
    b[i] = z[i]
  for i in np.ndindex(w.shape):
    a[i] = w[i]


def assert_reversed(kernel: Any, xs: Any) -> None:
  for got, want in zip(jax.jit(kernel)(*xs), xs[::-1], strict=True):
    assert got.dtype == want.dtype
    np.testing.assert_array_equal(got, want)


@pytest.mark.parametrize("dtype", DTYPES)
def test_every_dtype_of_numba_s_arrives_as_it_is(dtype: str) -> None:
  xs = [np.arange(math.prod(shape)).reshape(shape).astype(dtype) for shape in ((3,), (2, 3))]
  with jax.enable_x64(True):
    assert_reversed(cg.numba(reverse_two, out=lambda *xs: xs[::-1]), xs)


REVERSE_FOUR = cg.numba(reverse_four, out=lambda *xs: xs[::-1])
RANKS = [hnp.array_shapes(min_dims=n, max_dims=n, min_side=0, max_side=3) for n in range(1, 5)]


@examples(4)
@given(st.tuples(*RANKS))
def test_arrays_of_any_rank_arrive_as_they_are(shapes: Any) -> None:
  xs = [np.arange(math.prod(shape), dtype=np.float32).reshape(shape) for shape in shapes]
  assert_reversed(REVERSE_FOUR, xs)


def test_numba_s_views_are_of_xla_s_own_memory_and_contiguous() -> None:
  @cg.numba(out=lambda x: jax.ShapeDtypeStruct((5,), jnp.int32))
  def describe(out: Any, x: Any) -> None:
    out[0], out[1] = x.shape
    out[2], out[3] = x.strides
    out[4] = x.flags.c_contiguous

  assert jax.jit(describe)(jnp.zeros((3, 5)).T).tolist() == [5, 3, 12, 4, 1]


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float8_e4m3fn", "int4"])
def test_a_dtype_that_numba_lacks_is_an_error_that_names_the_argument(dtype: str) -> None:
  kernel = cg.numba(running_maximum, out=lambda x: X)
  with pytest.raises(cg.GateDefinitionError, match=f"argument 'x'.*float32.*got {dtype}"):
    jax.eval_shape(kernel, jax.ShapeDtypeStruct((4,), dtype))
  out = jax.ShapeDtypeStruct((4,), dtype)
  with pytest.raises(cg.GateDefinitionError, match=f"result 0.*got {dtype}"):
    jax.eval_shape(cg.numba(running_maximum, out=out), X)


def test_writing_to_an_input_is_refused_when_the_call_is_traced() -> None:
  @cg.numba(out=like_x)
  def spoil(out: Any, x: Any) -> None:
    x[0] = 1

  with pytest.raises(cg.GateDefinitionError, match=r"(?s)'spoil'.*Cannot modify readonly array"):
    jax.eval_shape(spoil, X)


def test_errors_of_numba_have_its_text_and_the_line() -> None:
  @cg.numba(out=like_x)
  def confused(out: Any, x: Any) -> None:
    out[:] = x + "one"

  with pytest.raises(cg.GateDefinitionError, match="No implementation of function") as caught:
    jax.eval_shape(confused, X)
  assert 'out[:] = x + "one"' in str(caught.value)
  assert "confused" in str(caught.value)
  assert isinstance(caught.value.__cause__, nb.core.errors.TypingError)


# -- static values -------------------------------------------------------------------------------
def test_static_keywords_are_constants_of_the_compilation() -> None:
  @cg.numba(out=lambda x, axes, **_: jax.ShapeDtypeStruct((len(axes),), x.dtype))
  def extents(out: Any, x: Any, axes: Any, *, unit: Any = None) -> None:
    for i in range(len(axes)):  # a tuple's length is of its type
      out[i] = x.shape[axes[i]]
    if unit is not None:  # without a unit this branch is not compiled: None * 2 has no type
      out[0] *= 2 * unit

  x = jnp.zeros((2, 3, 4))
  assert extents(x, axes=(0, 2)).tolist() == [2, 4]
  assert extents(x, axes=(1,)).tolist() == [3]
  assert extents(x, axes=(1,), unit=np.float32(0.5)).tolist() == [3]


class Order(enum.IntEnum):
  FIRST = 1


class Pair(NamedTuple):
  a: float
  b: int


def test_static_values_of_other_types_and_signs_are_other_constants(
  tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
  monkeypatch.setenv("CALLGATE_CACHE_DIR", str(tmp_path))  # where nothing is compiled
  kernel = cg.numba(lambda x, *, k: x * 0 + np.float32(np.copysign(1, k[0])), out=lambda x, **_: x)
  x, values = np.ones(1, np.float32), [(0.0, 1), (-0.0, 1), (0, 1), (-0.0, True), Pair(-0.0, 1)]
  assert [kernel(x, k=k).tolist() for k in values] == [[1], [-1], [1], [-1], [-1]]
  keys = list(core(kernel)._variants)
  assert len(set(keys)) == len(values)
  held = [core(kernel).types_of_key(key).static[0][1] for key in keys]
  assert [(type(k), repr(k)) for k in held] == [(type(k), repr(k)) for k in values]
  plain = cg.numba(lambda x, *, k: x, out=lambda x, **_: x)
  for k in (1, True, Order.FIRST, np.int8(1)):
    plain(x, k=k)
  assert len(core(plain)._variants) == 4


def test_a_static_value_reaches_out_and_the_rules() -> None:
  @cg.numba(out=lambda x, times: jax.ShapeDtypeStruct((x.size * times,), x.dtype))
  def tiled(out: Any, x: Any, times: Any) -> None:
    for i in range(out.size):
      out[i] = x[i % x.size]

  tiled.defvjp(
    lambda x, times: (tiled(x, times=times), None),
    lambda _, ct, times: (ct.reshape(times, -1).sum(0),),
  )
  assert jax.grad(lambda x: tiled(x, times=3).sum())(X).tolist() == [3] * 4


def test_a_static_value_that_no_program_can_hold_is_an_error_that_names_it() -> None:
  kernel = cg.numba(lambda out, x, how: None, out=like_x)
  with pytest.raises(cg.GateDefinitionError, match="static value 'how': expected a number"):
    kernel(X, how=np.sum)
  with pytest.raises(cg.GateDefinitionError, match="'how', which it doesn't have"):
    cg.numba(running_maximum, out=like_x)(X, how=1)
  with pytest.raises(cg.GateDefinitionError, match="'n' is keyword-only, so static; expected"):
    cg.numba(lambda out, x, *, n: None, out=like_x)(X, n=X)
  keyword_only = cg.numba(lambda out, x, *, n: None, out=like_x)
  with pytest.raises(cg.GateDefinitionError, match="expected a static value for 'n', got none"):
    keyword_only(X)


values = st.recursive(
  st.one_of(
    st.none(), st.booleans(), st.integers(-(2**40), 2**40), st.floats(allow_nan=False),
    st.complex_numbers(allow_nan=False), st.text(), st.builds(np.float32, st.floats(-8, 8)),
    st.builds(np.int8, st.integers(-9, 9)), st.builds(np.str_, st.text()),
  ),
  lambda inner: st.lists(inner, max_size=3).map(tuple),
  max_leaves=5,
)  # fmt: skip


@given(st.dictionaries(st.text("abc", min_size=1), values, max_size=3))
def test_a_variant_s_name_tells_what_it_was_compiled_for(static: Any) -> None:
  from callgate._kernel.numba.request import CallTypes

  kernel = cg.numba(running_maximum, out=like_x)
  types = CallTypes(
    ((np.dtype("float32"), 1), (np.dtype("bool"), 0)),
    ((np.dtype("complex64"), 3),),
    tuple(sorted(static.items())),
  )
  sides = [
    [jax.ShapeDtypeStruct((2,) * rank, dtype) for dtype, rank in side]
    for side in (types.operands, types.results)
  ]
  again = core(kernel).types_of_key(core(kernel).variant_key(*sides, types.static))
  assert repr(again) == repr(types)


# -- what is not a kernel ------------------------------------------------------------------------
def test_a_wrong_number_of_arguments_is_an_error_that_names_the_parameters() -> None:
  kernel = cg.numba(running_maximum, out=lambda *xs: xs[0])
  with pytest.raises(cg.GateDefinitionError, match=r"parameters \(out, x\).*3 arguments"):
    kernel(X, X, X)


def test_an_argument_that_is_no_single_array_is_an_error_that_names_it() -> None:
  kernel = cg.numba(running_maximum, out=like_x)
  with pytest.raises(cg.GateDefinitionError, match="argument 'x': expected one array, got 2"):
    kernel((X, X))


def test_only_functions_can_be_compiled() -> None:
  with pytest.raises(cg.GateDefinitionError, match="expected a Python function, an @njit"):
    cg.numba(3, out=like_x)  # pyright: ignore
  with pytest.raises(cg.GateDefinitionError, match=r"\*\*keywords, which Numba doesn't support"):
    cg.numba(lambda x, **more: x, out=like_x)


@pytest.mark.parametrize(
  ("function", "message"),
  [
    (lambda x: x * 2.0, "result 0: expected float32 of rank 1.*returns float64 of rank 1.*cast="),
    (lambda x: x.sum(), "result 0: expected float32 of rank 1, but.*returns float32 of rank 0"),
    (lambda x: (x, x), "returns 2 values, expected 1"),
    (lambda x: None, "parameters|returns 0 values, expected 1"),
    (lambda x: "text", "result 0: expected float32 of rank 1, but.*returns unicode"),
  ],
  ids=["dtype", "rank", "count", "none", "type"],
)
def test_wrong_results_are_errors_when_the_call_is_traced(function: Any, message: str) -> None:
  kernel = cg.numba(function, out=like_x, style="return")
  with pytest.raises(cg.GateDefinitionError, match=message):
    jax.eval_shape(kernel, X)


def test_cast_allows_casts_of_the_same_kind_only() -> None:
  kernel = cg.numba(lambda x: x * 2.0, out=like_x, cast=True)
  assert jax.jit(kernel)(X).tolist() == [4, 10, 6, 14]
  with pytest.raises(cg.GateDefinitionError, match="expected int32 of rank 1"):
    kernel(jnp.arange(3))


def test_a_returned_array_of_another_shape_is_an_error_of_the_call() -> None:
  kernel = cg.numba(lambda x: x[1:], out=like_x, name="numba.cut")
  said = r"^kernel 'numba\.cut': result 0: expected the shape \(4,\)"
  with pytest.raises(cg.ResultError, match=said), cg.errors():
    kernel(X)
  with pytest.raises(cg.ResultError, match=r"got \(3,\)"), cg.errors():
    jax.jit(kernel)(X)


def test_a_returned_view_of_any_layout_is_copied() -> None:
  kernel = cg.numba(lambda x: x.T[::-1], out=lambda x: jax.ShapeDtypeStruct((3, 2), x.dtype))
  x = jnp.arange(6.0).reshape(2, 3)
  np.testing.assert_array_equal(jax.jit(kernel)(x), x.T[::-1])


# -- functions that numba's decorators have made -------------------------------------------------
def test_an_njit_function_is_taken_as_it_is() -> None:
  @nb.njit(error_model="numpy")
  def ratio(out: Any, x: Any, y: Any) -> None:
    for i in range(x.size):
      out[i] = x[i] / y[i]

  kernel = cg.numba(ratio, out=like_x)
  assert jax.jit(kernel)(X, 0 * X).tolist() == [math.inf] * 4
  assert ratio.nopython_signatures == []  # the user's own object is left alone


def test_an_njit_function_with_signatures_is_taken() -> None:
  doubled = nb.njit("void(f8[:], f8[:])")(lambda out, x: None)
  assert jax.jit(cg.numba(doubled, out=like_x))(X).shape == X.shape


def test_options_beside_a_decorated_function_are_refused() -> None:
  with pytest.raises(cg.GateDefinitionError, match="got fastmath, parallel for a function with"):
    cg.numba(nb.njit(running_maximum), out=like_x, parallel=True, fastmath=True)


def pointers(signature: str) -> Any:
  @nb.cfunc(signature)
  def axpy(out: Any, a: Any, x: Any, n: Any) -> None:
    if n < 0:
      raise ValueError("negative", n)
    for i in range(n):
      out[i] = a * x[i]

  return axpy


def test_a_cfunc_takes_pointers_numbers_and_static_values() -> None:
  function = pointers("void(CPointer(float32), float32, CPointer(float32), int64)")
  kernel = cg.numba(function, out=lambda a, x, **_: x)
  assert jax.jit(lambda x: kernel(2.0, x, n=4))(X).tolist() == [4, 10, 6, 14]
  with pytest.raises(ValueError) as caught, cg.errors():
    kernel(2.0, X, n=-3)
  assert caught.value.args == ("negative", -3)


def test_a_cfunc_with_other_types_is_an_error_that_names_the_parameter() -> None:
  function = pointers("void(CPointer(float32), float32, CPointer(float64), int64)")
  with pytest.raises(cg.GateDefinitionError, match="'x' of the @cfunc: expected float64 of any"):
    cg.numba(function, out=lambda a, x, **_: x)(2.0, X, n=4)
  function = pointers("void(CPointer(float32), float64, CPointer(float32), int64)")
  with pytest.raises(cg.GateDefinitionError, match="'a' of the @cfunc: expected float64 of rank 0"):
    cg.numba(function, out=lambda a, x, **_: x)(2.0, X, n=4)


# -- exceptions ----------------------------------------------------------------------------------
class Refused(Exception):
  pass


@cg.numba(out=like_x, boundscheck=True)
def failing(out: Any, x: Any, how: Any) -> None:
  out[:] = x
  if how == 1:
    raise ValueError("not that", x.size, x[0])
  if how == 2:
    raise Refused("no")
  if how == 3:
    out[x.size] = 1
  if how == 4:
    out[0] = x.size // (x.size - x.shape[0])
  if how == 5:
    raise AssertionError("positive")
  if how == 6:
    raise StopIteration
  if how == 7:
    raise KeyError


FAILURES = {
  1: (ValueError, ("not that", 4, 2.0)),
  2: (Refused, ("no",)),
  3: (IndexError, ("index is out of bounds",)),
  4: (ZeroDivisionError, ("integer division by zero",)),
  5: (AssertionError, ("positive",)),
  6: (StopIteration, ()),
  7: (KeyError, ()),
}


@pytest.mark.parametrize("how", FAILURES)
def test_an_exception_reaches_the_caller_as_itself(how: int) -> None:
  kind, args = FAILURES[how]
  for run in (failing, jax.jit(failing)):
    with pytest.raises(kind) as caught, cg.errors():
      run(X, how)
    assert caught.type is kind
    assert caught.value.args == args
    assert "raised in kernel" in "".join(caught.value.__notes__)
  assert jax.jit(failing)(X, 0).tolist() == X.tolist()


def test_without_errors_the_program_s_error_has_the_exception_s_text() -> None:
  with pytest.raises(jax.errors.JaxRuntimeError, match=r"(?s)raised in kernel.*not that") as caught:
    jax.block_until_ready(jax.jit(failing)(X, 1))
  assert "kernel/numba/test_numba.py" in str(caught.value)  # where it was raised


@pytest.mark.parametrize("thread_safe", [False, True])
def test_an_exception_in_a_lane_is_that_of_the_first_lane(thread_safe: bool) -> None:
  @cg.numba(out=like_x, thread_safe=thread_safe)
  def positive(out: Any, x: Any) -> None:
    if x < 0:
      raise ValueError("negative", x)
    out[()] = x

  with pytest.raises(ValueError) as caught, cg.errors():
    jax.jit(jax.vmap(positive))(jnp.where(jnp.arange(64) == 40, -40.0, 1.0))
  assert caught.value.args == ("negative", -40.0)
  assert jax.vmap(positive)(jnp.ones(64)).sum() == 64


def test_an_exception_ends_a_loop_where_it_was_raised() -> None:
  seen: list[int] = []
  note = cg.gate(lambda i: (seen.append(int(i)), i)[1], out=like_x, effect="ordered")
  guarded = cg.numba(lambda out, i: fail_at_three(out, i), out=like_x)

  def step(carry: Any, i: Any) -> Any:
    return carry + guarded(note(i)), None

  with pytest.raises(ValueError), cg.errors():
    jax.jit(lambda: jax.lax.scan(step, 0, jnp.arange(6))[0])()
  assert seen[:4] == [0, 1, 2, 3]


@nb.njit
def fail_at_three(out: Any, i: Any) -> None:
  if i == 3:
    raise ValueError("three")
  out[()] = i


def test_on_several_devices_the_exception_surfaces_and_the_results_are_poisoned() -> None:
  @cg.numba(out=like_x)
  def positive(out: Any, x: Any) -> None:
    if x[0] < 0:
      raise ValueError("negative", x[0])
    out[:] = x

  mesh = jax.make_mesh((4,), ("i",), (jax.sharding.AxisType.Auto,), devices=jax.devices()[:4])
  parts = jax.P("i")
  program = jax.jit(jax.shard_map(positive, mesh=mesh, in_specs=parts, out_specs=parts))
  assert program(jnp.arange(4.0)).tolist() == [0, 1, 2, 3]
  with pytest.raises(ValueError) as caught, cg.errors():
    jax.block_until_ready(program(jnp.array([1.0, 0.0, -1.0, 1.0])))
  assert caught.value.args == ("negative", -1.0)


# -- numba itself --------------------------------------------------------------------------------
def test_without_numba_or_its_compiler_the_error_says_so() -> None:
  code = """if True:
    import os, sys
    import callgate as cg, jax.numpy as jnp
    def say():
      try:
        cg.numba(lambda x: x, out=lambda x: x, name="mine")(jnp.ones(2))
      except cg.GateDefinitionError as error:
        print(error)

    sys.modules["numba"] = None
    say()
    del sys.modules["numba"]
    os.environ["NUMBA_DISABLE_JIT"] = "1"
    say()
  """
  missing, off = printed_by(code).splitlines()
  assert "kernel 'mine'" in missing
  assert "callgate[numba]" in missing
  assert "NUMBA_DISABLE_JIT" in off


def test_a_kernel_has_the_function_that_it_was_made_from() -> None:
  def double(x: Any) -> Any:
    return 2 * x

  assert cg.numba(double, out=lambda x: x).function is double
  assert not hasattr(cg.elementwise("T x", "T y", "y = 2 * x"), "function")


def nothing(out: Any, x: Any) -> None:
  out[...] = x


def nothing_early(out: Any, x: Any) -> None:
  if x.size == 0:
    return
  out[...] = x


def text(x: Any) -> Any:
  return "None"


@pytest.mark.parametrize(
  ("function", "expected"),
  [(nothing, False), (nothing_early, False), (text, True), (lambda x: x, True), (lambda: 1, True)],
)
@pytest.mark.parametrize("newer", [False, True])
def test_a_function_that_returns_nothing_is_recognized(
  function: Any, expected: bool, newer: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
  """Also where None is one of the interpreter's common constants, as in Python 3.15."""
  instructions = dis.get_instructions

  def common(code: Any) -> Any:
    for i in instructions(code):
      if i.opname in ("LOAD_CONST", "RETURN_CONST") and i.argval is None:
        yield i._replace(opname="LOAD_COMMON_CONSTANT", argval=7, argrepr="None")
        if i.opname == "RETURN_CONST":
          yield i._replace(opname="RETURN_VALUE", argval=None, argrepr="")
      else:
        yield i

  if newer:
    monkeypatch.setattr(numba_kernel.dis, "get_instructions", common)
  assert numba_kernel._returns_value(function.__code__) == expected
