# SPDX-License-Identifier: Apache-2.0
"""Gates that a `concurrent.futures.Executor` runs: it gets pieces of their lanes.

Each piece is one task. The function goes with it as bytes, which a process unpickles once.
"""

from __future__ import annotations

import concurrent.futures as futures
import functools
import hashlib
import os
import pickle
import queue
import time
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from callgate import _callgate
from callgate._arrays import bind
from callgate._core import encoding
from callgate._core.errors import GateError, GateTimeoutError
from callgate._part import Wait
from callgate._places import travel
from callgate._places.place import Place, RemoteGate, RunLane
from callgate._places.remote import Description
from callgate._places.workers import usable_cpus

_PIECE_SECONDS = 0.01  # the seconds of a piece; sending it takes about a tenth of that
Arrays = Sequence[Any]
# The process whose gates an executor runs. Atomic: single steps.
_processes: weakref.WeakKeyDictionary[futures.Executor, int] = weakref.WeakKeyDictionary()


class ExecutorPlace(Place):
  """A `concurrent.futures.Executor`."""

  is_here, takes, arrays = False, ("retries", "in_flight"), ("numpy",)

  def __init__(self, executor: futures.Executor) -> None:
    self.executor = executor

  def bind(self, gate: Any) -> tuple[ExecutorGate, Any]:
    remote = ExecutorGate(gate, self.executor)
    return remote, _callgate.ExecutorCallee(gate.name, remote.run)


class ExecutorGate(RemoteGate):
  """A gate that an executor runs, as the runtime sees it."""

  def __init__(self, gate: Any, executor: futures.Executor) -> None:
    self.label, self.described, self.executor = gate.label, Description.of(gate), executor
    self.timeout, self.retries, self.aliases = gate.timeout, gate.retries, dict(gate.aliases)
    self.in_order = gate.effect == "ordered"
    self.most = 1 if self.in_order else gate.in_flight or 2 * _size(executor)
    # Threads get the function itself.
    self.here = isinstance(executor, futures.ThreadPoolExecutor)
    self._text: bytes | None = None
    self._tasks: dict[str, Callable[..., Any]] = {}  # by spec; executors may recognize equal tasks
    self._lane_seconds = 0.0

  def prepare(self) -> None:
    """Checks, while a call is traced, that the executor can make it."""
    if not _callgate.is_replaying():  # a replay may never need the executor
      self._pickle()

  def _refuse_the_parents(self) -> None:
    """Raises in a fork's child of the process whose gates the executor runs."""
    if _processes.setdefault(self.executor, os.getpid()) != os.getpid():
      raise GateError(
        f"{self.label}: this process was forked from the one whose gates ran on its "
        f"{type(self.executor).__name__}, whose threads are not here; create an executor in this "
        "process, or start processes with multiprocessing's 'spawn' or 'forkserver'"
      )

  def _pickle(self) -> None:
    if not self.here and self._text is None:
      self._text = travel.dumps(self.label, (vars(self.described), self.aliases))

  def _task(self, spec: str) -> Callable[..., Any]:
    if spec not in self._tasks:
      self._tasks[spec] = self._made_task(spec)
    return self._tasks[spec]

  def _made_task(self, spec: str) -> Callable[..., Any]:
    self._pickle()
    if self.here:
      return functools.partial(_run_here, vars(self.described), self.aliases, spec)
    spec, entries = encoding.for_another(spec)
    text = travel.dumps(self.label, entries)
    assert self._text is not None
    digest = hashlib.sha256(self._text).hexdigest()
    return functools.partial(run_there, digest, self._text, spec, text)

  def runner(self, callee: Any) -> RunLane:
    del callee

    def run(
      spec: str, cast: bool, operands: Arrays, types: Any, lane: int, interrupts: int
    ) -> list[Any]:
      del cast, types, lane, interrupts  # the waiting side checks the results
      call: Any = _OneLane(operands)
      self.run(spec, call)
      return list(call.results)

    return run

  def run(self, spec: str, lanes: _callgate.CallLanes) -> None:
    """Runs all lanes of a call; raises the exception of the first lane that failed."""
    count = len(lanes)
    if count == 0:
      return
    self._refuse_the_parents()
    task, outs = self._task(spec), None
    if self.described.style != "return":
      outs = [(array.shape, array.dtype) for array in lanes.empty()]
    wait = Wait(self.timeout or None)
    pending: dict[futures.Future[Any], tuple[int, int, int]] = {}
    # Not `futures.wait`, which an executor that is shut down doesn't notify of canceled futures.
    ended: queue.SimpleQueue[futures.Future[Any]] = queue.SimpleQueue()
    waiting = [(0, count, 0)]  # (first lane, number of lanes, tries)
    failure: tuple[int, BaseException] | None = None
    raised = False  # True if the function raised in the failed lane; else its whole piece was lost
    try:
      while pending or (waiting and failure is None):
        while waiting and failure is None and len(pending) < self.most:
          first, left, tries = waiting.pop()
          size = min(left, self._size_of_piece(left)) if tries == 0 else left
          if size < left:
            waiting.append((first + size, left - size, 0))
          inputs = [lanes.take(lane) for lane in range(first, first + size)]
          one = self.executor.submit(task, inputs, outs)
          pending[one] = (first, size, tries)
          one.add_done_callback(ended.put)
        one = self._next(ended, wait)
        first, size, tries = pending.pop(one)
        error = _error_of(one)
        answered = error is None
        if answered:
          error, first = self._take(lanes, first, one.result())
        elif tries < self.retries and not one.cancelled():  # a process of the executor has ended
          waiting.append((first, size, tries + 1))
          continue
        if error is not None and (failure is None or first < failure[0]):
          failure, raised = (first, error), answered
    finally:
      for one in pending:
        one.cancel()
    if failure is not None:
      if raised:
        lanes.failed = failure[0]
      raise failure[1]

  def _next(self, ended: queue.SimpleQueue[futures.Future[Any]], wait: Wait) -> futures.Future[Any]:
    """Waits for the end of a piece, and returns it."""
    try:
      return ended.get(timeout=None if wait.is_plain else wait.left)
    except queue.Empty:
      raise GateTimeoutError(
        f"{self.label} has run longer than its timeout, {self.timeout:g} s, on "
        f"{type(self.executor).__name__}; increase timeout= if the call needs longer"
      ) from None

  def _take(
    self, lanes: _callgate.CallLanes, first: int, answer: Any
  ) -> tuple[BaseException | None, int]:
    """Stores a piece's results; returns its error and the error's lane."""
    results, error, seconds = answer
    for lane, values in enumerate(results, first):
      try:
        lanes.give(lane, values)
      except Exception as wrong:  # noqa: BLE001 - the call's error
        return wrong, lane
    if results:
      self._lane_seconds = seconds / len(results)
    if error is None:
      return None, first
    where = f"{self.label} on {type(self.executor).__name__}"
    made = travel.unpack(where, error) if type(error) is bytes else error
    return made, first + len(results)

  def _size_of_piece(self, left: int) -> int:
    if self.in_order:
      return left
    even = -(-left // self.most)
    if not self._lane_seconds:
      return even
    return max(min(even, int(_PIECE_SECONDS / self._lane_seconds) + 1), -(-even // 4))


class _OneLane:
  """The only lane of a call that Python makes, with the interface that `ExecutorGate.run` uses."""

  def __init__(self, operands: Arrays) -> None:
    self._operands = operands
    self.results: tuple[Any, ...] = ()

  def __len__(self) -> int:
    return 1

  def take(self, lane: int) -> tuple[Any, ...]:
    del lane
    return tuple(array.copy() for array in self._operands)  # copies, also for a retry

  def give(self, lane: int, values: tuple[Any, ...]) -> None:
    del lane
    self.results = values


def _error_of(future: futures.Future[Any]) -> BaseException | None:
  try:
    return future.exception()
  except futures.CancelledError as error:  # the executor was shut down
    return error


def _size(executor: Any) -> int:
  """Returns the number of an executor's workers that may run at once."""
  size = getattr(executor, "_max_workers", None)
  return size if isinstance(size, int) and size > 0 else usable_cpus()


# -- where the executor runs -----------------------------------------------------------------------
@functools.lru_cache(maxsize=64)
def _function(digest: str, text: bytes) -> tuple[dict[str, Any], dict[int, int]]:
  del digest
  return pickle.loads(text)


def run_there(
  digest: str, text: bytes, spec: str, entries: bytes, inputs: list[Arrays], outs: Any
) -> Any:
  """Runs a piece in another process; returns the results up to an error, the error, and seconds."""
  try:
    described, aliases = _function(digest, text)
    encoding.learn(pickle.loads(entries))
  except Exception as error:  # noqa: BLE001 - the call's error
    return [], travel.pack(error), 0.0
  results, error, seconds = _run_here(described, aliases, spec, inputs, outs)
  return results, None if error is None else travel.pack(error), seconds


def _run_here(
  described: Mapping[str, Any], aliases: Mapping[int, int], spec: str, inputs: list[Arrays],
  outs: Any,
) -> Any:  # fmt: skip
  call, many = bind.bind(
    described["function"], described["style"], described["arrays"], described["name"], spec
  )
  results: list[tuple[Any, ...]] = []
  begin = time.perf_counter()
  for arrays in inputs:
    try:
      results.append(_run_lane(call, many, described["style"], aliases, arrays, outs))
    except BaseException as error:  # noqa: BLE001 - the call's error
      return results, error, time.perf_counter() - begin
  return results, None, time.perf_counter() - begin


def _run_lane(
  call: Callable[..., Any], many: bool, style: str, aliases: Mapping[int, int], arrays: Arrays,
  outs: Any,
) -> tuple[Any, ...]:  # fmt: skip
  for array in arrays:
    array.setflags(write=False)
  if style == "return":
    value = call(*arrays)
    if many and value is None:
      return ()
    return tuple(value) if many and isinstance(value, (tuple, list)) else (value,)
  made = [np.zeros(shape, dtype) for shape, dtype in outs]
  for operand, result in aliases.items():
    made[result][...] = arrays[operand]
  call(tuple(made) if many else made[0], *arrays)
  return tuple(made)
