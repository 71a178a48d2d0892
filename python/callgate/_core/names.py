# SPDX-License-Identifier: Apache-2.0
"""Names by which programs hold the static values that they can't write out.

A name stands for one value of this process. Values of plain content (numbers, text, functions and
classes that a module holds, frozen dataclasses of these) are named by that content, so that
another process finds its own. Any other object gets a number, which no other object of the process
ever gets; nothing is pickled for it. A program for `jax.export` names such an object by the digest
of its pickle instead: another process looks for an object of that content.

Objects belong to those who use them: a name lasts as long as the object or, where that takes no
weak reference, as what keeps its `Exact`.
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

_lock = exact.lock  # no function of the user's is called while it is held
# Guarded by exact.lock; never emptied: one number for each type, so that no name comes twice.
_counters: collections.Counter[str] = collections.Counter()
# Names of objects that live, by their identity. Guarded by exact.lock, but for the end of an
# object, which is single steps; emptied by the end of each object.
_numbered: dict[int, str] = {}
# Guarded by exact.lock.
_by_name: weakref.WeakValueDictionary[str, Exact] = weakref.WeakValueDictionary()
# Weak references to objects that have names. Guarded by exact.lock, but for the end of an object,
# which is single steps; emptied by the end of each object.
_objects: dict[str, Callable[[], Any]] = {}
_MOST = 1024
# The newest, see `_keep`. Guarded by exact.lock; at most _MOST entries.
_kept: collections.OrderedDict[Any, Exact] = collections.OrderedDict()
# Values of other processes. Guarded by exact.lock; at most _MOST entries.
_learned: collections.OrderedDict[str, Exact] = collections.OrderedDict()
_PROCESS = uuid.uuid4().hex  # what names from here begin with in other processes


def name(one: Exact, *, portable: bool = False) -> str:
  """The value's name in programs; with `portable` one that other processes find a value by.

  Raises:
    GateDefinitionError: with `portable`, it can't be pickled.
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
  """A name by content: another value of that text (of a class that was defined again) has it."""
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
  """The name of an object: its type's, with a number."""
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
  """Has a name lead to an object while that lives; False where no reference tells when it dies."""
  identity = id(value.value) if isinstance(value, Exact) else id(value)

  def died(reference: weakref.ref[Any]) -> None:  # may run at any time, in any thread: no lock
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
  """Keeps what has none of the user's objects, for programs that are loaded after their trace."""
  _kept[one] = one
  _kept.move_to_end(one)
  while len(_kept) > _MOST:
    _kept.popitem(last=False)


# -- other processes -------------------------------------------------------------------------------
def _exported_name(one: Exact, base: str) -> str:
  """`base`, with a number where another live object of this content has it."""
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
      f"{foreign.said_by(error)}. "
      "Expected numbers, text, tuples, functions that a module holds by their names, or what can "
      "be pickled; or make it in the gate's function"
    ) from error


def digest(value: Any) -> str:
  """A digest of a value's pickle, of which no more than a piece is in memory."""
  try:
    return _Hashed(fast=True).of(value)
  except (ValueError, RecursionError):  # it refers to itself
    return _Hashed(fast=False).of(value)


class _Hashed(io.RawIOBase):
  """Takes a pickle. `fast` has parts that are the same object, and equal ones, written alike."""

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
  """The value of a name.

  Raises:
    GateDefinitionError: there is none.
  """
  with _lock:
    found = _by_name.get(made) or _learned.get(made) or _named(made)
  if found is None:
    found = _of_content(made)
  if found is None:
    raise GateDefinitionError(
      f"a program that was loaded from elsewhere calls a gate with a {what} ({made}) that this "
      "process has not seen. Expected: plain tuples, lists, dicts and literals, which travel with "
      "the program; or trace one call of the gate with the same value in this process first, and "
      "keep the value"
    )
  return found


def _of_content(made: str) -> Exact | None:
  """Finds the live value of the digest in a name, by pickling those of the type."""
  base, _, number = made.partition("#")
  kind, _, wanted = base.rpartition(":")
  with _lock:
    known = [*exact.alive(), *filter(None, map(_named, list(_objects)))]
  found: list[Exact] = []
  for one in dict.fromkeys(known):
    try:
      if _kind(one) == kind and one.has_objects and digest(one.value) == wanted:
        found.append(one)
    except Exception:  # noqa: BLE001 - it can't be pickled: it is not what is looked for
      continue
  return found[min(int(number or 0), len(found) - 1)] if found else None


class NamedObjects:
  """Keeps, with a program, the objects that it names; such a program can't be pickled."""

  def __init__(self, kept: Sequence[Exact], what: str = "") -> None:
    self.kept = kept
    self.what = what or ", ".join(exact.kind_of(one) for one in kept if one.has_objects)

  def __reduce__(self) -> Any:
    raise pickle.PicklingError(
      f"callgate: a compiled program with an object of this process ({self.what}) can't go to "
      "another one. Expected numbers, text, tuples, frozen dataclasses of these or functions that "
      "a module holds by their names; jax.export takes what can be pickled, too"
    )


def abroad(made: str) -> str:
  """The name of this process's value in another, which has values and names of its own."""
  return f"{_PROCESS}/{made}"


def at_home(made: str) -> str:
  """The name that `abroad` was given here."""
  return made.removeprefix(f"{_PROCESS}/")


def learn(made: str, one: Exact) -> Exact:
  """Gives a name from another process a value; the first that it got stays."""
  with _lock:
    one = _learned.setdefault(made, one)
    _learned.move_to_end(made)
    while len(_learned) > _MOST:
      _learned.popitem(last=False)
    return one
