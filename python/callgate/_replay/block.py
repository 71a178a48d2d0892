# SPDX-License-Identifier: Apache-2.0
"""The common part of the blocks of `callgate.record` and `callgate.replay`."""

from __future__ import annotations

import threading
import weakref
from typing import Any, Self

from callgate import _callgate, _part
from callgate._core import foreign, registry, tape
from callgate._core.dtypes import Value
from callgate._core.errors import GateError
from callgate._core.pickling import Stays
from callgate._objects import handle
from callgate._objects.hold import of_objects
from callgate._part import Part, Wait
from callgate._process import group
from callgate._replay import static
from callgate._replay.calls import Recorded
from callgate._runtime import barrier

_CLOSE_SECONDS = 5.0  # seconds to wait for calls that outlive their programs, as timed-out ones do
# Guarded by _opening, but for a fork's child; at most one entry.
_open: list[Block] = []
_opening = threading.Lock()


class Block(Stays):
  """A block of one process; the runtime reports the calls of all threads to `_tell`."""

  _what = ""  # "record" or "replay"
  _replays = False

  def __init__(self, path: str) -> None:
    self.path = group.fill_index(path)
    self._counting = threading.Lock()
    # Calls that have begun, by number: (gate, call); the call lives as long as its program waits.
    self._running: dict[int, tuple[str, weakref.ref[Any]]] = {}
    self._used = False

  def __repr__(self) -> str:
    return f"<callgate.{self._what}({self.path!r})>"

  def __enter__(self) -> Self:
    with _opening:
      if _open:
        other = f"callgate.{_open[0]._what}({_open[0].path!r})"
        raise GateError(
          f"{self._what}: expected no other recording or replay in this process, got {other}, "
          "which is still open; close it first"
        )
      if self._used:
        raise GateError(f"{self._what}: a block can be entered once; make a new one")
      self._begin()
      self._used = True
      _open.append(self)
      tape.objects.clear()
      _callgate.set_tape(self._tell, self._replays)
    return self

  def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
    try:
      if error is None or foreign.is_a(error, Exception):
        _wait_for_calls()
    finally:
      _callgate.set_tape(None)
      with _opening:
        _open.clear()
        tape.objects.clear()
      late = self._wait_for_rest(0.0 if error is not None else _CLOSE_SECONDS)
      self._end(late, error)

  def _wait_for_rest(self, seconds: float) -> list[str]:
    """Waits up to `seconds`, and returns the gates whose calls still run."""
    gates: set[str] = set()

    def are_over() -> bool:
      nonlocal gates
      gates = {gate for gate, call in list(self._running.values()) if call() is not None}
      return not gates

    Wait(seconds).poll(are_over)
    return sorted(gates)

  def _begin(self) -> None:
    """Opens the file, at the start of the block."""

  def _end(self, late: list[str], error: BaseException | None) -> None:
    """Ends the block, after its last call.

    `late` are gates whose calls still run; `error` is the exception that leaves the block.
    """

  def _tell(
    self, gate: str, site: str, spec: str, lane: int, shard: int, device: int, run: int,
    operands: Any, types: Any,
  ) -> Any:  # fmt: skip
    """Handles a call before it is made: see src/bindings/gate/tape.h."""
    raise NotImplementedError


def call_of(
  gate: str, site: str, spec: str, lane: int, shard: int, device: int,
  operands: tuple[Value, ...], number: int,
) -> Recorded:  # fmt: skip
  """Returns a call before it is made; `number` is its place in a recording."""
  made = registry.get(gate)
  operands = _without_handles(gate, spec, operands)
  return Recorded(
    gate, site, lane, device, shard, number, getattr(made, "effect", "pure"),
    tuple(registry.argument(gate, spec, i) for i in range(len(operands))),
    tuple((code, shape) for code, shape, _ in operands), operands,
    static=static.of_call(gate, spec), waits=getattr(made, "waits", False),
  )  # fmt: skip


def _without_handles(gate: str, spec: str, operands: tuple[Value, ...]) -> tuple[Value, ...]:
  """Replaces handles by the numbers of the recorded calls that made their objects.

  Handles differ from run to run.
  """
  handles = getattr(getattr(registry.get(gate), "traits", None), "handles", "")  # feeds have none
  if not handles:
    return operands
  places = range(len(operands)) if handles == "takes" else handle.places(spec)
  return tuple(of_objects(x) if i in places else x for i, x in enumerate(operands))


def _wait_for_calls() -> None:
  """Waits for programs and for started calls; other functions report their failures."""
  barrier.wait_for_programs()
  for part in _part.parts():
    part.settle(Wait(None))


@_part.joins("recordings")
class _Blocks(Part):
  """Forgets the block in a fork's child, since the block and its file belong to the parent."""

  def forked(self) -> None:
    _open.clear()
    _callgate.set_tape(None)
