# SPDX-License-Identifier: Apache-2.0
"""Exceptions on their way to the user: described for XLA, kept, deferred, claimed.

A failing gate fails the program, and JAX raises `jax.errors.JaxRuntimeError` with a text. The store
(`kept.py`) keeps the original exception under an id in this text; `errors()`, `barrier()` and
`last_error()` return it. All functions run under the GIL, on any thread.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Sequence

from callgate._core import foreign, handlers, registry
from callgate._core import kept as _kept
from callgate._core.errors import (
  CheckError,
  ConsumerError,
  KernelError,
  LossError,
  ResultShapeError,
  set_kernel,
  set_lost,
  set_site,
)

# The prefix of callees of JAX's own callbacks (callgate.install).
JAX_CALLBACK = "jax:"


def describe_failure(
  exception: BaseException,
  gate: str,
  site: str,
  shard: str = "",
  run: int = _kept.NO_RUN,
  thread: int = _kept.THIS_THREAD,
  lane: str = "",
) -> str:
  """The runtime's `failed` hook: keeps the exception, returns the text for XLA's error.

  `site` is where the call was traced. `shard` is the part of its arrays ("" if unknown or whole).
  `run` is XLA's number of the program's run. `thread` is the thread that dispatched the call, or
  that runs it. `lane` is the lane of a `vmap` in its shard ("" for none).
  """
  if gate.startswith(JAX_CALLBACK):
    # The text of JAX's own callbacks, for programs that match it.
    number = _kept.keep(exception, run, thread)
    text = foreign.traceback_of(exception)
    return f"CpuCallback error calling callback: {text}\n[callgate error #{number}]"
  if foreign.is_a(exception, CheckError) and not exception.site:
    set_site(exception, site)
  if getattr(registry.get(gate), "kind", "") == "feed":
    return _describe(exception, f"feed '{gate}'", site, run, thread, once=True)
  what = f"gate '{gate}'" + (f" in {lane}" if lane else "") + (f" on {shard}" if shard else "")
  return _describe(exception, what, site, run, thread)


def _describe(
  exception: BaseException, what: str, site: str, *origin: int, once: bool = False
) -> str:
  """Describes a failure; with `once` notes the first call's place only, as feeds fail each time."""
  raised = f"callgate: raised in {what}"
  where = raised + (f", called at {site}" if site else "")
  number = _kept.keep(exception, *origin)
  if not (once and any(note.startswith(raised) for note in foreign.notes_of(exception))):
    foreign.add_note(exception, where)
  return f"[callgate error #{number}] {where}\n{foreign.traceback_of(exception)}"


def describe_handled(exception: BaseException) -> str:
  """The runtime's `handled` hook, for an exception of a signal handler in a program's call."""
  where = "callgate: a signal's handler raised while the program ran"
  return (
    f"[callgate error #{_kept.keep_for_main(exception)}] {where}\n{foreign.traceback_of(exception)}"
  )


def keep_unheard(exception: BaseException) -> bool:
  """The runtime's `unheard` hook, for an exception without a caller; True if the main thread's."""
  if not handlers.has_raised(exception):
    return False
  _kept.keep_for_main(exception)
  return True


def kernel_raised(exception: BaseException | None) -> str:
  """The runtime's hook for code that raised: returns a message that represents the exception."""
  if exception is None:
    return "the call failed without an exception"
  return f"[callgate error #{_kept.set_aside(exception)}]"


def kernel_failed(kernel: str, message: str, site: str, lane: str) -> str:
  """The runtime's hook for failing kernels: keeps the exception, returns XLA's error text."""
  exception = _kept.take_back(message) or KernelError(kernel, message, lane)
  if isinstance(exception, ResultShapeError) and not exception.kernel:
    set_kernel(exception, kernel.partition("[")[0])  # without the variant
  return _describe(exception, f"kernel '{kernel}'" + (f" in {lane}" if lane else ""), site)


def raise_kept(error: BaseException) -> None:
  """Raises the exception that an error's text stands for, if it is still kept."""
  if (kept := _kept.find(foreign.text_of(error))) is not None:
    raise kept.exception from None


_POISONED = (
  "callgate: the program continued, with NaN for the call's results; integer and bool results, "
  "which have no NaN, are 0"
)


def defer(text: str) -> None:
  """The runtime's `deferred` hook, for a failure that its program can't report.

  In a program over several devices the failing call's results are poisoned instead (NaN, or zero
  for integers). The exception waits for `errors()`, `barrier()`, the next call of a gate or the end
  of the process.
  """
  foreign.add_note(_kept.defer(text), _POISONED)


def raise_deferred(*, of_all_threads: bool = False) -> None:
  """Raises the oldest deferred exception, if there is one, with notes about the others.

  Exceptions of another Python thread's programs wait for that thread, or for `barrier()`.
  """
  if not _kept.deferred:  # each call of a gate checks this
    return
  if (in_group := _gathers()) and not of_all_threads:
    return  # the end of the block raises all
  if taken := take_deferred(of_all_threads=of_all_threads):
    if in_group:
      raise_group(taken)
    _name_others(taken[0], taken[1:])
    foreign.raise_unchained(taken[0])


_gathering = threading.local()  # .blocks: the thread's open `errors(all=True)`


def gather(change: int) -> None:
  """Counts the thread's blocks that raise all exceptions as a group: 1 to enter, -1 to leave."""
  _gathering.blocks = getattr(_gathering, "blocks", 0) + change


def _gathers() -> bool:
  return getattr(_gathering, "blocks", 0) > 0


def raise_group(found: list[BaseException]) -> None:
  """Raises a group of the exceptions without duplicates, if there are any."""
  each = list({id(one): one for one in found}.values())
  calls = "1 call" if len(each) == 1 else f"{len(each)} calls"
  try:
    if each:
      foreign.raise_unchained(BaseExceptionGroup(f"callgate: {calls} failed", each))
  finally:
    del found, each  # as in `foreign.raise_unchained`


def take_deferred(*, of_all_threads: bool = False) -> list[BaseException]:
  """Removes and returns the deferred exceptions, oldest first; other Python threads' ones stay."""
  others = set[int | None]() if of_all_threads else threads_of_python() - {threading.get_ident()}
  return _kept.take_deferred(others)


def print_deferred() -> bool:
  """Prints the deferred exceptions at the end of the process; returns True if there were any."""
  if taken := _kept.take_deferred(set()):
    print("callgate: failures that no caller received:", file=sys.stderr)
  for exception in taken[:_SHOWN]:
    foreign.print_traceback(exception)
  if len(taken) > _SHOWN:
    print(f"callgate: and {len(taken) - _SHOWN} more", file=sys.stderr)
  return bool(taken)


_SHOWN = 10


def _name_others(first: BaseException, others: Sequence[BaseException], more: int = 0) -> None:
  """Adds notes about the other exceptions to one; `more` is the number of those not kept."""
  others = [other for other in others if other is not first]
  for other in others[:_SHOWN]:
    foreign.add_note(first, f"callgate: then {foreign.said_by(other)}")
  if (unnamed := len(others[_SHOWN:]) + more) > 0:
    foreign.add_note(first, f"callgate: and {unnamed} more")


def keep_consumer_error(error: BaseException, where: str) -> None:
  """Keeps a consumer's exception; `where` names the consumer, the tap and the record.

  Beyond the store's limit it only counts them, so that an exception that is raised again and again
  doesn't collect notes.
  """

  def takes(one: _kept.KeptError) -> bool:
    kept = one.exception
    if kept is error or not foreign.is_a(kept, LossError):
      return False
    return kept._takes(error)  # pyright: ignore[reportPrivateUsage]

  if _kept.find_consumers(takes) is None and _kept.keep_consumers(error, where):
    foreign.add_note(error, where)  # without a lock: the class may run any code


def keep_consumer_failure(channel: str, consumer: str, message: str, lost: int) -> None:
  """The runtime's hook for native consumers: the error's text, and the number of lost records.

  A full disk fails every batch: that is one error, with the latest count.
  """
  where = f"callgate: raised in {consumer} of '{channel}'"

  def counts(one: _kept.KeptError) -> bool:
    error = one.exception
    if one.consumer != where or not isinstance(error, ConsumerError) or error.said != message:
      return False
    set_lost(error, lost)
    return True

  if _kept.find_consumers(counts) is None:
    keep_consumer_error(ConsumerError(message, lost), where)


def take_consumer_error(where: str) -> BaseException | None:
  """Removes and returns the oldest exception with this note; None if there is none."""
  return _kept.find_consumers(lambda one: one.consumer == where, take=True)


def raise_consumer_errors() -> None:
  """Raises the oldest exception of a consumer, with the others attached, and forgets them.

  The others are in its `callgate_others`, a tuple, and in its notes.
  """
  errors, more = _kept.take_consumers()
  if not errors:
    return
  first, others = errors[0], tuple(error for error in errors[1:] if error is not errors[0])
  foreign.attach(first, "callgate_others", others)
  _name_others(first, others, more)
  foreign.raise_unchained(first)


def original_of(error: BaseException) -> BaseException:
  """Returns the gate's exception for JAX's error, if it is still kept; else the error."""
  kept = _kept.find(foreign.text_of(error), claim=False)
  return error if kept is None else kept.exception


def threads_of_python() -> set[int | None]:
  """Returns threads that Python started, and XLA's threads on which Python code asked for it."""
  dummy = threading._DummyThread  # pyright: ignore[reportPrivateUsage, reportUnknownVariableType, reportAttributeAccessIssue, reportUnknownMemberType]
  return {t.ident for t in threading.enumerate() if not isinstance(t, dummy)}


def last_error() -> BaseException | None:
  """Returns the newest exception that a gate raised, or None.

  ```python
  import callgate as cg, jax

  @cg.gate(out=lambda x: x)
  def fail(x):
    raise ValueError("no")

  try:
    jax.jit(fail)(1.0).block_until_ready()
  except (jax.errors.JaxRuntimeError, ValueError):
    assert str(cg.last_error()) == "no"
  ```

  It returns the original object with its traceback. In a process with several threads it returns
  the newest exception of this thread's programs, or of one of XLA's threads.
  """
  others = threads_of_python() - {threading.get_ident()}
  for kept in _kept.newest_first():
    if kept.thread not in others:
      kept.claimed = True
      return kept.exception
  return None
