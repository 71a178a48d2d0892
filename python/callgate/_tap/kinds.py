# SPDX-License-Identifier: Apache-2.0
"""Kinds of records: images and texts, as taps send them and as consumers show them.

An image is sent as it is. A text is sent as UTF-8 in a uint8 array, padded with zeros; or as the
values of its fields, and then the tap's description has the format string.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, Literal, get_args

import jax
import jax.numpy as jnp
import numpy as np

from callgate._core import foreign, options
from callgate._core.encoding import is_open
from callgate._core.errors import GateDefinitionError

Kind = Literal["image", "text"]
# A text's format, and the name of the field for each value; None for a field without a name.
Fields = tuple[str, tuple[str | None, ...]]
_CHANNELS = (1, 3, 4)
# Texts are padded to multiples of so many bytes; texts of similar lengths share a program.
_ROOM = 64
_Array = np.ndarray[Any, Any]


# -- while tracing ---------------------------------------------------------------------------------
def option(label: str, kind: Any, effect: str, on_device: bool) -> None:
  """Checks a tap's `kind`, and the options that a text can't have."""
  if kind is not None:
    options.choice(label, "kind", kind, get_args(Kind), what="'image' or 'text'")
  if kind == "text" and effect == "dataflow":
    options.refuse(label, "effect", "'io' with kind='text'", effect)
  if kind == "text" and on_device:
    options.refuse(label, "on_device", "False with kind='text'", on_device)


def split_text(label: str, value: Any) -> tuple[Any, Fields | None]:
  """Returns the arrays that a tap with kind="text" sends: bytes, or the values of the fields."""
  if isinstance(value, str):
    data = text_bytes(options.text(label, "value", value))
    room = -(-max(1, data.size) // _ROOM) * _ROOM
    return np.pad(data, (0, room - data.size)), None
  if not (isinstance(value, (tuple, list)) and value and isinstance(value[0], str)):
    return value, None
  template = options.template(label, "value", value[0])
  rest: list[Any] = list(value[1:])
  named: Mapping[str, Any] = rest.pop() if rest and isinstance(rest[-1], Mapping) else {}
  check_fields(f"{label}: value", template, rest, named)
  for field, one in (*enumerate(rest), *named.items()):
    if not jax.tree_util.all_leaves([one]):
      what = f"{label}: value: expected an array for each field, got {type(one).__name__}"
      raise GateDefinitionError(f"{what} for {field!r}")
  return (*rest, *named.values()), (template, (*(None for _ in rest), *map(str, named)))


def check_fields(
  label: str, template: str, values: Sequence[Any], named: Mapping[str, Any]
) -> None:  # fmt: skip
  """Raises if the format lacks a field's value, or can't format arrays of these types."""

  def example(x: Any) -> Any:
    x = x if hasattr(x, "shape") and hasattr(x, "dtype") else np.asarray(x)
    return np.zeros([1 if is_open(extent) else extent for extent in x.shape], x.dtype)[()]

  try:
    examples = jax.tree.map(example, list(values)), jax.tree.map(example, dict(named))
    template.format(*examples[0], **examples[1])
  except Exception as error:
    got = f"got {template!r}: {foreign.said_by(error)}"
    what = f"{label}: expected a text with fields for the arrays, {got}"
    raise GateDefinitionError(what) from error


def check(label: str, kind: Kind, arrays: Sequence[Any], fields: Fields | None) -> None:
  """Raises GateDefinitionError unless the arrays are of the kind."""
  if fields is not None:
    return
  for index, array in enumerate(arrays):
    found = jnp.result_type(array)
    got = f"got {found}{list(array.shape)}"
    if kind == "text" and (found != np.uint8 or array.ndim != 1):
      expected = "a string, a string with values, or uint8[bytes] of UTF-8, padded with zeros"
      raise GateDefinitionError(f"{label}: value: expected {expected}, {got}")
    if kind == "image" and not _is_image(found, array.shape):
      expected = "uint8, or floats from 0 to 1, of [height, width], [height, width, 1, 3 or 4]"
      what = f"{label}: leaf {index}: expected an image, {expected} or a batch of these"
      raise GateDefinitionError(f"{what}, {got}")
  if kind == "text" and len(arrays) != 1:
    raise GateDefinitionError(f"{label}: value: expected one text, got {len(arrays)} arrays")


def _is_image(dtype: Any, shape: Sequence[Any]) -> bool:
  if dtype != np.uint8 and not jnp.issubdtype(dtype, jnp.floating):
    return False
  if any(map(is_open, shape)):
    return 2 <= len(shape) <= 4
  if len(shape) == 3:
    return not _has_other_channels(*shape[1:])
  return len(shape) == 2 or (len(shape) == 4 and shape[-1] in _CHANNELS)


def _has_other_channels(width: int, last: int) -> bool:
  """True if the last extent is likely 2 or 5 to 7 channels, and not the width of gray images."""
  return last == 2 or 5 <= last < 8 <= width


# -- in consumers ----------------------------------------------------------------------------------
def text_bytes(text: str) -> _Array:
  return np.frombuffer(text.encode(errors="replace"), np.uint8)


def text(arrays: Sequence[Any], fields: Fields | Sequence[Any] | None) -> str:
  """Returns the text of a record's leaves."""
  if fields is None:
    return np.asarray(arrays[0], np.uint8).tobytes().partition(b"\0")[0].decode(errors="replace")
  template, names = fields
  values = [x[()] if isinstance(x, np.ndarray) else x for x in arrays]
  named = {name: x for name, x in zip(names, values, strict=True) if name is not None}
  return template.format(*values[: len(values) - len(named)], **named)


def texts(arrays: Sequence[Any], fields: Fields | None) -> list[str]:
  """Returns the texts of stacked records."""
  return [text([x[row] for x in arrays], fields) for row in range(len(arrays[0]) if arrays else 0)]


def images(array: Any) -> _Array:
  """Returns a leaf with kind="image" as uint8[images, height, width, 1, 3 or 4].

  Floats are clipped to the range 0 to 1; NaN becomes 0.
  """
  array = np.asarray(array)
  if not (array.ndim >= 3 and array.shape[-1] in _CHANNELS):
    array = array[..., None]
  array = array.reshape(-1, *array.shape[-3:])
  if array.dtype == np.uint8:
    return array
  with np.errstate(invalid="ignore"):
    return (np.nan_to_num(np.clip(array.astype(np.float32), 0, 1)) * 255).round().astype(np.uint8)


def sheet(array: Any, most: int = 16) -> _Array:
  """Returns a batch's first `most` images in a grid, as one uint8[height, width, channels]."""
  batch = images(array)[:most]
  count, height, width, channels = batch.shape
  columns = max(1, math.ceil(math.sqrt(count)))
  rows = -(-count // columns)
  full = np.zeros((rows * columns, height, width, channels), np.uint8)
  full[:count] = batch
  grid = full.reshape(rows, columns, height, width, channels).swapaxes(1, 2)
  return grid.reshape(rows * height, columns * width, channels)
