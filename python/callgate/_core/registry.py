# SPDX-License-Identifier: Apache-2.0
"""Live operations by name, unique names, and the names of arguments in messages.

A call site has flat positions; users know `x` or `params['w']`. Gates register the information that
translates one into the other.
"""

from __future__ import annotations

import collections
import contextlib
import difflib
import itertools
import threading
import weakref
from collections.abc import Callable, Generator, Sequence
from typing import Any

import jax

from callgate import _callgate, _part
from callgate._core import encoding
from callgate._core.public import core_of
from callgate._core.where import Where

_gates: weakref.WeakValueDictionary[str, Any] = weakref.WeakValueDictionary()  # guarded by _lock
# Guarded by _lock; never emptied: one number for each name, so that names stay unique.
_counters: collections.Counter[str] = collections.Counter()
_lock = threading.Lock()
_naming = threading.RLock()  # held from the choice of a name to its registration
_local = threading.local()
_ENDING = 1.0  # seconds to wait for the end of a dropped gate


@contextlib.contextmanager
def defining(place: Where | None) -> Generator[None]:
  """Sets the place of the gates that the block makes, see `Where.definition`."""
  before, _local.place = current_place(), place
  try:
    yield
  finally:
    _local.place = before


def current_place() -> Where | None:
  return getattr(_local, "place", None)


def register(name: str, gate: Any) -> None:
  """Registers a gate and the names of its parameters; the gate has `parameters`."""
  gate.defined_at = current_place()
  with _lock:  # another thread may iterate over the names
    _gates[name] = gate


def take(name: str, replaces: Callable[[Any], bool] | None = None) -> None:
  """Frees a name for a new gate, kernel or feed, if it redefines the owner of the name.

  The old owner gets another name; programs compiled with it keep it. `replaces(owner)` returns True
  for an owner that the new one replaces wherever it is defined.

  Raises:
    ValueError: the owner is defined in another place.
  """
  with _naming:
    old, place = _gates.get(name), current_place()
    if old is None:
      await_free(name)
      return
    redefines = place is not None and place.redefines(old.defined_at)
    if not redefines and not (replaces is not None and replaces(old)):
      hint = "choose another name=, or delete the other one and the programs that call it"
      taken = f"the name '{name}' is taken by another live gate or kernel"
      if getattr(old, "loaded", False):
        taken = f"the name '{name}' is taken by another kernel, which callgate.load_kernels loaded"
        hint = "define the kernel before you load the file, or close the loaded kernels"
      raise ValueError(f"callgate: {taken}; {hint}")
    others = taken_names()
    numbered = (f"{name}#{number}" for number in itertools.count(1))
    rename(old, next(other for other in numbered if other not in others))


def await_free(name: str) -> None:
  """Waits for the end of a dropped gate's callee, which another thread may be freeing."""
  _part.Wait(_ENDING).poll(lambda: not _callgate.is_registered(name))


@contextlib.contextmanager
def naming(name: str, replaces: Callable[[Any], bool] | None = None) -> Generator[None]:
  """Like `take`, but no other thread gets the name before the block, which registers it, ends."""
  with _naming:
    take(name, replaces)
    yield


def rename(gate: Any, name: str) -> None:
  """Gives a gate or kernel another name, and frees its own."""
  with _lock:
    _gates.pop(gate.name, None)
  gate.rename(name)
  with _lock:
    _gates[name] = gate


def get(name: str) -> Any:
  """Returns the live gate or kernel of a name, or None."""
  return _gates.get(name)


def of(gate: str, spec: str, kind: str, index: int) -> str:
  """Returns "argument 'x'", "result 0" or "result ['w']" for a flat position of a call."""
  if kind == "argument":
    return f"argument {argument(gate, spec, index)}"
  if spec in ("", "*"):
    return f"result {index}"
  path = jax.tree_util.keystr(encoding.path_in(encoding.signature(spec).out_tree, index))
  return f"result {index}" + (f" ({path})" if path else "")


def argument(gate: str, spec: str, index: int) -> str:
  """Returns the name of a flat argument of a call site; see `argument_in`."""
  flat = spec in ("", "*")
  return argument_in(gate, None if flat else encoding.signature(spec).in_tree, index)


def argument_in(gate: str, tree: Any, index: int) -> str:
  """Returns a flat argument's name: the quoted parameter and a path, as "'model'.layers[0].bias".

  `tree` is the structure of the call's `(args, kwargs)`; None if all are positional arrays.
  """
  if tree is not None:
    return argument_at(gate, encoding.path_in(tree, index))
  return _positional(gate, index, "")


def argument_at(gate: str, path: Sequence[Any]) -> str:
  """The same of a path in the call's `(args, kwargs)`."""
  of_keywords, place, *inner = path
  rest = jax.tree_util.keystr(tuple(inner))
  return f"'{place.key}'{rest}" if of_keywords.idx else _positional(gate, place.idx, rest)


def _positional(gate: str, index: int, path: str) -> str:
  parameters: tuple[str, ...] = getattr(_gates.get(gate), "parameters", ())
  return f"'{parameters[index]}'{path}" if index < len(parameters) else f"{index}{path}"


def operations() -> list[tuple[str, Any]]:
  """Returns the live gates and kernels by name."""
  with _lock:
    return list(_gates.items())


# -- names that nothing else has -------------------------------------------------------------------
def unique_name(function: Callable[..., Any], prefix: str = "") -> str:
  """Returns a gate's default name: module, qualified name and, from the second on, a number.

  Numbers count gates of the same name in order of creation. So the next run of the program gives
  the same names, and finds its compiled programs in the persistent cache.
  """
  return free_name(f"{prefix}{name_of(function)}")


def name_of(function: Callable[..., Any]) -> str:
  """Returns a callable's module and qualified name."""
  function = getattr(function, "func", function)  # functools.partial
  module = getattr(function, "__module__", None) or type(function).__module__
  named = getattr(function, "__qualname__", None) or getattr(function, "__name__", None)
  return f"{module}.{named or type(function).__qualname__}"


@contextlib.contextmanager
def name_while_alive(base: str) -> Generator[str]:
  """Yields `base`, with a number if a live object has that name; the block registers the owner.

  So a program that is lowered again after the last one's end has the same text, and is found in the
  persistent cache.
  """
  with _naming:
    taken = set(_callgate.registered_names())
    names = (f"{base}#{number}" if number else base for number in itertools.count())
    yield next(name for name in names if name not in taken)


def taken_names() -> set[str]:
  """Returns names of live gates and kernels, and of kernels with a variant in a program."""
  with _lock:
    own = set(_gates)
  return {*own, *(name.partition("[")[0] for name in _callgate.registered_names())}


def names_like(name: str) -> list[str]:
  """Returns the names of all gates and kernels: first those most like `name`, then the others."""
  names = sorted(taken_names())
  like = difflib.get_close_matches(name.partition("[")[0], names)
  return [*like, *(other for other in names if other not in like)]


def free_name(base: str) -> str:
  """Returns `base`, with a number from the second call on."""
  taken = taken_names()
  with _lock:
    while True:
      number = _counters[base]
      _counters[base] += 1
      name = f"{base}#{number}" if number else base
      if name not in taken:
        return name


# -- names in programs from other processes ------------------------------------------------------
def defined(name: str) -> Any:
  """The runtime's hook: defines the callee of a loaded program, "name" or a variant "name[key]".

  Returns the core that now has the name; None if there is none.
  """
  base, bracket, key = name.partition("[")
  of_parts = (part.define(base) for part in _part.parts())
  found = core_of(_known(base) or next(filter(None, of_parts), None))
  if (define := getattr(found, "define_variant", None)) is None:
    return None if bracket else found
  return found if define(key.removesuffix("]") if bracket else "") else None


def _known(name: str) -> Any:
  """Returns the live gate or kernel of a name, or a member of one; None if there is none."""
  owner, dot, member = name.rpartition(".")
  if (found := get(name)) is not None or not dot:
    return found
  make = getattr(core_of(_known(owner)), "member", None)
  return make and make(member)
