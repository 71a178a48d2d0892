# SPDX-License-Identifier: Apache-2.0
"""Static arguments of a call in a recording: JSON by the argument's name.

A program has static arguments in the spec of a call (`_core/encoding.py`). Numbers, texts, tuples,
enumerations and frozen dataclasses of these are stored whole, classes and functions by their names.
For any other value the recording has only the type.
"""

from __future__ import annotations

import ast
import enum
import functools
import hashlib
import json
from collections.abc import Iterator
from typing import Any, cast

import jax
import numpy as np

from callgate._core import encoding, exact, registry, split

Static = tuple[tuple[str, str], ...]  # (name as messages write it, JSON) of each

_OWN = "callgate_"  # the prefix of static arguments that callgate adds to a call


def of_call(gate: str, spec: str) -> Static:
  """Returns the static arguments of a call of `spec`."""
  if spec in ("", "*"):
    return ()
  parameters = tuple(getattr(registry.get(gate), "parameters", ()))
  # A spec with names refers to the user's objects, which no cache may keep alive.
  return _of_spec(gate, spec) if encoding.keeps(spec) else _cached(gate, spec, parameters)


@functools.lru_cache(maxsize=1024)
def _cached(gate: str, spec: str, parameters: tuple[str, ...]) -> Static:
  del parameters  # another gate of the same name may have others
  return _of_spec(gate, spec)


def _of_spec(gate: str, spec: str) -> Static:
  signature = encoding.signature(spec)
  found = list(_positional(gate, signature.in_tree))
  found += [
    (f"'{name}'", _code(value))
    for name, value in signature.static.items()
    if not name.startswith(_OWN)
  ]
  return tuple(found)


def _positional(gate: str, tree: Any) -> Iterator[tuple[str, str]]:
  """Yields the parts of the arguments' structure that are no arrays, except methods' objects."""
  nodes = jax.tree.unflatten(tree, range(tree.num_leaves))
  known = jax.tree_util.tree_flatten_with_path(nodes, is_leaf=_is_static)[0]
  for path, node in known:
    if _is_static(node) and not node.by_identity:
      yield registry.argument_at(gate, path), _code(node.value)


def _is_static(node: Any) -> bool:
  return isinstance(node, split.Static)


def _code(value: Any) -> str:
  return json.dumps(_written(value), separators=(",", ":"))


def _written(value: Any) -> Any:
  """Returns the value as JSON; classes and functions by their names, without the module."""
  if value is None or type(value) in (bool, int, float, str, bytes):
    return {"v": repr(value)}
  if type(value) is tuple:
    return {"t": [_written(one) for one in cast("tuple[Any, ...]", value)]}
  if isinstance(value, (np.generic, np.dtype)):
    return {"v": repr(value)}
  name = getattr(value, "__qualname__", None)
  if isinstance(name, str):
    return {"of": name}
  kind = type(value).__qualname__
  if isinstance(value, enum.Enum):
    return {"type": kind, "name": value.name}
  if isinstance(value, tuple):  # a named tuple
    return {"type": kind, "t": [_written(one) for one in cast("tuple[Any, ...]", value)]}
  fields = exact.frozen_fields(value) or ()
  parts = {name: _written(getattr(value, name)) for name in fields if hasattr(value, name)}
  return {"type": kind, "parts": parts} if parts else {"type": kind}


def digested(static: Static) -> Static:
  """Returns the static arguments with a digest for each value, for a recording of digests."""
  made = ((name, hashlib.blake2b(code.encode(), digest_size=16)) for name, code in static)
  return tuple((name, f"digest {digest.hexdigest()}") for name, digest in made)


def value_of(code: str) -> Any:
  """Returns the value if it is a literal or a tuple of literals; else the recorded text.

  It imports nothing, because the text may come from anybody.
  """
  try:
    return _literal(json.loads(code))
  except (ValueError, SyntaxError, LookupError, TypeError, MemoryError, RecursionError):
    return code


def _literal(code: Any) -> Any:
  match code:
    case {"v": "nan" | "inf" | "-inf" as text}:
      return float(text)
    case {"v": str(text)}:
      return ast.literal_eval(text)
    case {"t": list(items)}:
      return tuple(map(_literal, cast("list[Any]", items)))
    case _:
      raise ValueError(code)


def text_of(code: str) -> str:
  """Returns the value's text for a message."""
  value = value_of(code)
  return code if value is code else repr(value)


def difference(recorded: Static, came: Static) -> str:
  """Returns the first difference: "argument 'mode': expected 'fast', got 'slow'"; or ""."""
  was, now = dict(recorded), dict(came)
  for name in (*was, *(name for name in now if name not in was)):
    if was.get(name) != now.get(name):
      expected, got = (
        text_of(one[name]) if name in one else "no static value" for one in (was, now)
      )
      return f"argument {name}: expected {expected}, got {got}"
  return ""
