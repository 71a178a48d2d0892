# SPDX-License-Identifier: Apache-2.0
"""A gate's function may return exactly the results that `out` declares."""

from __future__ import annotations

import itertools
import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import callgate as cg

VECTOR = jax.ShapeDtypeStruct((3,), np.float32)
SCALAR = jax.ShapeDtypeStruct((), np.float32)
ZEROS = np.zeros(3, np.float32)
numbers = itertools.count()


def run(value: Any, out: Any = VECTOR, **options: Any) -> Any:
  """The result of a compiled gate named 'made', and a number, that returns `value`."""
  gate = cg.gate(lambda: value, out=out, name=f"made{next(numbers)}", **options)
  with cg.errors():
    return jax.block_until_ready(jax.jit(gate)())


def message_of(value: Any, out: Any = VECTOR, **options: Any) -> str:
  with pytest.raises(cg.ResultError) as caught:
    run(value, out, **options)
  return re.sub(r"'made\d+'", "'made'", str(caught.value))


@pytest.mark.parametrize(
  ("value", "got"),
  [
    (np.zeros(3), "float64[3]; pass cast=True to cast results"),
    (np.zeros(3, np.float16), "float16[3]; pass cast=True"),
    (np.zeros(3, np.int32), "int32[3]; pass cast=True"),
    (np.zeros(4, np.float32), "float32[4]"),
    (np.zeros((3, 1), np.float32), "float32[3,1]"),
    (np.float32(0), "float32[]"),
    (np.zeros(3, "U1"), "<U1[3]"),
    (np.zeros(3, np.complex64), "complex64[3]"),
    ([0.0, 0.0, 0.0], "float64[3]; pass cast=True"),
    (1.0, "a Python float 1.0"),
    (True, "a Python bool True"),
    (None, "None"),
  ],
)
def test_a_wrong_result_is_an_error_that_says_what_came(value: Any, got: str) -> None:
  message = message_of(value)
  assert "gate 'made': result 0: expected float32[3], got " + got in message
  assert ("cast=True" in message) == ("cast=True" in got)


@pytest.mark.parametrize("cast", [None, True])
@pytest.mark.parametrize(
  ("dtype", "value", "got"),
  [
    ("int32", 7.0, "a Python float 7.0"),
    ("int32", np.float32(7), "float32[]"),
    ("float32", 1j, "a Python complex 1j"),
    ("float32", np.complex64(1), "complex64[]"),
    ("bool", 1, "a Python int 1"),
    ("bool", np.int32(1), "int32[]"),
  ],
)
def test_cast_is_named_only_where_it_helps(cast: Any, dtype: str, value: Any, got: str) -> None:
  message = message_of(value, jax.ShapeDtypeStruct((), dtype), cast=cast)
  assert message == f"gate 'made': result 0: expected {dtype}[], got {got}"


# -- Python's numbers, and integers of another width ---
BOTH = pytest.mark.parametrize("engine", ["callgate", "jax"])
FITTING = {
  "float32": [1, 1.5, True, -(10**30), float("inf"), float("nan"), 3.4028235e38],
  "float16": [1, 0.1, 65504.0, 65519.9],
  "bfloat16": [3, -2.5, 3.39e38],
  "float8_e4m3fn": [0.5, 448.0],
  "complex64": [1, 2.5, 1j, True],
  "int32": [7, True, -(2**31), 2**31 - 1, np.int64(2**31 - 1), np.uint8(3)],
  "uint8": [0, 255, np.int64(255)],
  "int8": [-128, np.uint64(127)],
  "bool": [True, False],
}
OUTSIDE = {
  "float32": [3.5e38, -1e300, 10**400],
  "float16": [65520.0],
  "bfloat16": [1e39],
  "float8_e4m3fn": [1000.0],
  "complex64": [1e39, 1e39j],
  "int32": [2**31, -(2**31) - 1, 2**63, 2**64, -(2**70), np.int64(2**31), np.uint64(2**63)],
  "uint8": [-1, 256, np.int64(-1)],
  "int8": [128, np.uint8(128)],
}
ANOTHER_KIND = {
  "float32": [1j, np.float64(1), np.complex128(1), np.int64(1), np.bool_(True)],
  "int32": [1.0, np.float32(1), np.bool_(True)],
  "bool": [1, 0.0, np.int8(1)],
}


def cases(values: dict[str, list[Any]]) -> list[Any]:
  return [pytest.param(name, v, id=f"{name}-{v!r:.20}") for name, vs in values.items() for v in vs]


@BOTH
@pytest.mark.parametrize(("dtype", "value"), cases(FITTING))
def test_a_number_of_no_width_or_an_integer_of_another_is_cast(
  engine: Any, dtype: str, value: Any
) -> None:
  with cg.config(engine=engine):
    got = run(value, jax.ShapeDtypeStruct((), dtype))
  assert got.dtype == dtype
  np.testing.assert_array_equal(np.asarray(got), np.asarray(value, dtype=got.dtype))


@BOTH
@pytest.mark.parametrize("dtype", ["bool", "int8", "uint16", "int32", "float16", "bfloat16",
                                   "float8_e4m3fn", "float32", "complex64"])  # fmt: skip
@pytest.mark.parametrize("lanes", [(), (3,)])
def test_scalars_that_numpy_makes_of_arrays_of_rank_0_are_results(
  engine: Any, dtype: str, lanes: tuple[int, ...]
) -> None:
  values = jnp.asarray(np.arange(1, 1 + np.prod(lanes, dtype=int)).reshape(lanes) * 40).astype(
    dtype
  )
  seen: list[type] = []

  def same(x: np.ndarray) -> Any:
    seen.append(type(x[()]))
    return x[()]

  gate = cg.gate(same, out=lambda x: x, vmap="each")
  with cg.config(engine=engine):
    got = jax.jit(jax.vmap(gate) if lanes else gate)(values)
  np.testing.assert_array_equal(np.asarray(got), np.asarray(values))
  assert got.dtype == dtype
  assert not issubclass(seen[0], np.ndarray)


def test_a_class_of_the_users_own_that_derives_from_numpys_scalar_is_a_result() -> None:
  class Metres(np.float32): ...

  assert run(Metres(2.5), SCALAR) == 2.5


@BOTH
@pytest.mark.parametrize("cast", [None, True])
@pytest.mark.parametrize(("dtype", "value"), cases(OUTSIDE))
def test_a_value_outside_of_the_range_is_an_error_that_says_it(
  engine: Any, cast: Any, dtype: str, value: Any
) -> None:
  with cg.config(engine=engine):
    message = message_of(value, jax.ShapeDtypeStruct((), dtype), cast=cast)
  assert f"gate 'made': result 0: expected {dtype}[], got {value}, outside {dtype}'s" in message
  assert "cast=True" not in message


def test_the_error_says_the_range_and_where_the_value_is() -> None:
  value = np.zeros((2, 3), np.int64)[:, ::-1]
  value[1, 2] = 3_000_000_000
  message = message_of({"rank": value}, {"rank": jax.ShapeDtypeStruct((2, 3), np.int32)})
  came = "got int64[2,3] with 3000000000 at [1, 2], outside int32's range, "
  assert (
    "result 0 (['rank']): expected int32[2,3], " + came + "-2147483648 to 2147483647" in message
  )


@BOTH
@pytest.mark.parametrize(("dtype", "value"), cases(ANOTHER_KIND))
def test_numbers_of_another_kind_and_numpys_own_width_are_not_cast(
  engine: Any, dtype: str, value: Any
) -> None:
  with cg.config(engine=engine):
    message = message_of(value, jax.ShapeDtypeStruct((), dtype))
  own = np.asarray(value).dtype
  plain = type(value) in (bool, int, float, complex)
  got = f"a Python {type(value).__name__} {value}" if plain else f"{own.name}[]"
  assert f"expected {dtype}[], got {got}" in message
  helps = np.can_cast(own, dtype, "same_kind") and not plain
  assert ("; pass cast=True to cast results" in message) == helps


def test_results_of_argmax_and_lists_of_integers_fit_under_every_transformation() -> None:
  gate = cg.gate(lambda x: np.argmax(x), out=jax.ShapeDtypeStruct((), np.int32))
  rows = jnp.array([[1.0, 3.0, 2.0], [5.0, 0.0, 1.0]])
  assert jax.vmap(gate)(rows).tolist() == [1, 0]
  assert jax.lax.scan(lambda c, x: (c, gate(x)), 0, rows)[1].tolist() == [1, 0]
  assert run([1, 2, 3], jax.ShapeDtypeStruct((3,), np.int16)).tolist() == [1, 2, 3]
  swapped = np.array([1, -2, 3], ">i8")
  assert run(swapped, jax.ShapeDtypeStruct((3,), np.int32)).tolist() == [1, -2, 3]


# -- config(cast=True) ---
@BOTH
def test_the_default_of_cast_is_an_option_of_the_process(engine: Any) -> None:
  gate = cg.gate(lambda x: np.asarray(x, np.float64), out=lambda x: x)
  strict = cg.gate(lambda x: np.asarray(x, np.float64), out=lambda x: x, cast=False)
  program = jax.jit(gate)
  with cg.config(engine=engine):
    with cg.config(cast=True):
      assert program(jnp.ones(2)).tolist() == [1, 1]
      with pytest.raises(cg.ResultError, match="expected float32"), cg.errors():
        jax.block_until_ready(jax.jit(strict)(jnp.ones(2)))
    with pytest.raises(cg.ResultError, match="expected float32"), cg.errors():
      jax.block_until_ready(program(jnp.ones(2)))  # traced again


# -- structure ---
@pytest.mark.parametrize(
  ("value", "got"),
  [
    ((ZEROS,), "a tuple of 1"),
    ((ZEROS, ZEROS, ZEROS), "a tuple of 3"),
    (ZEROS, "ndarray"),
    (None, "None"),
  ],
)
def test_a_wrong_number_of_results_says_how_many(value: Any, got: str) -> None:
  message = message_of(value, (VECTOR, SCALAR))
  assert "gate 'made'" in message
  assert "return value" in message or "structure" in message
  if got.startswith("a tuple"):
    assert "2 arrays" in message
    assert f"{got.split()[-1]}" in message
  else:
    assert got in message


@pytest.mark.parametrize(
  "value",
  [{"mean": ZEROS}, {"mean": ZEROS, "std": ZEROS, "max": ZEROS}, (ZEROS, ZEROS), ZEROS, None],
)
def test_another_structure_is_an_error_that_shows_both(value: Any) -> None:
  message = message_of(value, {"mean": VECTOR, "std": VECTOR})
  assert "gate 'made'" in message
  assert "expected results of structure PyTreeDef({'mean': *, 'std': *})" in message
  assert f"got {jax.tree.structure(value)}" in message


def test_a_wrong_leaf_is_named_by_its_path() -> None:
  out = {"mean": VECTOR, "more": [SCALAR, VECTOR]}
  message = message_of({"mean": ZEROS, "more": [np.float32(0), np.zeros(2)]}, out)
  assert "result 2 (['more'][1]): expected float32[3], got float64[2]" in message


def test_a_wrong_item_of_a_tuple_is_named_by_its_number() -> None:
  message = message_of((ZEROS, np.zeros(1)), (VECTOR, SCALAR))
  assert "result 1: expected float32[], got float64[1]" in message


def test_a_list_is_a_pytree_of_its_own() -> None:
  np.testing.assert_array_equal(run([ZEROS], [VECTOR])[0], ZEROS)
  assert "gate 'made'" in message_of([ZEROS], (VECTOR,))


@BOTH
@pytest.mark.parametrize("effect", ["io", "ordered"])
def test_a_gate_with_an_effect_has_no_results_unless_out_says_so(engine: Any, effect: Any) -> None:
  seen: list[Any] = []

  @cg.gate(effect=effect)
  def note(x: Any, *, tag: str = "") -> None:
    seen.append((float(x), tag))

  with cg.config(engine=engine), cg.errors():
    assert jax.jit(note)(1.0) == ()
    assert jax.jit(lambda x: note(x, tag="a"))(2.0) == ()
    assert cg.call(lambda x: seen.append(int(x)), None, 3, effect=effect) == ()
    jax.lax.scan(lambda carry, x: (carry, note(x)), 0, jnp.arange(2.0))
    cg.barrier()
  assert seen == [(1.0, ""), (2.0, "a"), 3, (0.0, ""), (1.0, "")]
  with pytest.raises(cg.GateDefinitionError, match="out="):
    cg.gate(lambda x: x)
  one = cg.gate(lambda x: x.copy(), effect=effect)
  with pytest.raises(
    cg.ResultError, match="expected None, as `out` declares no results, got ndarr"
  ):
    run_of(one, 1.0)


@BOTH
def test_none_in_arguments_and_results_is_an_empty_place(engine: Any) -> None:
  seen: list[Any] = []

  def double(x: Any, params: Any, bias: Any = None) -> Any:
    seen.append((params["b"], bias))
    return {"y": 2 * x, "state": None, "more": (None, params["w"].copy())}

  out = lambda x, params, bias=None: {"y": x, "state": None, "more": (None, params["w"])}
  gate = cg.gate(double, out=out)
  with cg.config(engine=engine):
    params = {"w": jnp.ones(2), "b": None}
    got = jax.jit(gate)(ZEROS, params)
    assert got["state"] is got["more"][0] is None
    assert got["more"][1].tolist() == [1, 1]
    jax.jit(lambda x, p: gate(x, p, None))(ZEROS, params)
    jax.vmap(gate, in_axes=(0, None))(np.zeros((2, 3), np.float32), params)
    jax.jit(lambda x, p: gate(x, p, bias=None))(ZEROS, params)["y"].block_until_ready()
  assert set(seen) == {(None, None)}


def run_of(gate: Any, *args: Any) -> None:
  with cg.errors():
    jax.block_until_ready(jax.jit(gate)(*args))
    cg.barrier()


# -- casts ---
@pytest.mark.parametrize("cast", [False, True])
@pytest.mark.parametrize("given", ["float64", "float16", "int64", "int8", "bool", "complex64"])
@pytest.mark.parametrize("declared", ["float32", "int32", "complex64", "uint8"])
def test_cast_allows_the_casts_that_numpy_calls_same_kind(
  declared: str, given: str, cast: bool
) -> None:
  value = np.array([0, 1, 1]).astype(given)
  out = jax.ShapeDtypeStruct((3,), declared)
  integers = np.dtype(given).kind == "i" and np.dtype(declared).kind in "iu"
  if given == declared or integers or (cast and np.can_cast(given, declared, "same_kind")):
    np.testing.assert_array_equal(run(value, out, cast=cast), value.astype(declared))
  else:
    assert f"expected {declared}[3], got {given}[3]" in message_of(value, out, cast=cast)


@pytest.mark.parametrize("cast", [False, True])
@pytest.mark.parametrize(
  ("value", "came"),
  [
    ((ZEROS, ZEROS), "a tuple of 2 (float32[2,3] as one array)"),
    ([ZEROS, ZEROS], "a list of 2 (float32[2,3] as one array)"),
    ((ZEROS,), "a tuple of 1 (float32[1,3] as one array)"),
    (np.linalg.eigh(np.eye(3)), "a tuple of 2"),  # of two shapes
    ((ZEROS, None), "a tuple of 2"),
    ((1.0, 2.0), "a tuple of 2 (float64[2] as one array)"),
    ((), "a tuple of 0 (float64[0] as one array)"),
  ],
)
def test_a_tuple_for_one_array_is_named_as_a_tuple(value: Any, came: str, cast: bool) -> None:
  message = message_of(value, cast=cast)
  assert f"result 0: expected float32[3], got {came}" in message
  message = message_of((value, ZEROS), (VECTOR, VECTOR), cast=cast)
  assert f"result 0: expected float32[3], got {came}" in message


def test_an_error_of_an_items_own_conversion_stays() -> None:
  class Odd:
    def __array__(self, *_: Any, **__: Any) -> Any:
      raise ValueError("no array today")

  with pytest.raises(ValueError, match="no array today"):
    run((Odd(), Odd()))


def test_cast_does_not_change_shapes() -> None:
  assert "got float64[1]" in message_of(np.zeros(1), cast=True)


def test_a_list_of_python_floats_is_accepted_with_cast() -> None:
  np.testing.assert_array_equal(run([1.0, 2.0, 3.0], cast=True), [1, 2, 3])


# -- styles that write in place ---
@pytest.mark.parametrize("style", ["inplace", "context"])
def test_a_function_that_writes_in_place_must_return_none(style: str) -> None:
  def fill(*leading: Any) -> Any:
    leading[-1][...] = 1
    return leading[-1].copy()

  gate = cg.gate(fill, out=VECTOR, style=style)
  with (
    pytest.raises(cg.ResultError, match=r"return value: expected None or `out` .*ndarray"),
    cg.errors(),
  ):
    jax.jit(gate)()


@pytest.mark.parametrize(
  ("out", "function"),
  [
    (lambda x: x, lambda out, x: np.add(x, 1, out=out)),
    (lambda x: (x,), lambda out, x: (np.add(x, 1, out=out[0]),)),
    (lambda x: {"y": x}, lambda out, x: (np.add(x, 1, out=out["y"]), out)[1]),
  ],
  ids=["array", "tuple", "dict"],
)
def test_a_function_that_writes_in_place_may_return_out(
  engine: Any, out: Any, function: Any
) -> None:
  gate = cg.gate(function, out=out, style="inplace")
  x = jnp.arange(6.0).reshape(2, 3)
  for f, args in ((jax.jit(gate), x[0]), (jax.jit(jax.vmap(gate)), x)):
    for _ in range(3):
      (got,) = jax.tree.leaves(f(args))
      np.testing.assert_array_equal(got, args + 1)


def test_memory_that_an_in_place_function_did_not_fill_is_kept_unchecked() -> None:
  @cg.gate(out=VECTOR, style="inplace")
  def half(out: Any) -> None:
    out[:] = 0
    out[1] = 5

  np.testing.assert_array_equal(jax.jit(half)(), [0, 5, 0])


def test_an_in_place_function_sees_numpys_own_shape_errors() -> None:
  @cg.gate(out=VECTOR, style="inplace")
  def wrong(out: Any) -> None:
    out[:] = np.zeros(4)

  with pytest.raises(ValueError, match="could not broadcast"), cg.errors():
    jax.jit(wrong)()


def test_in_place_results_come_in_the_declared_structure() -> None:
  @cg.gate(out=lambda x: {"double": x, "total": SCALAR}, style="inplace")
  def both(out: Any, x: Any) -> None:
    np.multiply(x, 2, out=out["double"])
    out["total"][...] = x.sum()

  got = jax.jit(both)(jnp.arange(3.0))
  np.testing.assert_array_equal(got["double"], [0, 2, 4])
  assert got["total"] == 3


# -- everything else ---
def test_an_object_that_is_no_array_is_an_error() -> None:
  class Thing:
    pass

  assert "result 0: expected float32[3], got Thing" in message_of(Thing())
  assert "result 0: expected float32[3], got dict" in message_of({"y": 1.0})


def test_an_object_whose_conversion_fails_raises_its_own_error() -> None:
  class Broken:
    def __array__(self, dtype: Any = None, copy: Any = None) -> Any:
      raise RuntimeError("no array today")

  with pytest.raises(RuntimeError, match="no array today"):
    run(Broken())


def test_an_object_with_an_array_protocol_is_accepted() -> None:
  class Array:
    def __array__(self, dtype: Any = None, copy: Any = None) -> Any:
      return np.arange(3, dtype=np.float32)

  np.testing.assert_array_equal(run(Array()), [0, 1, 2])


def test_a_jax_array_is_accepted_as_a_result() -> None:
  value = jnp.arange(3.0)
  np.testing.assert_array_equal(run(value), value)


@pytest.mark.parametrize("shape", [(2,), (3, 1), ()])
def test_lanes_of_vmap_are_checked_one_by_one(shape: tuple[int, ...]) -> None:
  gate = cg.gate(lambda x: np.zeros(shape, np.float32), out=VECTOR)
  with pytest.raises(cg.ResultError, match=r"expected float32\[3\]"), cg.errors():
    jax.jit(jax.vmap(gate))(jnp.zeros(4))


def test_a_result_error_is_also_a_type_error() -> None:
  assert issubclass(cg.ResultError, (cg.GateError, TypeError))


# -- masked arrays ---
class ByProtocol:
  def __array__(self, dtype: Any = None, copy: Any = None) -> Any:
    return np.ma.masked_array(ZEROS, [0, 1, 0])


@pytest.mark.parametrize("engine", ["callgate", "jax"])
@pytest.mark.parametrize("cast", [False, True])
@pytest.mark.parametrize("kind", ["lone", "in a tree", "a protocol's"])
def test_a_masked_result_is_refused(engine: Any, cast: bool, kind: str) -> None:
  value: Any = ByProtocol() if kind == "a protocol's" else np.ma.masked_array(ZEROS, [0, 1, 0])
  if kind == "a protocol's" and engine == "jax":
    pytest.skip("NumPy itself drops that one's mask")
  tree = kind == "in a tree"
  with cg.config(engine=engine):
    text = message_of({"a": value} if tree else value, {"a": VECTOR} if tree else VECTOR, cast=cast)
  assert "expected float32[3], got a masked array (float32[3]), which" in text
  assert "filled(value)" in text


@pytest.mark.parametrize("engine", ["callgate", "jax"])
def test_masked_constants_and_lists_with_masked_arrays_are_refused(engine: Any) -> None:
  masked = np.ma.masked_array(np.zeros(3, np.float32), [1, 0, 0])
  with cg.config(engine=engine):
    assert "a masked array" in message_of(np.ma.masked, SCALAR)
    rows = jax.ShapeDtypeStruct((2, 3), np.float32)
    assert "a masked array" in message_of(np.ma.stack([masked, masked]), rows)
  assert "a masked array" in message_of([masked, masked], rows)


@pytest.mark.parametrize("engine", ["callgate", "jax"])
def test_a_masked_array_in_which_nothing_is_masked_is_an_array(engine: Any) -> None:
  with cg.config(engine=engine):
    assert run(np.ma.masked_array(ZEROS)).tolist() == [0, 0, 0]
    assert run(np.ma.masked_array(ZEROS, [0, 0, 0])).tolist() == [0, 0, 0]


def test_masked_arrays_are_refused_where_arrays_come_in() -> None:
  masked = np.ma.masked_array(ZEROS, [0, 1, 0])
  echo = cg.gate(lambda x: x, out=lambda x: x)
  double = cg.elementwise("T x", "T y", "y = 2 * x")
  for call in (
    lambda: echo(masked),
    lambda: double(masked),
    lambda: cg.tap(masked, lambda _: None),
    lambda: cg.feed([masked]),
  ):
    with pytest.raises((TypeError, cg.GateError), match=r"masked array .*filled\(value\)"):
      call()
  packed = cg.gate(lambda out: out.pack(masked), out=VECTOR, arrays="buffer", style="inplace")
  with pytest.raises(TypeError, match=r"Buffer.pack: .*masked array"), cg.errors():
    jax.block_until_ready(jax.jit(packed)())
