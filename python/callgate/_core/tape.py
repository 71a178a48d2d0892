# SPDX-License-Identifier: Apache-2.0
"""Reports calls that Python makes by itself to `callgate.record` and `callgate.replay`.

The runtime reports the calls that programs make to the tape, a function of `_replay`
(src/bindings/gate/tape.h). Three kinds of calls report here instead, in the same form: gates that
run through JAX's callbacks (`config(engine="jax")`), makers of host objects, and `next(feed)`
outside programs.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NoReturn

from callgate import _callgate
from callgate._core.dtypes import Value, array_of, value_of
from callgate._core.errors import ReplayError

Type = tuple[int, tuple[int, ...]]  # the code of a dtype, and extents
UNKNOWN = -1
_NO_PLACE = ((), 0, UNKNOWN, UNKNOWN, "")  # as `_callgate.current_place` has it
# The number of the recorded call that made an object, by the object's handle, in the open block.
# Atomic: single steps; emptied by the begin and the end of each block.
objects: dict[bytes, int] = {}


class Answer(tuple[bytes, ...]):
  """A call's results from a recording; `number` is the recorded call's number."""

  number: int = UNKNOWN


class Standin:
  """Replaces an object that a recorded call made, because a replay makes none."""

  def __init__(self, maker: str) -> None:
    self._maker = maker

  def refuse(self, user: str) -> NoReturn:
    """Raises, for a call that needs the object."""
    raise ReplayError(
      f"{user}: expected a recorded call, got one that is not in the recording and takes an "
      f"object of '{self._maker}', which a replay doesn't create"
    )


def call(
  gate: str,
  operands: Sequence[Any],
  types: Sequence[Type],
  make: Callable[[], Sequence[Any]],
  *,
  spec: str = "",
  lane: int = 0,
) -> Sequence[Any]:
  """Makes a call by `make`, unless a recording has the answer; returns its arrays.

  Args:
    gate: the gate's name.
    operands: the flat operands, as NumPy arrays.
    types: the types of the results.
    make: returns the results, as NumPy arrays.
    spec: the spec of the call's site, for the names of arguments in messages.
    lane: the number of the lane.
  """
  if (tape := _callgate.tape()) is None:
    return make()
  answer = _ask(tape, gate, [value_of(x) for x in operands], types, spec, lane)
  if isinstance(answer, tuple):
    return [array_of((*type, data)) for type, data in zip(types, answer, strict=True)]
  return _make_and_report(answer, make, lambda results: tuple(value_of(x) for x in results))


def make_object(
  gate: str, operands: Sequence[Value], make: Callable[[], Any]
) -> tuple[Any, int | None]:
  """Makes an object by `make`, or a `Standin`; returns it and its call's number in the recording.

  The number is None without a recording.
  """
  if (tape := _callgate.tape()) is None:
    return make(), None
  _, lane, device, shard, _ = _callgate.current_place() or _NO_PLACE
  run = _callgate.current_run()
  run = UNKNOWN if run is None else run
  answer = _ask(tape, gate, operands, (), "", lane, shard, device, run)
  if isinstance(answer, Answer):
    return Standin(gate), answer.number
  return _make_and_report(answer, make, lambda _: ()), getattr(answer, "number", UNKNOWN)


def _ask(
  tape: Any, gate: str, operands: Sequence[Value], types: Sequence[Type], spec: str, lane: int,
  shard: int = UNKNOWN, device: int = UNKNOWN, run: int = UNKNOWN,
) -> Any:  # fmt: skip
  return tape(gate, "", spec, lane, shard, device, run, tuple(operands), tuple(types))


def _make_and_report(finish: Any, make: Callable[[], Any], values: Callable[[Any], Any]) -> Any:
  try:
    made = make()
  except BaseException as error:
    if finish is not None:
      finish(None, error)
    raise
  if finish is not None:
    finish(values(made), None)
  return made
