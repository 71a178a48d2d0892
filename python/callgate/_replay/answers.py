# SPDX-License-Identifier: Apache-2.0
"""Chooses the recorded call that answers a call.

A call of an ordered gate or a feed gets the next recorded call of the same device. Any other call
gets an unused recorded call with the same operands, because XLA promises no order. If there are
several, the call of the same source line, device and lane is preferred, and then the earliest. A
recorded call of a pure gate may answer again, since XLA may repeat such calls.
"""

from __future__ import annotations

import collections
import dataclasses
import re
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

from callgate._replay import differ
from callgate._replay.calls import Recorded


class CallPlace(NamedTuple):
  """The place where a call was made."""

  site: str
  device: int
  lane: int


@dataclasses.dataclass(frozen=True)
class Comparison:
  """The comparison of a call's operands with those of recorded calls.

  Attributes:
    rtol, atol: tolerances for floating-point operands.
    ignore: parameters whose operands aren't compared.
    match: the user's function, which replaces all of these.
  """

  rtol: float = 0.0
  atol: float = 0.0
  ignore: frozenset[str] = frozenset()
  match: Callable[[Recorded, Recorded], Any] | None = None

  @property
  def needs_operands(self) -> bool:
    """True if digests aren't enough."""
    return bool(self.rtol or self.atol or self.match)

  def fits(self, call: Recorded, recorded: Recorded) -> bool:
    if self.match is not None:
      return bool(self.match(call, recorded))
    if call.static != recorded.static:
      return False
    assert call.operands is not None
    return differ.is_close(recorded, call.operands, self.rtol, self.atol)


Calls = collections.OrderedDict[int, Recorded]  # by number; the first one is found at once


class _GateCalls:
  """The unused recorded calls of a gate, by the keys of the search."""

  def __init__(self, effect: str, waits: bool) -> None:
    self.effect, self.waits = effect, waits
    self.count = 0
    self.sites = set[str]()
    self.left: Calls = Calls()
    self.of_place: dict[CallPlace, Calls] = collections.defaultdict(Calls)
    self.of_device: dict[int, Calls] = collections.defaultdict(Calls)
    self.equal: dict[tuple[object, ...], Calls] = collections.defaultdict(Calls)
    self.given: dict[tuple[object, ...], Calls] = collections.defaultdict(Calls)

  def _groups(self, call: Recorded) -> tuple[Calls, ...]:
    of_place, of_device = self.of_place[place_of(call)], self.of_device[call.device]
    return self.left, of_place, of_device, self.equal[call.equality]

  def add(self, call: Recorded) -> None:
    self.count += 1
    self.sites.add(call.site)
    for group in self._groups(call):
      group[call.number] = call

  def give(self, call: Recorded) -> None:
    for group in self._groups(call):
      group.pop(call.number, None)
    self.given[call.equality][call.number] = call


class Answers:
  """The calls of a recording, and which of them have been used."""

  def __init__(self, recorded: Iterable[Recorded], comparison: Comparison) -> None:
    self._comparison = comparison
    self._gates: dict[str, _GateCalls] = {}
    for whole in sorted(recorded, key=lambda call: call.number):
      call = whole.without(comparison.ignore)
      self._gates.setdefault(call.gate, _GateCalls(call.effect, call.waits)).add(call)
    self._unnumbered: dict[str, list[_GateCalls]] = collections.defaultdict(list)
    for name, gate in self._gates.items():
      self._unnumbered[_without_numbers(name)].append(gate)

  def gates(self) -> list[str]:
    return sorted(self._gates)

  @property
  def left(self) -> int:
    """The number of unused calls; waits for started calls don't count."""
    return sum(len(gate.left) for gate in self._gates.values() if not gate.waits)

  def recorded(self, call: Recorded) -> int:
    """Returns the number of recorded calls of the gate."""
    gate = self._gate(call.gate, place_of(call))
    return 0 if gate is None else gate.count

  def _gate(self, name: str, place: CallPlace) -> _GateCalls | None:
    """Returns the gate's calls, by the gate's name.

    A function that is traced again has another number in its name. Its calls are found if the
    recording has only one gate whose name differs only in numbers and that was called on the same
    line.
    """
    if name in self._gates:
      return self._gates[name]
    alike = self._unnumbered.get(_without_numbers(name), ())
    same = [gate for gate in alike if place.site in gate.sites]
    return same[0] if len(same) == 1 else None

  def take(self, call: Recorded) -> Recorded | None:
    """Returns the recorded call that answers, or None."""
    place = place_of(call)
    if (gate := self._gate(call.gate, place)) is None:
      return None
    if gate.effect == "ordered":
      found = _next_in_order(gate, place)
      found = found if found is not None and self._comparison.fits(call, found) else None
    elif self._comparison.match is not None:
      found = self._matching(gate, place, call)
    else:
      found = self._nearest(gate, place, call)
    if found is not None:
      gate.give(found)
    return found

  def expected(self, call: Recorded) -> Recorded | None:
    """Returns the recorded call that would have been the next there."""
    place = place_of(call)
    if (gate := self._gate(call.gate, place)) is None:
      return None
    if gate.effect == "ordered":
      return _next_in_order(gate, place)
    return _best(gate.left.values(), place)

  def _matching(self, gate: _GateCalls, place: CallPlace, call: Recorded) -> Recorded | None:
    """Returns the nearest of the calls that the user's function accepts."""
    found = _best((one for one in gate.left.values() if self._comparison.fits(call, one)), place)
    if found is None and gate.effect == "pure":
      given = (one for calls in gate.given.values() for one in calls.values())
      found = _best((one for one in given if self._comparison.fits(call, one)), place)
    return found

  def _nearest(self, gate: _GateCalls, place: CallPlace, call: Recorded) -> Recorded | None:
    found = _best(gate.equal.get(call.equality, Calls()).values(), place)
    if found is None and (self._comparison.rtol or self._comparison.atol):
      found = self._within(gate, place, call)
    if found is None and gate.effect == "pure":
      found = _best(gate.given.get(call.equality, Calls()).values(), place)
    return found

  def _within(self, gate: _GateCalls, place: CallPlace, call: Recorded) -> Recorded | None:
    """Returns the nearest call within the tolerance: usually the next one of the place."""
    for one in gate.of_place.get(place, Calls()).values():
      if self._comparison.fits(call, one):
        return one
      break
    fitting = (one for one in gate.left.values() if self._comparison.fits(call, one))
    return _best(fitting, place)


def _without_numbers(name: str) -> str:
  return re.sub(r"#\d+", "", name)


def place_of(call: Recorded) -> CallPlace:
  return CallPlace(call.site, call.device, call.lane)


def _next_in_order(gate: _GateCalls, place: CallPlace) -> Recorded | None:
  devices = gate.of_device
  alone = place.device not in devices and len(devices) == 1
  device = next(iter(devices)) if alone else place.device
  return next(iter(devices[device].values()), None) if device in devices else None


def _best(calls: Iterable[Recorded], place: CallPlace) -> Recorded | None:
  """Returns the first of the calls whose place is most similar."""
  best, least = None, 8
  for call in calls:
    other = place_of(call)
    far = 4 * (other.device != place.device) + 2 * (other.lane != place.lane)
    far += other.site != place.site
    if far < least:
      best, least = call, far
    if far == 0:
      break
  return best
