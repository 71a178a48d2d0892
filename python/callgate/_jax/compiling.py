# SPDX-License-Identifier: Apache-2.0
"""Programs between their lowering and the end of their compilation (JAX 0.10 to 0.12).

A program names its callees, and XLA looks the names up when it loads the compiled program. In
between another thread may define a gate of the same name.
"""

from __future__ import annotations

import contextlib
import threading
import weakref
from collections.abc import Generator
from typing import Any

from jax._src.interpreters import pxla as _pxla

# The callees that each module names, by name. Atomic: single steps.
_callees: weakref.WeakKeyDictionary[Any, dict[str, Any]] = weakref.WeakKeyDictionary()
_changed = threading.Condition()  # one thread: a forked child, which has no other, makes a new one
# The callee that has each name, for each running compilation. Guarded by _changed; emptied by the
# end of each compilation.
_claims: dict[str, list[Any]] = {}


def keep_callee(context: Any, callee: Any) -> None:
  """Keeps a callee of the runtime alive as long as the module being lowered, which calls it.

  The module calls it even if another callee has the name when the module is compiled.
  """
  callees = _callees.setdefault(context.module_context.module, {})
  if callees.setdefault(callee.name, callee) is not callee:
    raise RuntimeError(
      f"callgate: '{callee.name}' was redefined while a program that calls the old and the new "
      "one was lowered; call the program again"
    )


def start() -> None:
  """Wraps JAX's compilation, once for the process."""
  make = _pxla.MeshComputation.compile

  def compile(self: Any, *args: Any, **kwargs: Any) -> Any:
    with _claimed(_callees.get(self._hlo, {})):
      return make(self, *args, **kwargs)

  _pxla.MeshComputation.compile = compile


def after_fork() -> None:
  """Resets the state in a forked child, where no program is being compiled."""
  global _changed
  _changed = threading.Condition()  # the parent's thread may hold the old one
  for callee, *_ in _claims.values():
    callee.release_name()
  _claims.clear()


@contextlib.contextmanager
def _claimed(callees: dict[str, Any]) -> Generator[None]:
  """Gives the callees their names in the block; waits for compilations that need the names."""

  def are_free() -> bool:
    return all(_claims.get(name, [callee])[0] is callee for name, callee in callees.items())

  claimed = list[str]()
  try:
    with _changed:
      _changed.wait_for(are_free)
      for name, callee in callees.items():
        _claims.setdefault(name, []).append(callee)
        claimed.append(name)
        callee.claim_name()
    yield
  finally:
    with _changed:
      for name in claimed:
        callee = _claims[name].pop()
        if not _claims[name]:
          del _claims[name]
          callee.release_name()
      _changed.notify_all()
