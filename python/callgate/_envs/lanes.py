# SPDX-License-Identifier: Apache-2.0
"""The environments themselves, in the process where they are stepped.

A process has one `EnvLanes` of each `callgate.envs`, with those environments that it was asked to
reset. Calls for different ones may come from several threads.
"""

from __future__ import annotations

import contextlib
import dataclasses
import inspect
import pickle
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import numpy as np

from callgate._core import foreign
from callgate._core import options as check
from callgate._core.errors import GateDefinitionError, GateError, ResultError
from callgate._envs import infos, seeds, spaces
from callgate._envs.spaces import Store
from callgate._jax import tracing
from callgate._places import objects


@dataclasses.dataclass(frozen=True)
class EnvPlan:
  """Describes the environments to all processes.

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
    """The results of a step: observations, rewards, terminated, truncated, infos, episodes."""
    seen, info = self.of_reset(count)
    number = jax.ShapeDtypeStruct((count,), self.reward)
    flag = jax.ShapeDtypeStruct((count,), np.bool_)
    length = jax.ShapeDtypeStruct((count,), np.int32)
    episodes = {"return": number, "length": length} if self.episodes else {}
    return seen, number, flag, flag, info, episodes


def plan_of(label: str, make: Any, count: int, info: Any, episodes: bool) -> EnvPlan:
  """The spaces of an environment, which is closed again."""
  spaces.gymnasium(label)
  try:
    inspect.signature(make).bind()
  except ValueError:  # it tells no signature
    pass
  except TypeError:
    check.refuse(label, "make", "a function without arguments that returns an environment", make)
  env = make()
  missing = [
    name
    for name in ("reset", "step", "observation_space", "action_space")
    if not hasattr(env, name)
  ]
  if missing:
    raise GateDefinitionError(
      f"{label}: make: expected an environment with Gymnasium's interface, got {env!r} without "
      f"{', '.join(missing)}"
    )
  if (lanes := getattr(env, "num_envs", None)) is not None:
    raise GateDefinitionError(
      f"{label}: make: expected one environment, of which callgate.envs makes n={count}, got a "
      f"vector of {lanes}, {env!r}"
    )
  seen, done = env.observation_space, env.action_space
  types = (
    spaces.types(label, "observation_space", seen), spaces.types(label, "action_space", done)
  )  # fmt: skip
  if callable(getattr(env, "close", None)):
    env.close()
  reward = np.dtype(tracing.canonical_dtype(np.dtype(np.float64)))
  return EnvPlan(label, make, count, seen, done, *types, info, reward, episodes)


class _Lane:
  """An environment and what Gymnasium's vector environments know of it."""

  __slots__ = ("ended", "env", "length", "step", "total")

  def __init__(self, env: Any) -> None:
    self.env, self.step = env, env.step
    self.ended: Any = False
    self.total, self.length = 0.0, 0  # of the episode


class EnvLanes:
  """The environments of one process, by lane.

  Results are written to rows of `out`, views of a program's memory: of what `EnvPlan` says. A lane
  number of `EnvPlan.count` or more is one that fills a call up, and has no environment.
  """

  def __init__(self, plan: EnvPlan) -> None:
    self._plan = plan
    self._lanes: dict[int, _Lane] = {}
    self._seen = Store.all_of("observation", plan.observations)
    self._infos = infos.Infos(plan.info)
    self._closed = False
    self._picture = b""  # the pickle of what was rendered last, for `picture`

  def reset(self, out: Any, lanes: Any, given: Any, *, how: seeds.How) -> None:
    """Makes what is not there yet, and resets it with its seed."""
    self._check_open()
    seen, info = out
    numbers = self._real(lanes)
    self._infos.clear(info)
    values: list[Any] = []
    number = -1
    try:
      every = seeds.of_lanes(how, given[: len(numbers)], numbers, self._plan.count)
      for row, (number, seed) in enumerate(zip(numbers, every, strict=True)):
        if number not in self._lanes:
          self._lanes[number] = _Lane(self._made())
        lane = self._lanes[number]
        lane.ended, lane.total, lane.length = False, 0.0, 0
        value, extra = lane.env.reset(seed=seed)
        values.append(value)
        self._infos.put(info, row, extra)
    except Exception as error:
      self._tell(error, number, "reset")
      raise
    self._put(seen, values, numbers, "reset")

  def step(self, out: Any, lanes: Any, actions: Any) -> None:
    """Steps each environment, or resets it where its episode has ended with the last step."""
    self._check_open()
    seen, *numeric, info, episodes = out
    numbers = self._real(lanes)
    plan, have = self._plan, self._lanes
    if plan.info:
      self._infos.clear(info)
    values: list[Any] = []
    rewards: list[Any] = []
    over: list[Any] = []
    cut: list[Any] = []
    number = -1
    try:
      for row, (number, action) in enumerate(
        zip(numbers, spaces.rows(plan.action_space, actions), strict=False)
      ):
        lane = have.get(number) or self._missing(number)
        if lane.ended:
          value, extra = lane.env.reset()
          reward, terminated, truncated = 0.0, False, False
          lane.total, lane.length = 0.0, 0
        else:
          value, reward, terminated, truncated, extra = lane.step(action)
          lane.length += 1
          lane.total += reward
        lane.ended = terminated or truncated
        values.append(value)
        rewards.append(reward)
        over.append(terminated)
        cut.append(truncated)
        if plan.info:
          self._infos.put(info, row, extra)
    except Exception as error:
      self._tell(error, number, "step")
      raise
    self._put(seen, values, numbers, "step")
    for one, view, given in zip(_NUMERIC, numeric, (rewards, over, cut), strict=True):
      _fill(view, len(numbers), self._as_numbers(one, given, numbers))
    if episodes:
      running = [have[number] for number in numbers]
      _fill(episodes["return"], len(numbers), [lane.total for lane in running])
      _fill(episodes["length"], len(numbers), [lane.length for lane in running])

  def shut(self, out: Any, lanes: Any) -> None:
    """`close`, for programs."""
    del lanes
    out[...] = True
    self.close()

  def render(self, number: int) -> Any:
    self._check_open()
    return (self._lanes.get(number) or self._missing(number)).env.render()

  def rendered(self, out: Any, lanes: Any) -> None:
    """Renders the one environment of `lanes`, if any; gives how many bytes its pickle has."""
    out[...] = 0
    for number in self._real(lanes):
      try:
        self._picture = pickle.dumps(self.render(number), pickle.HIGHEST_PROTOCOL)
      except Exception as error:
        self._tell(error, number, "render")
        raise
      out[...] = len(self._picture)

  def picture(self, out: Any, lanes: Any, *, room: int) -> None:
    """Gives the pickle of what was rendered last, where `lanes` has an environment, and zeros."""
    del room
    out[...] = 0
    if self._real(lanes):
      out.reshape(-1)[: len(self._picture)] = np.frombuffer(self._picture, np.uint8)
      self._picture = b""

  def close(self) -> None:
    """Closes the environments; calls fail from then on."""
    self._closed = True
    for lane in self._lanes.values():
      with contextlib.suppress(Exception):
        lane.env.close()
    self._lanes.clear()

  # ------------------------------------------------------------------------------------------------
  def _real(self, lanes: Any) -> list[int]:
    """The numbers of the environments; those that fill a call up come last."""
    numbers: list[int] = lanes.tolist()
    while numbers and numbers[-1] >= self._plan.count:
      numbers.pop()
    return numbers

  def _put(self, seen: Any, values: list[Any], numbers: Sequence[int], during: str) -> None:
    """Stores what each environment showed."""
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

  def _as_numbers(self, what: str, given: list[Any], numbers: Sequence[int]) -> Any:
    try:
      made = np.array(given, bool if what != "reward" else float)
      if made.shape == (len(given),):
        return made
    except (TypeError, ValueError):
      pass
    for number, one in zip(numbers, given, strict=True):
      if np.shape(one) != () or not isinstance(one, (bool, int, float, np.bool_, np.number)):
        error = ResultError(f"{what}: expected a number, got {one!r}")
        self._tell(error, number, "step")
        raise error
    raise ResultError(f"{what}: expected numbers, got {given!r}")

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

  def _tell(self, error: Exception, number: int, what: str) -> None:
    if number >= 0:
      plan = self._plan
      place = f"environment {number} of {plan.count} of {plan.label}"
      foreign.add_note(error, f"callgate: {place} raised it in {what}()")


_NUMERIC = ("reward", "terminated", "truncated")


def _fill(view: Any, count: int, values: Any) -> None:
  """Stores values in the first rows, and zeros in those that fill a call up."""
  view[:count] = values
  view[count:] = 0


class LanesMethod(objects.MethodOf):
  """A method of a process's `EnvLanes`, as a function that travels with the user's `make`."""

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
