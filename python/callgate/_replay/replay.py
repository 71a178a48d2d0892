# SPDX-License-Identifier: Apache-2.0
"""`callgate.replay`: answers the gates and feeds of a block from a recording."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable, Iterable
from typing import Any

from callgate import _callgate
from callgate._core import options
from callgate._core.dtypes import Value
from callgate._core.errors import ReplayError
from callgate._core.tape import Answer, Type
from callgate._replay import calls, differ, raised, static
from callgate._replay.answers import Answers, Comparison
from callgate._replay.block import Block, call_of
from callgate._replay.calls import Recorded
from callgate._replay.writing import CallFile
from callgate._runtime.targets import traceback_line
from callgate._stream.reader import is_address, open_stream


class Replay(Block):
  """The block of `callgate.replay`.

  Attributes:
    path: the file.
    answered: the number of calls that the recording has answered.
    called: the number of calls that were made, by partial=True or record_new=True.
    left: the number of recorded calls that no call has asked for.
  """

  _what = "replay"
  _stays = "it answers this process's calls; pass its path, or open a block in the other process"
  _replays = True

  def __init__(
    self, path: str, comparison: Comparison, *, partial: bool, record_new: bool, trust: bool
  ) -> None:
    super().__init__(path)
    self._comparison, self._partial, self._trust = comparison, partial, trust
    self._record_new = record_new
    self._answers = Answers((), comparison)
    self._file: CallFile | None = None
    self._next = 0
    self._digests = False
    self.answered = self.called = 0

  @property
  def left(self) -> int:
    """The number of recorded calls that no call has asked for."""
    return self._answers.left

  def _begin(self) -> None:
    is_new = self._record_new and not os.path.lexists(self.path)
    recorded = [] if is_new else read_recording("replay", self.path)
    self._digests = any(call.operands is None for call in recorded)
    if self._comparison.needs_operands and self._digests:
      given = "match" if self._comparison.match else "rtol, atol"
      raise ReplayError(
        f"replay: {self.path!r}: {given}: expected a recording with operands, got one with "
        "digests; record with operands"
      )
    if not is_new:
      self._check_ignored(recorded)
    self._answers = Answers(recorded, self._comparison)
    self._next = 1 + max((call.number for call in recorded), default=-1)
    if self._record_new:
      self._file = CallFile("replay", self.path)

  def _check_ignored(self, recorded: list[Recorded]) -> None:
    known = {calls.parameter_of(name) for call in recorded for name in call.all_names} - {""}
    for name in sorted(self._comparison.ignore - known):
      names = ", ".join(map(repr, sorted(known))) or "none"
      raise ReplayError(
        f"replay: {self.path!r}: ignore: expected arguments of the recording's gates ({names}), "
        f"got {name!r}"
      )

  def _end(self, late: list[str], error: BaseException | None) -> None:
    if self._file is not None:
      self._file.close(late, error)

  def _tell(
    self, gate: str, site: str, spec: str, lane: int, shard: int, device: int, run: int,
    operands: tuple[Value, ...], types: tuple[Type, ...],
  ) -> Any:  # fmt: skip
    whole = call_of(gate, site, spec, lane, shard, device, operands, -1)
    if self._digests:
      whole = dataclasses.replace(whole, static=static.digested(whole.static))
    call = whole.without(self._comparison.ignore)
    with self._counting:
      found = self._answers.take(call)
      if found is None and not self._may_be_made(call):
        raise ReplayError(self._refusal(call))
      if not whole.waits:
        self.answered += found is not None
        self.called += found is None
      if found is None and self._file is not None:
        whole = dataclasses.replace(whole, number=self._next)
        self._next += 1
    if found is not None:
      return self._answer(found, types)
    if self._file is None:
      return None
    if self._digests:
      whole = dataclasses.replace(whole, operands=None, known_digests=whole.digests)
    return self._file.begun(whole, run, self._running)

  def _may_be_made(self, call: Recorded) -> bool:
    """True if the function may be called; calls of ordered gates keep the recording's order."""
    if not self._record_new:
      return self._partial
    return call.effect != "ordered" or self._answers.expected(call) is None

  def _answer(self, call: Recorded, types: tuple[Type, ...]) -> Answer:
    where = f"replay: {self.path!r}, call {call.number} of '{call.gate}'"
    if call.results is None:
      raise raised.make(where, call.error, call.pickled, self._trust)
    came = tuple((code, shape) for code, shape, _ in call.results)
    if came != types:
      declared, recorded = (", ".join(map(calls.text_of, one)) for one in (types, came))
      raise ReplayError(
        f"{where}: expected results of the gate's declared types, ({declared}), got ({recorded}) "
        "in the recording"
      )
    answer = Answer(data for _, _, data in call.results)
    answer.number = call.number
    return answer

  def _refusal(self, call: Recorded) -> str:
    gate, site = call.gate, traceback_line(call.site)
    at = ", ".join([f"lane {call.lane}"] + [f"device {call.device}"] * (call.device > 0))
    head = f"replay: {self.path!r}: gate '{gate}'" + (f", called at {site}" if site else "")
    if not (count := self._answers.recorded(call)):
      gates = ", ".join(map(repr, self._answers.gates())) or "none"
      return f"{head}: expected a gate of the recording ({gates}), got '{gate}'"
    expected = self._answers.expected(call)
    if expected is None:
      return f"{head}: expected only the {count} recorded calls, got one more ({at})"
    if self._comparison.match is not None:
      return f"{head} ({at}): expected a call that match= accepts, got none"
    what = differ.difference(expected, call)
    return f"{head} ({at}) differs from call {expected.number} of the recording: {what}"


def read_recording(label: str, path: str) -> list[Recorded]:
  """Returns the calls of a file; `label` begins the messages of errors."""
  if is_address(path):
    raise ReplayError(f"{label}: path: expected a file of callgate.record, got {path!r}")
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
      f"{label}: expected a recording by callgate.record, got the missing file {path!r}"
    ) from None
  except (ValueError, OSError) as error:
    raise ReplayError(f"{label}: {path!r}: {error}") from error


def replay(
  path: str | os.PathLike[str], *, partial: bool = False, record_new: bool = False,
  rtol: float = 0.0, atol: float = 0.0, ignore: Iterable[str] = (),
  match: Callable[[Any, Any], bool] | None = None, trust: bool = False,
) -> Replay:  # fmt: skip
  """Answers the calls of gates and feeds from a recording, without calling their functions.

  ```python
  import callgate as cg, jax, numpy as np

  asked = []

  @cg.gate(out=np.float32(0), name="replay.price")
  def price(day):                    # asks a service, for example
    asked.append(int(day))
    return np.float32(day + 0.5)

  program = jax.jit(price)
  with cg.record("replay.cgr"):
    program(3).block_until_ready()
  with cg.replay("replay.cgr") as replay:
    assert program(3) == 3.5
  assert len(asked) == 1 and (replay.answered, replay.left) == (1, 0)
  ```

  The block answers the programs of all threads, without tracing them again. It finds a call by its
  gate, source line, device, lane, operands and static arguments (docs/replay.md). A recorded
  exception is raised again: Python's and callgate's own with their type, others as a
  `RecordedError`.

  If equal operands are too strict, `ignore` and `match` choose the recorded call:

  ```python
  import callgate as cg, jax, numpy as np

  ask = cg.gate(lambda day, seed: np.float32(day), out=np.float32(0), name="replay.ask")
  with cg.record("seeds.cgr"):
    jax.jit(ask)(3, 0).block_until_ready()
  with cg.replay("seeds.cgr", ignore=("seed",)):
    assert jax.jit(ask)(3, 1) == 3
  with cg.replay("seeds.cgr", match=lambda call, recorded: call.args[0] >= recorded.args[0]):
    assert jax.jit(ask)(4, 1) == 3
  ```

  Args:
    path: a file of `callgate.record`; "{process}" in it is replaced by `jax.process_index()`. If
      the writer was killed, the replay uses the complete records.
    partial: calls the function if the recording has no such call.
    record_new: calls the function as `partial` does, and adds the call to the file for the next
      replay. A missing file is made. Calls of an ordered gate are added after its recorded calls.
    rtol: relative tolerance for floating operands, as in `numpy.allclose`, for example for
      recordings of another machine. Without tolerances operands must be equal bit by bit. Digests
      have no tolerance.
    atol: absolute tolerance, likewise.
    ignore: names of parameters whose arguments aren't compared, passed by position or by name.
    match: `match(call, recorded)` returns True if the recorded call answers; it replaces the
      comparison of operands. Both arguments have `gate` (or `name`); `args`, the arrays in order;
      and `kwargs`, all arguments by name, also those passed by position: "day", "params['w']".
      Static numbers, strings and tuples are passed unchanged, other static arguments as text. The
      function must not run JAX programs. It doesn't work with digests, `rtol`, `atol` and `ignore`.
    trust: unpickles exceptions, which can run any code. Use it only for files that you made
      yourself.

  Returns:
    A context manager, with `path`, `answered`, `called` and `left`.

  Raises:
    GateDefinitionError: an option is wrong.
    FileNotFoundError: at the start: there is no such file.
    ReplayError: at the start: the file is damaged, isn't a recording, or has a later version; or
      its gates have no parameter of a name in `ignore`. In a program: the recording has no such
      call; the message shows the first difference.
    GateError: at the start: another recording or replay is open. In a call and at the end, with
      `record_new`: the file can't store a call, as for `record`.
  """
  checked = options.path("replay", "path", path)
  flags = options.booleans("replay", partial=partial, record_new=record_new, trust=trust)
  limits: list[float] = []
  for name, value in (("rtol", rtol), ("atol", atol)):
    what = "a number of 0 or more"
    limits.append(options.number("replay", name, value, what=what))
    if limits[-1] < 0:
      options.refuse("replay", name, what, value)
  ignored = [
    options.text("replay", "ignore", one) for one in options.strings("replay", "ignore", ignore)
  ]
  options.or_none(options.function, "replay", "match", match)
  if match is not None and (any(limits) or ignored):
    options.refuse("replay", "match", "None beside rtol=, atol= or ignore=", match)
  comparison = Comparison(limits[0], limits[1], frozenset(ignored), match)
  return Replay(checked, comparison, **flags)
