# SPDX-License-Identifier: Apache-2.0
"""Encodes the structure of a call's flat arrays as text for programs.

A call site's *spec* is "" if positional arrays go in and one array comes out, and "*" if a tuple of
arrays comes out. Otherwise it is JSON with the tree of the arguments, the tree of the results and
the static keyword arguments. It contains plain containers and literals in full. For `jax.export` it
also contains nodes of importable types in full, so that another process can call an exported
program without having traced it. All other values appear as names (`_core/names.py`).
"""

from __future__ import annotations

import ast
import functools
import json
import math
from collections.abc import Sequence
from typing import Any, cast

import jax
import numpy as np
from jax.export import is_symbolic_dim

from callgate._core import exact, foreign, method_objects, names, portable, split
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
  """Returns the spec of a call: `in_tree` is `(args, kwargs)`, `out_tree` the results.

  portable: True for a program for other processes; raises GateDefinitionError for values that can't
  be sent.
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


_HERE = object()  # represents an array while a tree is written


class _Encoder:
  """Writes trees and values. The `Exact` of a value keeps the names that were made for it."""

  def __init__(self, portable: bool) -> None:
    self._portable = portable
    self._named: list[exact.Exact] = []

  def tree(self, tree: PyTreeDef) -> Json:
    code = self._node(jax.tree.unflatten(tree, [_HERE] * tree.num_leaves), tree)
    self._keep(exact.exact_tree(tree))
    return code

  def value(self, value: Any) -> Json:
    code = self.static(value)
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
      if node.by_identity and not (self._portable and portable.importable(node.value)):
        return {"o": method_objects.name(node, portable=self._portable)}
      return {"s": self.static(node.value)}
    if isinstance(node, split.KeyNode):
      return {"k": self.static(node.impl), "of": self._node(node.data)}
    if type(node) in (tuple, list):
      items = cast("Sequence[Any]", node)
      return {"t" if type(node) is tuple else "l": [self._node(item) for item in items]}
    if type(node) is dict:
      entries = cast("dict[Any, Any]", node)
      if all(type(key) is str for key in entries):
        return {"d": [[key, self._node(entries[key])] for key in sorted(entries)]}
    known: PyTreeDef = jax.tree.structure(node) if tree is None else tree
    if self._portable and (code := self._typed(known)) is not None:
      return code
    return {"x": self._name(exact.exact_tree(known)), "n": known.num_leaves}

  def _typed(self, tree: PyTreeDef) -> Json:
    """Returns a node of a type that other processes can import; None if they can't rebuild it."""
    kind, kept = tree.node_data()
    if (place := portable.importable(kind)) is None or (code := written_out(kept)) is None:
      return None
    inner = [self._node(jax.tree.unflatten(c, [_HERE] * c.num_leaves), c) for c in tree.children()]
    return {"of": place, "kept": code, "c": inner}

  def static(self, value: Any) -> Json:
    if _is_literal(value):
      return {"v": repr(value)}
    if type(value) is tuple:
      items = cast("tuple[Any, ...]", value)
      return {"t": [self.static(item) for item in items]}
    if type(value) is float:
      return {"float": value.hex()}
    if type(value) is complex:
      return {"complex": [value.real.hex(), value.imag.hex()]}
    if self._portable and (place := portable.importable(value)):
      return {"of": place}
    if isinstance(value, np.dtype) and portable.is_named(value):
      return {"dtype": value.name}
    if self._portable and (found := portable.parts_of(value)) is not None:
      way, of, parts = found
      return {way: of, "parts": {name: self.static(part) for name, part in parts.items()}}
    if isinstance(value, exact.Exact):
      if self._portable and value.is_tree:
        return {"tree": self.tree(value.value)}
      return {"exact": self._name(value)}
    return {"x": self._name(exact.exact(value))}


def _is_literal(value: Any) -> bool:
  if type(value) in (tuple, list):
    return all(map(_is_literal, cast("Sequence[Any]", value)))
  if type(value) is dict:
    return all(map(_is_literal, cast("dict[Any, Any]", value).items()))
  if type(value) is float:
    return math.isfinite(value)
  return value is None or type(value) in (bool, int, str, bytes)


class _NamesNothing(_Encoder):
  """Writes only what any process can read."""

  def _name(self, one: exact.Exact) -> str:
    raise _Unwritten


class _Unwritten(Exception):
  """A value has no complete text."""


def written_out(value: Any) -> Json:
  """Returns a static value as JSON that any process can `read`; None if a type in it is unknown."""
  try:
    return _NamesNothing(portable=True).static(value)
  except _Unwritten:
    return None


def read(code: Json) -> Any:
  """Returns the value of `written_out`."""
  return _Decoder().static(code)


def _typed_node(place: str, kept: Any, children: Sequence[PyTreeDef]) -> Any:
  """Returns a node of an importable, registered type, with zeros for its arrays."""
  data = (portable.imported(place), kept)
  registry = jax.tree_util.default_registry
  try:
    make = jax.tree_util.PyTreeDef.from_node_data_and_children
    tree = make(registry, data, children)
  except RuntimeError as error:
    raise GateDefinitionError(
      f"a program from another process calls a gate with {place}: expected a type that its "
      f"module registers as a pytree, got {foreign.said_by(error)}"
    ) from error
  return jax.tree.unflatten(tree, [0] * tree.num_leaves)


class _Decoder:
  """Reads a spec; `kept` are the values that it names, which keep the names alive."""

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
      case {"k": impl, "of": data}:
        return split.KeyNode(self.node(data), self.static(impl))
      case {"o": name}:
        return method_objects.find(name)
      case {"d": items}:
        return {key: self.node(item) for key, item in items}
      case {"of": place, "kept": kept, "c": items}:
        return _typed_node(place, self.static(kept), [self.tree(item) for item in items])
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
        return portable.imported(place)
      case {"dtype": name}:
        return np.dtype(name)
      case {"parts": parts, **other}:
        ((way, of),) = other.items()
        return portable.made_of(way, of, {name: self.static(part) for name, part in parts.items()})
      case {"tree": tree}:
        return exact.exact_tree(self.tree(tree))
      case {"exact": name}:
        return self._named(name, "static argument")
      case _:
        return self._named(code["x"], "static argument").value

  def _named(self, name: str, what: str) -> exact.Exact:
    self.kept.append(found := names.find(name, what))
    return found


class DecodedSpec:
  """A decoded spec: calls the user's function with flat arrays."""

  def __init__(self, spec: str) -> None:
    code, decoder = json.loads(spec), _Decoder()
    self.in_tree, self.out_tree = (decoder.tree(code[k]) for k in ("in", "out"))
    self._unflatten = [split.unflattener(self.in_tree, keys=keys) for keys in (False, True)]
    self.static: dict[str, Any] = {name: decoder.static(v) for name, v in code["static"]}
    self._kept = decoder.kept

  def arguments(
    self, flat: Sequence[Any], *, keys: bool = False
  ) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Returns the user's positional and keyword arguments, including static ones.

    keys: True for typed PRNG keys; False for their data.
    """
    args, kwargs = self._unflatten[keys](flat)
    return args, {**kwargs, **self.static}


def keeps(spec: str) -> bool:
  """True if a spec has names, which stand for objects of the user's."""
  return any(code in spec for code in ('{"o":', '{"x":', '{"exact":'))


_signature = functools.lru_cache(maxsize=1024)(DecodedSpec)


def signature(spec: str) -> DecodedSpec:
  """Returns the decoded spec: the same object each time, unless it keeps the user's objects."""
  return DecodedSpec(spec) if keeps(spec) else _signature(spec)


def path_in(tree: PyTreeDef, index: int) -> tuple[Any, ...]:
  """Returns the path of a flat position in a pytree."""
  full = jax.tree.unflatten(tree, range(tree.num_leaves))
  return jax.tree_util.tree_flatten_with_path(full)[0][index][0]


def check_structure(expected: PyTreeDef, value: Any, gate: str) -> list[Any]:
  """Flattens a returned pytree; raises unless it has the declared structure.

  None represents any structure without arrays.
  """
  if value is None and not expected.num_leaves:
    return []
  leaves, tree = jax.tree.flatten(value)
  if tree != expected or any(map(split.is_key, leaves)):
    if (data := split.flatten_as(expected, value, f"gate '{gate}'")) is not None:
      return data
    raise ResultError(
      f"gate '{gate}': expected results of structure {expected}, got {tree}: the function must "
      "return the pytree that `out` declares"
    )
  return leaves


# The number in programs for an extent that symbolic shapes leave open.
OPEN = -1


def is_open(extent: Any) -> bool:
  """Returns True for a symbolic dimension of an exported program."""
  return is_symbolic_dim(extent)


# -- other processes -------------------------------------------------------------------------------
def for_another(spec: str) -> tuple[str, dict[str, Any]]:
  """Returns a spec for another process, and the values that it names, for a pickle.

  The names contain a mark of this process, so that they name nothing of the other one.
  """
  entries: dict[str, Any] = {}

  def renamed(code: Json) -> Json:
    if isinstance(code, list):
      return [renamed(one) for one in cast("list[Json]", code)]
    match code:
      case {"o": name}:
        entries[there := f"object:{names.abroad(name)}"] = method_objects.find(name).value
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
  """Registers the values of another process's `for_another`.

  Raises:
    GateDefinitionError: this process lacks a pytree's type.
  """
  for name, value in entries.items():
    if name.startswith("tree:"):
      tree = jax.tree.structure(value)
      if tree == jax.tree.structure(0):
        raise GateDefinitionError(
          f"a gate is called with a {type(value).__qualname__}, which is not a pytree in this "
          "process; define and register the type in a module, and import it here"
        )
      names.learn(name, exact.exact_tree(tree))
    elif name.startswith("value:"):
      names.learn(name, exact.exact(value))
    else:
      method_objects.learn(name, value)
