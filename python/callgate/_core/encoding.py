# SPDX-License-Identifier: Apache-2.0
"""Encodes how flat arrays make up a call: a program carries text instead of Python objects.

A call site's *spec* is "" when positional arrays go in and one array comes out, "*" when a tuple of
arrays comes out, else JSON with the tree of the arguments, the tree of the results and the static
keyword arguments. Plain containers and literals are written out, so that an exported program can be
called in a process that never traced it. Anything else is written as a name (`_core/names.py`).
"""

from __future__ import annotations

import ast
import collections
import functools
import importlib
import json
import math
import threading
import weakref
from collections.abc import Callable, Sequence
from typing import Any, cast

import jax
import numpy as np
from jax.export import is_symbolic_dim

from callgate._core import exact, foreign, names, split
from callgate._core.errors import GateDefinitionError, ResultError

PyTreeDef = Any
Json = Any
_LEAF = "*"


def encode(
  in_tree: PyTreeDef,
  out_tree: PyTreeDef,
  static: tuple[tuple[str, Any], ...],
  *,
  portable: bool = False,
) -> str:
  """The spec of a call with arguments `(args, kwargs)` of `in_tree` and results of `out_tree`.

  With `portable` for a program for other processes; raises GateDefinitionError for what can't go.
  """
  if not static and in_tree == jax.tree.structure(((0,) * in_tree.num_leaves, {})):
    if out_tree == jax.tree.structure(0):
      return ""
    if out_tree == jax.tree.structure((0,) * out_tree.num_leaves):
      return "*"
  encoder = _Encoder(portable)
  spec = {
    "in": encoder.tree(in_tree),
    "out": encoder.tree(out_tree),
    "static": [[name, encoder.value(value)] for name, value in static],
  }
  return json.dumps(spec, separators=(",", ":"))


_HERE = object()  # stands for an array while a tree is written out


class _Encoder:
  """Writes trees and values; whose `Exact` is kept keeps what was named for them."""

  def __init__(self, portable: bool) -> None:
    self._portable = portable
    self._named: list[exact.Exact] = []

  def tree(self, tree: PyTreeDef) -> Json:
    code = self._node(jax.tree.unflatten(tree, [_HERE] * tree.num_leaves), tree)
    self._keep(exact.exact_tree(tree))
    return code

  def value(self, value: Any) -> Json:
    code = self._static(value)
    self._keep(exact.exact(value))
    return code

  def _keep(self, one: exact.Exact) -> None:
    one.keep(self._named)
    self._named = []

  def _name(self, one: exact.Exact) -> str:
    self._named.append(one)
    return names.name(one, portable=self._portable)

  def _node(self, node: Any, tree: PyTreeDef | None = None) -> Json:
    if node is _HERE:
      return _LEAF
    if node is None:
      return None
    if isinstance(node, split.Static):
      if node.by_identity:
        return {"o": _name_object(node, self._portable)}
      return {"s": self._static(node.value)}
    if type(node) in (tuple, list):
      items = cast("Sequence[Any]", node)
      return {"t" if type(node) is tuple else "l": [self._node(item) for item in items]}
    if type(node) is dict:
      entries = cast("dict[Any, Any]", node)
      if all(type(key) is str for key in entries):
        return {"d": [[key, self._node(entries[key])] for key in sorted(entries)]}
    known: PyTreeDef = jax.tree.structure(node) if tree is None else tree
    return {"x": self._name(exact.exact_tree(known)), "n": known.num_leaves}

  def _static(self, value: Any) -> Json:
    if _is_literal(value):
      return {"v": repr(value)}
    if type(value) is tuple:
      items = cast("tuple[Any, ...]", value)
      return {"t": [self._static(item) for item in items]}
    if type(value) is float:
      return {"float": value.hex()}
    if type(value) is complex:
      return {"complex": [value.real.hex(), value.imag.hex()]}
    if self._portable and (place := exact.reference(value)) and not _is_of_main(place):
      return {"of": place}
    if isinstance(value, np.dtype) and _is_named(value):
      return {"dtype": value.name}
    if isinstance(value, exact.Exact):
      return {"exact": self._name(value)}
    return {"x": self._name(exact.exact(value))}


def _is_literal(value: Any) -> bool:
  if type(value) is tuple:
    return all(map(_is_literal, cast("tuple[Any, ...]", value)))
  if type(value) is float:
    return math.isfinite(value)
  return value is None or type(value) in (bool, int, str, bytes)


def _is_of_main(place: str) -> bool:
  """True for what another process's main module may have, or not."""
  return place.startswith("__main__:")


def _of_module(place: str) -> Any:
  """A function or class that a module holds."""
  module = place.partition(":")[0]
  try:
    importlib.import_module(module)
  except ImportError as error:
    why = foreign.said_by(error)
  else:
    if (found := exact.referred(place)) is not None:
      return found
    why = "the module holds none of that name"
  raise GateDefinitionError(
    f"a program that was loaded from elsewhere calls a gate with {place}: expected a function or "
    f"class that this process can import, got none: {why}"
  )


def _is_named(dtype: np.dtype[Any]) -> bool:
  """True if a dtype's name says all, which is not so of another byte order, or of fields."""
  try:
    return np.dtype(dtype.name) == dtype
  except TypeError:
    return False


class _Decoder:
  """Reads a spec; `kept` are the values that it names, whose names last as long as these."""

  def __init__(self) -> None:
    self.kept: list[exact.Exact] = []

  def tree(self, code: Json) -> PyTreeDef:
    return jax.tree.structure(self.node(code))

  def node(self, code: Json) -> Any:
    match code:
      case "*" | None:
        return 0 if code else None
      case {"t": items}:
        return tuple(map(self.node, items))
      case {"l": items}:
        return list(map(self.node, items))
      case {"s": value}:
        return split.Static(self.static(value))
      case {"o": name}:
        return _named_object(name)
      case {"d": items}:
        return {key: self.node(item) for key, item in items}
      case _:
        return jax.tree.unflatten(self._named(code["x"], "pytree node type").value, [0] * code["n"])

  def static(self, code: Json) -> Any:
    match code:
      case {"v": text}:
        return ast.literal_eval(text)
      case {"t": items}:
        return tuple(map(self.static, items))
      case {"float": digits}:
        return float.fromhex(digits)
      case {"complex": digits}:
        return complex(*map(float.fromhex, digits))
      case {"of": place}:
        return _of_module(place)
      case {"dtype": name}:
        return np.dtype(name)
      case {"exact": name}:
        return self._named(name, "static argument")
      case _:
        return self._named(code["x"], "static argument").value

  def _named(self, name: str, what: str) -> exact.Exact:
    self.kept.append(found := names.find(name, what))
    return found


# -- objects whose methods programs call -----------------------------------------------------------
# By the names that programs have for them, which no other object ever gets. The callee of a loaded
# program keeps its object; this table keeps none. A name lasts as long as the object or, where that
# takes no weak reference, as its `Exact`, which the program's trees keep. Guarded by _naming;
# emptied by the end of each object.
_objects: dict[str, Callable[[], split.Static | None]] = {}
_names: dict[int, str] = {}  # of those that live, by their identity
# Guarded by _naming; never emptied: one number for each type, so that no name comes twice.
_counters: collections.Counter[str] = collections.Counter()
_MOST = 1024
# Objects of other processes. Guarded by _naming; at most _MOST entries.
_learned: collections.OrderedDict[str, split.Static] = collections.OrderedDict()
_naming = threading.RLock()  # an object may die while another is named


def _name_object(node: split.Static, portable: bool) -> str:
  """The name of an object; a portable one stands for nothing in another process."""
  if portable:
    return names.abroad(_name_object(node, False))
  value = node.value
  with _naming:
    known = _names.get(id(value))
    if known is not None and _objects[known]() is not None:
      return known
    kind = f"{type(value).__module__}.{type(value).__qualname__}"
    name = _names[id(value)] = f"{kind}#{_counters[kind]}"
    _counters[kind] += 1
    try:
      weakref.finalize(value, _forget, id(value), name).atexit = False
      _objects[name] = functools.partial(_node_of, weakref.ref(value))
    except TypeError:
      one = exact.exact_object(value)
      weakref.finalize(one, _forget, id(value), name).atexit = False
      _objects[name] = functools.partial(_node_of, weakref.ref(one))
    return name


def _node_of(weak: weakref.ref[Any]) -> split.Static | None:
  """The node of a live object, which the reference leads to by itself or by its `Exact`."""
  found = weak()
  value = found.value if isinstance(found, exact.Exact) else found
  return None if found is None else split.Static.of_object(value)


def _forget(identity: int, name: str) -> None:
  with _naming:
    del _objects[name]
    if _names.get(identity) == name:
      del _names[identity]


def _named_object(name: str) -> split.Static:
  find = _objects.get(name) or _objects.get(names.at_home(name))
  node = _learned.get(name) if find is None else find()
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
    code, decoder = json.loads(spec), _Decoder()
    self.in_tree, self.out_tree = (decoder.tree(code[k]) for k in ("in", "out"))
    self._unflatten = split.unflattener(self.in_tree)
    self.static: dict[str, Any] = {name: decoder.static(v) for name, v in code["static"]}
    self._kept = decoder.kept

  def arguments(self, flat: Sequence[Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The user's positional and keyword arguments, static ones included."""
    args, kwargs = self._unflatten(flat)
    return args, {**kwargs, **self.static}


def _keeps(spec: str) -> bool:
  return any(code in spec for code in ('{"o":', '{"x":', '{"exact":'))


_signature = functools.lru_cache(maxsize=1024)(Signature)


def signature(spec: str) -> Signature:
  """The decoded spec; the same object each time, unless it keeps what is the user's."""
  return Signature(spec) if _keeps(spec) else _signature(spec)


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


# Programs hold this number for an extent that symbolic shapes leave open.
OPEN = -1


def is_open(extent: Any) -> bool:
  """True if it is a symbolic dimension, of a program for `jax.export`."""
  return is_symbolic_dim(extent)


# -- other processes -------------------------------------------------------------------------------
def for_another(spec: str) -> tuple[str, dict[str, Any]]:
  """A spec for a process that has not traced it, and what it names; to be pickled.

  The names get a mark of this process, so that none of them stands for an object over there.
  """
  entries: dict[str, Any] = {}

  def renamed(code: Json) -> Json:
    if isinstance(code, list):
      return [renamed(one) for one in cast("list[Json]", code)]
    match code:
      case {"o": name}:
        entries[there := f"object:{names.abroad(name)}"] = _named_object(name).value
        return {"o": there}
      case {"x": name, "n": count}:
        tree = names.find(name, "pytree node type").value
        entries[there := f"tree:{names.abroad(name)}"] = jax.tree.unflatten(tree, [0] * count)
        return {"x": there, "n": count}
      case {"x": name}:
        entries[there := f"value:{names.abroad(name)}"] = names.find(name, "static argument").value
        return {"x": there}
      case dict():
        return {key: renamed(value) for key, value in cast("dict[str, Json]", code).items()}
      case _:
        return code

  if spec in ("", "*"):
    return spec, entries
  return json.dumps(renamed(json.loads(spec)), separators=(",", ":")), entries


def learn(entries: dict[str, Any]) -> None:
  """Takes what `for_another` gave in another process.

  Raises:
    GateDefinitionError: a pytree's type is not one here.
  """
  for name, value in entries.items():
    if name.startswith("tree:"):
      tree = jax.tree.structure(value)
      if tree == jax.tree.structure(0):
        raise GateDefinitionError(
          f"a gate is called with a {type(value).__qualname__}, no pytree in this process; "
          "expected a type that a module registers, not a script, and that this process imports"
        )
      names.learn(name, exact.exact_tree(tree))
    elif name.startswith("value:"):
      names.learn(name, exact.exact(value))
    else:
      with _naming:
        _learned[name] = split.Static.of_object(value)
        _learned.move_to_end(name)
        oldest = _learned.popitem(last=False) if len(_learned) > _MOST else None
      del oldest  # without the lock: its end may be anything
