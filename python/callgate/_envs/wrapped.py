# SPDX-License-Identifier: Apache-2.0
"""Wrappers of environments that programs run themselves, without the host.

A wrapper keeps its state in the infos, which the user's loop carries: `reset` starts the state, and
`step` takes the infos of the last call and returns the next ones. Statistics are those of all
environments, also on other devices: in a `jax.shard_map` they are summed over the mesh's axes.

Running means and variances: Chan, Golub and LeVeque, "Updating formulae and a pairwise algorithm
for computing sample variances", 1979. The numbers equal those of Gymnasium's wrappers.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from callgate._core import options as check
from callgate._core.errors import GateDefinitionError
from callgate._core.public import Closing
from callgate._envs import spaces

State = dict[str, Any]
_FIRST_COUNT = 1e-4  # the initial count, with mean 0 and variance 1, as in Gymnasium


class WrappedEnvs(Closing):
  """Environments with a wrapper; use them like the environments inside.

  The wrapper keeps its state in the infos, under its name. So pass the infos of each call to the
  next `step`.

  Attributes:
    name: the environments' name in programs and messages.
    num_envs: the number of environments.
    single_observation_space, single_action_space: Gymnasium's spaces of one environment.
    observation_space, action_space: Gymnasium's spaces of all environments.
  """

  _wrapper = ""  # the function that makes one, and the name of its state

  def __init__(self, env: Any) -> None:
    label = f"envs.{self._wrapper}"
    if not hasattr(env, "_plan") or not hasattr(env, "_layout"):
      expected = "environments of callgate.envs or a wrapper"
      raise GateDefinitionError(f"{label}: env: expected {expected}, got {env!r}")
    self._env, self._label = env, f"{label} of '{env.name}'"
    self.name, self.num_envs = env.name, env.num_envs
    self.single_observation_space = env.single_observation_space
    self.single_action_space = env.single_action_space
    self.observation_space, self.action_space = env.observation_space, env.action_space
    taken: set[str] = {*env._plan.info, *getattr(env, "_names", ())}
    if used := taken & self._own_names():
      got = f"got {sorted(used)} in info= or in another wrapper"
      raise GateDefinitionError(
        f"{self._label}: expected infos with other names than its own, {got}"
      )
    self._names = {*getattr(env, "_names", ()), *self._own_names()}

  def reset(
    self, key: Any = None, *, mask: Any = None, options: Any = None, info: Any = None
  ) -> tuple[Any, dict[str, Any]]:
    """Resets all environments, or those of a mask, as `Envs.reset` does.

    Args:
      key: as for `Envs.reset`.
      mask: as for `Envs.reset`.
      options: as for `Envs.reset`.
      info: the infos of the last call, whose statistics continue. None starts new statistics. A
        mask needs the infos.
    """
    if mask is not None and info is None:
      raise GateDefinitionError(
        f"{self._label}: mask: expected info= as well, the infos of the last call, which hold "
        "the state"
      )
    seen, found = self._env.reset(key, mask=mask, options=options, info=info)
    state = self._begun() if info is None else self._state(info)
    seen, state, more = self._after_reset(state, seen, found, mask)
    return seen, {**found, **more, self._wrapper: state}

  def step(
    self, actions: Any, info: Any = None
  ) -> tuple[Any, jax.Array, jax.Array, jax.Array, dict[str, Any]]:
    """Steps all environments, as `Envs.step` does.

    Args:
      actions: as for `Envs.step`.
      info: the infos of the last `reset` or `step`, with the state.

    Returns:
      The results of `Envs.step`, changed by the wrapper. The infos have the next state.

    Raises:
      GateDefinitionError: while tracing: the infos have no state of this wrapper.
    """
    state = self._state(info)
    seen, reward, terminated, truncated, found = self._env.step(actions, info)
    seen, reward, state, more = self._after_step(
      state, seen, reward, terminated, truncated, found
    )  # fmt: skip
    return seen, reward, terminated, truncated, {**found, **more, self._wrapper: state}

  def render(self, lane: int = 0) -> Any:
    """Renders an environment, as `Envs.render` does."""
    return self._env.render(lane)

  def close(self) -> None:
    """Closes the environments, as `Envs.close` does."""
    self._env.close()

  def __repr__(self) -> str:
    return f"<callgate.{self._label}>"

  # -- methods of subclasses -----------------------------------------------------------------------
  def _own_names(self) -> set[str]:
    return {self._wrapper}

  def _begun(self) -> State:
    """Returns the state before the first reset."""
    raise NotImplementedError

  def _after_reset(self, state: State, seen: Any, info: Any, mask: Any) -> tuple[Any, State, Any]:
    """Returns the observations, the next state, and additional infos."""
    raise NotImplementedError

  def _after_step(
    self, state: State, seen: Any, reward: Any, terminated: Any, truncated: Any, info: Any
  ) -> tuple[Any, Any, State, Any]:
    """Returns the observations, the rewards, the next state, and additional infos."""
    raise NotImplementedError

  # ------------------------------------------------------------------------------------------------
  def _state(self, info: Any) -> State:
    found = info.get(self._wrapper) if isinstance(info, Mapping) else None  # pyright: ignore
    if found is None:
      raise GateDefinitionError(
        f"{self._label}: info: expected the infos of the last reset or step, which hold the "
        f"state '{self._wrapper}', got {_shown(info)}; call env.step(actions, info)"
      )
    return found

  @property
  def _layout(self) -> Any:
    return self._env._layout

  @property
  def _plan(self) -> Any:
    return self._env._plan

  def _flags(self) -> Any:
    """Returns False for each environment, split over devices as results are."""
    return self._layout.split(self._layout.lanes() < 0)

  def _zeros(self, dtype: Any) -> Any:
    return jnp.where(self._flags(), 1, 0).astype(dtype)

  def _sum(self, values: Any) -> Any:
    """The sum over all environments, those of other devices included."""
    total = values.sum(0)
    return jax.lax.psum(total, self._layout.axes) if self._layout.is_local() else total

  def _moments(self, values: Any, counts: Any, before: State) -> State:
    """Mean, variance and count with more rows of values, of which `counts` has True for each."""
    dtype = before["mean"].dtype
    values, weight = values.astype(dtype), counts.astype(dtype)
    number = self._sum(weight)
    some = jnp.maximum(number, 1)
    weight = weight.reshape(-1, *[1] * (values.ndim - 1))
    # Rows with weight 0 may have any value, also NaN.
    values = jnp.where(weight > 0, values, 0)
    mean = self._sum(values) / some
    spread = self._sum(jnp.where(weight > 0, (values - mean) ** 2, 0))
    delta, total = mean - before["mean"], before["count"] + number
    squares = before["var"] * before["count"] + spread
    squares += delta**2 * before["count"] * number / total
    return {
      "mean": before["mean"] + delta * number / total, "var": squares / total, "count": total
    }  # fmt: skip


def _shown(info: Any) -> str:
  return f"{sorted(info)}" if isinstance(info, Mapping) else repr(info)  # pyright: ignore


def _first_moments(shape: tuple[int, ...], dtype: Any) -> State:
  count = jnp.asarray(_FIRST_COUNT, dtype)
  return {"mean": jnp.zeros(shape, dtype), "var": jnp.ones(shape, dtype), "count": count}


class NormalizedObservation(WrappedEnvs):
  _wrapper = "normalize_observation"

  def __init__(self, env: Any, epsilon: float) -> None:
    super().__init__(env)
    self._epsilon = _epsilon(self._label, epsilon)
    self._types = self._plan.observations
    before = env.single_observation_space
    self.single_observation_space = _boxes(self._label, "observation_space", before)
    batch = spaces.gymnasium(self._label).vector.utils.batch_space
    self.observation_space = batch(self.single_observation_space, self.num_envs)

  def _begun(self) -> State:
    def first(one: Any) -> State:
      return _first_moments(one.shape, jnp.promote_types(one.dtype, np.float32))

    state: State = {"moments": jax.tree.map(first, self._types)}
    if self._plan.autoreset == "disabled":
      state["ended"] = self._flags()
    return state

  def _after_reset(self, state: State, seen: Any, info: Any, mask: Any) -> tuple[Any, State, Any]:
    counts = ~self._flags() if mask is None else jnp.asarray(mask)
    found = {**state, "moments": self._updated(state["moments"], seen, counts)}
    if "ended" in state:
      found["ended"] = state["ended"] & ~counts
    return self._normalized(found["moments"], seen), found, self._finals(found, info)

  def _after_step(
    self, state: State, seen: Any, reward: Any, terminated: Any, truncated: Any, info: Any
  ) -> tuple[Any, Any, State, Any]:
    counts = ~state["ended"] if "ended" in state else ~self._flags()
    found = {**state, "moments": self._updated(state["moments"], seen, counts)}
    if "ended" in state:
      found["ended"] = terminated | truncated
    return self._normalized(found["moments"], seen), reward, found, self._finals(found, info)

  def _updated(self, moments: Any, seen: Any, counts: Any) -> Any:
    def each(values: Any, before: State) -> State:
      return self._moments(values, counts, before)

    return jax.tree.map(each, seen, moments)

  def _normalized(self, moments: Any, seen: Any) -> Any:
    def one(value: Any, has: State) -> Any:
      scale = jnp.sqrt(has["var"] + self._epsilon)
      return ((value - has["mean"]) / scale).astype(np.float32)

    return jax.tree.map(one, seen, moments)

  def _finals(self, state: State, info: Any) -> dict[str, Any]:
    """Last observations by the same numbers, which do not count them; zeros stay."""
    if "final_obs" not in info:
      return {}
    made = self._normalized(state["moments"], info["final_obs"])

    def masked(value: Any) -> Any:
      return jnp.where(info["_final_obs"].reshape(-1, *[1] * (value.ndim - 1)), value, 0)

    return {"final_obs": jax.tree.map(masked, made)}


class NormalizedReward(WrappedEnvs):
  _wrapper = "normalize_reward"

  def __init__(self, env: Any, gamma: float, epsilon: float) -> None:
    super().__init__(env)
    self._gamma = check.number(self._label, "gamma", gamma, what="a number from 0 to 1")
    if not 0 <= self._gamma <= 1:
      check.refuse(self._label, "gamma", "a number from 0 to 1", gamma)
    self._epsilon = _epsilon(self._label, epsilon)

  def _begun(self) -> State:
    dtype = self._plan.reward
    return {
      "moments": _first_moments((), dtype), "returns": self._zeros(dtype), "ended": self._flags()
    }  # fmt: skip

  def _after_reset(self, state: State, seen: Any, info: Any, mask: Any) -> tuple[Any, State, Any]:
    del info
    begins = ~self._flags() if mask is None else jnp.asarray(mask)
    returns, ended = jnp.where(begins, 0, state["returns"]), state["ended"] & ~begins
    return seen, {**state, "returns": returns, "ended": ended}, {}

  def _after_step(
    self, state: State, seen: Any, reward: Any, terminated: Any, truncated: Any, info: Any
  ) -> tuple[Any, Any, State, Any]:
    del info
    same_step = self._plan.autoreset == "same_step"
    counts = ~state["ended"]  # a step that resets has no reward
    goes_on = jnp.where(terminated, 0, self._gamma).astype(reward.dtype)
    returns = jnp.where(counts, state["returns"] * goes_on + reward, state["returns"])
    moments = self._moments(returns, counts, state["moments"])
    ended = terminated | truncated
    if same_step:
      returns, ended = jnp.where(ended, 0, returns), self._flags()
    scaled = reward / jnp.sqrt(moments["var"] + self._epsilon)
    return seen, scaled, {"moments": moments, "returns": returns, "ended": ended}, {}


class EpisodeStatistics(WrappedEnvs):
  _wrapper = "episode_statistics"

  def _own_names(self) -> set[str]:
    return {self._wrapper, "episode", "_episode"}

  def _begun(self) -> State:
    return {
      "return": self._zeros(self._plan.reward), "length": self._zeros(np.int32),
      "ended": self._flags(),
    }  # fmt: skip

  def _after_reset(self, state: State, seen: Any, info: Any, mask: Any) -> tuple[Any, State, Any]:
    del info
    begins = ~self._flags() if mask is None else jnp.asarray(mask)
    found = {name: jnp.where(begins, 0, value) for name, value in state.items() if name != "ended"}
    found["ended"] = state["ended"] & ~begins
    return seen, found, self._episodes(found, self._flags())

  def _after_step(
    self, state: State, seen: Any, reward: Any, terminated: Any, truncated: Any, info: Any
  ) -> tuple[Any, Any, State, Any]:
    del info
    before, ended = state["ended"], terminated | truncated
    stays = self._plan.autoreset == "disabled"
    rest = (state["return"], state["length"]) if stays else (0, 0)
    found: State = {
      "return": jnp.where(before, rest[0], state["return"] + reward),
      "length": jnp.where(before, rest[1], state["length"] + 1),
    }
    more = self._episodes(found, ended & ~before)
    if self._plan.autoreset == "same_step":
      found = {name: jnp.where(ended, 0, value) for name, value in found.items()}
      ended = self._flags()
    return seen, reward, {**found, "ended": ended}, more

  def _episodes(self, state: State, ended: Any) -> dict[str, Any]:
    """The infos of episodes that have just ended, by Gymnasium's names."""
    episode = {
      "r": jnp.where(ended, state["return"], 0), "l": jnp.where(ended, state["length"], 0)
    }  # fmt: skip
    return {"episode": episode, "_episode": ended}


def _epsilon(label: str, value: Any) -> float:
  return check.number(label, "epsilon", value, above=0, what="a number above 0")


def _boxes(label: str, which: str, space: Any) -> Any:
  """The space of normalized observations."""
  kinds = spaces.gymnasium(label).spaces
  if isinstance(space, kinds.Dict):
    inner: Any = space
    return kinds.Dict({k: _boxes(label, f"{which}[{k!r}]", one) for k, one in inner.items()})
  if isinstance(space, kinds.Tuple):
    return kinds.Tuple([_boxes(label, f"{which}[{i}]", one) for i, one in enumerate(space.spaces)])
  if not isinstance(space, kinds.Box):
    raise GateDefinitionError(f"{label}: {which}: expected a Box, of numbers, got {space}")
  return kinds.Box(-np.inf, np.inf, space.shape, np.float32)
