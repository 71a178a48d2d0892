# SPDX-License-Identifier: Apache-2.0
"""Pickles and copies of objects that belong to one process: gates, kernels, feeds.

A copy is the object itself. A pickle has the object's place in a module, as for functions. If no
module holds the object, the pickle has the call that made it. A mark tells a process that it
already has the object: the process that made the pickle, or one that has loaded it before.
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

# Guarded by _lock, but for a mark that no other thread has yet.
_marked: weakref.WeakValueDictionary[str, Any] = weakref.WeakValueDictionary()
_lock = threading.RLock()  # held while an object is made: two threads may load one pickle
_local = threading.local()  # .anew: the mark of the object in this thread's `made_anew`


@dataclasses.dataclass(frozen=True)
class Origin:
  """The call that made an object, and the module whose code made the call."""

  module: str
  make: Callable[..., Any]
  args: tuple[Any, ...]
  options: Mapping[str, Any]


class Identity(Uncopied):
  """The core of a public object, for its copies and pickles.

  Attributes:
    label: the object's name in messages.
    origin: the call that made it; None if callgate made it for internal use.
    travels: True if another process can make it again. `why_not` has the reason if it can't.
    mark: the name by which processes recognize an object that they already have.
  """

  label: Any
  origin: Origin | None = None
  travels = True
  why_not = "it is internal to callgate"
  mark: str | None = None


C = TypeVar("C", bound=Identity)


class Portable(Public[C]):
  """A public object with pickles as this module describes."""

  def __reduce_ex__(self, protocol: Any) -> Any:
    del protocol
    identity = core(self)
    origin, pickler = identity.origin, sys._getframe(1)  # pyright: ignore[reportPrivateUsage]
    for module, path in _places(self, origin):
      if _at(module, path) is self and not _takes_along(pickler, module):
        return _found, (identity.label, module, path)
    if origin is None or not identity.travels:
      expected = "assign it to a name in a module that the other process imports"
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
    """Returns the state for `__setstate__`: later additions; None if there are none."""


class Stays(Uncopied):
  """An object of its process, which can't be pickled."""

  __slots__ = ()
  _stays = ""  # the reason, and what to do instead

  def __reduce_ex__(self, protocol: Any) -> Any:
    del protocol
    raise pickle.PicklingError(f"{self!r} can't be pickled: {self._stays}")


def made_by(origin: Origin, made: Any) -> Any:
  """Records the call that made a user's object, and returns the object.

  A call may go through another maker's. The innermost call, which reports first, is the origin.
  """
  if isinstance(made, Portable) and (identity := core(made)).origin is None:
    if not identity.travels:  # never made again: frees its arguments
      origin = dataclasses.replace(origin, args=(), options={})
    identity.origin, identity.mark = origin, uuid.uuid4().hex
    _marked[identity.mark] = made
  return made


def _places(held: Any, origin: Origin | None) -> list[tuple[str, str]]:
  """Returns modules and qualified names by which they may hold the object."""
  own = vars(held)  # it has the names of its function
  places = [(own["__module__"], own["__qualname__"])] if "__qualname__" in own else []
  module = origin.module if origin is not None else ""
  names = dict(vars(sys.modules[module])) if module in sys.modules else {}
  return places + [(module, name) for name, value in names.items() if value is held]


def _type_of(leaf: Any) -> Any:
  """Returns the type of an array in `out`, whose values do not matter."""
  is_array = isinstance(leaf, (np.ndarray, jax.Array))
  return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype) if is_array else leaf


def _at(module: str, path: str) -> Any:
  """Returns a module's object by its qualified name; None if there is none."""
  found: Any = sys.modules.get(module)
  for name in path.split("."):
    found = getattr(found, name, None)
  return found


def _takes_along(frame: FrameType, module: str) -> bool:
  """Returns True if the running pickler pickles `module` by value, for readers without it.

  cloudpickle, its copies in other libraries, and dill do that for `__main__`. Only the frame of
  theirs that calls the pickle shows it.
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
    hint = ". Other processes don't import a script: define it in a module, or use cloudpickle"
    if "__mp_main__" in sys.modules:  # multiprocessing's name for the parent's script
      hint = (
        ". The script is imported here without its `if __name__ == '__main__':` block: define "
        "it outside that block, or in a module"
      )
  raise pickle.UnpicklingError(f"{label}: expected it as {module}.{path}, found {got} there{hint}")


def made_anew(held: Portable[Any], data: bytes) -> Any:
  """Reads a pickle of a thing as another process does, which has not got it; under another name.

  A thing that a module holds is found there.
  """
  before, _local.anew = getattr(_local, "anew", None), core(held).mark
  try:
    return pickle.loads(data)
  finally:
    _local.anew = before


def _made_again(
  mark: str, name: str, make: Callable[..., Any], args: tuple[Any, ...], options: dict[str, Any]
) -> Any:
  with _lock:
    anew = getattr(_local, "anew", None) == mark
    if (known := _marked.get(mark)) is not None and not anew:
      return known
    call = inspect.signature(make).bind(*args, **options)
    if anew:
      call.arguments["name"] = registry.free_name(f"{name} read back")
      return make(*call.args, **call.kwargs)
    if call.arguments.get("name") is None:  # keeps the old name, which programs use
      taken = name in registry.taken_names()
      call.arguments["name"] = registry.free_name(name.partition("#")[0]) if taken else name
    made = make(*call.args, **call.kwargs)
    core(made).mark, _marked[mark] = mark, made
    return made
