# SPDX-License-Identifier: Apache-2.0
"""`callgate.replay`: a block whose gates and feeds are answered from a recording."""

from __future__ import annotations

import os
from typing import Any

from callgate import _callgate
from callgate._core import options, registry
from callgate._core.dtypes import Value
from callgate._core.errors import ReplayError
from callgate._core.tape import Answer, Type
from callgate._replay import calls, differ, raised
from callgate._replay.answers import Answers, CallPlace
from callgate._replay.block import Block, without_handles
from callgate._replay.calls import Recorded
from callgate._runtime.targets import traceback_line
from callgate._stream.reader import is_address, open_stream


class Replay(Block):
  """The block of `callgate.replay`.

  Attributes:
    path: the file.
    answered: how many calls it has answered.
    called: how many calls were made, by partial=True.
    left: how many of the recording's calls nobody has asked for.
  """

  _what = "replay"
  _stays = "it answers this process's calls; expected its path, or a block in the other process"
  _replays = True

  def __init__(self, path: str, *, partial: bool, rtol: float, atol: float, trust: bool) -> None:
    super().__init__(path)
    self._partial, self._tolerance, self._trust = partial, (rtol, atol), trust
    self._answers = Answers((), rtol, atol)
    self.answered = self.called = 0

  @property
  def left(self) -> int:
    return self._answers.left

  def _begin(self) -> None:
    recorded = _read(self.path)
    if any(self._tolerance) and any(call.operands is None for call in recorded):
      raise ReplayError(
        f"replay: {self.path!r}: rtol, atol: expected a recording with operands, got one of digests"
      )
    self._answers = Answers(recorded, *self._tolerance)

  def _tell(
    self, gate: str, site: str, spec: str, lane: int, shard: int, device: int, run: int,
    operands: tuple[Value, ...], types: tuple[Type, ...],
  ) -> Any:  # fmt: skip
    del shard, run
    operands = without_handles(gate, spec, operands)
    place = CallPlace(site, device, lane)
    with self._counting:
      call = self._answers.take(gate, place, operands)
      if call is None and not self._partial:
        raise ReplayError(self._refusal(gate, place, operands))
      if not getattr(registry.get(gate), "waits", False):
        self.answered += call is not None
        self.called += call is None
    return None if call is None else self._answer(call, types)

  def _answer(self, call: Recorded, types: tuple[Type, ...]) -> Answer:
    where = f"replay: {self.path!r}, call {call.number} of '{call.gate}'"
    if call.results is None:
      raise raised.make(where, call.error, call.pickled, self._trust)
    came = tuple((code, shape) for code, shape, _ in call.results)
    if came != types:
      declared, recorded = (", ".join(map(calls.text_of, one)) for one in (types, came))
      raise ReplayError(
        f"{where}: expected results of the types that the gate declares, ({declared}), got "
        f"({recorded}) in the recording"
      )
    answer = Answer(data for _, _, data in call.results)
    answer.number = call.number
    return answer

  def _refusal(self, gate: str, place: CallPlace, operands: tuple[Value, ...]) -> str:
    site = traceback_line(place.site)
    at = ", ".join([f"lane {place.lane}"] + [f"device {place.device}"] * (place.device > 0))
    head = f"replay: {self.path!r}: gate '{gate}'" + (f", called at {site}" if site else "")
    if not (count := self._answers.recorded(gate, place)):
      gates = ", ".join(map(repr, self._answers.gates())) or "none"
      return f"{head}: expected a gate of the recording ({gates}), got '{gate}'"
    expected = self._answers.expected(gate, place)
    if expected is None:
      return f"{head}: expected no call but the {count} that were recorded, got one more ({at})"
    what = differ.difference(expected, operands)
    return f"{head} ({at}) differs from call {expected.number} of the recording: {what}"


def _read(path: str) -> list[Recorded]:
  if is_address(path):
    raise ReplayError(f"replay: path: expected a file of callgate.record's, got {path!r}")
  try:
    with open_stream(path) as stream:
      found = [calls.read(record) for record in stream]
    if not found:
      native = _callgate.StreamReader(path)
      native.scan()
      if native.offset == 0:
        raise ValueError(f"expected a recording, got a file of {os.path.getsize(path)} bytes")
    return found
  except FileNotFoundError:
    raise FileNotFoundError(
      f"replay: expected a recording, which callgate.record makes, got no file {path!r}"
    ) from None
  except (ValueError, OSError) as error:
    raise ReplayError(f"replay: {path!r}: {error}") from error


def replay(
  path: str | os.PathLike[str], *, partial: bool = False, rtol: float = 0.0, atol: float = 0.0,
  trust: bool = False,
) -> Replay:  # fmt: skip
  """A block in which a recording answers the calls of gates and feeds; no function is called.

  ```python
  import callgate as cg, jax, numpy as np

  asked = []

  @cg.gate(out=np.float32(0), name="replay.price")
  def price(day):                    # of a service, say
    asked.append(int(day))
    return np.float32(day + 0.5)

  program = jax.jit(price)
  with cg.record("replay.cgr"):
    program(3).block_until_ready()
  with cg.replay("replay.cgr") as replay:
    assert program(3) == 3.5
  assert len(asked) == 1 and (replay.answered, replay.left) == (1, 0)
  ```

  Programs need not be traced anew; those of all threads count. Calls are told apart by gate, source
  line, device, lane and operands (docs/replay.md). An exception that was recorded is
  raised again: Python's own and callgate's as they were, others as `RecordedError`.

  Args:
    path: a file of `callgate.record`'s, "{process}" in it replaced by `jax.process_index()`. If its
      writer was killed, the records that are whole count.
    partial: call the function where the recording has no such call.
    rtol: operands of floating types may differ so far, as by `numpy.allclose`: from another
      machine, say. Without tolerances each bit counts. Not for recordings of digests.
    atol: the same, absolute.
    trust: unpickle exceptions, which may run any code: of a file that you made yourself.

  Returns:
    A context manager, with `path`, `answered`, `called` and `left`.

  Raises:
    GateDefinitionError: an option is wrong.
    FileNotFoundError: (entering) there is no such file.
    ReplayError: (entering) it is damaged, or no recording, or of a later version. (fails the
      program) a call is none of the recording's: the message shows the first difference.
    GateError: (entering) another recording or replay is open.
  """
  checked = options.path("replay", "path", path)
  flags = options.booleans("replay", partial=partial, trust=trust)
  limits: list[float] = []
  for name, value in (("rtol", rtol), ("atol", atol)):
    what = "a number of 0 or more"
    limits.append(options.number("replay", name, value, what=what))
    if limits[-1] < 0:
      options.refuse("replay", name, what, value)
  return Replay(
    checked, partial=flags["partial"], rtol=limits[0], atol=limits[1], trust=flags["trust"]
  )
