# SPDX-License-Identifier: Apache-2.0
"""The code of a worker process: `main`, and its answers to the runtime (src/bindings/workers)."""

from __future__ import annotations

import atexit
import contextlib
import faulthandler
import functools
import os
import pickle
import signal
import sys
from typing import Any, NoReturn

import jax

from callgate import _callgate, _part
from callgate._arrays import bind
from callgate._core import encoding, foreign, kept, registry
from callgate._core.errors import WorkerError
from callgate._places import travel

_forked = False  # one thread: a fork's child has no other


def _in_child() -> None:
  global _forked
  _forked = True


def _bound(function: Any, style: str, arrays: str, name: str, spec: str) -> Any:
  call, many = bind.bind(function, style, arrays, name, spec)
  return functools.partial(_run, call), many


def _run(call: Any, *args: Any) -> Any:
  """Calls a function. A child that it forks ends with the call: only the worker answers."""
  try:
    result = call(*args)
  except BaseException as error:
    if _forked:
      foreign.print_traceback(error)
      _leave(1)
    raise
  if _forked:
    _leave(0)
  return result


def _leave(status: int) -> NoReturn:
  for stream in (sys.stdout, sys.stderr):
    with contextlib.suppress(OSError, ValueError):
      stream.flush()
  os._exit(status)


class _ParentsGate:
  """A gate of the parent, for messages and for the runtime in this process."""

  def __init__(
    self, *, name: str, function: Any, style: str, arrays: str, copy: bool,
    parameters: tuple[str, ...],
  ) -> None:  # fmt: skip
    self.parameters = parameters
    self.callee = _callgate.Callee(
      name, function, style=style, arrays="numpy" if arrays == "numpy" else "buffer",
      bind=functools.partial(_bound, function, style, arrays, name), owned_inputs=copy,
    )  # fmt: skip
    self.callee.give_up_name()  # another gate of the same name may come
    registry.register(name, self)


class _RequestsOfParent:
  """Answers the parent's requests, except calls, which the runtime makes."""

  def __init__(self) -> None:
    self._gates: dict[int, _ParentsGate] = {}

  def start(self, text: bytes) -> None:
    options: dict[str, Any] = pickle.loads(text)
    for name, value in options["jax"].items():
      jax.config.update(name, value)
    if options["initializer"] is not None:
      pickle.loads(options["initializer"])()

  def define(self, number: int, text: bytes) -> Any:
    """Defines a gate; returns the runtime's handle on it."""
    self._gates[number] = gate = _ParentsGate(**pickle.loads(text))
    return gate.callee

  def describe(self, gate: int, text: bytes) -> tuple[str, bool]:
    """Reads a call site of a gate: returns its spec, and True if it casts results."""
    del gate
    spec, cast, entries = pickle.loads(text)
    encoding.learn(entries)
    return spec, cast

  def forget(self, number: int) -> None:
    self._gates.pop(number, None)

  def drop(self, number: int) -> None:
    """Drops an object that the parent's programs no longer refer to."""
    _part.tell("object dropped", number)

  def raised(self, error: BaseException) -> bytes:
    return travel.pack(error)

  def failed(self, text: str) -> bytes:
    """Returns the pickled exception for the text of a call's failure."""
    found = kept.take(text)
    return travel.pack(WorkerError(text) if found is None else found.exception)


def _interrupt(number: int, frame: object) -> None:
  """Handles the parent's request after Ctrl-C; ignores other senders and other calls."""
  del number, frame
  if _callgate.worker_interrupted():
    raise KeyboardInterrupt


def main(memory: int, calls: int, parent_socket: int, parent: int, index: int) -> None:
  """Serves the parent until it closes its workers."""
  # The parent handles Ctrl-C. It was blocked until here.
  signal.signal(signal.SIGINT, signal.SIG_IGN)
  signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGINT])
  signal.signal(signal.SIGUSR2, _interrupt)
  os.register_at_fork(after_in_child=_in_child)
  # Before the parent kills a worker, it asks for its traceback.
  faulthandler.register(signal.SIGUSR1, all_threads=True)
  os.environ["CALLGATE_WORKER"] = str(index)
  with contextlib.suppress(OSError, ValueError):  # the parent reads it
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
  _callgate.serve_worker(_RequestsOfParent(), memory, calls, parent_socket, parent)
  # Runs the registered exit functions; finalizing the interpreter would only take time.
  atexit._run_exitfuncs()  # pyright: ignore[reportPrivateUsage]
  _leave(0)
