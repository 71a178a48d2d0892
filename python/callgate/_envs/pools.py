# SPDX-License-Identifier: Apache-2.0
"""Vector environments, in the process where they are stepped: each is a unit.

Each copy, and each device, has a vector environment of its own.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

from callgate._core.errors import GateError, ResultError
from callgate._envs import resets, seeds, spaces, vectors, videos
from callgate._envs.hosts import Host, Levels, Unit


class _Vector(Unit):
  """A vector environment, with the state of its episodes."""

  __slots__ = ("ended", "lengths", "seen", "totals")

  def __init__(self, env: Any, width: int) -> None:
    super().__init__(env)
    self.ended = np.zeros(width, bool)
    # Returns and lengths of the current episodes.
    self.totals, self.lengths = np.zeros(width), np.zeros(width, np.int32)
    # Copies of the last observations, if resets may leave some environments alone.
    self.seen: Any = None

  def begin(self, mask: Any) -> None:
    """Begins episodes in the environments of the mask."""
    rows = slice(None) if mask is None else mask
    self.ended[rows] = False
    self.totals[rows], self.lengths[rows] = 0, 0


class EnvVectors(Host[_Vector]):
  """The vector environments of one process."""

  def reset(
    self, out: Any, lanes: Any, given: Any, mask: Any, options: Any, *, how: seeds.How, form: Any,
    levels: Levels,
  ) -> None:  # fmt: skip
    """Resets vector environments with their seeds; makes the missing ones."""
    seen, info = out
    numbers = self._begun(info, lanes, levels)
    every = self._seeds(how, given, numbers)
    for number, rows in self._by_unit(numbers):
      which = None if mask is None else np.array(mask[rows])
      try:
        unit = self._unit(number)
        whole = None if how in ("none", "lanes") else seeds.integer_of(given[rows[0]])
        if which is None or which.any():
          first = rows[0] if which is None else rows[int(np.argmax(which))]
          more = resets.options_of(form, lambda i, first=first: options[i][first])
          own = None if how == "none" else ([every[row] for row in rows], whole)
          self._begin(number, unit, own, more, which, (seen, info, rows))
        else:
          self._put_seen(seen, rows, self._last(unit, number))
      except Exception as error:
        self._tell(error, number * self._size, "reset", mapped=bool(levels))
        raise
    self._clear_rest(len(numbers), seen)

  def _begin(
    self, number: int, unit: _Vector, own: Any, options: Any, mask: Any, results: Any
  ) -> None:
    """Resets a unit's environments of the mask with `own` seeds, and stores their observations."""
    plan = self._plan
    if mask is not None and mask.all() and unit.fresh:
      mask = None
    if mask is not None:
      self._last(unit, number)
    more = own
    if own is not None and vectors.seeded_by_make(unit.env, plan.make):
      if mask is None:
        unit.env.close()
        unit.env = vectors.make_vector(plan.make, vectors.seed_of_make(*own))
      more = None
    elif own is not None:
      more = vectors.seed_of(unit.env, *own)
    value, extra = vectors.reset(unit.env, seed=more, options=options, mask=mask)
    unit.begin(mask)
    unit.fresh = False
    if plan.autoreset == "disabled":
      value = self._kept(unit, value, mask)
    seen, info, rows = results
    self._put_seen(seen, rows, value)
    self._infos.put_rows(info, rows, extra, mask)
    filmed = self._video_lane - number * self._size
    if self._video is not None and 0 <= filmed < self._size and (mask is None or mask[filmed]):
      self._film(unit, begins=True)

  def step(self, out: Any, lanes: Any, actions: Any, *, levels: Levels) -> None:
    """Steps each vector environment, which resets its own environments when episodes end."""
    seen, rewards, over, cut, info, episodes = out
    numbers = self._begun(info, lanes, levels)
    plan = self._plan
    for number, rows in self._by_unit(numbers):
      try:
        unit = self._existing(number)
        if plan.autoreset == "disabled" and unit.ended.any():
          raise self._at_its_end(unit, number)
        own = spaces.batch(plan.action_space, actions, rows)
        value, reward, terminated, truncated, extra = vectors.step(unit.env, own)
        self._put_seen(seen, rows, self._kept(unit, value, None))
        for what, view, one in (
          ("reward", rewards, reward), ("terminated", over, terminated),
          ("truncated", cut, truncated),
        ):  # fmt: skip
          view[rows] = self._as_numbers(what, one, [numbers[row] for row in rows])
        if plan.info:
          self._infos.put_rows(info, rows, extra, None)
        ended = over[rows] | cut[rows]
        if plan.autoreset == "same_step":
          self._put_finals(info, rows, extra, ended)
        totals, lengths = self._count(unit, rewards[rows], ended)
        if episodes:
          episodes["return"][rows], episodes["length"][rows] = totals, lengths
        filmed = self._video_lane - number * self._size
        if self._video is not None and 0 <= filmed < self._size:
          # A vector environment that resets in the same step has no picture of the end.
          now = bool(ended[filmed])
          begins = now and plan.autoreset == "same_step"
          self._film(unit, begins=begins, ends=now and not begins)
      except Exception as error:
        self._tell(error, number * self._size, "step", mapped=bool(levels))
        raise
    self._clear_rest(len(numbers), seen, rewards, over, cut, *episodes.values())

  def _count(self, unit: _Vector, rewards: Any, ended: Any) -> tuple[Any, Any]:
    """Returns the returns and lengths of the episodes so far, with the last step."""
    begun = unit.ended if self._plan.autoreset == "next_step" else np.zeros_like(unit.ended)
    unit.totals = np.where(begun, 0.0, unit.totals + rewards)
    unit.lengths = np.where(begun, 0, unit.lengths + 1)
    totals, lengths = unit.totals, unit.lengths
    unit.ended = ended
    if self._plan.autoreset == "same_step":
      unit.ended = np.zeros_like(ended)
      unit.totals, unit.lengths = np.where(ended, 0.0, totals), np.where(ended, 0, lengths)
    return totals, lengths

  def _put_finals(self, info: Any, rows: Any, extra: Any, ended: Any) -> None:
    """Stores the final observations and infos of episodes, from Gymnasium's infos of the step."""
    if not ended.any():
      return
    if "final_obs" not in extra:
      raise ResultError("info: expected 'final_obs' when an episode ends, got none")
    inner = extra.get("final_info", {})
    if self._plan.info:
      info["_final_info"][rows[ended]] = True
      self._final_infos.put_rows(info["final_info"], rows, inner, ended)
    info["_final_obs"][rows[ended]] = True
    for index in np.flatnonzero(ended):
      value = vectors.final_row(extra["final_obs"], int(index))
      for one in self._final_seen:
        one.put(spaces.at(info["final_obs"], one.path), int(rows[index]), one.part(value))

  # ------------------------------------------------------------------------------------------------
  def _by_unit(self, numbers: list[int]) -> Iterator[tuple[int, Any]]:
    """Yields each unit's number, and the rows of its environments in order."""
    units = np.array(numbers, np.int64) // self._size
    for number in dict.fromkeys(units.tolist()):
      yield number, np.flatnonzero(units == number)

  def _put_seen(self, seen: Any, rows: Any, value: Any) -> None:
    for one in self._seen:
      one.put_rows(spaces.at(seen, one.path), rows, one.part(value))

  def _kept(self, unit: _Vector, value: Any, mask: Any) -> Any:
    """Returns observations, with the last ones outside the mask; keeps copies of them."""
    if self._plan.autoreset != "disabled":
      return value
    copy = unit.seen if mask is not None else {}
    for one in self._seen:
      now = np.array(one.part(value))
      if mask is not None:
        now = np.where(mask.reshape(-1, *[1] * (now.ndim - 1)), now, copy[one.path])
      copy[one.path] = now
    unit.seen = copy
    return spaces.tree_of(copy)

  def _last(self, unit: _Vector, number: int) -> Any:
    """Returns the last observations; raises if there are none."""
    if unit.fresh:
      raise self._missing(number * self._size)
    return spaces.tree_of(unit.seen)

  def _clear_rest(self, count: int, *views: Any) -> None:
    """Writes zeros to the rows that fill up a call."""
    for view in views:
      for _, one in spaces.leaves(view):
        one[count:] = 0

  def _at_its_end(self, unit: _Vector, number: int) -> GateError:
    lane = number * self._size + int(np.argmax(unit.ended))
    return GateError(
      f"{self._place(lane, mapped=False)} is at the end of its episode, and a vector environment "
      "steps all its environments; call env.reset(key, mask=terminated | truncated) before the "
      "next step"
    )

  def new_unit(self, number: int) -> _Vector:
    del number
    env = vectors.make_vector(self._plan.make)
    self._check_spaces(vectors.spaces_of(env))
    return _Vector(env, self._size)

  def picture_of(self, unit: _Vector, lane: int) -> Any:
    if vectors.is_pool(unit.env):
      return unit.env.render(np.array([lane], np.int32))[0]
    return videos.picture_of(unit.env.render(), lane, self._size)
