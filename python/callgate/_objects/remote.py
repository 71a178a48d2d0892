# SPDX-License-Identifier: Apache-2.0
"""Objects that live in workers: makes them there, and calls functions where they are.

The process's table has a `RemoteObject` for each, with its worker; the worker keeps the object by
the same number. The runtime passes all lanes of a call to Python, which looks up the handles. Then
the runtime spreads the lanes without the GIL, each to the worker of its objects.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import jax

from callgate import _callgate
from callgate._core import encoding, foreign, registry
from callgate._core.errors import HandleError, WorkerError
from callgate._core.public import core
from callgate._objects import table
from callgate._objects.handle import SCOPE, places
from callgate._objects.table import Held
from callgate._places.place import RemoteGate
from callgate._places.remote import Description, WorkerGate, ended, how_ended
from callgate._places.workers import Workers


class RemoteObject:
  """Represents a worker's object in the table; the object dies with it.

  It exists before the object; until then the worker's number is 0, which stands for any worker.
  """

  __slots__ = ("number", "pool", "worker", "workers")

  def __init__(self, workers: Workers, pool: Any, number: int) -> None:
    self.workers, self.pool, self.worker, self.number = workers, pool, 0, number

  def where(self) -> str:
    known = self.pool.worker(self.worker)
    index = known["worker"] if isinstance(known, dict) else known
    return f"worker {index} of {self.workers.count}" if index >= 0 else "a worker that has ended"

  def __del__(self) -> None:
    self.pool.drop(self.number, self.worker)


@functools.lru_cache(256)
def _scope_of(spec: str) -> int:
  """Returns the flat position of the scope among a call's operands; -1 without one."""
  if spec in ("", "*"):
    return -1
  tree = encoding.signature(spec).in_tree
  _, kwargs = jax.tree.unflatten(tree, range(tree.num_leaves))
  return kwargs.get(SCOPE, -1)


def bind(gate: Any, there: Any) -> tuple[ObjectGate, Any]:
  """Returns the interface to a gate of workers' objects, and the runtime's handle on it."""
  remote = ObjectGate(gate, there)
  return remote, _callgate.ExecutorCallee(gate.name, remote.run)


class ObjectGate(RemoteGate):
  """A gate that makes or uses objects of workers, as the runtime sees it."""

  def __init__(self, gate: Any, there: Any) -> None:
    self.label, self.workers = gate.label, gate.run_on
    self._there = there if gate.traits.handles == "makes" else None
    style = "inplace" if gate.traits.handles == "makes" else gate.style
    described = Description(gate.name, there, style, gate.arrays, gate.copy, gate.parameters)
    self._remote = WorkerGate(gate.label, described, gate.run_on, gate.timeout)
    name = registry.free_name(f"{gate.name}.there")
    callee = self._remote.callee(name, 0, gate.effect == "ordered", by_lane=False)
    callee.give_up_name()  # nothing looks it up by name
    self._site = functools.lru_cache(64)(callee.site)

  def prepare(self) -> None:
    self._remote.prepare()

  def run(self, spec: str, lanes: _callgate.CallLanes) -> None:
    """Runs all lanes of a call, each where its objects live."""
    handles, scope, count = places(spec), _scope_of(spec), len(lanes)
    held = [self._held(handles, lanes, i) for i in range(count)] if handles else []
    placed = self._workers_of(held)
    there, pool = self._there, core(self.workers).pool()
    made = [self._new(pool) for _ in range(count)] if there is not None else []
    for lane, one in enumerate(made):
      lanes.give(lane, (table.words(one.number),))
    try:
      ran_on = self._site(spec, lanes.cast).run_lanes(lanes, placed, there is not None)
    except WorkerError as error:
      if held:
        foreign.add_note(error, f"callgate: called with {_shown(held[0])}")
      raise
    for lane, (one, worker) in enumerate(zip(made, ran_on, strict=False)):
      one.worker = worker
      assert there is not None
      table.add(one, there.maker, lanes.take_one(lane, scope), one.number)

  def _new(self, pool: Any) -> RemoteObject:
    return RemoteObject(self.workers, pool, _callgate.new_number())

  def _held(self, handles: Sequence[int], lanes: _callgate.CallLanes, lane: int) -> list[Held]:
    """Returns the objects of a lane."""
    taken: list[Any] = [lanes.take_one(lane, i) for i in handles]
    pairs = (words for each in taken for words in each.reshape(-1, table.WORDS))
    held = [table.get(words, self.label) for words in pairs]
    for one in held:
      if not isinstance(one.value, RemoteObject) or one.value.workers is not self.workers:
        where = one.value.where() if isinstance(one.value, RemoteObject) else "this process"
        raise HandleError(
          f"{self.label}: expected objects of {self.workers!r}, got object #{one.number}, made "
          f"by {one.maker}, which lives in {where}; make and use an object with the same run_on="
        )
    if len({one.value.worker for one in held}) > 1:
      raise HandleError(
        f"{self.label}: expected objects that live in one worker, got {_shown(held)}; hold them in "
        "one object, or use callgate.workers(1)"
      )
    return held

  def _workers_of(self, held: Sequence[Sequence[Held]]) -> list[int]:
    """Returns the numbers of the lanes' workers.

    Raises:
      WorkerError: a worker has ended, with its objects.
    """
    placed: list[int] = []
    alive = set[int]()
    for objects in held:
      if not objects:  # all handles are empty batches
        return []
      first = objects[0]
      there: RemoteObject = first.value
      if there.worker not in alive and not isinstance(there.pool.worker(there.worker), int):
        raise self._gone(first)
      alive.add(there.worker)
      placed.append(there.worker)
    return placed

  def _gone(self, held: Held) -> WorkerError:
    how = held.value.pool.worker(held.value.worker)
    who = held.value.where()
    if how["pid"] > 0:
      who += f" (process {how['pid']}), which {how_ended(how)}"
    return ended(
      f"{self.label}: object #{held.number}, made by {held.maker}, was lost with {who}; make it "
      "again",
      how,
    )


def _shown(held: Sequence[Held]) -> str:
  return "; ".join(f"#{one.number}, made by {one.maker}, in {one.value.where()}" for one in held)
