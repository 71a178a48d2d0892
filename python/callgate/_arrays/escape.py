# SPDX-License-Identifier: Apache-2.0
"""Finds views that outlive their call, makes them safe, and reports them.

XLA will reuse or free the memory of a view that is still referenced after a call. So each object
that points into it gets a private copy: the view, arrays derived from it, torch tensors.
Memoryviews over it are released. An error reports references that can't be made safe: their holder
may have taken the address (`holders.py`), or is unknown. The gate then works on private copies from
its next call on. This is the slow path for a mistake, or for an exception whose frames hold the
views.
"""

from __future__ import annotations

import dataclasses
import gc
import inspect
import sys
import threading
import time
import weakref
from collections import Counter
from collections.abc import Callable
from types import FrameType
from typing import Any

import numpy as np

from callgate import _callgate
from callgate._arrays import gpu
from callgate._arrays import holders as _holders
from callgate._core import kept, registry
from callgate._core.errors import EscapedViewError
from callgate._part import Wait

# kind ("argument" or "result"), index, view, address and size of XLA's memory
Suspect = tuple[str, int, Any, int, int]
# Held while reading other threads' frames, the heap, or the list of JAX's arrays: they hold the
# arguments of calls. References that are taken under this lock end before it does.
reading_frames = threading.Lock()


def settle(
  gate: str, spec: str, suspects: list[Suspect], exception: BaseException | None,
  make_private: Callable[[str], None],
) -> None:  # fmt: skip
  """The runtime's `escaped` hook: makes escaped views safe; raises unless the call failed anyway.

  `suspects` are all views of the call. `make_private(kind)` makes views of that kind copies from
  now on.
  """
  escaped = _escaped(suspects)
  if escaped and exception is None:
    escaped = _escaped_for_good(gate, suspects)
  if not escaped:
    return
  own = {id(suspects), *map(id, suspects)}
  rescues = [_make_safe(_Rescue(suspect, own), exception) for suspect in escaped]
  unsafe = [rescue for rescue in rescues if rescue.remaining]
  for kind in {rescue.suspect[0] for rescue in unsafe}:
    make_private(kind)
  if exception is not None:
    return

  def named(rescues: list[_Rescue]) -> str:
    return ", ".join(registry.of(gate, spec, *rescue.suspect[:2]) for rescue in rescues)

  text = "The kept object now holds a private copy of the data"
  if any(rescue.released for rescue in rescues):
    text += "; a memoryview, which can't, was released"
  if any(rescue.deleted for rescue in rescues):
    text += "; a jax.Array, which can't, was deleted"
  text += "."
  if unsafe:
    holders = sorted({name for rescue in unsafe for name in rescue.holders()})
    text += (
      f" But something else still points to XLA's memory of {named(unsafe)}: "
      f"{', '.join(holders)}. Don't use it: XLA overwrites that memory. From now on the gate "
      "gets private copies, which it may keep; use cg.gate(copy=True) for private copies from "
      "the start."
    )
  if any(rescue.on_gpu for rescue in rescues):
    text = "Don't use the kept object any more: its memory on the GPU is XLA's."
  raise EscapedViewError(
    f"gate '{gate}': {named(rescues)}: a view of XLA's memory, or an array derived from it, was "
    "kept after the call returned. Expected: views used only during the call; keep a copy "
    f"(x.copy()) instead. {text}"
  )


def _escaped(suspects: list[Suspect]) -> list[Suspect]:
  return [suspect for suspect in suspects if _others(suspect) > 0]


def _others(suspect: Suspect) -> int:
  """Counts references to a view beyond the tuple's and the runtime's."""
  return _references(suspect, _VIEW) - 1


def _references(holder: Any, key: Any) -> int:
  """Counts references to an item beyond its holder's.

  The item has no name here, because Python 3.14 borrows the reference of a name: it may count once
  less. The second term is the holder's and the argument's share, as this interpreter counts it.
  """
  return sys.getrefcount(holder[key]) - sys.getrefcount(_ALONE[0])


_ALONE = (object(),)
_VIEW = 2  # in a Suspect


# The gates with a call whose view was in a reference cycle of the collector's oldest generation.
# After their next calls that generation is collected at once. A gate that dies removes itself.
_leave_old_cycles: weakref.WeakSet[Any] = weakref.WeakSet()  # atomic: single steps
_OLDEST = 2


def _escaped_for_good(gate: str, suspects: list[Suspect]) -> list[Suspect]:
  """Removes the suspects that other threads or reference cycles hold only for a moment.

  A cycle that the call itself left is usually young, and collecting young objects takes
  microseconds. Collecting all objects takes time in proportion to their number.
  """
  known = registry.get(gate) in _leave_old_cycles
  for generation in (_OLDEST,) if known else range(_OLDEST):
    gc.collect(generation)
    if not _escaped_now(suspects):
      return []
  _clear_ended_frames()
  for attempt in range(5):
    time.sleep(0.0005 * attempt)  # lets a thread drop its argument
    if not _escaped_now(suspects):
      return []
  gc.collect(_OLDEST)
  if not _escaped_now(suspects) and (found := registry.get(gate)) is not None:
    _leave_old_cycles.add(found)
  for suspect in suspects:  # no name for its view, which would be a reference
    _await_xla(suspect[2], until_dropped=False)
  return _escaped_now(suspects)


def _escaped_now(suspects: list[Suspect]) -> list[Suspect]:
  """Returns the escaped views while no thread reads frames, the heap or the list of arrays."""
  with reading_frames:
    return _escaped(suspects)


# Code whose frames may be resumed.
_SUSPENDS = inspect.CO_GENERATOR | inspect.CO_COROUTINE | inspect.CO_ASYNC_GENERATOR


def _clear_ended_frames() -> None:
  """Clears the variables of ended frames in this thread's stored exceptions.

  The call's function may have handled the failure of a program that it called. The exception's
  frames then lead to the function's own frames, which hold its arguments.
  """
  thread, seen = threading.get_ident(), set[int]()
  for one in kept.newest_first():
    for found in _holders.frames_of(one.exception) if one.thread == thread else ():
      frame = found if isinstance(found, FrameType) else None
      while frame is not None and id(frame) not in seen:
        seen.add(id(frame))
        if not frame.f_code.co_flags & _SUSPENDS:
          try:
            frame.clear()
          except RuntimeError:  # the frame runs, and so do its callers
            break
        frame = frame.f_back


def _make_safe(rescue: _Rescue, exception: BaseException | None) -> _Rescue:
  """Moves objects away from XLA's memory, and finds out if any remains there."""
  view, address = rescue.suspect[2:4]
  if not isinstance(view, np.ndarray) and view.stream:
    # A Buffer on a GPU is closed: code that asks it for the memory gets an error, not a copy. Among
    # the arrays made from it, only torch tensors can get memory of their own, on XLA's stream.
    rescue.on_gpu = True
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_available():
      roots = _holders.heap() if exception is None else _holders.frames_of(exception)
      run = gpu.library("torch").run
      run(view.stream, view.__dlpack_device__()[1], lambda: rescue.repoint(roots))
    view._detach()
    return rescue
  if isinstance(view, np.ndarray):
    rescue.keeper = keeper = view.copy()
    keeper.setflags(write=view.flags.writeable)
    rescue.target = keeper.ctypes.data
    _callgate.repoint(view, address, rescue.target, keeper)
    del keeper
  else:
    array = jax_arrays.get(view, lambda: None)()
    if array is not None:
      array.delete()
      rescue.deleted = True
      del array
      _await_xla(view, until_dropped=True)
    view._detach()
    rescue.target = view._data
  del view
  # An exception's frames hold the arguments. They usually account for all references, so the search
  # of the whole heap (much of a second) is not needed.
  with reading_frames:
    if exception is not None:
      rescue.repoint(_holders.frames_of(exception))
      rescue.account()
    if exception is None or rescue.remaining:
      rescue.repoint(_holders.heap())
      rescue.account()
  return rescue


@dataclasses.dataclass
class _Rescue:
  """The views that move from XLA's memory to the copy at `target`.

  `keeper` owns the copy; None if the view, a Buffer, does. Nothing here refers to the view itself,
  because its references are counted. `own` are the ids of callgate's own holders of it.
  """

  suspect: Suspect
  own: set[int]
  keeper: Any = None
  target: int = 0
  on_gpu: bool = False
  remaining: bool = False  # True if an unknown reference to the view or its arrays remains
  released: bool = False  # True if memoryviews were released
  deleted: bool = False  # True if a jax.Array was deleted
  arrays: dict[int, Any] = dataclasses.field(default_factory=dict[int, Any])
  # The number of known, harmless references to each object; the harmful holders.
  harmless: Counter[int] = dataclasses.field(default_factory=Counter[int])
  harmful: set[type] = dataclasses.field(default_factory=set[type])

  def repoint(self, roots: list[Any]) -> None:
    """Repoints everything reachable from the roots, and records its holders."""
    self.harmless.clear()
    self.harmful.clear()
    plain = _holders.plain()
    found: dict[int, Any] = {}
    memoryviews: list[memoryview] = []
    namespaces: dict[int, tuple[Any, Counter[int]]] = {}
    for holder, item in _holders.references(roots, self.own):
      if item is self.suspect[2] or self._is_array_of_ours(item, found):
        if plain(type(holder)):
          self.harmless[id(item)] += 1
        elif type(holder).__name__ != "managedbuffer":  # belongs to a memoryview
          self.harmful.add(type(holder))
        if type(holder) is dict:
          namespaces.setdefault(id(holder), (holder, Counter()))[1][id(item)] += 1
      elif isinstance(item, memoryview):
        memoryviews.append(item)
      elif not isinstance(item, (np.ndarray, _callgate.Buffer)):
        try:
          inside = self._holds(item.data_ptr())
        except RuntimeError:
          continue  # sparse and fake tensors have no memory
        if inside:
          item.data = item.data.clone()
    for namespace, counts in namespaces.values():
      holder = _holders.instance_of(namespace)
      if holder is not None:  # the `__dict__` of an object that may keep an address
        self.harmless -= counts
        self.harmful.add(type(holder))
    keeper = self.suspect[2] if self.keeper is None else self.keeper
    for array in found.values():
      _callgate.repoint(array, self.suspect[3], self.target, keeper)
    self.arrays |= found
    for item in filter(self._derives, memoryviews):  # last, because arrays derive through them
      try:
        item.release()
        self.released = True
      except BufferError:  # being read through a pointer that can't be changed
        self.harmful.add(memoryview)

  def account(self) -> None:
    """Sets `remaining`, after everything that `repoint` visited is dropped."""
    bases = 0
    for key in self.arrays:
      if _references(self.arrays, key) > self.harmless[key]:
        self.remaining = True
        return
      bases += self.arrays[key].base is self.suspect[2]
    self.remaining = _others(self.suspect) > self.harmless[id(self.suspect[2])] + bases

  def holders(self) -> list[str]:
    names = [_holders.full_name(kind) for kind in self.harmful]
    return names or ["an object that Python can't see into (an iterator such as x.flat, say)"]

  def _is_array_of_ours(self, item: Any, found: dict[int, Any]) -> bool:
    if not isinstance(item, np.ndarray):
      return False
    if id(item) in found or id(item) in self.arrays:
      return True
    if ours := self._holds(item.ctypes.data) and self._derives(item):
      found[id(item)] = item
    return ours

  def _holds(self, pointer: int) -> bool:
    return 0 <= pointer - self.suspect[3] < self.suspect[4]

  def _derives(self, item: Any) -> bool:
    owner = _owner(item)
    while owner is not None:
      if owner is self.suspect[2] or owner is self.keeper:
        return True
      # A DLPack capsule does not reveal its memory's owner, nor does a moved tensor; an array's
      # address does.
      unknown = isinstance(owner, _holders.tensor_types()) or type(owner).__name__ == "PyCapsule"
      if unknown and not isinstance(item, memoryview):
        return True
      owner = _owner(owner)
    return False


def _owner(item: Any) -> Any:
  """Returns the owner of the memory of an array, a memoryview or NumPy's array replacement."""
  if isinstance(item, memoryview):
    try:
      return item.obj
    except ValueError:  # released
      return None
  return getattr(item, "base", None)


# Weak references to the jax.Arrays over Buffers, by Buffer. These arrays can't be repointed, only
# deleted. Their address doesn't identify them, because the program's own input may share it.
# Atomic: single steps.
jax_arrays: weakref.WeakKeyDictionary[Any, Any] = weakref.WeakKeyDictionary()
_XLA_SECONDS = 30.0


def _await_xla(buffer: Any, *, until_dropped: bool) -> None:
  """Waits for computations that the callable started on its jax.Array and did not wait for.

  They hold the memory without a Python reference. An array with a Python reference holds it for
  good, so with `until_dropped` the array must have been deleted before.
  """
  if isinstance(buffer, np.ndarray):
    return
  reference = jax_arrays.get(buffer)
  if reference is None or (reference() is not None and not until_dropped):
    return
  Wait(_XLA_SECONDS).poll(lambda: not buffer._exports)
