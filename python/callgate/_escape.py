"""Views that outlive their call: found, made safe, reported.

The runtime calls `settle` when, after a call, a view of XLA's memory is still referenced. XLA will
reuse or free that memory, so everything that points into it gets a private copy instead: the view,
arrays derived from it wherever they are held, torch tensors and memoryviews over it. This is the
slow path of a mistake (or of an exception whose frames hold the views); it may take a while.
"""

from __future__ import annotations

import contextlib
import dataclasses
import gc
import sys
import time
import traceback
import weakref
from collections.abc import Iterator
from typing import Any

import numpy as np

from callgate import _callgate, _cuda_arrays, _names
from callgate.errors import EscapedViewError

# kind ("argument" or "result"), index, view, address and size of XLA's memory
Suspect = tuple[str, int, Any, int, int]


def settle(gate: str, spec: str, suspects: list[Suspect], exception: BaseException | None) -> None:
  """The runtime's `escaped` hook: makes escaped views safe; raises unless the call failed anyway.

  Args:
    gate: the gate's name.
    spec: the call site's description, for the arguments' names.
    suspects: all views of the call; those still referenced are the escaped ones.
    exception: the exception that the call ended with, or None.

  Raises:
    EscapedViewError: a view escaped from a call that was otherwise successful.
  """
  escaped = _escaped(suspects)
  if escaped and exception is None:
    escaped = _escaped_for_good(suspects)
  if not escaped:
    return
  names = [_names.of(gate, spec, suspect[0], suspect[1]) for suspect, _ in escaped]
  for suspect, references in escaped:
    _make_safe(suspect, references, exception)
  if exception is not None:
    return
  raise EscapedViewError(
    f"gate '{gate}': {', '.join(names)}: a view of XLA's memory, or an array derived from it, was "
    "kept after the call returned. Expected: views used during the call alone; keep a copy "
    f"(x.copy()) instead. {_consequence(suspects)}"
  )


def _consequence(suspects: list[Suspect]) -> str:
  if any(not isinstance(suspect[2], np.ndarray) and suspect[2].stream for suspect in suspects):
    return "What was kept must not be used any more: its memory on the GPU is XLA's."
  return "What was kept now holds a private copy of the data."


def _escaped(suspects: list[Suspect]) -> list[tuple[Suspect, int]]:
  """The suspects that somebody else refers to, and how often.

  Three references are not somebody else's: the runtime's, the tuple's and getrefcount's argument.
  """
  counted = [(suspect, sys.getrefcount(suspect[2]) - 3) for suspect in suspects]
  return [(suspect, references) for suspect, references in counted if references > 0]


def _escaped_for_good(suspects: list[Suspect]) -> list[tuple[Suspect, int]]:
  """Leaves out what other threads or reference cycles hold for a moment longer."""
  for attempt in range(5):
    time.sleep(0.0005 * attempt)  # gives the GIL to a worker that is about to drop its argument
    if not _escaped(suspects):
      return []
  gc.collect()
  for suspect in suspects:  # not its view by name: that would be one reference more
    _await_xla(suspect[2], until_dropped=False)
  return _escaped(suspects)


def _make_safe(suspect: Suspect, references: int, exception: BaseException | None) -> None:
  _, _, view, address, size = suspect
  if not isinstance(view, np.ndarray) and view.stream:
    _leave_gpu(view, address, size, exception)
    return
  if isinstance(view, np.ndarray):
    keeper = view.copy()
    keeper.setflags(write=view.flags.writeable)
    target = keeper.ctypes.data
    _callgate.repoint(view, address, target, keeper)
  else:
    _delete_jax_array(view)
    view._detach()  # pyright: ignore[reportPrivateUsage]
    keeper, target = view, view._data  # pyright: ignore[reportPrivateUsage]
  rescue = _Rescue(view, keeper, address, target, size)
  # An exception's frames hold the arguments: nearly always they account for all references, and
  # the search of the whole heap (a good part of a second) is not needed.
  if exception is None or rescue.run(_frames_of(exception)) < references:
    rescue.run(_heap())


def _leave_gpu(view: Any, address: int, size: int, exception: BaseException | None) -> None:
  """Ends a Buffer on a GPU: whoever asks it for the memory gets an error, not a copy.

  Of what was made of it, torch's tensors alone can be given memory of their own, on XLA's stream.
  """
  torch = sys.modules.get("torch")
  if torch is not None and torch.cuda.is_available():
    rescue = _Rescue(view, view, address, 0, size)
    roots = _heap() if exception is None else _frames_of(exception)
    library = _cuda_arrays.library("torch")
    library.run(view.stream, view.__dlpack_device__()[1], lambda: rescue.run(roots))
  view._detach()  # pyright: ignore[reportPrivateUsage]


@dataclasses.dataclass
class _Rescue:
  """What moves from XLA's memory at `address` to the copy at `target`, which `keeper` owns."""

  view: Any
  keeper: Any
  address: int
  target: int
  size: int

  def run(self, roots: list[Any]) -> int:
    """Repoints what is reachable from the roots; returns how many references to the view it met."""
    found = 0
    arrays: dict[int, Any] = {}
    memoryviews: list[memoryview] = []
    for item in _references(roots):
      if item is self.view:
        found += 1
      elif isinstance(item, np.ndarray):
        if id(item) not in arrays and self._holds(item.ctypes.data) and self._derives(item):
          arrays[id(item)] = item
          found += item.base is self.view
      elif isinstance(item, memoryview):
        memoryviews.append(item)
      elif not isinstance(item, _callgate.Buffer):
        self._rescue_tensor(item)
    for array in arrays.values():
      _callgate.repoint(array, self.address, self.target, self.keeper)
    for item in memoryviews:  # last: arrays derive through them
      if self._derives(item):
        _release_memoryview(item)
    return found

  def _holds(self, pointer: int) -> bool:
    return self.address <= pointer < self.address + self.size

  def _derives(self, item: Any) -> bool:
    owner = _owner(item)
    while owner is not None:
      if owner is self.view or owner is self.keeper:
        return True
      # A capsule of DLPack does not say whose memory it is; an array's address does.
      if type(owner).__name__ == "PyCapsule" and not isinstance(item, memoryview):
        return True
      owner = _owner(owner)
    return False

  def _rescue_tensor(self, tensor: Any) -> None:
    try:
      inside = self._holds(tensor.data_ptr())
    except RuntimeError:
      return  # no memory to point to: sparse and fake tensors
    if inside:
      tensor.data = tensor.data.clone()


def _owner(item: Any) -> Any:
  """Whose memory an array, a memoryview or one of NumPy's stand-ins for an array shows."""
  if isinstance(item, memoryview):
    try:
      return item.obj
    except ValueError:  # released
      return None
  return getattr(item, "base", None)


def _frames_of(exception: BaseException) -> list[Any]:
  """The frames of the exception and of those that it follows from."""
  frames: list[Any] = []
  pending: list[BaseException | None] = [exception]
  seen: set[int] = set()
  while pending:
    error = pending.pop()
    if error is None or id(error) in seen:
      continue
    seen.add(id(error))
    frames.append(error.args)
    frames += [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
    pending += [error.__cause__, error.__context__]
  return frames


def _heap() -> list[Any]:
  """Everything that the collector tracks, and the locals of running frames, which it does not."""
  roots = gc.get_objects()
  for frame in sys._current_frames().values():  # pyright: ignore[reportPrivateUsage]
    roots += [list(f.f_locals.values()) for f, _ in traceback.walk_stack(frame)]
  return roots


def _references(roots: list[Any]) -> Iterator[Any]:
  """The array-likes that the roots refer to, directly or through plain containers.

  One that several holders refer to comes once for each.
  """
  kinds = (np.ndarray, memoryview, _callgate.Buffer, *_tensor_types())
  seen = {id(root) for root in roots}
  stack = list(roots)
  while stack:
    for item in gc.get_referents(stack.pop()):
      # By type: isinstance asks for __class__, and an object may answer with anything (deprecated
      # names of torch.distributed warn).
      if issubclass(type(item), kinds):
        yield item
        # Arrays of objects are containers that the collector does not look into.
        if isinstance(item, np.ndarray) and item.dtype.hasobject and id(item) not in seen:
          seen.add(id(item))
          stack.append(item.ravel().tolist())
      elif issubclass(type(item), (dict, tuple, list, set)) and id(item) not in seen:  # pyright: ignore[reportUnknownArgumentType]
        seen.add(id(item))
        stack.append(item)


def _release_memoryview(view: memoryview) -> None:
  # BufferError: somebody reads it at this moment, through a pointer that nobody can change.
  with contextlib.suppress(BufferError):
    view.release()


def _tensor_types() -> tuple[type, ...]:
  torch = sys.modules.get("torch")
  return () if torch is None else (torch.Tensor,)


# The jax.Arrays made for a call, by Buffer. They can't be repointed, only deleted; and none can be
# told by its address, which it may share with the program's own input.
_jax_arrays: weakref.WeakKeyDictionary[Any, Any] = weakref.WeakKeyDictionary()


def track_jax_array(buffer: Any, array: Any) -> Any:
  """Remembers that the array is a view of the buffer, for as long as the buffer lives."""
  _jax_arrays[buffer] = weakref.ref(array)
  return array


def _delete_jax_array(buffer: Any) -> None:
  reference = _jax_arrays.get(buffer) if not isinstance(buffer, np.ndarray) else None
  array = reference() if reference is not None else None
  if array is not None:
    array.delete()
    del array
    _await_xla(buffer, until_dropped=True)


_XLA_SECONDS = 30.0


def _await_xla(buffer: Any, *, until_dropped: bool) -> None:
  """Waits for computations that the callable started on its jax.Array and did not wait for.

  They hold the memory without a Python reference. An array that Python still refers to holds it for
  good, so with `until_dropped` it must have been deleted before.
  """
  if isinstance(buffer, np.ndarray):
    return
  reference = _jax_arrays.get(buffer)
  if reference is None or (reference() is not None and not until_dropped):
    return
  deadline = time.monotonic() + _XLA_SECONDS
  while buffer._exports and time.monotonic() < deadline:  # pyright: ignore[reportPrivateUsage]
    time.sleep(0.0005)
