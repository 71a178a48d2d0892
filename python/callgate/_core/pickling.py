# SPDX-License-Identifier: Apache-2.0
"""Pickles and copies of what belongs to its process: gates, kernels, feeds.

A copy is the thing itself. A pickle says where a module holds the thing, as pickles of functions
do. The call that made a thing makes it again if no module holds it. A mark tells the process that
it came from, and one that has got it before, that they have it already.
"""

from __future__ import annotations

import dataclasses
import inspect
import pickle
import sys
import threading
import uuid
import weakref
from collections.abc import Callable, Mapping
from types import FrameType
from typing import Any, TypeVar

import jax
import numpy as np

from callgate._core import registry
from callgate._core.public import Public, Uncopied, core

# Guarded by _lock, but for a mark that nobody knows yet.
_marked: weakref.WeakValueDictionary[str, Any] = weakref.WeakValueDictionary()
_lock = threading.RLock()  # held while a thing is made again: two threads may have got one pickle


@dataclasses.dataclass(frozen=True)
class Origin:
  """The call that made a thing, and the module whose code made the call."""

  module: str
  make: Callable[..., Any]
  args: tuple[Any, ...]
  options: Mapping[str, Any]


class Identity(Uncopied):
  """The core of an object that users hold, as copies and pickles of the object see it.

  Attributes:
    label: what messages call the object.
    origin: the call that made it; None if callgate made it for a purpose of its own.
    travels: True if another process can make it again. `why_not` says why it can't.
    mark: the name by which processes know that they have it already.
  """

  label: Any
  origin: Origin | None = None
  travels = True
  why_not = "callgate made it for a purpose of its own"
  mark: str | None = None


C = TypeVar("C", bound=Identity)


class Portable(Public[C]):
  """An object that users hold, with pickles as the module's text says."""

  def __reduce_ex__(self, protocol: Any) -> Any:
    del protocol
    identity = core(self)
    origin, pickler = identity.origin, sys._getframe(1)  # pyright: ignore[reportPrivateUsage]
    for module, path in _places(self, origin):
      if _at(module, path) is self and not _takes_along(pickler, module):
        return _found, (identity.label, module, path)
    if origin is None or not identity.travels:
      expected = "expected one that a module holds by a name, which the other process imports"
      raise pickle.PicklingError(
        f"{identity.label} can't be pickled: {identity.why_not}; {expected}"
      )
    options = dict(origin.options)
    if not callable(out := options.get("out", callable)):
      options["out"] = jax.tree.map(_type_of, out)
    name = getattr(identity, "name", None)
    made_again = identity.mark, name, origin.make, origin.args, options
    return _made_again, made_again, self._rules()

  def _rules(self) -> Any:
    """The state for `__setstate__`: what was added since it was made; None for nothing."""


class Stays(Uncopied):
  """A thing of its process, of which no pickle is made."""

  __slots__ = ()
  _stays = ""  # why, and what is expected instead

  def __reduce_ex__(self, protocol: Any) -> Any:
    del protocol
    raise pickle.PicklingError(f"{self!r} can't be pickled: {self._stays}")


def made_by(origin: Origin, made: Any) -> Any:
  """Notes the call that made an object of a user's, and returns the object.

  A call may go through another maker's: the first to say so, which made it, is its origin.
  """
  if isinstance(made, Portable) and (identity := core(made)).origin is None:
    if not identity.travels:  # nobody makes it again: what it was made of may go
      origin = dataclasses.replace(origin, args=(), options={})
    identity.origin, identity.mark = origin, uuid.uuid4().hex
    _marked[identity.mark] = made
  return made


def _places(held: Any, origin: Origin | None) -> list[tuple[str, str]]:
  """Modules and the qualified names by which they may hold the object."""
  own = vars(held)  # where it has the names of its function
  places = [(own["__module__"], own["__qualname__"])] if "__qualname__" in own else []
  module = origin.module if origin is not None else ""
  names = dict(vars(sys.modules[module])) if module in sys.modules else {}
  return places + [(module, name) for name, value in names.items() if value is held]


def _type_of(leaf: Any) -> Any:
  """Returns the type of an array in `out`, whose values do not count."""
  is_array = isinstance(leaf, (np.ndarray, jax.Array))
  return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype) if is_array else leaf


def _at(module: str, path: str) -> Any:
  """Returns what a module holds by a qualified name; None for nothing."""
  found: Any = sys.modules.get(module)
  for name in path.split("."):
    found = getattr(found, name, None)
  return found


def _takes_along(frame: FrameType, module: str) -> bool:
  """True if the pickler at work takes along what `module` defines, for readers without the module.

  cloudpickle, its copies in other libraries, and dill do so with `__main__`. They tell nobody but
  by the frame of theirs that asked for the pickle.
  """
  for kind in type(frame.f_locals.get("self")).__mro__:
    if "cloudpickle" in kind.__module__:
      listed = getattr(sys.modules.get(kind.__module__), "list_registry_pickle_by_value", set[str])
      return any(f"{module}.".startswith(f"{name}.") for name in {"__main__", *listed()})
    if kind.__module__.split(".")[0] == "dill":
      return module == "__main__"
  return False


# -- the other side --------------------------------------------------------------------------------
def _found(label: str, module: str, path: str) -> Any:
  found = getattr(__import__(module, fromlist=["*"]), path.split(".")[0], None)
  for name in path.split(".")[1:]:
    found = getattr(found, name, None)
  if isinstance(found, Portable):
    return found
  got = "nothing" if found is None else f"a {type(found).__name__}"
  hint = ""
  if module == "__main__":
    hint = ". A script is not imported elsewhere: define it in a module, or pickle by cloudpickle"
    if "__mp_main__" in sys.modules:  # multiprocessing's name for the parent's script
      hint = (
        ". The script is imported here, but for what is under `if __name__ == '__main__':` "
        "define it outside of that, or in a module"
      )
  raise pickle.UnpicklingError(f"{label}: expected it as {module}.{path}, found {got} there{hint}")


def _made_again(
  mark: str, name: str, make: Callable[..., Any], args: tuple[Any, ...], options: dict[str, Any]
) -> Any:
  with _lock:
    if (known := _marked.get(mark)) is not None:
      return known
    call = inspect.signature(make).bind(*args, **options)
    if call.arguments.get("name") is None:  # the old name, so that programs find each other
      taken = name in registry.taken_names()
      call.arguments["name"] = registry.free_name(name.partition("#")[0]) if taken else name
    made = make(*call.args, **call.kwargs)
    core(made).mark, _marked[mark] = mark, made
    return made
