# SPDX-License-Identifier: Apache-2.0
"""Every element type in C++ kernels, all codes of the small ones, against ml_dtypes and NumPy."""

from __future__ import annotations

import shutil
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

import callgate as cg
from callgate._kernel.source import cpp_type

if not any(map(shutil.which, ("c++", "g++", "clang++"))):
  pytest.skip("a C++ compiler is needed", allow_module_level=True)

SMALL = [
  "bfloat16",
  "float16",
  "float8_e5m2",
  "float8_e4m3",
  "float8_e3m4",
  "float8_e4m3fn",
  "float8_e4m3b11fnuz",
  "float8_e4m3fnuz",
  "float8_e5m2fnuz",
]
NUMBERS = [
  *(f"{sign}int{bits}" for sign in ("", "u") for bits in (8, 16, 32, 64)),
  *("float32", "float64", "complex64", "complex128"),
]


def dtype_of(name: str) -> np.dtype[Any]:
  return np.dtype(getattr(ml_dtypes, name, name))


def each(names: list[str], text: str) -> str:
  """The text once for each type, with the type for T and its number for #."""
  types = enumerate(cpp_type(dtype_of(name)) for name in names)
  return ", ".join(text.replace("#", str(n)).replace("T", element) for n, element in types)


def bits(array: Any) -> np.ndarray[Any, Any]:
  array = np.asarray(array)
  return array.view(f"uint{8 * array.dtype.itemsize}")


def assert_same(got: Any, want: Any) -> None:
  """Bit for bit, but one NaN is like another."""
  got, want = np.asarray(got), np.asarray(want)
  assert got.dtype == want.dtype
  both_nan = np.isnan(got.astype("float32")) & np.isnan(want.astype("float32"))
  np.testing.assert_array_equal(np.where(both_nan, 0, bits(got)), np.where(both_nan, 0, bits(want)))


def all_codes(dtype: np.dtype[Any]) -> np.ndarray[Any, Any]:
  return np.arange(256**dtype.itemsize).astype(f"uint{8 * dtype.itemsize}").view(dtype)


def test_every_code_widens_as_in_ml_dtypes() -> None:
  widen = cg.cpp(
    f"""
    void widen_one(const auto& x, cg::Out<float> y) {{
      for (int64_t i = 0; i < x.size(); ++i) y[i] = float(x[i]);
    }}
    void widen({each(SMALL, "cg::In<T> x#")}, {each(SMALL, "cg::Out<float> y#")}) {{
      {each(SMALL, "widen_one(x#, y#)")};
    }}""", "widen", out=lambda *xs: [jax.ShapeDtypeStruct(x.shape, "float32") for x in xs],
    name="dtypes.widen")  # fmt: skip
  codes = [all_codes(dtype_of(name)) for name in SMALL]
  for one, got in zip(codes, jax.jit(widen)(*codes), strict=True):
    assert_same(got, one.astype("float32"))


def interesting(dtype: np.dtype[Any]) -> np.ndarray[Any, Any]:
  """Floats where rounding is decided: each value, the middles between them, and what is beside."""
  values = np.unique(all_codes(dtype).astype("float32"))
  values = values[np.isfinite(values)]
  middles = (values[1:].astype("float64") + values[:-1]) / 2
  top = 2 * np.float64(values[-1])
  points = np.concatenate([values, middles, [top, -top, values[-1] + (top / 2 - values[-2]) / 2]])
  with np.errstate(over="ignore"):
    points = points.astype("float32")
  beside = [np.nextafter(points, np.float32(way)) for way in (-np.inf, np.inf)]
  special = np.array([np.inf, -np.inf, np.nan, 0.0, -0.0, 1e-45, -1e-45, 3.4e38], "float32")
  return np.concatenate([points, *beside, special])


def test_floats_narrow_as_in_ml_dtypes() -> None:
  narrow = cg.cpp(
    f"""
    template <typename E> void narrow_one(cg::In<float> x, cg::Out<E> y) {{
      for (int64_t i = 0; i < x.size(); ++i) y[i] = E(x[i]);
    }}
    void narrow({each(SMALL, "cg::In<float> x#")}, {each(SMALL, "cg::Out<T> y#")}) {{
      {each(SMALL, "narrow_one(x#, y#)")};
    }}""", "narrow", name="dtypes.narrow",
    out=lambda *xs: [
      jax.ShapeDtypeStruct(x.shape, dtype_of(name)) for name, x in zip(SMALL, xs, strict=True)
    ],
  )  # fmt: skip
  random = np.random.default_rng(0).integers(0, 2**32, 1 << 16, dtype="uint32").view("float32")
  given = [np.concatenate([interesting(dtype_of(name)), random]) for name in SMALL]
  for name, x, got in zip(SMALL, given, jax.jit(narrow)(*given), strict=True):
    with np.errstate(over="ignore", invalid="ignore"):
      assert_same(got, x.astype(dtype_of(name)))


def test_views_and_scalars_of_every_type() -> None:
  names = [*SMALL, *NUMBERS]
  sums = cg.cpp(
    f"""
    template <typename E> void sum(E start, cg::In<E> x, cg::Out<E, 0> total) {{
      total() = start;
      for (int64_t i = 0; i < x.size(); ++i) total() += x[i];
    }}
    void sums({each(names, "T start#, cg::In<T> x#")}, {each(names, "cg::Out<T, 0> total#")}) {{
      {each(names, "sum(start#, x#, total#)")};
    }}""", "sums", name="dtypes.sums",
    out=lambda *given: [jax.ShapeDtypeStruct((), x.dtype) for x in given[1::2]],
  )  # fmt: skip
  with jax.enable_x64(True):
    xs = [np.array([1, 2, 0.5, 4]).astype(dtype_of(name)) for name in names]
    found = jax.jit(sums)(*(v for x in xs for v in (x[1], x.reshape(2, 2))))
    for name, x, got in zip(names, xs, found, strict=True):
      want = np.asarray(x[1] + x.sum(dtype=x.dtype), x.dtype)
      assert got.dtype == want.dtype, name
      np.testing.assert_array_equal(np.asarray(got), want, err_msg=name)


def test_bool_is_a_type_of_its_own() -> None:
  kernel = cg.cpp(
    """void both(bool by, cg::In<bool> x, cg::Out<bool> y) {
      for (int64_t i = 0; i < x.size(); ++i) y[i] = by != x[i];
    }""", out=lambda by, x: x, name="dtypes.both")  # fmt: skip
  assert kernel(True, jnp.array([True, False])).tolist() == [False, True]
  with pytest.raises(cg.GateDefinitionError, match="'x': expected bool of any rank, got uint8"):
    kernel(True, jnp.ones(2, "uint8"))


@pytest.mark.parametrize("name", ["int4", "uint4", "float4_e2m1fn"])
def test_types_of_several_elements_a_byte_are_refused(name: str) -> None:
  if not hasattr(jnp, name):
    pytest.skip(f"this JAX has no {name}")
  kernel = cg.cpp("template <class T> void f(cg::In<T> x, cg::Out<float> y) {}", out=lambda x: x)
  with pytest.raises(
    cg.GateDefinitionError, match=f"0: {name} has several elements.*convert to int8"
  ):
    kernel(jnp.zeros(2, getattr(jnp, name)))
