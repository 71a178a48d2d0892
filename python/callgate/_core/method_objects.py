# SPDX-License-Identifier: Apache-2.0
"""Unique names of objects whose methods programs call.

The callee of a loaded program keeps its object; this table keeps none. A name lives as long as the
object. If the object supports no weak references, the name lives as long as its `Exact`, which the
program's trees keep.
"""

from __future__ import annotations

import collections
import functools
import threading
import weakref
from collections.abc import Callable
from typing import Any

from callgate._core import exact, names, split
from callgate._core.errors import GateDefinitionError

# Guarded by _naming; emptied by the end of each object.
_objects: dict[str, Callable[[], split.Static | None]] = {}
# The names of live objects, by identity. Guarded by _naming; emptied by the end of each.
_names: dict[int, str] = {}
# Guarded by _naming; never emptied: one number for each type, so that names stay unique.
_counters: collections.Counter[str] = collections.Counter()
_MOST = 1024
# Objects of other processes. Guarded by _naming; at most _MOST entries.
_learned: collections.OrderedDict[str, split.Static] = collections.OrderedDict()
_naming = threading.RLock()  # an object may die while another is named


def name(node: split.Static, *, portable: bool) -> str:
  """Returns the name of an object; a portable name refers to nothing in another process."""
  if portable:
    return names.abroad(name(node, portable=False))
  value = node.value
  with _naming:
    known = _names.get(id(value))
    if known is not None and _objects[known]() is not None:
      return known
    kind = f"{type(value).__module__}.{type(value).__qualname__}"
    made = _names[id(value)] = f"{kind}#{_counters[kind]}"
    _counters[kind] += 1
    try:
      weakref.finalize(value, _forget, id(value), made).atexit = False
      _objects[made] = functools.partial(_node_of, weakref.ref(value))
    except TypeError:
      one = exact.exact_object(value)
      weakref.finalize(one, _forget, id(value), made).atexit = False
      _objects[made] = functools.partial(_node_of, weakref.ref(one))
    return made


def _node_of(weak: weakref.ref[Any]) -> split.Static | None:
  """Returns the node of a live object; the reference is to the object or to its `Exact`."""
  found = weak()
  value = found.value if isinstance(found, exact.Exact) else found
  return None if found is None else split.Static.of_object(value)


def _forget(identity: int, made: str) -> None:
  with _naming:
    del _objects[made]
    if _names.get(identity) == made:
      del _names[identity]


def find(made: str) -> split.Static:
  """Returns the node of a name's object.

  Raises:
    GateDefinitionError: this process has no such object.
  """
  of_name = _objects.get(made) or _objects.get(names.at_home(made))
  node = _learned.get(made) if of_name is None else of_name()
  if node is None:
    raise GateDefinitionError(
      f"a program calls a method of an object ({made}) that is not in this process. Exported "
      "programs can't call methods of such objects: register the object's class as a pytree, or "
      "export a gate that is not a method"
    )
  return node


def learn(made: str, value: Any) -> None:
  """Gives the name of another process's object to an object of this process."""
  with _naming:
    _learned[made] = split.Static.of_object(value)
    _learned.move_to_end(made)
    oldest = _learned.popitem(last=False) if len(_learned) > _MOST else None
  del oldest  # without the lock: its end may run any code
