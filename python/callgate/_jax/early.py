# SPDX-License-Identifier: Apache-2.0
"""Jitted functions that JAX did not make through callgate: earlier ones, and copies.

The runtime learns each function that `jax.jit` makes after the import (`cpp_path.py`), counts its
calls and translates its errors. Earlier functions are found once, among all objects of the process,
before the first gate, kernel or tap is made, so before any of them can call it. Copies and
unpickled functions go through `__setstate__` of JAX's class.

The search takes about 5 ms for each 100,000 objects of the process. After `gc.freeze()` it includes
the frozen objects, and then freezes all objects.
"""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any

import jax
from jax._src import api

from callgate import _callgate


def adopt() -> None:
  """Finds earlier jitted functions; called once, before the first gate, kernel or tap is made."""
  kind: Any = type(api.jit(lambda: None))  # `jax.jit` may be another library's wrapper
  restore: Callable[[Any, Any], None] = kind.__setstate__  # of the C++ class (0.10 to 0.12)

  def __setstate__(self: Any, state: Any) -> None:
    restore(self, state)
    _callgate.have_raise(self, jax.errors.JaxRuntimeError)

  kind.__setstate__ = __setstate__
  was_frozen = gc.get_freeze_count() != 0
  gc.unfreeze()  # the search needs the objects that `gc.freeze` hides
  functions = [one for one in gc.get_objects() if type(one) is kind]
  if was_frozen:
    gc.freeze()  # forked processes share frozen pages
  for function in functions:
    _callgate.have_raise(function, jax.errors.JaxRuntimeError)
