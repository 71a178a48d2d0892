# SPDX-License-Identifier: Apache-2.0
"""The environments of one process, where they are stepped: the common part of all kinds.

A process has one host for each `callgate.envs`, with the environments that it was asked to reset.
Calls for different environments may come from several threads.

Lane l of `jax.vmap` has a copy of environment i, with the number l * count + i. A process keeps its
environments in units, which reset and step separately: one environment, or one vector environment.
"""

from __future__ import annotations

import contextlib
import math
import pickle
import threading
from collections.abc import Sequence
from typing import Any, Generic, TypeVar

import numpy as np

from callgate._core import foreign
from callgate._core.errors import GateError
from callgate._envs import infos, results, seeds, spaces
from callgate._envs.plans import EnvPlan
from callgate._envs.spaces import Store
from callgate._envs.videos import Video
from callgate._places import objects

MOST = 2**31 - 1  # the most environments, with copies
NONE = -(2**31)  # the number of an environment that fills up a call; its copies are negative, too
# Lanes of `jax.vmap` around a call, the innermost first: (lanes in the call, all or one; number of
# lanes).
Levels = tuple[tuple[int, int], ...]


def copies_of(levels: Levels) -> int:
  """Returns the number of copies of each environment."""
  return math.prod(extent for _, extent in levels)


def rows_of(levels: Levels) -> int:
  """Returns the number of a call's rows for each environment."""
  return math.prod(size for size, _ in levels)


class Unit:
  """Environments that are reset and stepped together.

  Attributes:
    env: the environment, or the vector environment.
    fresh: True before the first reset.
  """

  __slots__ = ("env", "fresh")

  def __init__(self, env: Any) -> None:
    self.env, self.fresh = env, True


U = TypeVar("U", bound=Unit)


class Host(Generic[U]):
  """The environments of one process.

  It writes results to rows of `out`, views of a program's memory in the types of `EnvPlan`.
  """

  def __init__(self, plan: EnvPlan) -> None:
    self._plan = plan
    self._units: dict[int, U] = {}
    self._size = max(plan.width, 1)  # the number of environments of a unit
    self._seen = Store.all_of("observation", plan.observations)
    self._infos = infos.Infos(plan.info)
    self._final_seen = Store.all_of("final_obs", plan.observations)
    self._final_infos = infos.Infos(plan.info, "final_info")
    self._closed = False
    self._picture = b""  # the pickle of the last picture, for `picture`
    self._video = None if plan.video is None else Video(plan.video)
    self._video_lane = -1 if plan.video is None else plan.video.lane
    self._making = threading.RLock()

  def new_unit(self, number: int) -> U:
    """Makes the environments of a unit, which must have the plan's spaces."""
    raise NotImplementedError

  def prepare(self, copies: int) -> None:
    """Makes copies of all environments, before a program that is being traced needs them."""
    self._check_open()
    for number in range(self._plan.count * copies // self._size):
      self._unit(number)

  def _unit(self, number: int) -> U:
    if (found := self._units.get(number)) is None:
      with self._making:
        if (found := self._units.get(number)) is None:
          found = self._units[number] = self.new_unit(number)
    return found

  def _existing(self, number: int) -> U:
    """Returns a unit that has been reset."""
    found = self._units.get(number)
    if found is None or found.fresh:
      raise self._missing(number * self._size)
    return found

  # -- pictures ------------------------------------------------------------------------------------
  def picture_of(self, unit: U, lane: int) -> Any:
    """Renders an environment of a unit."""
    raise NotImplementedError

  def _film(self, unit: U, *, begins: bool = False, ends: bool = False) -> None:
    """Adds the picture of the environment of `record_video=`."""
    assert self._video is not None
    if begins:
      self._video.end()
    self._video.add(self.picture_of(unit, self._video_lane % self._size))
    if ends:
      self._video.end()

  def render(self, number: int) -> Any:
    self._check_open()
    return self.picture_of(self._existing(number // self._size), number % self._size)

  def rendered(self, out: Any, lanes: Any) -> None:
    """Renders the only environment of `lanes`, if any; returns the size of the pickle in bytes."""
    out[...] = 0
    for number in self._real(lanes):
      try:
        self._picture = pickle.dumps(self.render(number), pickle.HIGHEST_PROTOCOL)
      except Exception as error:
        self._tell(error, number, "render")
        raise
      out[...] = len(self._picture)

  def picture(self, out: Any, lanes: Any, *, room: int) -> None:
    """Returns the pickle of the last picture if `lanes` has an environment, else zeros."""
    del room
    out[...] = 0
    if self._real(lanes):
      out.reshape(-1)[: len(self._picture)] = np.frombuffer(self._picture, np.uint8)
      self._picture = b""

  # -- the end -------------------------------------------------------------------------------------
  def shut(self, out: Any, lanes: Any) -> None:
    """Does as `close`, for programs."""
    del lanes
    out[...] = True
    self.close()

  def close(self) -> None:
    """Closes the environments; later calls fail."""
    self._closed = True
    if self._video is not None:
      with contextlib.suppress(Exception):
        self._video.end()
    for unit in self._units.values():
      with contextlib.suppress(Exception):
        unit.env.close()
    self._units.clear()

  # -- common to steps and resets ------------------------------------------------------------------
  def _begun(self, info: Any, lanes: Any, levels: Levels) -> list[int]:
    """Returns the numbers of a call's environments, after clearing their infos."""
    self._check_open()
    if self._plan.info:
      self._infos.clear(info)
    if self._plan.autoreset == "same_step":
      self._clear_final(info)
    return self._real(lanes, levels)

  def _real(self, lanes: Any, levels: Levels = ()) -> list[int]:
    """Returns the numbers of the environments, without those at the end that fill up the call."""
    stride = self._plan.count
    for size, extent in levels:
      lanes = (lanes[:, None] + np.arange(size, dtype=np.int32) * np.int32(stride)).reshape(-1)
      stride *= extent
    numbers: list[int] = lanes.tolist()
    while numbers and numbers[-1] < 0:
      numbers.pop()
    return numbers

  def _seeds(self, how: seeds.How, given: Any, numbers: Sequence[int]) -> list[int | None]:
    count = self._plan.count
    lanes = [number % count for number in numbers]
    return seeds.of_lanes(how, given[: len(numbers)], lanes, count)

  def _put(self, seen: Any, values: list[Any], numbers: Sequence[int], during: str) -> None:
    """Stores the observation of each environment."""
    for one in self._seen:
      view, parts = spaces.at(seen, one.path), values
      row = 0
      try:
        if one.path:
          parts = []
          for row in range(len(values)):
            parts.append(one.part(values[row]))
        if not one.put_all(view, parts):
          for row, part in enumerate(parts):
            one.put(view, row, part)
      except Exception as error:
        self._tell(error, numbers[row], during)
        raise
      if len(parts) < len(view):
        view[len(parts) :] = 0

  def _clear_final(self, info: Any) -> None:
    """Marks that no episode has ended yet."""
    info["_final_obs"][...] = False
    for one in self._final_seen:
      spaces.at(info["final_obs"], one.path)[...] = 0
    if self._plan.info:
      info["_final_info"][...] = False
      self._final_infos.clear(info["final_info"])

  def _put_final(self, info: Any, row: int, value: Any, extra: Any) -> None:
    """Stores the final observation and infos of an episode."""
    info["_final_obs"][row] = True
    for one in self._final_seen:
      one.put(spaces.at(info["final_obs"], one.path), row, one.part(value))
    if self._plan.info:
      info["_final_info"][row] = True
      self._final_infos.put(info["final_info"], row, extra)

  def _as_numbers(self, what: str, given: Any, numbers: Sequence[int]) -> Any:
    try:
      return results.array(what, given, len(numbers))
    except results.WrongRow as wrong:
      self._tell(wrong.error, numbers[wrong.row], "step")
      raise wrong.error from None

  def _check_spaces(self, found: tuple[Any, Any]) -> None:
    plan = self._plan
    wanted = plan.observation_space, plan.action_space
    names = "observation_space", "action_space"
    for what, want, got in zip(names, wanted, found, strict=True):
      if got != want:
        raise GateError(
          f"{plan.label}: {what}: expected {want}, as in the first environment, got {got}"
        )

  def _missing(self, number: int) -> GateError:
    count = self._plan.count
    lane = f" in lane {number // count}" if number >= count else ""
    return GateError(
      f"{self._plan.label}: environment {number % count}{lane} has not been reset, or its worker "
      "has ended; call reset() before step()"
    )

  def _check_open(self) -> None:
    if self._closed:
      raise self._plan.closed_error()

  def _place(self, number: int, *, mapped: bool = True) -> str:
    count = self._plan.count
    lane = f", in lane {number // count}" if mapped or number >= count else ""
    return f"environment {number % count} of {count} of {self._plan.label}{lane}"

  def _tell(self, error: Exception, number: int, what: str, *, mapped: bool = False) -> None:
    """Notes on an error which environment raised it; `mapped` is True in a `jax.vmap`."""
    if number >= 0:
      place = self._place(number, mapped=mapped)
      foreign.add_note(error, f"callgate: {place} raised this in {what}()")


def fill(view: Any, count: int, values: Any) -> None:
  """Stores values in the first rows, and zeros in the rows that fill up a call."""
  view[:count] = values
  view[count:] = 0


class LanesMethod(objects.MethodOf):
  """A method of a process's `Host`, as a function that is sent with the user's `make`."""

  def __reduce__(self) -> Any:
    return LanesMethod, (self.instances, self.name)

  @property
  def make(self) -> Any:
    """The user's function, for checks that it can be imported."""
    made: Any = self.instances.make
    made = made.args[0].make
    while hasattr(made, "func"):
      made = made.func
    return made
