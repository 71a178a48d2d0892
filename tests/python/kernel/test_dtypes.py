# SPDX-License-Identifier: Apache-2.0
"""Every element type in C++ kernels, all codes of the small ones, against ml_dtypes and NumPy."""

from __future__ import annotations

import functools
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


@functools.cache
def conversions() -> tuple[Any, Any]:
  """Kernels from any floating-point type to float32, and back to the type of an example."""
  widen = cg.cpp(
    """template <typename T> void widen(cg::In<T> x, cg::Out<float> y) {
      for (int64_t i = 0; i < x.size(); ++i) y[i] = float(x[i]);
    }""", out=lambda x: jax.ShapeDtypeStruct(x.shape, "float32"), name="dtypes.widen")  # fmt: skip
  narrow = cg.cpp(
    """template <typename T> void narrow(cg::In<float> x, cg::In<T, 0> like, cg::Out<T> y) {
      for (int64_t i = 0; i < x.size(); ++i) y[i] = T(x[i]);
    }""", out=lambda x, like: jax.ShapeDtypeStruct(x.shape, like.dtype),
    name="dtypes.narrow")  # fmt: skip
  return widen, narrow


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


@pytest.mark.parametrize("name", SMALL)
def test_every_code_widens_as_in_ml_dtypes(name: str) -> None:
  widen, _ = conversions()
  codes = all_codes(dtype_of(name))
  assert_same(jax.jit(widen)(codes), codes.astype("float32"))


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


@pytest.mark.parametrize("name", SMALL)
def test_floats_narrow_as_in_ml_dtypes(name: str) -> None:
  _, narrow = conversions()
  dtype = dtype_of(name)
  random = np.random.default_rng(0).integers(0, 2**32, 1 << 16, dtype="uint32").view("float32")
  x = np.concatenate([interesting(dtype), random])
  with np.errstate(over="ignore", invalid="ignore"):
    want = x.astype(dtype)
  assert_same(jax.jit(narrow)(x, np.zeros((), dtype)), want)


@functools.cache
def sum_of(name: str) -> Any:
  element = cpp_type(dtype_of(name))
  return cg.cpp(
    f"""void sum({element} start, cg::In<{element}> x, cg::Out<{element}, 0> total) {{
      total() = start;
      for (int64_t i = 0; i < x.size(); ++i) total() += x[i];
    }}""",
    out=lambda start, x: jax.ShapeDtypeStruct((), x.dtype),
    name=f"dtypes.sum_{name}",
  )


@pytest.mark.parametrize("name", [*SMALL, *NUMBERS])
def test_views_and_scalars_of_every_type(name: str) -> None:
  with jax.enable_x64(True):
    x = np.array([1, 2, 0.5, 4]).astype(dtype_of(name))
    got = jax.jit(sum_of(name))(x[1], x.reshape(2, 2))
    want = np.asarray(x[1] + x.sum(dtype=x.dtype), x.dtype)
    assert got.dtype == want.dtype
    np.testing.assert_array_equal(np.asarray(got), want)


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
  widen, _ = conversions()
  with pytest.raises(
    cg.GateDefinitionError, match=f"0: {name} has several elements.*convert to int8"
  ):
    widen(jnp.zeros(2, getattr(jnp, name)))
