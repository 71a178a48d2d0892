# SPDX-License-Identifier: Apache-2.0
"""Numbers that kernels take as attributes: those that the parameter's dtype holds, as they are."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest

import callgate as cg
from callgate._core import static_values

POWERS = [sign * 2**bits for bits in (0, 7, 8, 31, 32, 63, 64) for sign in (1, -1)]
EDGES = sorted({power + step for power in POWERS for step in (-1, 0, 1)})
INTEGERS = [np.dtype(f"{kind}{bits}") for kind in ("int", "uint") for bits in (8, 16, 32, 64)]


def forms(value: int) -> list[Any]:
  """The number as Python's, and as each of NumPy's that hold it."""
  held = [d.type(value) for d in INTEGERS if np.iinfo(d).min <= value <= np.iinfo(d).max]
  reals = [float(value)] if int(float(value)) == value else []
  return [value, *held, *reals]


@pytest.mark.parametrize("dtype", INTEGERS, ids=str)
def test_an_integer_arrives_or_is_an_error(dtype: np.dtype[Any]) -> None:
  limits = np.iinfo(dtype)
  for value in EDGES:
    for form in forms(value):
      for make, given in ((static_values.number, form), (static_values.numbers, [form])):
        if limits.min <= value <= limits.max:
          (got,) = np.atleast_1d(make("k", "n", given, dtype).value).tolist()
          assert got == value
        else:
          with pytest.raises(cg.GateDefinitionError, match=f"that {dtype.name} holds, got"):
            make("k", "n", given, dtype)


def test_integers_that_numpy_would_round_are_an_error() -> None:
  for given in ([2**63 + 1, -1], [2**63 + 1, 0.5]):
    for dtype in (np.dtype(np.uint64), np.dtype(np.float64), None):
      with pytest.raises(cg.GateDefinitionError, match="array of numbers"):
        static_values.numbers("k", "n", given, dtype)


@pytest.mark.parametrize(
  ("dtype", "good", "bad"),
  [
    (np.bool_, [0, 1, True, 1.0], [2, -1, 0.5, np.int8(2)]),
    (ml_dtypes.int4, [-8, 7, np.int64(7), 7.0], [8, -9, 16, np.uint64(15)]),
    (np.float32, [1, 2**60, 0.1, np.inf, np.float64(1e38), -0.0], [1e39, -1e60, 1j]),
    (np.float16, [65504, 0.1, np.int32(7)], [65536, np.float32(1e5), 2**63]),
    (ml_dtypes.bfloat16, [1, 0.1, 1e38], [3.4e38 * 2, 1e300]),
    (ml_dtypes.float8_e4m3fn, [448, 0.1], [512, 1e9]),
    (np.complex64, [1, 1j, 0.1], [1e60, 1e60j]),
  ],
)
def test_other_numbers_are_rounded_and_never_wrapped(dtype: Any, good: Any, bad: Any) -> None:
  dtype = np.dtype(dtype)
  for value in good:
    got = static_values.number("k", "n", value, dtype).value
    assert got.dtype == dtype
    assert got == np.asarray(value).astype(dtype)
  for value in bad:
    with pytest.raises(cg.GateDefinitionError, match=f"that {dtype.name} holds, got"):
      static_values.number("k", "n", value, dtype)
