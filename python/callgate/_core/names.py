# SPDX-License-Identifier: Apache-2.0
"""Names in programs for static values that can't be written as text.

A name refers to one value of this process. A value of plain content (numbers, text, functions and
classes of modules, frozen dataclasses of these) is named by that content, so that another process
finds its own value. Any other object gets a number that is unique in the process; nothing is
pickled. A program for `jax.export` names such an object by the digest of its pickle instead:
another process looks for an object of the same content.

Users own the objects: a name lives as long as the object. If the object supports no weak
references, the name lives as long as the owner of its `Exact`.
"""

from __future__ import annotations

import collections
import hashlib
import io
import itertools
import pickle
import uuid
import weakref
from collections.abc import Callable, Sequence
from typing import Any

from callgate._core import exact, foreign
from callgate._core.errors import GateDefinitionError
from callgate._core.exact import Exact

_lock = exact.lock  # never held while a user's function runs
# Guarded by exact.lock; never emptied: one number for each type, so that names stay unique.
_counters: collections.Counter[str] = collections.Counter()
# Names of live objects, by identity. Guarded by exact.lock, but for the end of an object, which is
# single steps; emptied by the end of each object.
_numbered: dict[int, str] = {}
# Guarded by exact.lock.
_by_name: weakref.WeakValueDictionary[str, Exact] = weakref.WeakValueDictionary()
# Weak references to named objects. Guarded by exact.lock, but for the end of an object, which is
# single steps; emptied by the end of each object.
_objects: dict[str, Callable[[], Any]] = {}
_MOST = 1024
# The newest values, see `_keep`. Guarded by exact.lock; at most _MOST entries.
_kept: collections.OrderedDict[Any, Exact] = collections.OrderedDict()
# Values of other processes. Guarded by exact.lock; at most _MOST entries.
_learned: collections.OrderedDict[str, Exact] = collections.OrderedDict()
_PROCESS = uuid.uuid4().hex  # the prefix of this process's names in other processes


def name(one: Exact, *, portable: bool = False) -> str:
  """Returns the value's name in programs; with `portable` one for other processes.

  Raises:
    GateDefinitionError: with `portable`: the value can't be pickled.
  """
  if portable and one.has_objects:
    return _exported_name(one, f"{_kind(one)}:{_digest(one)}")
  with _lock:
    if one.name is None:
      text = one.text(exact.no_name)
      one.name = _named_by(one, text) if text is not None else _local_name(one)
      _by_name[one.name] = one
      if text is not None:
        _keep(one)
      else:
        _refer(one.name, one.value)
    return one.name


def _kind(one: Exact) -> str:
  return f"{'tree' if one.is_tree else 'value'}:{exact.kind_of(one)}"


def _named_by(one: Exact, text: str) -> str:
  """Returns a name by content, which another value of that text (of a redefined class) may have."""
  base = f"{_kind(one)}:{hashlib.sha256(text.encode()).hexdigest()[:16]}"
  names = (f"{base}#{number}" if number else base for number in itertools.count())
  return next(each for each in names if each not in _by_name)


def _local_name(one: Exact) -> str:
  parts: list[Exact] = []

  def number(value: Any) -> str:
    parts.append(part := exact.exact(value))
    return _number(part)

  if not one.is_tree and exact.is_object(one.value):
    return _number(one)
  text = one.text(number)
  assert text is not None
  one.keep(parts)
  return _named_by(one, text)


def _number(one: Exact) -> str:
  """Returns the name of an object: its type's name and a number."""
  value = one.value
  if (known := _numbered.get(id(value))) is not None:
    return known
  base = f"value:{_described(value)}"
  made = _numbered[id(value)] = f"{base}#{_counters[base]}"
  _counters[base] += 1
  if not _refer(made, value):
    _refer(made, one)
  return made


def _refer(made: str, value: Any) -> bool:
  """Makes a name refer to an object while that lives; False if it supports no weak references."""
  identity = id(value.value) if isinstance(value, Exact) else id(value)

  def died(reference: weakref.ref[Any]) -> None:  # no lock: may run at any time, in any thread
    if _objects.get(made) is reference:
      del _objects[made]
    if _numbered.get(identity) == made:
      del _numbered[identity]

  try:
    _objects[made] = weakref.ref(value, died)
  except TypeError:
    return False
  return True


def _described(value: Any) -> str:
  kind = type(value)
  return f"{kind.__module__}.{kind.__qualname__}"


def _keep(one: Exact) -> None:
  """Keeps a value without users' objects, for programs that are loaded after their trace."""
  _kept[one] = one
  _kept.move_to_end(one)
  while len(_kept) > _MOST:
    _kept.popitem(last=False)


# -- other processes -------------------------------------------------------------------------------
def _exported_name(one: Exact, base: str) -> str:
  """Returns `base`, with a number if another live object of this content has it."""
  with _lock:
    names = (f"{base}#{number}" if number else base for number in itertools.count())
    made = next(each for each in names if _named(each) in (None, one))
    if not _refer(made, one.value):
      _refer(made, one)
      _keep(one)
  return made


def _named(made: str) -> Exact | None:
  value = _objects.get(made, lambda: None)()
  return value if value is None or isinstance(value, Exact) else exact.exact(value)


def _digest(one: Exact) -> str:
  try:
    return digest(one.value)
  except Exception as error:
    what = f"a {exact.kind_of(one)}"
    raise GateDefinitionError(
      f"jax.export: a static value of the program can't go to other processes: {what}: "
      f"{foreign.said_by(error)}. Pass numbers, text, tuples, functions of modules or other "
      "values that can be pickled, or create the value inside the gate's function"
    ) from error


def digest(value: Any) -> str:
  """Returns a digest of a value's pickle, without holding the whole pickle in memory."""
  try:
    return _Hashed(fast=True).of(value)
  except (ValueError, RecursionError):  # the value refers to itself
    return _Hashed(fast=False).of(value)


class _Hashed(io.RawIOBase):
  """Hashes a pickle. `fast` writes identical parts and equal parts in the same way."""

  def __init__(self, *, fast: bool) -> None:
    super().__init__()
    self._hash, self._fast = hashlib.sha256(), fast

  def of(self, value: Any) -> str:
    pickler = pickle.Pickler(self, protocol=5, buffer_callback=self._take)
    pickler.fast = self._fast
    pickler.dump(value)
    return self._hash.hexdigest()[:16]

  def write(self, data: Any) -> int:
    self._hash.update(data)
    return len(data)

  def _take(self, buffer: pickle.PickleBuffer) -> None:
    self._hash.update(buffer.raw())


def find(made: str, what: str) -> Exact:
  """Returns the value of a name.

  Raises:
    GateDefinitionError: there is none.
  """
  with _lock:
    found = _by_name.get(made) or _learned.get(made) or _named(made)
  if found is None:
    found = _of_content(made)
  if found is None:
    raise GateDefinitionError(
      f"a program from another process calls a gate with a {what} ({made}) that this process has "
      "not seen. Use plain tuples, lists, dicts and literals, which travel with the program; or "
      "first trace one call of the gate with the same value in this process, and keep the value"
    )
  return found


def _of_content(made: str) -> Exact | None:
  """Finds the live value of the digest in a name, by pickling the values of the type."""
  base, _, number = made.partition("#")
  kind, _, wanted = base.rpartition(":")
  with _lock:
    known = [*exact.alive(), *filter(None, map(_named, list(_objects)))]
  found: list[Exact] = []
  for one in dict.fromkeys(known):
    try:
      if _kind(one) == kind and one.has_objects and digest(one.value) == wanted:
        found.append(one)
    except Exception:  # noqa: BLE001 - an object that can't be pickled is no match
      continue
  return found[min(int(number or 0), len(found) - 1)] if found else None


class NamedObjects:
  """Keeps the objects that a program names; such a program can't be pickled."""

  def __init__(self, kept: Sequence[Exact], what: str = "") -> None:
    self.kept = kept
    self.what = what or ", ".join(exact.kind_of(one) for one in kept if one.has_objects)

  def __reduce__(self) -> Any:
    raise pickle.PicklingError(
      f"callgate: a compiled program with an object of this process ({self.what}) can't go to "
      "another one. Expected numbers, text, tuples, frozen dataclasses of these or functions of "
      "modules; use jax.export for other values that can be pickled"
    )


def abroad(made: str) -> str:
  """Returns the name for this process's value in another process."""
  return f"{_PROCESS}/{made}"


def at_home(made: str) -> str:
  """Returns the name that `abroad` got here."""
  return made.removeprefix(f"{_PROCESS}/")


def learn(made: str, one: Exact) -> Exact:
  """Gives a name from another process a value; the first value stays."""
  with _lock:
    one = _learned.setdefault(made, one)
    _learned.move_to_end(made)
    while len(_learned) > _MOST:
      _learned.popitem(last=False)
    return one
