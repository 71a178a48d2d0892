# SPDX-License-Identifier: Apache-2.0
"""The functions that wrap environments; they are attributes of `callgate.envs`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Concatenate, ParamSpec, Protocol, TypeVar, cast

from callgate._envs.wrapped import (
  EpisodeStatistics,
  NormalizedObservation,
  NormalizedReward,
  WrappedEnvs,
)

P = ParamSpec("P")
Make = TypeVar("Make", contravariant=True)
Made = TypeVar("Made", covariant=True)


def normalize_observation(env: Any, epsilon: float = 1e-8) -> WrappedEnvs:
  """Normalizes each element of observations to mean 0 and variance 1, by running statistics.

  Like `gymnasium.wrappers.vector.NormalizeObservation`, it uses the mean and the variance of all
  observations of all environments so far.

  ```python
  import callgate as cg, gymnasium, jax, jax.numpy as jnp

  env = cg.envs.normalize_observation(cg.envs(lambda: gymnasium.make("CartPole-v1"), n=4))

  @jax.jit
  def rollout(key):
    def step(carry, _):
      observation, info = carry
      actions = (observation[:, 2] > 0).astype(jnp.int32)
      observation, reward, _, _, info = env.step(actions, info)
      return (observation, info), observation

    return jax.lax.scan(step, env.reset(key), length=200)[1]

  assert abs(rollout(jax.random.key(0))[100:].std() - 1) < 0.5
  env.close()
  ```

  Args:
    env: environments of `callgate.envs` or of a wrapper. Their observation space is a Box, or a
      Dict or Tuple of Boxes.
    epsilon: the number that is added to the variance.

  Returns:
    Environments with float32 observations. The state is `info["normalize_observation"]`.

  Raises:
    GateDefinitionError: an argument is wrong, or a part of the observation space is not a Box.
  """
  return NormalizedObservation(env, epsilon)


def normalize_reward(env: Any, gamma: float = 0.99, epsilon: float = 1e-8) -> WrappedEnvs:
  """Scales rewards so that their discounted sum has a variance of about 1.

  Like `gymnasium.wrappers.vector.NormalizeReward`, it divides rewards by the running standard
  deviation of the discounted sums of all environments.

  Args:
    env: environments of `callgate.envs` or of a wrapper.
    gamma: the discount factor, from 0 to 1.
    epsilon: the number that is added to the variance.

  Returns:
    Environments with scaled rewards. The state is `info["normalize_reward"]`.

  Raises:
    GateDefinitionError: an argument is wrong.
  """
  return NormalizedReward(env, gamma, epsilon)


def episode_statistics(env: Any) -> WrappedEnvs:
  """Adds the return and the length of each ended episode to the infos.

  As in `gymnasium.wrappers.vector.RecordEpisodeStatistics`, `info["episode"]` has "r", the sum of
  rewards, and "l", the number of steps, where `info["_episode"]` is True, and zeros elsewhere.

  Args:
    env: environments of `callgate.envs` or of a wrapper.

  Returns:
    Environments with these infos. The state is `info["episode_statistics"]`.

  Raises:
    GateDefinitionError: `env` is not from `callgate.envs` or a wrapper, or its infos already have
      these names.
  """
  return EpisodeStatistics(env)


class _Reachable(Protocol[Make, P, Made]):
  """A function whose attributes are the wrappers."""

  @property
  def normalize_observation(self) -> _NormalizeObservation: ...
  @property
  def normalize_reward(self) -> _NormalizeReward: ...
  @property
  def episode_statistics(self) -> Callable[[Any], WrappedEnvs]: ...
  def __call__(self, make: Make, /, *args: P.args, **options: P.kwargs) -> Made: ...


class _NormalizeObservation(Protocol):
  def __call__(self, env: Any, epsilon: float = 1e-8) -> WrappedEnvs: ...


class _NormalizeReward(Protocol):
  def __call__(self, env: Any, gamma: float = 0.99, epsilon: float = 1e-8) -> WrappedEnvs: ...


def reachable(
  function: Callable[Concatenate[Make, P], Made],
) -> _Reachable[Make, P, Made]:
  """Returns the function with the wrappers as its attributes."""
  for wrapper in (normalize_observation, normalize_reward, episode_statistics):
    setattr(function, wrapper.__name__, wrapper)
  return cast("_Reachable[Make, P, Made]", function)
