"""What a gate's function may return: exactly what `out` declares."""

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
    (np.zeros(3), "float64[3]"),
    (np.zeros(3, np.float16), "float16[3]"),
    (np.zeros(3, np.int32), "int32[3]"),
    (np.zeros(4, np.float32), "float32[4]"),
    (np.zeros((3, 1), np.float32), "float32[3,1]"),
    (np.float32(0), "float32[]"),
    (np.zeros(3, "U1"), "<U1[3]"),
    ([0.0, 0.0, 0.0], "float64[3]"),
    (1.0, "float64[]"),
    (None, "None"),
  ],
)
def test_a_wrong_result_is_an_error_that_says_what_came(value: Any, got: str) -> None:
  message = message_of(value)
  assert "gate 'made': result 0: expected float32[3], got " + got in message
  assert "cast=True" in message


@pytest.mark.parametrize("value", [1, 1.0, True, 1j])
def test_a_python_scalar_is_not_cast_silently(value: Any) -> None:
  assert "result 0: expected float32[], got" in message_of(value, SCALAR)


def test_a_numpy_bool_is_not_a_number_and_a_bool_result_takes_a_python_bool() -> None:
  assert "got bool[]" in message_of(np.bool_(True), SCALAR)
  assert bool(run(True, jax.ShapeDtypeStruct((), bool)))


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


# -- casts ---
@pytest.mark.parametrize("cast", [False, True])
@pytest.mark.parametrize("given", ["float64", "float16", "int64", "int8", "bool", "complex64"])
@pytest.mark.parametrize("declared", ["float32", "int32", "complex64", "uint8"])
def test_cast_allows_the_casts_that_numpy_calls_same_kind(
  declared: str, given: str, cast: bool
) -> None:
  value = np.array([0, 1, 1]).astype(given)
  out = jax.ShapeDtypeStruct((3,), declared)
  if given == declared or (cast and np.can_cast(given, declared, "same_kind")):
    np.testing.assert_array_equal(run(value, out, cast=cast), value.astype(declared))
  else:
    assert f"expected {declared}[3], got {given}[3]" in message_of(value, out, cast=cast)


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
    pytest.raises(cg.ResultError, match=r"return value: expected None .*`out`.*ndarray"),
    cg.errors(),
  ):
    jax.jit(gate)()


def test_what_an_in_place_function_did_not_fill_is_not_checked_but_kept() -> None:
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

  assert "result 0: expected float32[3], got object[]" in message_of(Thing())


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
  assert "expected float32[3], got a masked array (float32[3]), whose mask" in text
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
