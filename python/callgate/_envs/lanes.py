# SPDX-License-Identifier: Apache-2.0
"""The environments themselves, in the process where they are stepped.

A process has one `Lanes` of each `callgate.envs`, with those environments that it was asked to
reset. Calls for different ones may come from several threads.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import numpy as np

from callgate._core.errors import GateError
from callgate._envs import infos, seeds, spaces
from callgate._envs.spaces import Store
from callgate._workers import objects


@dataclasses.dataclass(frozen=True)
class Plan:
  """What all processes know of the environments.

  Attributes:
    label: as messages begin.
    make: gives one environment.
    count: how many there are.
    observation_space, action_space: of one.
    observations, actions: those as pytrees of ShapeDtypeStructs.
    info: what of infos programs get, likewise.
    reward: its dtype.
    episodes: whether programs get returns and lengths of episodes.
  """

  label: str
  make: Callable[[], Any]
  count: int
  observation_space: Any
  action_space: Any
  observations: Any
  actions: Any
  info: Mapping[str, Any]
  reward: np.dtype[Any]
  episodes: bool

  def of_reset(self, count: int) -> tuple[Any, Any]:
    """The types of a reset's results: observations and infos."""

    def of_all(one: Any) -> jax.ShapeDtypeStruct:
      return jax.ShapeDtypeStruct((count, *one.shape), one.dtype)

    return jax.tree.map(of_all, self.observations), infos.batched(self.info, count)

  def of_step(self, count: int) -> tuple[Any, ...]:
    """Those of a step: observations, rewards, terminated, truncated, infos, episodes."""
    seen, info = self.of_reset(count)
    number = jax.ShapeDtypeStruct((count,), self.reward)
    flag = jax.ShapeDtypeStruct((count,), np.bool_)
    length = jax.ShapeDtypeStruct((count,), np.int32)
    episodes = {"return": number, "length": length} if self.episodes else {}
    return seen, number, flag, flag, info, episodes


class _Lane:
  """An environment and what Gymnasium's vector environments know of it."""

  __slots__ = ("ended", "env", "length", "total")

  def __init__(self, env: Any) -> None:
    self.env, self.ended, self.total, self.length = env, False, 0.0, 0


class Lanes:
  """The environments of one process, by lane.

  Results are written to rows of `out`, views of a program's memory: of what `Plan` says. A lane
  number of `Plan.count` or more is one that fills a call up, and has no environment.
  """

  def __init__(self, plan: Plan) -> None:
    self._plan = plan
    self._lanes: dict[int, _Lane] = {}
    self._seen = Store.all_of("observation", plan.observations)
    self._infos = infos.Infos(plan.info)
    self._closed = False

  def reset(self, out: Any, lanes: Any, given: Any, *, how: seeds.How) -> None:
    """Makes what is not there yet, and resets it with its seed."""
    self._check_open()
    seen, info = out
    self._infos.clear(info)
    views = [spaces.at(seen, one.path) for one in self._seen]
    numbers = lanes.tolist()
    all_seeds = seeds.of_lanes(how, given, numbers, self._plan.count)
    for row, (number, seed) in enumerate(zip(numbers, all_seeds, strict=True)):
      if number >= self._plan.count:
        _clear(views, row)
        continue
      with self._told(number, "reset"):
        if number not in self._lanes:
          self._lanes[number] = _Lane(self._made())
        lane = self._lanes[number]
        lane.ended, lane.total, lane.length = False, 0.0, 0
        value, extra = lane.env.reset(seed=seed)
        self._put(views, row, value)
        self._infos.put(info, row, extra)

  def step(self, out: Any, lanes: Any, actions: Any) -> None:
    """Steps each environment, or resets it where its episode has ended with the last step."""
    self._check_open()
    seen, rewards, terminated, truncated, info, episodes = out
    if self._plan.info:
      self._infos.clear(info)
    views = [spaces.at(seen, one.path) for one in self._seen]
    numbers = lanes.tolist()
    count, have = self._plan.count, self._lanes
    number = -1
    try:
      for row, action in enumerate(spaces.rows(self._plan.action_space, actions)):
        number = numbers[row]
        if number >= count:
          _clear([*views, rewards, terminated, truncated, *episodes.values()], row)
          continue
        lane = have.get(number) or self._missing(number)
        if lane.ended:
          value, extra = lane.env.reset()
          reward, ended, cut = 0.0, False, False
          lane.total, lane.length = 0.0, 0
        else:
          value, reward, ended, cut, extra = lane.env.step(action)
          lane.length += 1
        lane.ended = bool(ended or cut)
        rewards[row], terminated[row], truncated[row] = reward, ended, cut
        self._put(views, row, value)
        if self._plan.info:
          self._infos.put(info, row, extra)
        if episodes:
          lane.total += float(reward)
          episodes["return"][row], episodes["length"][row] = lane.total, lane.length
    except Exception as error:
      self._tell(error, number, "step")
      raise

  def shut(self, out: Any, lanes: Any) -> None:
    """`close`, for programs."""
    del lanes
    out[...] = True
    self.close()

  def render(self, number: int) -> Any:
    return (self._lanes.get(number) or self._missing(number)).env.render()

  def close(self) -> None:
    """Closes the environments; calls fail from then on."""
    self._closed = True
    for lane in self._lanes.values():
      with contextlib.suppress(Exception):
        lane.env.close()
    self._lanes.clear()

  # ------------------------------------------------------------------------------------------------
  def _put(self, views: Sequence[Any], row: int, value: Any) -> None:
    for one, view in zip(self._seen, views, strict=True):
      try:
        part = spaces.at(value, one.path) if one.path else value
      except (KeyError, IndexError, TypeError):
        raise GateError(f"{one.what}: expected one of the observation space's, got none") from None
      one.put(view, row, part)

  def _made(self) -> Any:
    plan = self._plan
    env = plan.make()
    for what, want in (
      ("observation_space", plan.observation_space),
      ("action_space", plan.action_space),
    ):
      got = getattr(env, what)
      if got != want:
        raise GateError(f"{plan.label}: {what}: expected {want}, as the first's, got {got}")
    return env

  def _missing(self, number: int) -> _Lane:
    raise GateError(
      f"{self._plan.label}: environment {number} has not been reset, or the worker that had it has "
      "ended; expected a reset() before step()"
    )

  def _check_open(self) -> None:
    if self._closed:
      raise GateError(f"{self._plan.label}: the environments have been closed")

  @contextlib.contextmanager
  def _told(self, number: int, what: str) -> Any:
    try:
      yield
    except Exception as error:
      self._tell(error, number, what)
      raise

  def _tell(self, error: Exception, number: int, what: str) -> None:
    if number >= 0:
      plan = self._plan
      error.add_note(
        f"callgate: environment {number} of {plan.count} of {plan.label} raised it in {what}()"
      )


def _clear(views: Sequence[Any], row: int) -> None:
  for view in views:
    view[row] = 0


class LanesMethod(objects.MethodOf):
  """A method of a process's `Lanes`, as a function that travels with the user's `make`."""

  def __reduce__(self) -> Any:
    return LanesMethod, (self.instances, self.name)

  @property
  def make(self) -> Any:
    """The user's function, for who looks whether it can be imported."""
    made: Any = self.instances.make
    made = made.args[0].make
    while hasattr(made, "func"):
      made = made.func
    return made
