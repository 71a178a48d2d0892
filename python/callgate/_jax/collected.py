# SPDX-License-Identifier: Apache-2.0
"""JAX's arrays as Python's collector knows them, for free-threaded Python 3.13.

jaxlib's list of arrays also has those that another thread is freeing. Python's API that leaves them
out is new in 3.14; before that, a reference from the list may be one to freed memory. The collector
stops the other threads while it lists its objects. It leaves out objects that `gc.freeze` has
frozen, so `gc.freeze` notes the arrays first.
"""

from __future__ import annotations

import gc
import sys
import weakref
from typing import Any

from jax._src.array import ArrayImpl as _ArrayImpl

from callgate import _callgate

NEEDED = sys.version_info < (3, 14) and not getattr(sys, "_is_gil_enabled", lambda: True)()
# The frozen arrays. Atomic: single steps; emptied by the next `gc.freeze`, of those that died.
_frozen: list[weakref.ref[Any]] = []


def live_arrays() -> list[Any]:
  """Returns all arrays that are not deleted."""
  in_one_stop: Any = getattr(_callgate, "live_objects", None)  # free-threaded Python's
  every = gc.get_objects() if in_one_stop is None else in_one_stop(_ArrayImpl)
  frozen = [reference() for reference in list(_frozen)]
  known = [one for one in (*every, *frozen) if type(one) is _ArrayImpl]
  return [one for one in known if not one.is_deleted()]


def start() -> None:
  """Makes `gc.freeze` note the arrays, once, if the collector has to list them."""
  if not NEEDED:
    return
  freeze = gc.freeze

  def noting() -> None:
    _frozen[:] = [weakref.ref(one) for one in live_arrays()]
    freeze()

  gc.freeze = noting
