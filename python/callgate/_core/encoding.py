# SPDX-License-Identifier: Apache-2.0
"""Encodes how flat arrays make up a call: a program carries text instead of Python objects.

A call site's *spec* is "" when positional arrays go in and one array comes out, "*" when a tuple of
arrays comes out, else JSON with the tree of the arguments, the tree of the results and the static
keyword arguments. Plain containers and literals are written out, so that an exported program can be
called in a process that never traced it. Anything else is written as a key of a table that tracing
fills: the key is made from the value's content where it pickles, so the same program gets the same
key in the next process.
"""

from __future__ import annotations

import ast
import collections
import functools
import hashlib
import json
import math
import operator
import pickle
import threading
import weakref
from collections.abc import Callable, Sequence
from typing import Any, cast

import jax
import numpy as np
from jax.export import is_symbolic_dim

from callgate._core import split
from callgate._core.errors import GateDefinitionError, ResultError

PyTreeDef = Any
Json = Any
_LEAF = "*"
_table: dict[str, Any] = {}


def encode(in_tree: PyTreeDef, out_tree: PyTreeDef, static: tuple[tuple[str, Any], ...]) -> str:
  """The spec of a call with arguments `(args, kwargs)` of `in_tree` and results of `out_tree`."""
  if not static and in_tree == jax.tree.structure(((0,) * in_tree.num_leaves, {})):
    if out_tree == jax.tree.structure(0):
      return ""
    if out_tree == jax.tree.structure((0,) * out_tree.num_leaves):
      return "*"
  spec = {
    "in": _encode_tree(in_tree),
    "out": _encode_tree(out_tree),
    "static": [[name, _encode_static(value)] for name, value in static],
  }
  return json.dumps(spec, separators=(",", ":"))


_HERE = object()  # stands for an array while a tree is written out


def _encode_tree(tree: PyTreeDef) -> Json:
  return _encode_node(jax.tree.unflatten(tree, [_HERE] * tree.num_leaves), tree)


def _encode_node(node: Any, tree: PyTreeDef | None = None) -> Json:
  if node is _HERE:
    return _LEAF
  if node is None:
    return None
  if isinstance(node, split.Static):
    return {"o": _name_object(node)} if node.by_identity else {"s": _encode_static(node.value)}
  if type(node) in (tuple, list):
    items = cast("Sequence[Any]", node)
    return {"t" if type(node) is tuple else "l": [_encode_node(item) for item in items]}
  if type(node) is dict:
    entries = cast("dict[Any, Any]", node)
    if all(type(key) is str for key in entries):
      return {"d": [[key, _encode_node(entries[key])] for key in sorted(entries)]}
  known: PyTreeDef = jax.tree.structure(node) if tree is None else tree
  return {"x": _remember(known, "tree"), "n": known.num_leaves}


def _decode_node(code: Json) -> Any:
  match code:
    case "*" | None:
      return 0 if code else None
    case {"t": items}:
      return tuple(map(_decode_node, items))
    case {"l": items}:
      return list(map(_decode_node, items))
    case {"s": value}:
      return split.Static(_decode_static(value))
    case {"o": name}:
      return _named_object(name)
    case {"d": items}:
      return {key: _decode_node(item) for key, item in items}
    case _:
      return jax.tree.unflatten(_recall(code["x"], "pytree node type"), [0] * code["n"])


def _encode_static(value: Any) -> Json:
  if _is_literal(value):
    return {"v": repr(value)}
  if isinstance(value, np.dtype):
    return {"dtype": value.name}
  return {"x": _remember(value, "value")}


def _is_literal(value: Any) -> bool:
  if type(value) is tuple:
    return all(map(_is_literal, cast("tuple[Any, ...]", value)))
  if type(value) is float:
    return math.isfinite(value)
  return value is None or type(value) in (bool, int, str, bytes)


def _decode_static(code: Json) -> Any:
  if "v" in code:
    return ast.literal_eval(code["v"])
  return np.dtype(code["dtype"]) if "dtype" in code else _recall(code["x"], "static argument")


def _remember(value: Any, kind: str) -> str:
  try:
    digest = hashlib.sha256(pickle.dumps(value)).hexdigest()[:16]
    key = f"{kind}:{type(value).__qualname__}:{digest}"
  except Exception:  # noqa: BLE001 - whatever pickling raises, the value has no portable content
    # A tree is another object each time.
    same = operator.eq if kind == "tree" else operator.is_
    known = next((k for k, v in _table.items() if type(v) is type(value) and same(v, value)), None)
    key = known or f"{kind}:{type(value).__qualname__}#{len(_table)}"
  _table.setdefault(key, value)
  return key


def _recall(key: str, what: str) -> Any:
  if key not in _table:
    raise GateDefinitionError(
      f"a program that was loaded from elsewhere calls a gate with a {what} ({key}) that this "
      "process has not seen. Expected: plain tuples, lists, dicts and literals, which travel with "
      "the program; or trace one call of the gate with the same value in this process first"
    )
  return _table[key]


# -- objects whose methods programs call -----------------------------------------------------------
# By the names that programs have for them, which no other object ever gets. What is called for a
# program that is loaded keeps its object; this table keeps none but those that can't be referred to
# weakly.
_objects: dict[str, Callable[[], split.Static | None]] = {}
_names: dict[int, str] = {}  # of those that live, by their identity
_counters: collections.Counter[str] = collections.Counter()
_naming = threading.RLock()  # an object may die while another is named


def _name_object(node: split.Static) -> str:
  value = node.value
  with _naming:
    if (known := _names.get(id(value))) is not None:
      return known
    kind = f"{type(value).__module__}.{type(value).__qualname__}"
    name = _names[id(value)] = f"{kind}#{_counters[kind]}"
    _counters[kind] += 1
    try:
      weak = weakref.ref(value)
    except TypeError:
      _objects[name] = lambda: node
    else:
      weakref.finalize(value, _forget, id(value), name).atexit = False
      _objects[name] = lambda: None if (one := weak()) is None else split.Static.of_object(one)
    return name


def _forget(identity: int, name: str) -> None:
  with _naming:
    del _names[identity], _objects[name]


def _named_object(name: str) -> split.Static:
  node = _objects.get(name, lambda: None)()
  if node is None:
    raise GateDefinitionError(
      f"a program calls a method of an object ({name}) that is not in this process. Programs that "
      "are exported can't call methods of objects that are no pytrees; expected an object that is "
      "registered as one, or a gate that is no method"
    )
  return node


class Signature:
  """A decoded spec: how to call the user's function with flat arrays."""

  def __init__(self, spec: str) -> None:
    code = json.loads(spec)
    self.in_tree, self.out_tree = (jax.tree.structure(_decode_node(code[k])) for k in ("in", "out"))
    self._unflatten = split.unflattener(self.in_tree)
    self.static: dict[str, Any] = {name: _decode_static(v) for name, v in code["static"]}

  def arguments(self, flat: Sequence[Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The user's positional and keyword arguments, static ones included."""
    args, kwargs = self._unflatten(flat)
    return args, {**kwargs, **self.static}


_signature = functools.lru_cache(maxsize=1024)(Signature)


def signature(spec: str) -> Signature:
  """The decoded spec; the same object each time, unless it keeps one of the user's."""
  return Signature(spec) if '{"o":' in spec else _signature(spec)


def path_in(tree: PyTreeDef, index: int) -> tuple[Any, ...]:
  """The path of a flat position in a pytree."""
  full = jax.tree.unflatten(tree, range(tree.num_leaves))
  return jax.tree_util.tree_flatten_with_path(full)[0][index][0]


def check_structure(expected: PyTreeDef, value: Any, gate: str) -> list[Any]:
  """Flattens a returned pytree; raises unless its structure is the declared one.

  None stands for any without arrays.
  """
  if value is None and not expected.num_leaves:
    return []
  leaves, tree = jax.tree.flatten(value)
  if tree != expected:
    raise ResultError(
      f"gate '{gate}': expected results of structure {expected}, got {tree}: the function must "
      "return the pytree that `out` declares"
    )
  return leaves


# What programs hold for an extent that symbolic shapes leave open.
OPEN = -1


def is_open(extent: Any) -> bool:
  """True if it is a symbolic dimension, of a program for `jax.export`."""
  return is_symbolic_dim(extent)


# -- other processes -------------------------------------------------------------------------------
def entries_of(spec: str) -> dict[str, Any]:
  """What a spec refers to by a key, for a process that has not traced it; it is to be pickled."""
  entries: dict[str, Any] = {}

  def visit(code: Json) -> None:
    if isinstance(code, list):
      for one in cast("list[Json]", code):
        visit(one)
    elif isinstance(code, dict):
      match cast("dict[str, Json]", code):
        case {"o": name}:
          entries[name] = _named_object(name).value
        case {"x": key, "n": count}:
          entries[key] = jax.tree.unflatten(_recall(key, "pytree node type"), [0] * count)
        case {"x": key}:
          entries[key] = _recall(key, "static argument")
        case others:
          visit(list(others.values()))

  if spec not in ("", "*"):
    visit(json.loads(spec))
  return entries


def learn(entries: dict[str, Any]) -> None:
  """Takes what `entries_of` gave in another process.

  Raises:
    GateDefinitionError: a pytree's type is not one here.
  """
  for key, value in entries.items():
    if key.startswith("tree:"):
      tree = _table.setdefault(key, jax.tree.structure(value))
      if tree == jax.tree.structure(0):
        raise GateDefinitionError(
          f"a gate is called with a {type(value).__qualname__}, no pytree in this process; "
          "expected a type that a module registers, not a script, and that this process imports"
        )
    elif key.startswith("value:"):
      _table.setdefault(key, value)
    else:
      node = split.Static.of_object(value)
      _objects[key] = lambda node=node: node


# A batch level: its extent and, for each operand, whether it has that axis.
Level = tuple[int, tuple[bool, ...]]


def encode_levels(levels: Sequence[Level]) -> dict[str, Any]:
  """Batch levels as programs hold them (`Lanes::of` in src/core/lanes.h)."""
  if not levels:
    return {}
  return {
    "sizes": np.array([OPEN if is_open(n) else n for n, _ in levels], np.int64),
    "masks": np.array([flag for _, mask in levels for flag in mask], np.int64),
  }
