# SPDX-License-Identifier: Apache-2.0
"""Exceptions of signal handlers, which Python runs on the main thread, in any code.

A handler may run in a gate, whose program then ends. Such an exception is not the gate's: the main
thread raises it again where it called the program.
"""

from __future__ import annotations

import functools
import signal
import threading
from types import CodeType
from typing import Any

# BaseException's own attribute, in case a class redefines it.
_traceback_of: Any = vars(BaseException)["__traceback__"].__get__


def has_raised(exception: BaseException) -> bool:
  """Returns True for KeyboardInterrupt, and for an exception of a user's handler on this thread."""
  if issubclass(type(exception), KeyboardInterrupt):  # `isinstance` also reads its `__class__`
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
  """Returns the code that calling a handler runs; None if it has no Python code."""
  while isinstance(handler, functools.partial):
    handler = handler.func
  handler = getattr(handler, "__func__", handler)
  if not hasattr(handler, "__code__"):
    handler = vars(type(handler)).get("__call__")
  code = getattr(handler, "__code__", None)
  return code if isinstance(code, CodeType) else None
