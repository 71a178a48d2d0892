# SPDX-License-Identifier: Apache-2.0
"""Environments that tests make in this process and in workers, which import them from here."""

from __future__ import annotations

import os
import pathlib
import signal
import time
from typing import Any

import gymnasium
import numpy as np
from gymnasium import spaces

LENGTH = 5
HANGS = 404  # the seed of a `Simple` whose reset does not return


def cart_pole() -> Any:
  return gymnasium.make("CartPole-v1")


def pendulum() -> Any:
  return gymnasium.make("Pendulum-v1", max_episode_steps=7)


class Composite(gymnasium.Env[Any, Any]):
  """Spaces of all kinds, one in the other; what it gives depends on all of what it got."""

  observation_space = spaces.Dict(
    {
      "z": spaces.Box(-1e6, 1e6, (2, 3), np.float64),
      "picture": spaces.Box(0, 255, (2, 2), np.uint8),
      "pair": spaces.Tuple((spaces.Discrete(1000, start=-5), spaces.MultiBinary(3))),
      "a": spaces.Dict({"many": spaces.MultiDiscrete([1000, 2000])}),
    }
  )
  action_space = spaces.Dict(
    {
      "turn": spaces.Discrete(4, start=1),
      "push": spaces.Tuple((spaces.Box(-1, 1, (2,), np.float32), spaces.MultiDiscrete([3, 5]))),
      "flags": spaces.MultiBinary(2),
    }
  )

  def __init__(self) -> None:
    self.at, self.total, self.last = 0, 0.0, None

  def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
    super().reset(seed=seed)
    self.at, self.total = 0, float(self.np_random.random())
    return self._seen(), {"begun": self.at, "inner": {"total": self.total}}

  def step(self, action: Any) -> Any:
    assert self.action_space.contains(action), action
    self.last = action  # kept, as environments do
    self.at += 1
    push, pair = action["push"]
    self.total += action["turn"] + push.sum() + pair[0] - pair[1] + 10 * action["flags"].sum()
    info: dict[str, Any] = {"vector": np.full(2, self.total)} if self.at % 2 else {}
    over = self.total > 40
    return self._seen(), self.total / 7, over, self.at >= LENGTH, info

  def _seen(self) -> Any:
    whole = int(self.total)
    return {
      "z": self.total + self.np_random.random((2, 3)),
      "picture": np.full((2, 2), whole % 256, np.uint8),
      "pair": (np.int64(whole % 900 - 5), np.array([1, 0, self.at % 2], np.int8)),
      "a": {"many": np.array([self.at, whole % 2000])},
    }


class Simple(gymnasium.Env[Any, Any]):
  """Counts its steps; `on_step` gets the environment, whose `seed` says which one it is."""

  observation_space = spaces.Box(-np.inf, np.inf, (2,), np.float32)
  action_space = spaces.Discrete(3)

  def __init__(self, on_step: Any = None, folder: str | None = None) -> None:
    self.on_step, self.folder, self.seed, self.count, self.closed = on_step, folder, -1, 0, False

  def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
    self.count = 0
    self.seed = self.seed if seed is None else seed
    if self.seed == HANGS:
      time.sleep(600)
    return np.array([self.seed, 0], np.float32), {}

  def step(self, action: Any) -> Any:
    self.count += 1
    if self.on_step is not None:
      self.on_step(self)
    seen = np.array([self.seed, self.count], np.float32)
    return seen, float(action), False, False, {"pid": os.getpid()}

  def close(self) -> None:
    if self.folder is not None:
      (pathlib.Path(self.folder) / f"closed-{self.seed}").touch()


def simple() -> Simple:
  return Simple()


def fail(env: Simple) -> None:
  if env.seed == 3 and env.count == 2:
    raise ArithmeticError("the simulation has diverged")


def die(env: Simple) -> None:
  if env.seed == 3 and env.count == 2:
    os.kill(os.getpid(), signal.SIGKILL)


def hang(env: Simple) -> None:
  if env.seed == 3 and env.count == 2:
    time.sleep(600)


class Calling(gymnasium.Env[Any, Any]):
  """Calls a function with each action: its result is what is seen."""

  observation_space = action_space = spaces.Box(-np.inf, np.inf, (), np.float32)

  def __init__(self, function: Any) -> None:
    self.function = function

  def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
    return np.float32(0), {}

  def step(self, action: Any) -> Any:
    return self.function(action), 0.0, False, False, {}


class Meeting:
  """Waits until environments of so many processes have come: they step at the same time."""

  def __init__(self, folder: str, count: int) -> None:
    self.folder, self.count = folder, count

  def __call__(self, env: Simple) -> None:
    (pathlib.Path(self.folder) / str(os.getpid())).touch()
    end = time.monotonic() + 60
    while len(os.listdir(self.folder)) < self.count:
      assert time.monotonic() < end, "the others didn't come"
      time.sleep(0.005)


class Odd(Simple):
  """Gives one thing that its space has not."""

  def __init__(self, seen: Any) -> None:
    super().__init__()
    self.seen = seen

  def step(self, action: Any) -> Any:
    return (self.seen, *super().step(action)[1:])


class Changed(Simple):
  """Replaces values of its step by others, by their places, or returns what `reset` says."""

  def __init__(self, values: dict[int, Any], reset: Any = None) -> None:
    super().__init__()
    self.values, self.on_reset = values, reset

  def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
    found = super().reset(seed=seed, options=options)
    return found if self.on_reset is None else self.on_reset(found)

  def step(self, action: Any) -> Any:
    found = super().step(action)
    return tuple(self.values.get(i, value) for i, value in enumerate(found))[: self.values.get(-1)]


class ChangedVector:
  """Two environments with Gymnasium's interface for vectors, whose results are replaced."""

  num_envs = 2
  single_observation_space, single_action_space = Simple.observation_space, Simple.action_space
  observation_space = spaces.Box(-np.inf, np.inf, (2, 2), np.float32)
  action_space = spaces.MultiDiscrete([3, 3])

  def __init__(self, values: dict[int, Any], reset: Any = None) -> None:
    self.values, self.on_reset = values, reset

  def reset(self, *, seed: Any = None, options: Any = None) -> Any:
    found = np.zeros((2, 2), np.float32), {}
    return found if self.on_reset is None else self.on_reset(found)

  def step(self, actions: Any) -> Any:
    no = np.zeros(2, bool)
    found = np.zeros((2, 2), np.float32), np.zeros(2), no, no, {}
    return tuple(self.values.get(i, value) for i, value in enumerate(found))[: self.values.get(-1)]

  def close(self) -> None: ...


class Pool:
  """EnvPool's interface over Gymnasium's CartPole: results come in an order of their own."""

  def __init__(self, count: int, seed: int = 0) -> None:
    self._envs = [cart_pole() for _ in range(count)]
    self._ended = [False] * count
    self.seed, self.closed = seed, False
    self.config = {"num_envs": count, "batch_size": count}
    self.spec = None
    self.observation_space = self._envs[0].observation_space  # of one
    self.action_space = self._envs[0].action_space
    self._reset = False

  def _results(self, numbers: list[int], parts: list[Any]) -> Any:
    order = numbers[::-1]
    rows = [np.stack([dict(zip(numbers, one, strict=True))[i] for i in order]) for one in parts]
    return *rows, {"env_id": np.array(order, np.int32), "twice": np.array(order) * 2}

  def reset(self, env_id: Any = None) -> Any:
    numbers = list(range(len(self._envs))) if env_id is None else env_id.tolist()
    seeds = [None if self._reset else self.seed + i for i in numbers]
    seen = [self._envs[i].reset(seed=s)[0] for i, s in zip(numbers, seeds, strict=True)]
    self._reset = True
    return self._results(numbers, [seen])

  def step(self, action: Any, env_id: Any = None) -> Any:
    numbers = list(range(len(self._envs))) if env_id is None else env_id.tolist()
    found: list[Any] = []
    for i, one in zip(numbers, action, strict=True):
      if self._ended[i]:
        found.append((self._envs[i].reset()[0], np.float32(0), False, False))
      else:
        found.append(self._envs[i].step(one)[:4])
      self._ended[i] = found[-1][2] or found[-1][3]
    return self._results(numbers, list(zip(*found, strict=True)))

  def close(self) -> None:
    self.closed = True


class Drawn(Simple):
  """Draws its count of steps; an episode has three."""

  render_mode = "rgb_array"
  metadata: dict[str, Any] = {"render_fps": 10}  # noqa: RUF012

  def step(self, action: Any) -> Any:
    seen, reward, _, _, info = super().step(action)
    return seen, reward, self.count == 3, False, info

  def render(self) -> Any:
    picture = np.zeros((16, 24, 3), np.uint8)
    picture[:, : 6 * self.count + 1] = (255, 10 * max(self.seed, 0), 0)
    return picture
