# SPDX-License-Identifier: Apache-2.0
"""Finds the holders of a call's arrays: those that the heap shows, and those that it can't show.

A view that outlives its call can get a copy if its holder reads the view's address at each use: a
container, a frame, an instance of a Python class. A holder with a C layout may have stored the
address instead: a tree of SciPy's, a memoryview of Cython's, `x.ctypes`. Other holders are
invisible (`x.flat`): they are the rest of an object's reference count.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import sys
import traceback
import types
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from callgate import _callgate
from callgate._core import foreign

_HEAP_TYPE, _IMMUTABLE_TYPE = 1 << 9, 1 << 8  # from CPython's Py_TPFLAGS
_WORD = np.dtype(np.intp).itemsize
# Modules of C types that hold objects, and never an address inside an object, with exceptions.
_PLAIN_MODULES = frozenset({
  "_asyncio", "_collections", "_contextvars", "_functools", "_operator", "_queue", "_thread",
  "_typing", "_weakref", "builtins", "collections", "functools", "itertools", "operator", "types",
  "typing", "weakref",
})  # fmt: skip
_ADDRESSES = frozenset({"PyCapsule", "managedbuffer", "memoryview"})
# Memory that these hold is repointed with them.
_ARRAYS = frozenset({"numpy.ndarray", "numpy.generic", "torch.Tensor", "torch._C.TensorBase"})
# Python classes that keep an address: NumPy's `x.ctypes`.
_KEEP_ADDRESSES = frozenset({"numpy._core._internal._ctypes", "numpy.core._internal._ctypes"})
_OURS = (__name__, "callgate._arrays.escape")  # their frames hold the objects of the search


def full_name(kind: type) -> str:
  """Returns a type's name with its module."""
  module = str(getattr(kind, "__module__", ""))
  name = str(getattr(kind, "__qualname__", kind.__name__))
  return name if module in ("", "builtins") else f"{module}.{name}"


def plain() -> Callable[[type], bool]:
  """Returns a function, for one walk: True if holders of a type read addresses at each use."""
  return functools.cache(lambda kind: all(map(_adds_no_address, kind.__mro__)))


def _adds_no_address(part: type) -> bool:
  name, base = full_name(part), part.__base__
  if name in _KEEP_ADDRESSES:
    return False
  if name in _ARRAYS or (part.__module__ in _PLAIN_MODULES and part.__name__ not in _ADDRESSES):
    return True
  if base is None or part.__flags__ & (_HEAP_TYPE | _IMMUTABLE_TYPE) != _HEAP_TYPE:
    return False
  # A class statement adds slots, a __dict__ and weak references to the base's layout.
  words = sum(isinstance(v, types.MemberDescriptorType) for v in vars(part).values())
  # Negative offsets lie before the object (CPython's managed dicts), except -8, at its end.
  words += not base.__dictoffset__ and (part.__dictoffset__ > 0 or part.__dictoffset__ < -1)
  words += not base.__weakrefoffset__ and part.__weakrefoffset__ > 0
  return part.__basicsize__ - base.__basicsize__ == _WORD * words


def references(roots: list[Any], own: set[int]) -> Iterator[tuple[Any, Any]]:
  """Yields holders and array-likes of the roots, through plain containers, except ids in `own`."""
  kinds = (np.ndarray, memoryview, _callgate.Buffer, *tensor_types())
  seen = {id(root) for root in roots} | own
  stack = list(roots)
  while stack:
    holder = stack.pop()
    if id(holder) in own:
      continue
    for item in gc.get_referents(holder):
      # By type, because isinstance reads __class__, and an object may return anything (deprecated
      # names of torch.distributed warn).
      if issubclass(type(item), kinds):
        yield holder, item
        # The collector does not traverse arrays of objects, which are containers.
        if isinstance(item, np.ndarray) and item.dtype.hasobject:
          while isinstance(item.base, np.ndarray) and item.base.dtype.hasobject:
            item = item.base  # visits its elements once
          if id(item) not in seen:
            seen.add(id(item))
            stack.append(item.ravel().tolist())
      elif issubclass(type(item), (dict, tuple, list, set)) and id(item) not in seen:  # pyright: ignore[reportUnknownArgumentType]
        seen.add(id(item))
        stack.append(item)


def instance_of(namespace: Any) -> Any:
  """Returns the object of a C type that has this dict as its `__dict__`; or None."""
  for holder in gc.get_referrers(namespace):
    if not all(map(_adds_no_address, type(holder).__mro__)):
      with contextlib.suppress(Exception):
        if object.__getattribute__(holder, "__dict__") is namespace:
          return holder
  return None


def heap() -> list[Any]:
  """Returns the objects that the collector tracks, and the locals of running frames."""
  frames = _running_frames()  # first, so that its own objects are found below
  # Without tuples in free-threaded Python: another thread may be making one, and Python can't
  # resize a tuple that has a second reference.
  in_one_stop: Any = getattr(_callgate, "live_objects", None)
  tracked = gc.get_objects() if in_one_stop is None else in_one_stop(None)
  known = set(frames).intersection(map(id, tracked))
  return tracked + [item for key, item in frames.items() if key not in known]


# Since Python 3.14 a call's arguments may borrow the references of the caller's variables.
_BORROWS = sys.version_info >= (3, 14)


def _running_frames() -> dict[int, Any]:
  """Returns containers with the locals of all threads' frames, by id.

  Where callees may borrow, an object is in the containers of one thread as often as in its frame
  that has it most often: each surplus count could hide a holder that nobody knows.

  Free-threaded Python can't read the locals of another thread's frame, which runs meanwhile. There
  these are unknown holders.
  """
  found: dict[int, Any] = {}
  frame: Any = None
  for frame in _frames_of_threads():
    while frame is not None and frame.f_globals.get("__name__") in _OURS:
      frame = frame.f_back
    seen: Counter[int] = Counter()  # of this thread's inner frames
    for f, _ in traceback.walk_stack(frame):
      names: Any = f.f_locals
      if isinstance(
        names, dict
      ):  # a module's or a class's own dict; before 3.13 also a lasting copy
        found[id(names)] = names
      if f.f_code.co_flags & 1:  # CO_OPTIMIZED: a function has its locals outside dicts
        plain = set(f.f_code.co_varnames) - set(f.f_code.co_cellvars)
        values = [names[name] for name in plain if name in names]
        if _BORROWS:
          values = _beyond(seen, values)
        found[id(values)] = values
  frame = f = None  # breaks the cycle through our own frame
  return found


def _frames_of_threads() -> list[Any]:
  if hasattr(_callgate, "live_objects"):
    return [sys._getframe()]  # pyright: ignore[reportPrivateUsage]
  return list(sys._current_frames().values())  # pyright: ignore[reportPrivateUsage]


def _beyond(seen: Counter[int], values: list[Any]) -> list[Any]:
  """Returns the values that are here more often than in `seen`, and adds them there."""
  here: Counter[int] = Counter()
  more: list[Any] = []
  for value in values:
    here[id(value)] += 1
    if here[id(value)] > seen[id(value)]:
      more.append(value)
  seen |= here
  return more


def frames_of(exception: BaseException) -> list[Any]:
  """Returns the frames of the exception and of those that it follows from."""
  found: dict[int, BaseException] = {}
  pending: list[BaseException | None] = [exception]
  while pending:
    error = pending.pop()
    if error is not None and id(error) not in found:
      found[id(error)] = error
      pending += foreign.follows_from(error)
  frames = [
    f for error in found.values() for f, _ in traceback.walk_tb(foreign.frames_begin(error))
  ]
  return [*found.values(), *frames]


def tensor_types() -> tuple[type, ...]:
  torch = sys.modules.get("torch")
  return () if torch is None else (torch.Tensor,)
