# SPDX-License-Identifier: Apache-2.0
"""Every element type and layout through gates: bits in, bits out."""

from __future__ import annotations

from typing import Any

import hypothesis
import hypothesis.extra.numpy as hnp
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from property_checks import examples

import callgate as cg

PLAIN = [
  "bool",
  "int8",
  "int16",
  "int32",
  "uint8",
  "uint16",
  "uint32",
  "float16",
  "bfloat16",
  "float32",
  "complex64",
]
FLOAT8 = [name for name in dir(ml_dtypes) if name.startswith("float8_") and hasattr(jnp, name)]
WIDE = ["int64", "uint64", "float64", "complex128"]
PACKED = ["int4", "uint4", "int2", "uint2", "float4_e2m1fn"]


def dtype_of(name: str) -> np.dtype[Any]:
  return np.dtype(getattr(ml_dtypes, name, name))


def random_bits(name: str, shape: tuple[int, ...]) -> np.ndarray[Any, Any]:
  """An array with every kind of bit pattern, NaNs included; bools are 0 or 1."""
  dtype = dtype_of(name)
  random = np.random.default_rng(7)
  count = int(np.prod(shape))
  if name == "bool":
    return random.integers(0, 2, shape).astype(bool)
  raw = random.integers(0, 256, count * dtype.itemsize, dtype=np.uint8)
  return raw.view(dtype).reshape(shape)


def same_bits(a: Any, b: Any) -> bool:
  a, b = np.asarray(a), np.asarray(b)
  return a.dtype == b.dtype and a.shape == b.shape and a.tobytes() == b.tobytes()


@pytest.mark.parametrize("shape", [(), (5,), (2, 3)])
@pytest.mark.parametrize("dtype", [*PLAIN, *FLOAT8])
def test_bits_arrive_and_return_unchanged(dtype: str, shape: tuple[int, ...]) -> None:
  x = random_bits(dtype, shape)
  seen: list[Any] = []

  @cg.gate(out=lambda x: x)
  def identity(x: Any) -> Any:
    seen.append(x.copy())
    return x

  assert same_bits(jax.jit(identity)(x), x)
  assert same_bits(seen[0], x)


@pytest.mark.parametrize("dtype", [*PLAIN, *FLOAT8])
def test_results_written_in_place_have_the_declared_dtype(dtype: str) -> None:
  x = random_bits(dtype, (4,))

  @cg.gate(out=lambda x: x, style="inplace")
  def reverse(out: Any, x: Any) -> None:
    assert out.dtype == x.dtype
    out[...] = x[::-1]

  with cg.errors():
    assert same_bits(jax.jit(reverse)(x), x[::-1])


@pytest.mark.parametrize("dtype", WIDE)
def test_64_bit_types_pass_with_x64(dtype: str) -> None:
  with jax.enable_x64(True):
    x = random_bits(dtype, (3, 2))
    assert same_bits(jax.jit(cg.gate(lambda x: x, out=lambda x: x))(x), x)


@pytest.mark.parametrize("dtype", WIDE)
def test_64_bit_results_without_x64_are_an_error_while_tracing(dtype: str) -> None:
  gate = cg.gate(lambda: None, out=jax.ShapeDtypeStruct((2,), dtype))
  with pytest.raises(cg.GateDefinitionError, match=f"{dtype} needs jax_enable_x64"):
    jax.jit(gate)()


@pytest.mark.parametrize("dtype", PACKED)
def test_packed_types_are_refused_as_numpy_views_by_name(dtype: str) -> None:
  x = jnp.zeros(4, dtype)

  @cg.gate(out=jax.ShapeDtypeStruct((4,), np.float32))
  def reads(weights: Any) -> Any:
    return weights

  with pytest.raises(cg.GateDefinitionError, match=rf"'weights'.*{dtype}.*arrays='buffer'"):
    jax.jit(reads)(x)
  writes = cg.gate(lambda x: x, out=jax.ShapeDtypeStruct((4,), dtype_of(dtype)))
  with pytest.raises(cg.GateDefinitionError, match=rf"result 0.*{dtype}.*arrays='buffer'"):
    jax.jit(writes)(jnp.zeros(4))


@pytest.mark.parametrize("dtype", PACKED)
@pytest.mark.parametrize("size", [1, 2, 5])
def test_packed_types_round_trip_through_buffers(dtype: str, size: int) -> None:
  x = np.resize(np.array([1, 0, -2 if dtype.startswith("int") else 2]), size).astype(
    dtype_of(dtype)
  )

  @cg.gate(out=lambda x: x, arrays="buffer", style="inplace")
  def reverse(out: cg.Buffer, x: cg.Buffer) -> None:
    out.pack(x.unpack()[::-1])

  with cg.errors():
    got = np.asarray(jax.jit(reverse)(jnp.asarray(x)))
  np.testing.assert_array_equal(got.astype(np.float32), x[::-1].astype(np.float32))


# -- shapes ---
def test_an_empty_argument_reaches_the_callable() -> None:
  seen: list[Any] = []

  @cg.gate(out=jax.ShapeDtypeStruct((), np.float32))
  def total(x: Any) -> Any:
    seen.append((x.shape, x.dtype))
    return x.sum()

  assert jax.jit(total)(jnp.zeros((0, 3))) == 0.0
  assert seen == [((0, 3), np.float32)]


@pytest.mark.parametrize("style", ["return", "inplace"])
def test_an_io_gate_with_an_empty_result_runs_once(style: str) -> None:
  calls: list[Any] = []

  def look(*arrays: Any) -> Any:
    calls.append([a.shape for a in arrays])
    return np.zeros((2, 0), np.float32) if style == "return" else None

  gate = cg.gate(look, out=jax.ShapeDtypeStruct((2, 0), np.float32), effect="io", style=style)
  with cg.errors():
    assert jax.jit(gate)(jnp.zeros(3)).shape == (2, 0)
  assert calls == [[(3,)] if style == "return" else [(2, 0), (3,)]]


@pytest.mark.parametrize("value", [np.float32(3), np.array(3, np.float32)])
def test_a_rank_0_result_may_be_a_numpy_scalar(value: Any) -> None:
  assert jax.jit(cg.gate(lambda: value, out=jax.ShapeDtypeStruct((), np.float32)))() == 3.0


@examples(10)
@hypothesis.given(
  x=st.sampled_from(["bool", "int8", "uint16", "int32", "float16", "float32", "complex64"]).flatmap(
    lambda dtype: hnp.arrays(
      dtype, hnp.array_shapes(min_dims=0, max_dims=4, min_side=0, max_side=4)
    )
  )
)
def test_any_array_is_seen_and_returned_as_numpy_has_it(x: np.ndarray[Any, Any]) -> None:
  def transpose(x: Any) -> Any:
    assert x.flags.c_contiguous
    return x.T

  gate = cg.gate(transpose, out=lambda x: jax.ShapeDtypeStruct(x.shape[::-1], x.dtype))
  with cg.errors():
    assert same_bits(jax.jit(gate)(x), x.T)


# -- layouts of returned arrays ---
BASE = np.arange(24, dtype=np.float32).reshape(4, 6)
LAYOUTS = {
  "Fortran order": np.asfortranarray(BASE),
  "a transpose": BASE.T.copy().T,
  "reversed": BASE[::-1, ::-1].copy()[::-1, ::-1],
  "every second element": np.repeat(np.repeat(BASE, 2, 0), 2, 1)[::2, ::2],
  "byte-swapped": BASE.astype(">f4"),
  "byte-swapped and strided": np.repeat(BASE.astype(">f4"), 2, 1)[:, ::2],
  "unaligned": np.frombuffer(b"\0" + BASE.tobytes(), np.float32, offset=1).reshape(4, 6),
  "broadcast": np.broadcast_to(BASE[:1], (4, 6)),
  "a subclass": np.ma.masked_array(BASE),
  "a record's field": np.rec.fromarrays([BASE, BASE], names="a,b").a,
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_returned_array_may_have_any_layout(layout: str) -> None:
  value = LAYOUTS[layout]
  gate = cg.gate(lambda: value, out=jax.ShapeDtypeStruct((4, 6), np.float32))
  with cg.errors():
    np.testing.assert_array_equal(jax.jit(gate)(), np.asarray(value, np.float32))


@pytest.mark.parametrize("part", [np.s_[::-1, ::-1], np.s_[:, :]])
def test_a_view_of_the_argument_itself_may_be_returned(part: Any) -> None:
  gate = cg.gate(lambda x: x[part], out=lambda x: x)
  with cg.errors():
    np.testing.assert_array_equal(jax.jit(gate)(BASE), BASE[part])


def test_an_aliased_gate_may_return_its_reversed_argument() -> None:
  gate = cg.gate(lambda x: x[::-1], out=lambda x: x, aliases={0: 0})
  x = np.arange(1001, dtype=np.float32)
  with cg.errors():
    np.testing.assert_array_equal(jax.jit(gate)(x), x[::-1])


@pytest.mark.parametrize("kind", ["jax", "torch"])
def test_other_libraries_arrays_come_and_go(kind: str) -> None:
  if kind == "torch":
    pytest.importorskip("torch", reason="PyTorch is not installed")
  gate = cg.gate(lambda x: x + x, out=lambda x: x, arrays=kind)
  with cg.errors():
    for dtype in ("float32", "bfloat16", "int32"):
      x = jnp.arange(4).astype(dtype)
      assert same_bits(jax.jit(gate)(x), x + x)
