# SPDX-License-Identifier: Apache-2.0
"""Gates that run in workers: the data that they get, and the exceptions of their failures."""

from __future__ import annotations

import dataclasses
import functools
import signal
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Self

import numpy as np

from callgate import _callgate
from callgate._core import encoding, foreign
from callgate._core.dtypes import dtype_named
from callgate._core.errors import GateTimeoutError, Interruption, WorkerError
from callgate._core.public import core
from callgate._places import travel
from callgate._places.place import RemoteGate, RunLane, Types


@dataclasses.dataclass(frozen=True, eq=False)
class Description:
  """The description from which a worker makes a callee."""

  name: str
  function: Callable[..., Any]
  style: str
  arrays: str
  copy: bool
  parameters: tuple[str, ...]

  @classmethod
  def of(cls, gate: Any) -> Self:
    return cls(gate.name, gate.function, gate.style, gate.arrays, gate.copy, gate.parameters)


# WorkerFailure::Kind.
_KINDS = (
  "raised", "undefined", "not started", "ended", "overdue", "interrupted", "closed", "gone",
  "restarts",
)  # fmt: skip
_ENDS = 4  # before the last attempt, see Pool::gives_up


# The least seconds that a worker gets to load the function of a gate with a timeout.
LOADING_SECONDS = 30.0


class WorkerGate(RemoteGate):
  """A gate that runs on `workers` (`callgate.Workers`), as the runtime sees it."""

  def __init__(self, label: str, described: Description, workers: Any, timeout: float) -> None:
    self.label, self.described, self.workers, self.timeout = label, described, workers, timeout
    self.loading = max(timeout, LOADING_SECONDS) if timeout else 0.0
    self.most = 2 * workers.count
    self._bytes: bytes | None = None

  def callee(self, name: str, retries: int, in_order: bool, by_lane: bool) -> Any:
    """Returns the runtime's handle on the gate's function."""
    return _callgate.WorkerCallee(
      name, start=self.start, describe=self.describe, failed=self.failed, timeout=self.timeout,
      loading=self.loading, retries=retries, in_order=in_order, by_lane=by_lane,
    )  # fmt: skip

  def runner(self, callee: Any) -> RunLane:
    site = functools.lru_cache(64)(callee.site)

    def run(
      spec: str, cast: bool, operands: Sequence[Any], types: Types, lane: int, interrupts: int
    ) -> list[Any]:
      results = [np.empty(shape, dtype_named(name)) for shape, name in types]
      site(spec, cast).run(operands, results, lane, interrupts)
      return results

    return run

  def start(self) -> Any:
    """Returns the runtime's pool; starts it if needed."""
    return core(self.workers).pool()

  def prepare(self) -> None:
    """Checks, while a call is traced, that workers can make it."""
    if not _callgate.is_replaying():  # a replay may never need workers
      self._of_gate()
      self.start()

  def describe(self, spec: str | None, cast: bool) -> bytes:
    """Returns the definition of a call site for a worker; with None, that of the gate."""
    if spec is None:
      return self._of_gate()
    spec, entries = encoding.for_another(spec)
    return travel.dumps(self.label, (spec, cast, entries))

  def _of_gate(self) -> bytes:
    if self._bytes is None:
      self._bytes = travel.dumps(self.label, vars(self.described))
    return self._bytes

  def failed(self, what: Mapping[str, Any]) -> BaseException:
    """Returns the exception of a WorkerFailure (src/workers/pool.h)."""
    kind = _KINDS[what["kind"]]
    who = f"worker {what['worker']} of {self.workers.count}"
    if what["pid"] > 0:
      who += f" (process {what['pid']})"
    if what["raised"]:
      error = travel.unpack(f"{self.label}, {who}", what["raised"])
      if kind == "undefined":
        foreign.add_note(error, f"callgate: {who} could not load the function")
      elif kind == "not started":
        foreign.add_note(error, f"callgate: {who} could not start")
      return error
    said = what["said"].decode(errors="replace")
    call = f"called with {what['arguments']}"
    if kind == "interrupted":
      return Interruption(f"{self.label}: {what['text']}")
    if kind == "closed":
      return WorkerError(f"{self.label}: {what['text']}")
    if kind == "restarts":
      return ended(
        f"{self.label}: {who} {how_ended(what)} before any call, as did {_ENDS} workers before it; "
        f"the next call tries again{_quoted(said)}",
        what,
      )
    if kind == "overdue" and what["text"]:
      return GateTimeoutError(
        f"{self.label} {call}: {who} had not loaded the function after {self.loading:g} s, and "
        f"was killed{_quoted(said)}"
      )
    if kind == "overdue":
      return GateTimeoutError(
        f"{self.label} {call} has run longer than its timeout, {self.timeout:g} s, on {who}, "
        f"which was killed; increase timeout= if the call needs longer{_quoted(said)}"
      )
    how = how_ended(what)
    begin = "could not start: it " if kind == "not started" else ""
    if kind == "not started" and what["pid"] <= 0:
      begin, how = "could not start: ", what["text"]
    during = f", {call}" if kind == "ended" else ""
    return ended(f"{self.label}{during}: {who} {begin}{how}{_quoted(said)}", what)


def ended(message: str, what: Mapping[str, Any]) -> WorkerError:
  """Returns the error of a call whose worker has ended, with the runtime's data about the end."""
  number = what["signal"]
  return WorkerError(
    message, worker=what["worker"], pid=what["pid"], exit_code=None if number else what["code"],
    signal=_signal_name(number), stderr=what["said"].decode(errors="replace"),
  )  # fmt: skip


def how_ended(what: Mapping[str, Any]) -> str:
  """Returns text such as "ended by SIGKILL, as by the system when memory runs out"."""
  if number := what["signal"]:
    why = ", probably by the system because memory ran out" if number == signal.SIGKILL else ""
    return f"ended by {_signal_name(number)}{why}"
  return f"ended with exit code {what['code']}"


def _signal_name(number: int) -> str:
  """Returns a name such as "SIGKILL"; "" for 0."""
  try:
    return signal.Signals(number).name if number else ""
  except ValueError:
    return f"signal {number}"


_SHOWN = 20  # the most lines of a worker's stderr


def _quoted(said: str) -> str:
  lines = said.rstrip().splitlines()[-_SHOWN:]
  return ". Its last output:\n  " + "\n  ".join(lines) if lines else ""
