"""Exceptions on their way back: described for XLA, kept, deferred, claimed.

A failing gate fails the program, and JAX raises `jax.errors.JaxRuntimeError` with text. The
original exception object is kept (`kept.py`), under the id that the text carries; `errors()`,
`barrier()` and `last_error()` give it back. All functions run under the GIL, on any thread.
"""

from __future__ import annotations

import re
import sys
import threading
import traceback as _traceback
from collections.abc import Callable, Sequence

from callgate._core import kept as _kept
from callgate._core.errors import CheckError, ConsumerError, KernelError

LONG_SECONDS = 1e9  # for waits without a limit
_lock = threading.Lock()
# The names of callees that stand for JAX's own callbacks (callgate.install) start so.
JAX_CALLBACK = "jax:"


def describe_failure(
  exception: BaseException,
  gate: str,
  site: str,
  shard: str = "",
  run: int = _kept.NO_RUN,
  thread: int = _kept.THIS_THREAD,
) -> str:
  """The runtime's `failed` hook: keeps the exception, returns the text for XLA's error.

  Args:
    exception: what the gate raised, with its traceback.
    gate: the gate's name.
    site: where the call was traced, "" when unknown.
    shard: which part of its arrays the call was on, "" for whole ones.
    run: XLA's number of the program's run.
    thread: the one that gave the call to XLA, or that XLA made it on.
  """
  if gate.startswith(JAX_CALLBACK):
    # The text of JAX's own callbacks, for programs that look at it.
    text = "".join(_traceback.format_exception(exception)).rstrip()
    number = _kept.keep(exception, run, thread)
    return f"CpuCallback error calling callback: {text}\n[callgate error #{number}]"
  if isinstance(exception, CheckError) and not exception.site:
    exception.at(site)
  on = f" on {shard}" if shard else ""
  return _describe(exception, f"gate '{gate}'{on}", site, run, thread)


def _describe(
  exception: BaseException,
  what: str,
  site: str,
  run: int = _kept.NO_RUN,
  thread: int = _kept.THIS_THREAD,
) -> str:
  where = f"callgate: raised in {what}" + (f", called at {site}" if site else "")
  if where not in getattr(exception, "__notes__", ()):
    exception.add_note(where)
  text = "".join(_traceback.format_exception(exception)).rstrip()
  return f"[callgate error #{_kept.keep(exception, run, thread)}] {where}\n{text}"


def raise_interrupt() -> None:
  """The runtime's hook on the main thread after a gate that raised KeyboardInterrupt: raises it.

  The gate's program fails with JAX's exception, which an `except Exception` takes for an error that
  one can go on after. A block of `errors()` raises the interrupt itself.
  """
  interrupt = _kept.take_interrupt()
  if interrupt is not None:
    raise interrupt


_raised: dict[int, BaseException] = {}
_RAISED = re.compile(r"\[callgate exception #(\d+)\]")


def kernel_raised(exception: BaseException | None) -> str:
  """The runtime's hook for code that has raised: a message that stands for the exception."""
  if exception is None:
    return "it failed without an exception"
  with _lock:
    number = len(_raised) + 1
    while number in _raised:
      number += 1
    _raised[number] = exception
  return f"[callgate exception #{number}]"


def kernel_failed(kernel: str, message: str, site: str) -> str:
  """The runtime's hook for failing kernels: keeps the exception, returns text for XLA's error."""
  match = _RAISED.fullmatch(message)
  with _lock:
    exception = _raised.pop(int(match.group(1)), None) if match else None
  if exception is None:
    exception = KernelError(kernel, message)
  return _describe(exception, f"kernel '{kernel}'", site)


def raise_kept(error: BaseException) -> None:
  """Raises the exception that an error's text stands for, if it is still here."""
  kept = _kept.find(str(error))
  if kept is not None:
    raise kept.exception from None


_POISONED = (
  "callgate: its program went on, as those of the other devices, with NaN for the call's results; "
  "integers and booleans, which have no NaN, are 0"
)


def defer(text: str) -> None:
  """The runtime's `deferred` hook: a failure that its program could not be told of.

  In a program over several devices the failing call's results are poisoned instead (NaN, or zero
  for integers), and the exception waits for `errors()`, `barrier()`, the next call of a gate or the
  end of the process.
  """
  exception = _kept.defer(text)
  if _POISONED not in getattr(exception, "__notes__", ()):
    exception.add_note(_POISONED)


def raise_deferred(*, of_all_threads: bool = False) -> None:
  """Raises the oldest deferred exception, if there is one, with the others named in its notes.

  Those of programs that another thread of Python called wait for that thread, or for `barrier()`.
  """
  if not _kept.has_deferred():  # asked on every call of a gate
    return
  others = set[int | None]() if of_all_threads else threads_of_python() - {threading.get_ident()}
  taken = _kept.take_deferred(others)
  if taken:
    _name_others(taken[0], taken[1:])
    raise_original(taken[0])


def print_deferred() -> bool:
  """At the end of the process: shows the deferred exceptions; whether there were any."""
  taken = _kept.take_deferred(set())
  if not taken:
    return False
  print("callgate: failures that no program's caller was told of:", file=sys.stderr)
  for exception in taken[:_SHOWN]:
    _traceback.print_exception(exception)
  if len(taken) > _SHOWN:
    print(f"callgate: and {len(taken) - _SHOWN} more", file=sys.stderr)
  return True


_SHOWN = 10


def _name_others(first: BaseException, others: Sequence[BaseException], more: int = 0) -> None:
  """Notes on an exception those that came with it; there are `more` that were not kept."""
  others = [other for other in others if other is not first]
  for other in others[:_SHOWN]:
    first.add_note(f"callgate: then {type(other).__name__}: {other}")
  if len(others) + more > _SHOWN:
    first.add_note(f"callgate: and {len(others) + more - min(len(others), _SHOWN)} more")


# What consumers of taps raised, oldest first, until it is raised where the user waits. Bounded: a
# consumer that raises for every record of a long run must not fill the memory.
_CONSUMER_ERRORS = 64
_consumer_errors: list[BaseException] = []
_consumer_errors_more = 0


def keep_consumer_error(error: BaseException, where: str) -> None:
  """Keeps what a consumer raised; `where` names the consumer, the tap and the record.

  An error may take a later one in, by its method `takes(later)`.
  """
  global _consumer_errors_more
  with _lock:
    for kept in _consumer_errors:
      takes: Callable[[BaseException], bool] | None = getattr(kept, "takes", None)
      if kept is not error and takes is not None and takes(error):
        return
    error.add_note(where)
    if len(_consumer_errors) < _CONSUMER_ERRORS:
      _consumer_errors.append(error)
    else:
      _consumer_errors_more += 1


def keep_consumer_failure(channel: str, consumer: str, message: str, lost: int) -> None:
  """The runtime's hook for native consumers: what they said, and what they have lost so far.

  A full disk fails batch after batch: that is one error, with the newest count.
  """
  where = f"callgate: raised in {consumer} of '{channel}'"
  with _lock:
    for error in _consumer_errors:
      if isinstance(error, ConsumerError) and error.said == message and where in error.__notes__:
        error.count(lost)
        return
  keep_consumer_error(ConsumerError(message, lost), where)


def take_consumer_error(where: str) -> BaseException | None:
  """The oldest exception that was kept with just this note, taken out; or None."""
  with _lock:
    for index, error in enumerate(_consumer_errors):
      if where in getattr(error, "__notes__", ()):
        return _consumer_errors.pop(index)
  return None


def raise_consumer_errors() -> None:
  """Raises the oldest exception of a consumer, with the others attached, and forgets them.

  The others are in its `callgate_others`, a tuple, and named in its notes.
  """
  global _consumer_errors_more
  if not _consumer_errors:
    return
  with _lock:
    errors, more = list(_consumer_errors), _consumer_errors_more
    _consumer_errors.clear()
    _consumer_errors_more = 0
  if not errors:
    return
  first, others = errors[0], tuple(error for error in errors[1:] if error is not errors[0])
  first.callgate_others = others  # pyright: ignore[reportAttributeAccessIssue]
  _name_others(first, others, more)
  raise_original(first)


def original_of(error: BaseException) -> BaseException:
  """The gate's exception that JAX's error stands for, where it is still here; else the error."""
  kept = _kept.find(str(error), claim=False)
  return error if kept is None else kept.exception


def threads_of_python() -> set[int | None]:
  """Threads that Python started. XLA's have an entry, too, once Python code asked for it there."""
  dummy = threading._DummyThread  # pyright: ignore[reportPrivateUsage, reportUnknownVariableType, reportAttributeAccessIssue, reportUnknownMemberType]
  return {t.ident for t in threading.enumerate() if not isinstance(t, dummy)}


def raise_original(exception: BaseException) -> None:
  """Raises the exception as it is: the chain that the user built is not replaced."""
  context = exception.__context__
  suppress = exception.__suppress_context__
  try:
    raise exception
  finally:
    exception.__context__ = context
    exception.__suppress_context__ = suppress


def last_error() -> BaseException | None:
  """The newest exception that a gate raised, or None.

  In a process with several threads: the newest of this thread, or of a thread of XLA's own.
  The object is the one that was raised, with its traceback.
  """
  own = threading.get_ident()
  python_threads = threads_of_python()
  for kept in _kept.newest_first():
    if kept.thread == own or kept.thread not in python_threads:
      kept.claimed = True
      return kept.exception
  return None
