# SPDX-License-Identifier: Apache-2.0
"""Static arguments of a call, as a recording holds them: JSON by the argument's name.

A program has static arguments in the spec of a call (`_core/encoding.py`). Numbers, texts, tuples,
enumerations and frozen dataclasses of these are written whole, classes and functions by their
names. A recording has the type alone of any other value.
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

Static = tuple[tuple[str, str], ...]  # names as messages write them, and JSON

_OWN = "callgate_"  # begins the names of static arguments that callgate adds to a call


def of_call(gate: str, spec: str) -> Static:
  """The static arguments of a call of `spec`."""
  if spec in ("", "*"):
    return ()
  parameters = tuple(getattr(registry.get(gate), "parameters", ()))
  # A spec with names stands for the user's objects, which nothing may keep alive.
  return _of_spec(gate, spec) if encoding.keeps(spec) else _cached(gate, spec, parameters)


@functools.lru_cache(maxsize=1024)
def _cached(gate: str, spec: str, parameters: tuple[str, ...]) -> Static:
  del parameters  # a gate of the same name may have others
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
  """The parts of the arguments' structure that are no arrays, but for objects of methods."""
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
  """The value as JSON; of classes and functions the names, which don't say in which module."""
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
  if isinstance(value, tuple):  # a named one
    return {"type": kind, "t": [_written(one) for one in cast("tuple[Any, ...]", value)]}
  fields = exact.frozen_fields(value) or ()
  parts = {name: _written(getattr(value, name)) for name in fields if hasattr(value, name)}
  return {"type": kind, "parts": parts} if parts else {"type": kind}


def digested(static: Static) -> Static:
  """The same with a digest for each value, for a recording that keeps no arguments."""
  made = ((name, hashlib.blake2b(code.encode(), digest_size=16)) for name, code in static)
  return tuple((name, f"digest {digest.hexdigest()}") for name, digest in made)


def value_of(code: str) -> Any:
  """The value, if it is a literal or a tuple of such; else the text that a recording has.

  It imports nothing: the text may be anybody's.
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
  """The value for a message."""
  value = value_of(code)
  return code if value is code else repr(value)


def difference(recorded: Static, came: Static) -> str:
  """The first difference: "argument 'mode': expected 'fast', got 'slow'"; or ""."""
  was, now = dict(recorded), dict(came)
  for name in (*was, *(name for name in now if name not in was)):
    if was.get(name) != now.get(name):
      expected, got = (
        text_of(one[name]) if name in one else "no static value" for one in (was, now)
      )
      return f"argument {name}: expected {expected}, got {got}"
  return ""
