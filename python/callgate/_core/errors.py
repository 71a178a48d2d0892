# SPDX-License-Identifier: Apache-2.0
"""All exception classes of callgate, and the note that links to their page."""

from __future__ import annotations

from typing import Any, ClassVar, Self


def reduced(error: BaseException) -> tuple[Any, ...]:
  """Returns the result of `__reduce__`, so that a pickle skips the exception's `__init__`.

  The default calls the class with `args`, the text, but `__init__` takes other arguments.
  """
  return without_init, (type(error), error.args), error.__dict__


def without_init(kind: type[BaseException], args: tuple[Any, ...]) -> BaseException:
  """Makes an exception with these `args`, without its `__init__`."""
  made = kind.__new__(kind, *args)
  made.args = args
  return made


# The beginning of the note; the page follows.
LINK = "callgate: causes and remedies: https://callgate.github.io/callgate/"


class GateError(Exception):
  """The base class of callgate's exceptions; their last note links to the page of their messages.

  `CheckError`, `VerifyError`, `RecordedError` and `EndOfFeed` have no such note.
  """

  _page: ClassVar[str] = "messages_running"

  def __new__(cls, *args: Any, **kwargs: Any) -> Self:
    made = super().__new__(cls, *args, **kwargs)
    if cls._page:
      # A subclass may refuse attributes. A pickle or a copy replaces the list by its own.
      made.__dict__["__notes__"] = [f"{LINK}{cls._page}/"]
    return made

  def __reduce__(self) -> tuple[Any, ...]:
    return reduced(self)


class ResultError(GateError, TypeError):
  """A gate returned a result of another structure, shape, dtype or range than it declares."""


class EscapedViewError(GateError, ValueError):
  """A gate kept a view of XLA's memory after its call.

  On the CPU the kept view now has a private copy of the data, so reading it is safe. On a GPU a
  `callgate.Buffer` rejects further use, a jax.Array is deleted and a torch tensor gets a copy.
  Don't touch arrays of other libraries: their memory is XLA's.
  """


class InputWriteError(GateError, ValueError):
  """A gate wrote to an input; `callgate.config(check_writes=True)` detected it."""


class GateTimeoutError(GateError, TimeoutError):
  """A call took longer than the gate's `timeout`."""


class CaptureError(GateError, RuntimeError):
  """A gate with command_buffer=True did something that a CUDA graph can't record."""


class Interruption(BaseException):
  """Raised in a call that Ctrl-C ended; the program's caller gets a KeyboardInterrupt."""


class HandleError(GateError, ValueError):
  """A handle refers to no live object of this process; see `callgate.hold`."""


class EndOfFeed(GateError):
  """A program read a feed after its last item; see `callgate.feed`."""

  _page = ""


class GateDefinitionError(GateError, TypeError):
  """A gate, an option or a call is wrong; raised before the program runs."""

  _page = "messages"


class ReplayError(GateError, ValueError):
  """A replayed call isn't in the recording, or the file is unreadable; see `callgate.replay`."""


class RecordedError(GateError):
  """A recorded call raised an exception that a replay can't create; see `callgate.replay`.

  Attributes:
    kind: the name of the exception's class, with its module.
    message: the exception's text.
  """

  _page = ""

  def __init__(self, kind: str, message: str) -> None:
    super().__init__(f"{kind}: {message}" if message else kind)
    self.kind = kind
    self.message = message


class CheckError(GateError, AssertionError):
  """The predicate of a `callgate.check` was False.

  Attributes:
    message: the check's formatted message.
    values: the check's values by name, as NumPy arrays.
    site: the place where the check was traced.
  """

  _page = ""

  def __init__(self, message: str, values: dict[str, Any], site: str = "") -> None:
    self.message, self.values, self.site = message, values, ""
    set_site(self, site)


def set_site(error: CheckError, site: str) -> None:
  """Sets where an error's check was traced, also in the error's text."""
  error.site = site
  shown = "".join(f"\n  {name} = {value}" for name, value in error.values.items())
  error.args = (f"{error.message}{shown}" + (f"\n  checked at {site}" if site else ""),)


class VerifyError(GateError, AssertionError):
  """Questions of `Gate.verify` failed; `VerifyReport.raise_for_failed` raises it.

  Attributes:
    failed: the names of the failed questions.
  """

  _page = ""

  def __init__(self, message: str, failed: tuple[str, ...] = ()) -> None:
    super().__init__(message)
    self.failed = failed


class KernelError(GateError, RuntimeError):
  """A kernel failed, for example by a C++ exception.

  Attributes:
    kernel: the kernel's name.
    message: the text of the kernel's error.
    lane: the lane of a vmap: "lane 3", or "lane (1, 2)" for two levels; "" without vmap.
  """

  def __init__(self, kernel: str, message: str, lane: str = "") -> None:
    super().__init__(f"kernel '{kernel}'" + (f" in {lane}" if lane else "") + f": {message}")
    self.kernel = kernel
    self.message = message
    self.lane = lane


class LossError(Exception):
  """The base of errors that count the records lost by a failure in `lost`."""

  lost: int

  def _takes(self, later: BaseException) -> bool:
    """Returns True if this error also counts a later one with the same text."""
    raise NotImplementedError


class SinkError(LossError, GateError, RuntimeError):
  """A sink can't be opened or can't write a record; the message names the sink and the reason.

  Attributes:
    lost: the number of records that this error stands for.
  """

  __module__ = "callgate.sinks"  # its public name, for tracebacks

  def __init__(self, message: str, *, lost: int = 0) -> None:
    super().__init__(message)
    self.lost, self._said = lost, message

  def _takes(self, later: BaseException) -> bool:
    """Adds the records of a later error, and returns True, if that error repeats this one.

    A full disk's error repeats for batch after batch.
    """
    if not isinstance(later, SinkError) or later._said != self._said:
      return False
    self.lost += later.lost
    self.args = later.args
    return True


class ConsumerError(SinkError):
  """A native sink of a channel failed.

  Attributes:
    said: the failure's text.
    lost: the number of records lost so far; each lane counts.
  """

  def __init__(self, said: str, lost: int = 0) -> None:
    super().__init__(said)
    self.said = said
    set_lost(self, lost)

  def _takes(self, later: BaseException) -> bool:
    """Returns False: `keep_consumer_failure` sets the latest count instead."""
    del later
    return False


def set_lost(error: SinkError, lost: int, so_far: int | None = None) -> None:
  """Sets the number of records that an error stands for; its text gets the number lost so far."""
  so_far = lost if so_far is None else so_far
  error.lost = lost
  said = error._said  # pyright: ignore[reportPrivateUsage]
  error.args = (said + (f"; {so_far} record(s) lost so far" if so_far else ""),)


class ProcessError(GateError, RuntimeError):
  """Another process failed, ended or died while this one was in `barrier(all_processes=True)`.

  Attributes:
    process: the index of that process (`jax.process_index()`).
    kind: the name of the exception's class in that process; "" if it ended or died without one.
    message: the exception's text, or a description of the end.
  """

  def __init__(self, process: int, kind: str, message: str) -> None:
    said = f": {kind}: {message}" if kind else f" {message}"
    super().__init__(f"process {process}{said}")
    self.process = process
    self.kind = kind
    self.message = message


class WorkerError(GateError, RuntimeError):
  """A worker process ended during a call, could not start, or is closed; see `callgate.workers`.

  Attributes:
    worker: the worker's index, from 0; -1 if the error is about no single worker.
    pid: the worker's process id; -1 if there is none.
    exit_code: the worker's exit code; None if a signal ended it, or it has not ended.
    signal: the name of that signal, such as "SIGSEGV"; "" for none.
    stderr: the end of the worker's stderr, at most 4096 bytes.
  """

  def __init__(
    self, message: str, *, worker: int = -1, pid: int = -1, exit_code: int | None = None,
    signal: str = "", stderr: str = "",
  ) -> None:  # fmt: skip
    super().__init__(message)
    self.worker, self.pid = worker, pid
    self.exit_code, self.signal, self.stderr = exit_code, signal, stderr


class CompileError(GateError, ValueError):
  """The compiler rejected a kernel's source, or there is no compiler.

  Attributes:
    output: the compiler's output, with the line numbers of your source.
  """

  _page = "messages"

  def __init__(self, message: str, output: str = "") -> None:
    super().__init__(message)
    self.output = output


class KernelFileError(GateError, ValueError):
  """A file of kernels is damaged, of another version, or not a file of kernels."""


class ResultShapeError(ResultError):
  """A Numba function returned an array of another shape than its call declares.

  Attributes:
    kernel: the kernel's name.
  """

  def __init__(self, index: int, expected: tuple[int, ...], got: tuple[int, ...]) -> None:
    super().__init__(f"result {index}: expected the shape {expected}, got {got}")
    self.kernel = ""


def set_kernel(error: ResultShapeError, kernel: str) -> None:
  """Sets the kernel's name, also in the error's text; compiled code raises the error without it."""
  error.kernel = kernel
  error.args = (f"kernel '{kernel}': {error}",)
