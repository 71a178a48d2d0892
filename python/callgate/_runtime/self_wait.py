# SPDX-License-Identifier: Apache-2.0
"""Detects gates with `run_on="own"` that wait for themselves.

During the first call of a jitted function, JAX makes other threads that call it wait for the end of
that call. A gate with `run_on="own"` in this function that calls the function would wait forever.
It gets JAX's RecursionError: the runtime calls `report` every second of a program's first run
(xla/call_site.h).
"""

from __future__ import annotations

import ctypes
import dis
import sys
import threading
import time
from collections.abc import Sequence
from types import FrameType
from typing import Any, cast

from callgate._core.failures import describe_failure
from callgate._jax import dispatch


class Ended(RecursionError):
  """Raised in the callable after its call has failed by `report`; its result is ignored."""

  def __init__(self) -> None:
    super().__init__("the jitted function that is called here waited for this gate")


_lock = threading.Lock()
# Each thread's position and its seconds of processor time at the last call of `report`. Guarded by
# _lock; at most one entry for each thread's number.
_seen: dict[int, tuple[tuple[object, int], float]] = {}
_AT_REST = 0.01  # seconds of processor time: a waiting thread uses less between two reports


def report(gate: str, thread: int) -> str:
  """Returns why a thread that runs a gate will never continue, as an error's text; else "".

  The thread was at the same place twice, without working in between. There it uses a function whose
  first call, on another thread, executes a program with the gate. The exception is raised in the
  thread when the first call has ended.
  """
  frames = sys._current_frames()  # pyright: ignore[reportPrivateUsage]
  frame = frames.pop(thread, None)
  if frame is None:  # the thread has ended
    with _lock:
      _seen.pop(thread, None)
    return ""
  place, spent = (frame.f_code, frame.f_lasti), _processor_time(thread)
  with _lock:
    stood, then = _seen.get(thread, (None, 0.0))
    _seen[thread] = place, spent
  if stood != place or spent - then > _AT_REST:
    return ""
  used, calls = _jitted(frame), dispatch.first_calls(frames.values())
  calls = ((f, str(jaxpr)) for f, jaxpr in calls if any(f is one for one in used))
  own = (f for f, text in calls if f"gate '{gate}'" in text)
  if (function := next(own, None)) is None:
    return ""
  with _lock:
    _seen.pop(thread, None)
  name = getattr(function, "__qualname__", repr(function))
  error = RecursionError(
    f"gate '{gate}', which has run_on='own', calls the jitted function '{name}' that it runs in, "
    f'at File "{frame.f_code.co_filename}", line {frame.f_lineno}. JAX makes this call wait for '
    "the end of the function's first call, which waits for the gate. Make a first call with such "
    "arguments in which the gate doesn't call the function"
  )
  ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread), ctypes.py_object(Ended))
  return describe_failure(error, gate, "")


def _processor_time(thread: int) -> float:
  """Returns a live thread's processor time in seconds; 0 if the system doesn't report it."""
  if not hasattr(time, "pthread_getcpuclockid"):
    return 0.0
  return time.clock_gettime(time.pthread_getcpuclockid(thread))


def _jitted(frame: FrameType) -> list[Any]:
  """Returns the jitted functions that a frame's call may mean: by name, attribute or container."""
  names = _callee(frame)
  values: list[Any] = []
  for held in (frame.f_locals, frame.f_globals):
    values += [held[name] for name in names if name in held]
  for holder in [x for value in values for x in (value, type(value))]:
    held = getattr(holder, "__dict__", {})
    values += [held[name] for name in names if name in held]
  for value in tuple(values):
    if isinstance(value, (list, tuple)):
      values += cast("Sequence[Any]", value)
    elif isinstance(value, dict):
      values += cast("dict[Any, Any]", value).values()
  return [value.__wrapped__ for value in values if dispatch.is_jitted(value)]


def _callee(frame: FrameType) -> set[str]:
  """Returns the names in the callee of a frame's current call: `a` and `b` for `a.b(c)`."""
  instructions = list(dis.get_instructions(frame.f_code))
  call = next((one.positions for one in instructions if one.offset == frame.f_lasti), None)
  begin = (call.lineno, call.col_offset) if call else (None, None)
  if None in begin:  # compiled without positions (`python -X no_debug_ranges`)
    code = frame.f_code
    return {*code.co_names, *code.co_varnames, *code.co_cellvars, *code.co_freevars}
  # An expression begins where its first part begins.
  return {
    name
    for one in instructions
    if one.positions and (one.positions.lineno, one.positions.col_offset) == begin
    for name in (one.argval if isinstance(one.argval, tuple) else (one.argval,))
    if isinstance(name, str)
  }
