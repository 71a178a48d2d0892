# SPDX-License-Identifier: Apache-2.0
"""Single environments, in the process where they are stepped."""

from __future__ import annotations

from typing import Any

from callgate._envs import resets, results, seeds, spaces
from callgate._envs.hosts import Host, Levels, Unit, fill


class _Lane(Unit):
  """An environment, with the state that Gymnasium's vector environments keep of it."""

  __slots__ = ("ended", "flags", "length", "seen", "step", "total")

  def __init__(self, env: Any) -> None:
    super().__init__(env)
    self.step = env.step
    self.ended: Any = False
    self.flags: tuple[Any, Any] = (False, False)  # (terminated, truncated) of the last step
    self.seen: Any = None  # the last observation
    self.total, self.length = 0.0, 0  # of the current episode

  def begin(self, seed: int | None, options: Any) -> Any:
    """Begins an episode; returns the infos."""
    more = {} if options is None else {"options": options}
    self.seen, extra = results.of_reset(self.env.reset(seed=seed, **more))
    self.fresh, self.ended, self.total, self.length = False, False, 0.0, 0
    return extra

  def again(self) -> Any:
    """Begins the next episode; returns the infos."""
    self.seen, extra = results.of_reset(self.env.reset())
    self.ended, self.total, self.length = False, 0.0, 0
    return extra


class EnvLanes(Host[_Lane]):
  """The environments of one process, by lane."""

  def reset(
    self, out: Any, lanes: Any, given: Any, mask: Any, options: Any, *, how: seeds.How, form: Any,
    levels: Levels,
  ) -> None:  # fmt: skip
    """Resets environments with their seeds; makes the missing ones."""
    seen, info = out
    numbers = self._begun(info, lanes, levels)
    values: list[Any] = []
    number = -1
    try:
      every = self._seeds(how, given, numbers)
      for row, (number, seed) in enumerate(zip(numbers, every, strict=True)):
        if mask is None or mask[row]:
          lane = self._unit(number)
          more = resets.options_of(form, lambda i, row=row: options[i][row])
          extra = lane.begin(seed, more)
          self._infos.put(info, row, extra)
          if number == self._video_lane:
            self._film(lane, begins=True)
        else:
          lane = self._existing(number)
        values.append(lane.seen)
    except Exception as error:
      self._tell(error, number, "reset", mapped=bool(levels))
      raise
    self._put(seen, values, numbers, "reset")

  def step(self, out: Any, lanes: Any, actions: Any, *, levels: Levels) -> None:
    """Steps each environment, and resets ended ones as `EnvPlan.autoreset` says."""
    seen, *numeric, info, episodes = out
    numbers = self._begun(info, lanes, levels)
    plan, have = self._plan, self._units
    stays = plan.autoreset == "disabled"
    notes = plan.episodes or plan.autoreset != "next_step" or self._video is not None
    values: list[Any] = []
    rewards: list[Any] = []
    over: list[Any] = []
    cut: list[Any] = []
    done: list[tuple[float, int]] = []  # return and length of each episode so far
    number = -1
    try:
      for row, (number, action) in enumerate(
        zip(numbers, spaces.rows(plan.action_space, actions), strict=False)
      ):
        lane = have.get(number)
        if lane is None or lane.fresh:
          raise self._missing(number)
        if not lane.ended:
          value, reward, terminated, truncated, extra = results.of_step(lane.step(action))
          lane.length += 1
          lane.total += reward
          lane.ended = terminated or truncated
        elif stays:
          value, reward, (terminated, truncated), extra = lane.seen, 0.0, lane.flags, {}
          lane.total, lane.length = 0.0, 0  # the ended episode has been reported
        else:
          extra = lane.again()
          value, reward, terminated, truncated = lane.seen, 0.0, False, False
        if notes:
          done.append((lane.total, lane.length))
          lane.seen, lane.flags = value, (terminated, truncated)
          extra = self._noted(lane, number, row, info, extra)
          value = lane.seen
        values.append(value)
        rewards.append(reward)
        over.append(terminated)
        cut.append(truncated)
        if plan.info:
          self._infos.put(info, row, extra)
    except Exception as error:
      self._tell(error, number, "step", mapped=bool(levels))
      raise
    self._put(seen, values, numbers, "step")
    for one, view, given in zip(_NUMERIC, numeric, (rewards, over, cut), strict=True):
      fill(view, len(numbers), self._as_numbers(one, given, numbers))
    if episodes:
      fill(episodes["return"], len(numbers), [total for total, _ in done])
      fill(episodes["length"], len(numbers), [length for _, length in done])

  def _noted(self, lane: _Lane, number: int, row: int, info: Any, extra: Any) -> Any:
    """Films a step; with autoreset="same_step" begins the next episode. Returns the infos."""
    if number == self._video_lane and (lane.length or not lane.ended):
      self._film(lane, ends=bool(lane.ended))
    if lane.ended and self._plan.autoreset == "same_step":
      self._put_final(info, row, lane.seen, extra)
      extra = lane.again()
      if number == self._video_lane:
        self._film(lane)
    return extra

  def new_unit(self, number: int) -> _Lane:
    del number
    env = self._plan.make()
    self._check_spaces((env.observation_space, env.action_space))
    return _Lane(env)

  def picture_of(self, unit: _Lane, lane: int) -> Any:
    del lane
    return unit.env.render()


_NUMERIC = ("reward", "terminated", "truncated")
