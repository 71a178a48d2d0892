# SPDX-License-Identifier: Apache-2.0
"""Exceptions that signals' handlers raise: Python runs those on the main thread, in any code there.

So also in a gate, whose program then ends. Such an exception is not the gate's: the main thread
raises it once more, where it called the program.
"""

from __future__ import annotations

import functools
import signal
import threading
from types import CodeType
from typing import Any

# Whatever a class makes of the name.
_traceback_of: Any = vars(BaseException)["__traceback__"].__get__


def has_raised(exception: BaseException) -> bool:
  """True for KeyboardInterrupt, and for what a handler of the user's raised on this thread."""
  if issubclass(type(exception), KeyboardInterrupt):  # `isinstance` asks its `__class__`, too
    return True
  if threading.current_thread() is not threading.main_thread():
    return False
  codes = {_code_of(signal.getsignal(number)) for number in signal.valid_signals()} - {None}
  step = _traceback_of(exception)
  while codes and step is not None:
    if step.tb_frame.f_code in codes:
      return True
    step = step.tb_next
  return False


def _code_of(handler: Any) -> CodeType | None:
  """The code that calling a handler runs; None where there is none, or it is not Python's."""
  while isinstance(handler, functools.partial):
    handler = handler.func
  handler = getattr(handler, "__func__", handler)
  if not hasattr(handler, "__code__"):
    handler = vars(type(handler)).get("__call__")
  code = getattr(handler, "__code__", None)
  return code if isinstance(code, CodeType) else None
