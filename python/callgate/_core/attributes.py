# SPDX-License-Identifier: Apache-2.0
"""FFI attributes: the static data of calls in programs, beside the arrays.

An attribute is a string, a number, an array of numbers, or a dictionary of these. A list is a
dictionary with the keys "0", "1", ... The runtime reads attributes with src/core/attributes.h.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable, Mapping
from typing import Any, cast

import numpy as np

_PLAIN = re.compile(rb'[^\x20-\x7e]|["\\]')
_ELEMENTS = {"int64": "i64", "uint8": "ui8"}


class Raw(str):
  """An attribute in MLIR's text form."""

  __slots__ = ()


def listed(items: Iterable[Any]) -> dict[str, Any]:
  """Returns a list as a dictionary."""
  return {str(place): item for place, item in enumerate(items)}


def key_of(held: Mapping[str, Any]) -> str:
  """Returns a hash that is equal for equal attributes."""
  return hashlib.blake2b(repr(_plain(held)).encode(), digest_size=8).hexdigest()


def _plain(value: Any) -> Any:
  if isinstance(value, Mapping):
    entries = cast("Mapping[str, Any]", value)
    return [(name, _plain(entries[name])) for name in sorted(entries)]
  if isinstance(value, (np.ndarray, np.generic)):
    return value.dtype.name, value.shape, value.tobytes()
  return value


def text(value: Any) -> str:
  """Returns MLIR's text of a string, `Raw`, bool, int64, array of int64 or uint8, or dictionary."""
  if isinstance(value, Raw):
    return value
  if isinstance(value, str):
    escaped = _PLAIN.sub(lambda match: b"\\%02X" % match[0][0], value.encode())
    return f'"{escaped.decode()}"'
  if isinstance(value, Mapping):
    entries = cast("Mapping[str, Any]", value)
    return f"{{{', '.join(f'{text(name)} = {text(entries[name])}' for name in sorted(entries))}}}"
  if isinstance(value, (bool, np.bool_)):
    return "true" if value else "false"
  if isinstance(value, (int, np.int64)):  # pyright: ignore[reportArgumentType]
    return f"{int(value)} : i64"
  array = cast("np.ndarray[Any, Any]", value)
  inside = f"[{', '.join(map(str, array.tolist()))}]" if array.size else ""
  return f"dense<{inside}> : tensor<{array.size}x{_ELEMENTS[array.dtype.name]}>"
