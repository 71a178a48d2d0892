# SPDX-License-Identifier: Apache-2.0
"""Live operations by name, names that nothing else has, and what arguments are called in messages.

A call site knows flat positions; users know `x` or `params['w']`. Gates register what is needed to
translate one into the other.
"""

from __future__ import annotations

import collections
import contextlib
import itertools
import threading
import weakref
from collections.abc import Callable, Generator
from typing import Any

import jax

from callgate import _callgate, _part
from callgate._core import encoding
from callgate._core.public import core_of
from callgate._core.where import Where

_gates: weakref.WeakValueDictionary[str, Any] = weakref.WeakValueDictionary()  # guarded by _lock
# Guarded by _lock; never emptied: one number for each name, so that none comes twice.
_counters: collections.Counter[str] = collections.Counter()
_lock = threading.Lock()
_naming = threading.RLock()  # held from the choice of a name until it is taken
_local = threading.local()
_ENDING = 1.0  # seconds that the end of a dropped gate may take


@contextlib.contextmanager
def defining(place: Where | None) -> Generator[None]:
  """Gates that the block makes are defined at `place`, see `Where.definition`."""
  before, _local.place = current_place(), place
  try:
    yield
  finally:
    _local.place = before


def current_place() -> Where | None:
  return getattr(_local, "place", None)


def register(name: str, gate: Any) -> None:
  """Makes a gate's parameter names known; the gate has `parameters`."""
  gate.defined_at = current_place()
  with _lock:  # while another thread looks through the names
    _gates[name] = gate


def take(name: str) -> None:
  """Frees a name for a new gate, kernel or feed, where it redefines the one that has the name.

  That one gets another: what was compiled with it keeps it.

  Raises:
    ValueError: it is defined elsewhere.
  """
  with _naming:
    old, place = _gates.get(name), current_place()
    if old is None:
      await_free(name)
      return
    if place is None or not place.redefines(old.defined_at):
      hint = "choose another name=, or drop the other one and the programs that call it"
      taken = f"the name '{name}' is taken by another live gate or kernel"
      raise ValueError(f"callgate: {taken}; {hint}")
    others = taken_names()
    numbered = (f"{name}#{number}" for number in itertools.count(1))
    rename(old, next(other for other in numbered if other not in others))


def await_free(name: str) -> None:
  """Waits for the end of a callee of a gate that was dropped, which another thread may free now."""
  _part.Wait(_ENDING).poll(lambda: not _callgate.is_registered(name))


@contextlib.contextmanager
def naming(name: str) -> Generator[None]:
  """As `take`; no other thread takes the name before the block, which registers it, has ended."""
  with _naming:
    take(name)
    yield


def rename(gate: Any, name: str) -> None:
  """Gives a gate or kernel another name, and frees its own."""
  with _lock:
    _gates.pop(gate.name, None)
  gate.rename(name)
  with _lock:
    _gates[name] = gate


def get(name: str) -> Any:
  """The live gate or kernel of a name, or None."""
  return _gates.get(name)


def of(gate: str, spec: str, kind: str, index: int) -> str:
  """ "argument 'x'", "result 0" or "result ['w']" for a flat position of a call."""
  if kind == "argument":
    return f"argument {argument(gate, spec, index)}"
  if spec in ("", "*"):
    return f"result {index}"
  path = jax.tree_util.keystr(encoding.path_in(encoding.signature(spec).out_tree, index))
  return f"result {index}" + (f" ({path})" if path else "")


def argument(gate: str, spec: str, index: int) -> str:
  """The name of a flat argument of a call site: `argument_in` of its arguments' structure."""
  flat = spec in ("", "*")
  return argument_in(gate, None if flat else encoding.signature(spec).in_tree, index)


def argument_in(gate: str, tree: Any, index: int) -> str:
  """The name of a flat argument: its parameter, quoted, and a path, as "'model'.layers[0].bias".

  `tree` is the structure of the call's `(args, kwargs)`; None where all are positional arrays.
  """
  parameters: tuple[str, ...] = getattr(_gates.get(gate), "parameters", ())
  path = ""
  if tree is not None:
    of_keywords, place, *inner = encoding.path_in(tree, index)
    path = jax.tree_util.keystr(tuple(inner))
    if of_keywords.idx:
      return f"'{place.key}'{path}"
    index = place.idx
  return f"'{parameters[index]}'{path}" if index < len(parameters) else f"{index}{path}"


def operations() -> list[tuple[str, Any]]:
  """The live gates and kernels by name."""
  with _lock:
    return list(_gates.items())


# -- names that nothing else has -------------------------------------------------------------------
def unique_name(function: Callable[..., Any], prefix: str = "") -> str:
  """A gate's name when the user gives none: module, qualified name and, from the second, a number.

  Numbers count gates of the same name in order of creation, so that the next run of the program
  gives the same names and finds its compiled programs in the persistent cache.
  """
  return free_name(f"{prefix}{name_of(function)}")


def name_of(function: Callable[..., Any]) -> str:
  """A callable's module and qualified name."""
  function = getattr(function, "func", function)  # functools.partial
  module = getattr(function, "__module__", None) or type(function).__module__
  named = getattr(function, "__qualname__", None) or getattr(function, "__name__", None)
  return f"{module}.{named or type(function).__qualname__}"


@contextlib.contextmanager
def name_while_alive(base: str) -> Generator[str]:
  """`base`, or with a number what nothing alive has; the block registers what is to have it.

  So a program that is lowered anew, when the last one is gone, has the same text, and is found in
  the persistent cache.
  """
  with _naming:
    taken = set(_callgate.registered_names())
    names = (f"{base}#{number}" if number else base for number in itertools.count())
    yield next(name for name in names if name not in taken)


def taken_names() -> set[str]:
  """Names of live gates and kernels, and of kernels of which a program has a variant."""
  with _lock:
    own = set(_gates)
  return {*own, *(name.partition("[")[0] for name in _callgate.registered_names())}


def free_name(base: str) -> str:
  """`base`, with a number from the second time it is asked for."""
  taken = taken_names()
  with _lock:
    while True:
      number = _counters[base]
      _counters[base] += 1
      name = f"{base}#{number}" if number else base
      if name not in taken:
        return name


# -- what programs from other processes name -------------------------------------------------------
def defined(name: str) -> Any:
  """The runtime's hook: defines what a loaded program calls, "name" or a variant "name[key]".

  Returns the core that has the name then; None if there is none.
  """
  base, bracket, key = name.partition("[")
  of_parts = (part.define(base) for part in _part.parts())
  found = core_of(_known(base) or next(filter(None, of_parts), None))
  if (define := getattr(found, "define_variant", None)) is None:
    return None if bracket else found
  return found if define(key.removesuffix("]") if bracket else "") else None


def _known(name: str) -> Any:
  """The live gate or kernel of a name, or the member of one; None if there is none."""
  owner, dot, member = name.rpartition(".")
  if (found := get(name)) is not None or not dot:
    return found
  make = getattr(core_of(_known(owner)), "member", None)
  return make and make(member)
