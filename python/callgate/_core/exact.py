# SPDX-License-Identifier: Apache-2.0
"""Cache keys that distinguish values that `==` does not: 1, True and 1.0; 0.0 and -0.0; objects.

Indistinguishable values share one `Exact`: numbers and text of one type and content, and tuples,
enumerations and frozen dataclasses of these. Any other object is known by its identity, so that a
call gets the very object that it was given. A bound method consists of its object and its function.

An `Exact` keeps its value. So the owner of the `Exact` (a trace, a loaded program) may refer to the
value by name: `_core/names.py`.
"""

from __future__ import annotations

import dataclasses
import decimal
import enum
import fractions
import pathlib
import struct
import sys
import threading
import types
import weakref
from collections.abc import Callable, Iterable
from typing import Any

import jax
import numpy as np

from callgate._core.bound import BoundMethod

_TREE: type = type(jax.tree.structure(0))
_PLAIN: tuple[type, ...] = (type(None), bool, int, str, bytes)
# Immutable types of the standard library whose `repr` is complete.
_SHOWN: tuple[type, ...] = (
  range, decimal.Decimal, fractions.Fraction, pathlib.PosixPath, pathlib.PurePosixPath, np.dtype,
)  # fmt: skip
Name = Callable[[Any], "str | None"]  # returns an object's name
_live: weakref.WeakValueDictionary[Any, Exact] = weakref.WeakValueDictionary()  # guarded by lock
lock = threading.RLock()  # held while an `Exact` or a name is found or made


class Exact:
  """The key of a value or of a pytree's structure; made by `exact` and `exact_tree`.

  Attributes:
    value: the user's value, kept alive.
    is_tree: True for the structure of a pytree.
    key: distinguishes it from others while it lives.
  """

  __slots__ = ("__weakref__", "_hash", "_objects", "_parts", "is_tree", "key", "name", "value")

  def __init__(self, value: Any, key: Any, *, is_tree: bool) -> None:
    self.value, self.is_tree, self.key, self._hash = value, is_tree, key, hash(key)
    self._objects: bool | None = None
    self.name: str | None = None  # its name in programs, see `_core/names.py`
    self._parts: dict[Exact, None] = {}  # the named parts of its text

  def __hash__(self) -> int:
    return self._hash

  def __eq__(self, other: object) -> bool:
    return self is other or (isinstance(other, Exact) and self.key == other.key)

  def __repr__(self) -> str:
    return repr(self.value)

  @property
  def has_objects(self) -> bool:
    """True if it contains an object that is known by its identity and has no importable name."""
    if self._objects is None:
      self._objects = self.text(no_name) is None
    return self._objects

  def keep(self, parts: Iterable[Exact]) -> None:
    """Keeps named parts alive as long as this object lives."""
    self._parts.update((part, None) for part in parts if part is not self)

  def text(self, name: Name) -> str | None:
    """Returns the content as text, with `name(object)` for objects known by identity; or None."""
    try:
      return (_tree_text if self.is_tree else _text)(self.value, name)
    except _Unnamed:
      return None


class Keyed:
  """A value with its own key among values of its type, and its own text."""

  def exact_key(self) -> Any:
    raise NotImplementedError

  def exact_text(self, name: Name) -> str:
    return f"{_text(type(self), name)} {self.exact_key()!r}"


class _Unnamed(Exception):
  """An object has no name."""


def no_name(value: Any) -> None:
  del value


def exact(value: Any) -> Exact:
  """Returns the one `Exact` of a value."""
  return _shared(value, _key(value), is_tree=False)


def exact_tree(tree: Any) -> Exact:
  """Returns the one `Exact` of a pytree's structure: its types, keys and static parts."""
  return _shared(tree, ("tree", _tree_key(tree)), is_tree=True)


def exact_object(value: Any) -> Exact:
  """Returns the one `Exact` of an object, whatever its content."""
  return _shared(value, ("object", *identity(value)), is_tree=False)


def identity(value: Any) -> tuple[Any, ...]:
  """Returns an object's identity, a key while it lives; for a bound method, of its parts."""
  return (type(value), *_identity(value))


def _shared(value: Any, key: Any, *, is_tree: bool) -> Exact:
  with lock:
    found = _live.get(key)
    if found is None:
      found = _live[key] = Exact(value, key, is_tree=is_tree)
    return found


def alive() -> list[Exact]:
  """Returns the live `Exact`s in order of creation."""
  with lock:
    return list(_live.values())


def is_object(value: Any) -> bool:
  """Returns True for an object that is known by its identity."""
  if type(value) in _PLAIN or isinstance(value, (frozenset, Keyed, Exact, _TREE)):
    return False
  return _bits(value) is None and _items(value) is None


def kind_of(one: Exact) -> str:
  """Returns the name of a value's type; for a pytree, of its root's."""
  if not one.is_tree:
    return type(one.value).__qualname__
  data = one.value.node_data()
  return "*" if data is None else data[0].__qualname__


# -- keys ------------------------------------------------------------------------------------------
# The `Exact` of a key keeps the objects whose identities are in the key.
def _key(value: Any) -> Any:
  kind: type[Any] = type(value)
  if kind in _PLAIN:
    return kind, value
  if isinstance(value, Keyed):
    return kind, value.exact_key()
  if isinstance(value, Exact):
    return kind, value.key
  if kind is _TREE:
    return kind, _tree_key(value)
  if (bits := _bits(value)) is not None:
    return kind, bits
  if (items := _items(value)) is not None:
    return kind, tuple(map(_key, items))
  if isinstance(value, frozenset) and not _state(value):
    members: frozenset[Any] = value
    return kind, frozenset(map(_key, members))
  return (kind, *_identity(value))


def _bits(value: Any) -> Any:
  """Returns a unique key of a number or text of any type; None for other values."""
  kind: type[Any] = type(value)
  if kind is float:
    return struct.pack("d", value)
  if kind is complex:
    return struct.pack("dd", value.real, value.imag)
  if kind in _SHOWN or isinstance(value, np.dtype):
    return repr(value)
  if isinstance(value, np.generic):
    return None if value.dtype.hasobject else (value.dtype.str, value.tobytes())
  if isinstance(value, enum.Enum) or _state(value):
    return None
  bases: tuple[Any, ...] = (int, float, complex, str, bytes)
  base = next((one for one in bases if isinstance(value, one)), None)
  return None if base is None else base.__repr__(value)  # also for subclasses


def _items(value: Any) -> Iterable[Any] | None:
  """Returns the parts of an immutable container; None for other values."""
  if isinstance(value, tuple):
    items: tuple[Any, ...] = value
    return None if _state(items) else tuple.__iter__(items)
  fields = frozen_fields(value)
  return None if fields is None else [getattr(value, name, _MISSING) for name in fields]


def frozen_fields(value: Any) -> list[str] | None:
  """Returns the field names of a frozen dataclass without other state; None for other values."""
  if not dataclasses.is_dataclass(value) or isinstance(value, type):
    return None
  frozen: bool = type(value).__dataclass_params__.frozen  # type: ignore[attr-defined]
  names = [field.name for field in dataclasses.fields(value)]
  return names if frozen and _state(value).keys() <= set(names) else None


_MISSING = object()


def _state(value: Any) -> dict[str, Any]:
  return getattr(value, "__dict__", {})


def _identity(value: Any) -> tuple[Any, ...]:
  match value:
    case types.MethodType() | BoundMethod():
      return id(value.__self__), id(value.__func__)
    case types.BuiltinMethodType() | types.MethodWrapperType():
      owner: Any = value.__self__
      if owner is not None and not isinstance(owner, types.ModuleType):
        return id(owner), value.__name__
    case _:
      pass
  return (id(value),)


def _tree_key(tree: Any) -> Any:
  data = tree.node_data()
  if data is None:
    return tree.num_leaves  # 1 for a leaf; 0 for None, if it is no node
  kind, kept = data
  children = tuple(map(_tree_key, tree.children()))
  return kind, (None if kept is None else _kept_key(kept, tree)), children


def _kept_key(kept: Any, tree: Any) -> Any:
  """Returns the key of a node's static part."""
  kind: type[Any] = type(kept)
  if isinstance(kept, Keyed):
    return kind, kept.exact_key()
  if kind in (list, tuple):
    return kind, tuple(_kept_key(item, tree) for item in kept)
  if kind is dict:
    return kind, tuple((_kept_key(k, tree), _kept_key(v, tree)) for k, v in kept.items())
  key = _key(kept)
  if kind.__eq__ is not object.__eq__ and key == (kind, id(kept)) and _is_made_anew(kept, tree):
    return kind, _Equal(kept)
  return key


def _is_made_anew(kept: Any, tree: Any) -> bool:
  """Returns True if each `flatten` of a node makes a new object of its static part."""
  try:
    again = jax.tree.structure(jax.tree.unflatten(tree, [0] * tree.num_leaves))
  except Exception:  # noqa: BLE001 - of the user's unflatten, which expects arrays
    return False
  found = again.node_data()
  return found is not None and type(found[1]) is type(kept) and found[1] is not kept


class _Equal:
  """Compares by the value's own `==`."""

  def __init__(self, value: Any) -> None:
    self.value = value

  def __hash__(self) -> int:
    return hash(self.value)

  def __eq__(self, other: object) -> bool:
    return isinstance(other, _Equal) and bool(self.value == other.value)


# -- text ------------------------------------------------------------------------------------------
def content_text(value: Any, name: Name) -> str:
  """Returns a value's content, see `Exact.text`."""
  return _text(value, name)


def _text(value: Any, name: Name) -> str:
  kind: type[Any] = type(value)
  if kind in _PLAIN:
    return repr(value) if value is None or kind is bool else f"{kind.__name__} {value!r}"
  if kind is float or kind is complex:
    return f"{kind.__name__} {value!r}"
  if isinstance(value, Keyed):
    return value.exact_text(name)
  if isinstance(value, Exact):
    return f"exact {(_tree_text if value.is_tree else _text)(value.value, name)}"
  if kind is _TREE:
    return _tree_text(value, name)
  if (bits := _bits(value)) is not None:
    return f"{_text(kind, name)} {bits!r}"
  if (items := _items(value)) is not None:
    return f"{_text(kind, name)}({', '.join(_text(item, name) for item in items)})"
  if isinstance(value, frozenset) and not _state(value):
    members: frozenset[Any] = value
    return f"{_text(kind, name)}{{{', '.join(sorted(_text(one, name) for one in members))}}}"
  if isinstance(value, enum.Enum):
    return f"{_text(kind, name)}.{value.name}"
  return reference(value) or object_text(value, name)


def object_text(value: Any, name: Name) -> str:
  """Returns the same for an object that is known by its identity."""
  if value is _MISSING or value is type(None):
    return "none"
  if (found := name(value)) is None:
    raise _Unnamed
  return found


def reference(value: Any) -> str | None:
  """Returns "module:name" of a function or class that its module has by that name; else None."""
  module, path = getattr(value, "__module__", None), getattr(value, "__qualname__", None)
  if not callable(value) or isinstance(value, types.MethodType):
    return None
  path = path or getattr(value, "__name__", None)
  if module is None and isinstance(value, np.ufunc):
    module = "numpy"
  if not isinstance(module, str) or not isinstance(path, str):
    return None
  name = f"{module}:{path}"
  return name if referred(name) is value else None


def referred(name: str) -> Any:
  """Returns the object of a `reference`; None if no module of this process has it."""
  module, _, path = name.partition(":")
  found: Any = sys.modules.get(module)
  for part in path.split("."):
    found = getattr(found, part, None)
  return found


def _tree_text(tree: Any, name: Name) -> str:
  data = tree.node_data()
  if data is None:
    return "*" if tree.num_leaves else "None"
  kind, kept = data
  children = ", ".join(_tree_text(child, name) for child in tree.children())
  return f"{_text(kind, name)}[{_kept_text(kept, name)}]({children})"


def _kept_text(kept: Any, name: Name) -> str:
  kind: type[Any] = type(kept)
  if kind in (list, tuple):
    return f"{kind.__name__}({', '.join(_kept_text(item, name) for item in kept)})"
  if kind is dict:
    pairs = (f"{_kept_text(k, name)}: {_kept_text(v, name)}" for k, v in kept.items())
    return f"{{{', '.join(pairs)}}}"
  return _text(kept, name)
