# SPDX-License-Identifier: Apache-2.0
"""Every exception class of callgate, and the note that leads to their page."""

from __future__ import annotations

from typing import Any


def reduced(error: BaseException) -> tuple[Any, ...]:
  """Returns the answer of `__reduce__`: a pickle makes the exception without its `__init__`.

  An exception's own way calls the class with `args`, the text, which is not what `__init__` takes.
  """
  return _made, (type(error), error.args), error.__dict__


def _made(kind: type[BaseException], args: tuple[Any, ...]) -> BaseException:
  made = kind.__new__(kind, *args)
  made.args = args
  return made


PAGE = "callgate: causes and remedies: https://callgate.github.io/callgate/messages/"


class GateError(Exception):
  """The base of callgate's exceptions; a note, `PAGE`, leads to the page of their messages."""

  def __reduce__(self) -> tuple[Any, ...]:
    return reduced(self)


class _DefinitionError(GateError):
  """The base of errors that are raised while the program is traced."""

  def __init__(self, *args: Any) -> None:
    super().__init__(*args)
    self.__notes__ = [PAGE]


class ResultError(GateError, TypeError):
  """A gate returned something other than its declared results: structure, shape or dtype."""


class EscapedViewError(GateError, ValueError):
  """A view of XLA's memory was kept beyond the call that it belonged to.

  The kept view has been given a private copy of the data, so reading it stays safe. On a GPU it is
  not: `callgate.Buffer`s refuse to be used, jax.Arrays are deleted and torch tensors copied, but
  nothing can be done about arrays of other libraries. They must not be used any more.
  """


class InputWriteError(GateError, ValueError):
  """A gate wrote into an input (found by `callgate.config(check_writes=True)`)."""


class GateTimeoutError(GateError, TimeoutError):
  """A gate ran longer than its `timeout`."""


class CaptureError(GateError, RuntimeError):
  """A gate with command_buffer=True did something that a CUDA graph can't hold."""


class Interruption(BaseException):
  """A call that Ctrl-C has ended; the program's caller gets the main thread's KeyboardInterrupt."""


class HandleError(GateError, ValueError):
  """A handle stands for no live object of this process; see `callgate.hold`."""


class EndOfFeed(GateError):
  """A program asked a feed for an item after the last one; see `callgate.feed`."""


class GateDefinitionError(_DefinitionError, TypeError):
  """A gate was defined or called in a way that can't work; raised while tracing."""


class ReplayError(GateError, ValueError):
  """A call in a block of `callgate.replay` is none of the recording's, or that can't be read."""


class RecordedError(GateError):
  """A recorded call raised an exception whose class a replay doesn't make; see `callgate.replay`.

  Attributes:
    kind: the class's name, with its module's.
    message: what the exception said.
  """

  def __init__(self, kind: str, message: str) -> None:
    super().__init__(f"{kind}: {message}" if message else kind)
    self.kind = kind
    self.message = message


class CheckError(GateError, AssertionError):
  """A `callgate.check` in a compiled program found its predicate False.

  Attributes:
    message: the text given to `check`, formatted.
    values: the values given to `check`, by name, as NumPy arrays.
    site: where the check was traced.
  """

  def __init__(self, message: str, values: dict[str, Any], site: str = "") -> None:
    self.message = message
    self.values = values
    self.at(site)

  def at_first(self, site: str) -> None:
    """Says where the check was traced, unless that has been said."""
    if not self.site:
      self.at(site)

  def at(self, site: str) -> None:
    """Says where the check was traced."""
    self.site = site
    shown = "".join(f"\n  {name} = {value}" for name, value in self.values.items())
    self.args = (f"{self.message}{shown}" + (f"\n  checked at {site}" if site else ""),)


class VerifyError(GateError, AssertionError):
  """Questions of `Gate.verify` failed; raised by `VerifyReport.raise_for_failed`.

  Attributes:
    failed: their names.
  """

  def __init__(self, message: str, failed: tuple[str, ...] = ()) -> None:
    super().__init__(message)
    self.failed = failed


class KernelError(GateError, RuntimeError):
  """A kernel failed: what its code said, an exception's text in C++, say.

  Attributes:
    kernel: the kernel's name.
    message: what it said.
    lane: of a vmap: "lane 3", or "lane (1, 2)" of two levels; "" without one.
  """

  def __init__(self, kernel: str, message: str, lane: str = "") -> None:
    super().__init__(f"kernel '{kernel}'" + (f" in {lane}" if lane else "") + f": {message}")
    self.kernel = kernel
    self.message = message
    self.lane = lane


class LossError(Exception):
  """The base of errors that say how many records they stand for: `lost`."""

  lost: int

  def takes(self, later: BaseException) -> bool:
    """True if it stands for a later error from here on, which says the same."""
    raise NotImplementedError


class ConsumerError(GateError):
  """A native consumer of a channel failed, or a sink's file did.

  Attributes:
    said: what it said.
    lost: records, lanes counted each, that it could not take until then.
  """

  def __init__(self, said: str, lost: int = 0) -> None:
    self.said = said
    self.count(lost)

  def count(self, lost: int) -> None:
    """Puts the number of lost records into the message."""
    self.lost = lost
    self.args = (self.said + (f"; {lost} record(s) lost so far" if lost else ""),)


class ProcessError(GateError, RuntimeError):
  """Another process failed, ended or died, while this one was in `barrier(all_processes=True)`.

  Attributes:
    process: index of that process (`jax.process_index()`).
    kind: name of the exception's type there; "" where there was none: it ended, or died.
    message: the exception's text, or what is known otherwise.
  """

  def __init__(self, process: int, kind: str, message: str) -> None:
    said = f": {kind}: {message}" if kind else f" {message}"
    super().__init__(f"process {process}{said}")
    self.process = process
    self.kind = kind
    self.message = message


class WorkerError(GateError, RuntimeError):
  """A worker process ended in a call, could not start, or is closed; see `callgate.workers`.

  Attributes:
    worker: which one, from 0; -1 where it is about none.
    pid: its process id; -1 where there was none.
    exit_code: what it ended with; None where a signal ended it, or it did not end.
    signal: the name of that signal, such as "SIGSEGV"; "" for none.
    stderr: the last of what it wrote there, at most 4096 bytes.
  """

  def __init__(
    self, message: str, *, worker: int = -1, pid: int = -1, exit_code: int | None = None,
    signal: str = "", stderr: str = "",
  ) -> None:  # fmt: skip
    super().__init__(message)
    self.worker, self.pid = worker, pid
    self.exit_code, self.signal, self.stderr = exit_code, signal, stderr


class CompileError(_DefinitionError, ValueError):
  """The C++ compiler refused a kernel's source, or there is no compiler.

  Attributes:
    output: what the compiler printed; line numbers are those of the source given.
  """

  def __init__(self, message: str, output: str = "") -> None:
    super().__init__(message)
    self.output = output


class KernelFileError(_DefinitionError, ValueError):
  """A file of kernels is damaged, is of another version, or isn't one."""


class ResultShapeError(ResultError):
  """A Numba function returned an array of another shape than its call declares."""

  def __init__(self, index: int, expected: tuple[int, ...], got: tuple[int, ...]) -> None:
    super().__init__(f"result {index}: expected the shape {expected}, got {got}")


# Their messages are the user's own: no page explains them.
OWN_WORDS = (CheckError, EndOfFeed, RecordedError, VerifyError)
