# SPDX-License-Identifier: Apache-2.0
"""Descriptions of environments, which all processes that step them get."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import jax
import numpy as np

from callgate._core import options as check
from callgate._core import signatures
from callgate._core.errors import GateDefinitionError, GateError
from callgate._envs import infos, spaces, vectors
from callgate._envs.options import Autoreset
from callgate._envs.videos import VideoPlan
from callgate._jax import tracing

FINAL = ("final_obs", "final_info")  # Gymnasium's names for the last step's results of an episode


@dataclasses.dataclass(frozen=True)
class EnvPlan:
  """Describes the environments to all processes.

  Attributes:
    label: the beginning of messages.
    make: returns one environment, or one vector environment.
    count: the number of environments, without the copies of lanes of `jax.vmap`.
    width: the number of environments of a vector environment; 0 for single environments.
    autoreset: the option of `callgate.envs`.
    observation_space, action_space: the spaces of one environment.
    observations, actions: the spaces as pytrees of ShapeDtypeStructs.
    info: the entries of infos that programs get, as ShapeDtypeStructs.
    reward: the rewards' dtype.
    episodes: True if programs get returns and lengths of episodes.
    video: the environment whose pictures are kept, and the folder; or None.
  """

  label: str
  make: Callable[..., Any]
  count: int
  width: int
  autoreset: Autoreset
  observation_space: Any
  action_space: Any
  observations: Any
  actions: Any
  info: Mapping[str, Any]
  reward: np.dtype[Any]
  episodes: bool
  video: VideoPlan | None

  def closed_error(self) -> GateError:
    """Returns the exception of a use after `close()`."""
    return GateError(
      f"{self.label}: the environments are closed; step them before close(), or make others"
    )

  def of_reset(self, count: int) -> tuple[Any, Any]:
    """Returns the types of a reset's results: observations and infos."""

    def of_all(one: Any) -> jax.ShapeDtypeStruct:
      return jax.ShapeDtypeStruct((count, *one.shape), one.dtype)

    seen, info = jax.tree.map(of_all, self.observations), infos.batched(self.info, count)
    if self.autoreset == "same_step":
      flag = jax.ShapeDtypeStruct((count,), np.bool_)
      info |= {"final_obs": seen, "_final_obs": flag}
      if self.info:
        info |= {"final_info": infos.batched(self.info, count), "_final_info": flag}
    return seen, info

  def of_step(self, count: int) -> tuple[Any, ...]:
    """Returns a step's types: observations, rewards, terminated, truncated, infos, episodes."""
    seen, info = self.of_reset(count)
    number = jax.ShapeDtypeStruct((count,), self.reward)
    flag = jax.ShapeDtypeStruct((count,), np.bool_)
    length = jax.ShapeDtypeStruct((count,), np.int32)
    episodes = {"return": number, "length": length} if self.episodes else {}
    return seen, number, flag, flag, info, episodes


def plan_of(
  label: str, make: Any, count: int, info: Any, *, devices: int, vector: bool,
  autoreset: Autoreset, episodes: bool, video: VideoPlan | None,
) -> EnvPlan:  # fmt: skip
  """Returns the plan for an environment's spaces; makes and closes one."""
  spaces.gymnasium(label)
  _check_make(label, make, vector=vector)
  if autoreset == "same_step":
    for name in FINAL:
      if used := {name, f"_{name}"} & info.keys():
        taken = f"which autoreset='same_step' adds itself, got {sorted(used)}"
        raise GateDefinitionError(f"{label}: info: expected names other than '{name}', {taken}")
  env = vectors.make_vector(make) if vector else make()
  width = vectors.width_of(label, env, autoreset) if vector else 0
  if not vector:
    _check_single(label, env, count)
  elif count not in (1, width * devices):
    raise GateDefinitionError(
      f"{label}: n: expected no n= with vector=True, since the environment has {width} "
      f"lanes{f' on each of {devices} devices' if devices > 1 else ''}, got n={count}"
    )
  count = width * devices if vector else count
  if video is not None:
    video = video.of(label, env, count)
  seen, done = vectors.spaces_of(env) if vector else (env.observation_space, env.action_space)
  types = (
    spaces.types(label, "observation_space", seen), spaces.types(label, "action_space", done)
  )  # fmt: skip
  if callable(getattr(env, "close", None)):
    env.close()
  reward = np.dtype(tracing.canonical_dtype(np.dtype(np.float64)))
  return EnvPlan(
    label, make, count, width, autoreset, seen, done, *types, info, reward, episodes, video
  )


def _check_make(label: str, make: Any, *, vector: bool) -> None:
  try:
    signature = signatures.read(make)
    seeded = vector and "seed" in signature.parameters
    signature.bind(**({"seed": 0} if seeded else {}))
  except ValueError:  # no signature is available
    pass
  except TypeError:
    kind = "a vector environment" if vector else "an environment"
    given = "without arguments, or with seed=," if vector else "without arguments"
    check.refuse(label, "make", f"a function {given} that returns {kind}", make)


def _check_single(label: str, env: Any, count: int) -> None:
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
      f"{label}: make: expected a single environment, since callgate.envs makes n={count} of "
      f"them, got a vector of {lanes}, {env!r}; pass vector=True, or make a single environment"
    )
