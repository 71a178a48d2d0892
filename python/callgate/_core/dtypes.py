# SPDX-License-Identifier: Apache-2.0
"""Element types: their names, the runtime's codes for them, and their packing."""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np

from callgate import _callgate
from callgate._core.errors import GateDefinitionError


def dtype_named(name: str) -> np.dtype[Any]:
  """Returns the dtype of a NumPy or ml_dtypes name; raises TypeError if neither has it."""
  return np.dtype(getattr(ml_dtypes, name, name))


@functools.cache
def dtypes() -> dict[int, np.dtype[Any]]:
  """Returns JAX's dtypes by XLA's codes."""
  table: dict[int, np.dtype[Any]] = {}
  for code, name in _callgate.dtype_codes():
    try:
      table[code] = dtype_named(name)
    except TypeError:
      continue  # older ml_dtypes lack the newest types
  return table


@functools.cache  # at most one entry for each dtype of JAX
def dtype_code(dtype: np.dtype[Any]) -> int:
  """Returns XLA's code of a dtype."""
  for code, known in dtypes().items():
    if known == dtype:
      return code
  raise GateDefinitionError(f"dtype: expected a dtype of JAX, got {dtype}")


def is_inexact(dtype: Any) -> bool:
  """Returns True if derivatives with respect to such numbers exist."""
  return bool(jnp.issubdtype(dtype, jnp.inexact))


def is_complex(dtype: Any) -> bool:
  return bool(jnp.issubdtype(dtype, jnp.complexfloating))


# The bits of an element.
_PACKED = {
  "int4": 4, "uint4": 4, "int2": 2, "uint2": 2, "int1": 1, "uint1": 1, "float4_e2m1fn": 4
}  # fmt: skip


def is_packed(dtype: Any) -> bool:
  """Returns True for dtypes with several elements in a byte of XLA's memory."""
  return np.dtype(dtype).name in _PACKED


# An array in XLA's form: the code of its dtype, its extents, its bytes.
Value = tuple[int, tuple[int, ...], bytes]


def value_of(array: Any) -> Value:
  """Returns a NumPy array in XLA's form; raises GateDefinitionError for a dtype that JAX lacks."""
  array = np.asarray(array)
  if not array.dtype.isnative:
    array = array.astype(array.dtype.newbyteorder("="))
  code, shape = dtype_code(array.dtype), tuple(map(int, array.shape))
  if (bits := _PACKED.get(array.dtype.name)) is None:
    return code, shape, array.tobytes()
  # The first element is in the low bits of a byte.
  bytes_of_each = np.ascontiguousarray(array).reshape(-1, 1).view(np.uint8)
  kept = np.unpackbits(bytes_of_each, axis=1, bitorder="little")[:, :bits]
  return code, shape, np.packbits(kept, bitorder="little").tobytes()


def array_of(value: Value) -> np.ndarray:
  """Returns the NumPy array of a value, read-only."""
  code, shape, data = value
  dtype = dtype_of(code)
  if (bits := _PACKED.get(dtype.name)) is None:
    return np.frombuffer(data, dtype).reshape(shape)
  each = np.unpackbits(np.frombuffer(data, np.uint8), bitorder="little")
  each = each[: math.prod(shape) * bits].reshape(-1, bits)
  if np.dtype(dtype).name.startswith("int"):  # the sign
    each = np.concatenate([each, np.repeat(each[:, -1:], 8 - bits, axis=1)], axis=1)
  return np.packbits(each, axis=1, bitorder="little").view(dtype).reshape(shape)


def dtype_of(code: int) -> np.dtype[Any]:
  """Returns the NumPy dtype of one of XLA's codes."""
  return dtypes()[code]


def type_text(dtype: Any, shape: Sequence[int]) -> str:
  """Returns a type's text, such as "float32[3,4]" or "key<fry>[2]"."""
  name = getattr(dtype, "name", None) or np.dtype(dtype).name  # a key's dtype is no NumPy dtype
  return f"{name}[{','.join(map(str, shape))}]"


MOST_DIMENSIONS = 64  # of a NumPy array


def check_rank(where: str, shape: Sequence[Any]) -> None:
  """Raises if an array has more dimensions than NumPy allows."""
  if len(shape) > MOST_DIMENSIONS:
    expected = f"expected an array of at most {MOST_DIMENSIONS} dimensions, NumPy's limit"
    raise GateDefinitionError(f"{where}: {expected}, got one of {len(shape)}; reshape it first")


_KEY = "key "  # followed by the key's kind


def carried(leaf: Any, *, keys: bool = False) -> tuple[Any, str | None]:
  """Returns a leaf in a dtype that can travel, and the name of its own dtype if that differs.

  keys: True also names PRNG keys, which travel as their data.
  """
  if jax.numpy.issubdtype(leaf.dtype, jax.dtypes.prng_key):
    impl = jax.random.key_impl(leaf)  # raises without a name
    return jax.random.key_data(leaf), f"{_KEY}{impl}" if keys and isinstance(impl, str) else None
  if not is_packed(leaf.dtype):
    return leaf, None
  return leaf.astype(carrier(leaf.dtype)), np.dtype(leaf.dtype).name


def uncarried(array: Any, name: str, *, keys: bool = True) -> Any:
  """Returns the array of a leaf that was `carried`; with keys=False PRNG keys stay data."""
  if not name.startswith(_KEY):
    return array.astype(dtype_named(name))
  impl = name.removeprefix(_KEY)
  return jax.random.wrap_key_data(jax.numpy.asarray(array), impl=impl) if keys else array


def carrier(dtype: Any) -> np.dtype[Any]:
  """Returns the dtype in which an array travels on the host: its own, unless that is packed."""
  name = np.dtype(dtype).name
  if name not in _PACKED:
    return np.dtype(dtype)
  return np.dtype("float32" if name[0] == "f" else "uint8" if name[0] == "u" else "int8")
