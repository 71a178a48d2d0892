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
from typing import Any

import jax
import numpy as np

from callgate._core import registry

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


class Portable:
  """An object with copies and pickles as the module's text says.

  Attributes:
    label: what messages call it.
    travels: whether it can be made again in another process. `why_not` says why it can't.
  """

  label: Any
  origin: Origin | None = None
  travels = True
  why_not = "callgate made it for a purpose of its own"
  _mark: str | None = None

  def made_by(self, origin: Origin) -> Any:
    """Returns the user's object of this, with a note of who made it."""
    if self.origin is not None:
      return self  # by another maker, which that one asked
    made = self.handle()
    made.origin, made._mark = origin, uuid.uuid4().hex
    _marked[made._mark] = made
    return made

  def handle(self) -> Any:
    return self

  def __copy__(self) -> Any:
    return self

  def __deepcopy__(self, memo: Any) -> Any:
    del memo
    return self

  def __reduce_ex__(self, protocol: Any) -> Any:
    del protocol
    origin, pickler = self.origin, sys._getframe(1)  # pyright: ignore[reportPrivateUsage]
    for module, path in self._places():
      if _at(module, path) is self and not _takes_along(pickler, module):
        return _found, (self.label, module, path)
    if origin is None or not self.travels:
      expected = "expected one that a module holds by a name, which the other process imports"
      raise pickle.PicklingError(f"{self.label} can't be pickled: {self.why_not}; {expected}")
    options = dict(origin.options)
    if not callable(out := options.get("out", callable)):
      options["out"] = jax.tree.map(_type_of, out)
    name = getattr(self, "name", None)
    return _made_again, (self._mark, name, origin.make, origin.args, options), self._rules()

  def _rules(self) -> Any:
    """The state for `__setstate__`: what was added since it was made; None for nothing."""

  def _places(self) -> list[tuple[str, str]]:
    """Modules and the qualified names by which they may hold this."""
    own = vars(self)  # where it has the names of its function
    places = [(own["__module__"], own["__qualname__"])] if "__qualname__" in own else []
    module = self.origin.module if self.origin is not None else ""
    held = dict(vars(sys.modules[module])) if module in sys.modules else {}
    return places + [(module, name) for name, value in held.items() if value is self]


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
    made._mark, _marked[mark] = mark, made
    return made
