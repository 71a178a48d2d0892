"""Views that outlive their call: found, made safe, reported.

The runtime calls `settle` when, after a call, a view of XLA's memory is still referenced. XLA will
reuse or free that memory, so everything that points into it gets a private copy instead: the view,
arrays derived from it wherever they are held, torch tensors and memoryviews over it. This is the
slow path of a mistake (or of an exception whose frames hold the views); it may take a while.
"""

from __future__ import annotations

import gc
import sys
import time
from collections.abc import Iterator
from typing import Any

import numpy as np

from callgate import _callgate, _names
from callgate.errors import EscapedViewError

# kind ("argument" or "result"), index, view, address and size of XLA's memory
Suspect = tuple[str, int, Any, int, int]


def settle(
  gate: str, spec: str, suspects: list[Suspect], exception: BaseException | None
) -> None:
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
  names = [_names.of(gate, spec, kind, index) for kind, index, *_ in escaped]
  for _, _, view, address, size in escaped:
    _make_safe(view, address, size)
  if exception is not None:
    return
  raise EscapedViewError(
    f"gate '{gate}': {', '.join(names)}: a view of XLA's memory, or an array derived from it, was "
    "kept after the call returned. Expected: views used during the call alone; keep a copy "
    "(x.copy()) instead. What was kept now holds a private copy of the data."
  )


def _escaped(suspects: list[Suspect]) -> list[Suspect]:
  # Three references are ours: the runtime's, the tuple's, and getrefcount's argument.
  return [suspect for suspect in suspects if sys.getrefcount(suspect[2]) > 3]


def _escaped_for_good(suspects: list[Suspect]) -> list[Suspect]:
  """Leaves out what other threads or reference cycles hold for a moment longer."""
  for attempt in range(5):
    time.sleep(0.0005 * attempt)  # gives the GIL to a worker that is about to drop its argument
    if not _escaped(suspects):
      return []
  gc.collect()
  return _escaped(suspects)


def _make_safe(view: Any, address: int, size: int) -> None:
  if isinstance(view, np.ndarray):
    copy = view.copy()
    copy.setflags(write=view.flags.writeable)
    target, root = copy.ctypes.data, view
    _callgate.repoint(view, address, target, copy)
  else:
    view._detach()  # pyright: ignore[reportPrivateUsage]
    target, root = view._data, view  # pyright: ignore[reportPrivateUsage]
  for holder in _everything():
    if holder is view:
      continue
    if isinstance(holder, np.ndarray):
      if _derives(holder, root) and address <= holder.ctypes.data <= address + size:
        _callgate.repoint(holder, address, target, None)
    elif isinstance(holder, memoryview):
      _release_memoryview(holder, root)
    else:
      _rescue_tensor(holder, address, size)


def _everything() -> Iterator[Any]:
  """Every object that a tracked one refers to; arrays are not tracked themselves."""
  seen: set[int] = set()
  stack: list[Any] = gc.get_objects()
  own = {id(stack), id(seen)}
  kinds = (np.ndarray, memoryview, *_tensor_types())
  while stack:
    holder = stack.pop()
    if id(holder) in own:
      continue
    for item in gc.get_referents(holder):
      if isinstance(item, kinds):
        if id(item) not in seen:
          seen.add(id(item))
          yield item
      elif not gc.is_tracked(item) and isinstance(item, (dict, tuple)) and id(item) not in seen:
        seen.add(id(item))
        stack.append(item)


def _derives(array: np.ndarray[Any, Any], root: Any) -> bool:
  base = array.base
  while base is not None:
    if base is root:
      return True
    base = base.base if isinstance(base, np.ndarray) else getattr(base, "obj", None)
  return False


def _release_memoryview(view: memoryview, root: Any) -> None:
  try:
    if view.obj is root:
      view.release()
  except (ValueError, BufferError):
    pass  # released already, or an array on top of it holds it: that one was repointed


def _tensor_types() -> tuple[type, ...]:
  types: list[type] = []
  if "torch" in sys.modules:
    types.append(sys.modules["torch"].Tensor)
  if "jax" in sys.modules:
    from jaxlib import _jax  # the concrete class, to find its instances

    types.append(_jax.ArrayImpl)
  return tuple(types)


def _rescue_tensor(tensor: Any, address: int, size: int) -> None:
  try:
    if hasattr(tensor, "data_ptr"):
      if address <= tensor.data_ptr() < address + max(size, 1):
        tensor.data = tensor.data.clone()
    elif address <= tensor.unsafe_buffer_pointer() < address + max(size, 1):
      tensor.delete()
  except Exception:  # noqa: BLE001 - deleted or sharded arrays have no address to compare
    pass
