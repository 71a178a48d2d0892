# SPDX-License-Identifier: Apache-2.0
"""Vector environments, with the interface of Gymnasium or EnvPool: their properties and calls.

EnvPool (https://envpool.readthedocs.io) takes its seed when it is made, resets and steps the
environments of given numbers (`env_id`), and has the spaces of one environment. It also returns the
order of its results.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sized
from typing import Any

import numpy as np

from callgate._core import signatures
from callgate._core.errors import GateDefinitionError
from callgate._envs import results, spaces
from callgate._envs.options import Autoreset

_MOST_SEED = 2**31  # the limit of EnvPool's seeds


def takes(function: Any, name: str) -> bool:
  """True if a function has a parameter of this name."""
  try:
    return name in signatures.read(function).parameters
  except (TypeError, ValueError):
    return False


def make_vector(make: Any, seed: Any = None) -> Any:
  """Makes a vector environment; with `seed` if `make` takes one."""
  if not takes(make, "seed"):
    return make()
  required = signatures.read(make).parameters["seed"].default is inspect.Parameter.empty
  if seed is None:
    return make(seed=0) if required else make()
  return make(seed=seed)


def is_pool(env: Any) -> bool:
  """True for EnvPool's interface."""
  return takes(env.reset, "env_id")


def seeded_by_make(env: Any, make: Any) -> bool:
  """True if a seed goes to `make`, so that a reset with one makes a new environment."""
  return takes(make, "seed") and (is_pool(env) or not takes(env.reset, "seed"))


def spaces_of(env: Any) -> tuple[Any, Any]:
  """Returns the spaces of one of its environments."""
  return tuple(
    getattr(env, f"single_{name}", None) or getattr(env, name)
    for name in ("observation_space", "action_space")
  )  # type: ignore[return-value]


def _width(env: Any) -> Any:
  """Returns its number of environments; EnvPool has it in its config, and by `len`."""
  if (width := getattr(env, "num_envs", None)) is None:
    config = getattr(env, "config", None)
    width = config.get("num_envs") if isinstance(config, Mapping) else None  # pyright: ignore
  return len(env) if width is None and isinstance(env, Sized) else width


def width_of(label: str, env: Any, autoreset: Autoreset) -> int:
  """Returns its number of environments; raises unless it has this `autoreset`."""
  width: Any = _width(env)
  has_all = all(
    hasattr(env, name) for name in ("reset", "step", "observation_space", "action_space")
  )
  if not has_all or not isinstance(width, (int, np.integer)):
    hint = "for a single environment, use callgate.envs(make, n=...)"
    raise GateDefinitionError(
      f"{label}: make: expected a vector environment with vector=True, as gymnasium.make_vec "
      f"returns (num_envs, reset, step and spaces), got {env!r}; {hint}"
    )
  config = getattr(env, "config", None)
  batch = config.get("batch_size", 0) if isinstance(config, Mapping) else 0  # pyright: ignore
  if batch and batch != width:
    raise GateDefinitionError(
      f"{label}: make: expected an EnvPool that steps all of its environments at once, "
      f"batch_size={width}, got batch_size={batch}"
    )
  mode = _mode_of(env)
  if mode != autoreset:
    way = f"make it with vector_kwargs={{'autoreset_mode': AutoresetMode.{autoreset.upper()}}}"
    raise GateDefinitionError(
      f"{label}: autoreset={autoreset!r}: expected a vector environment with that mode, got one "
      f"with {mode!r}; {way}, or pass autoreset={mode!r}"
    )
  return int(width)


def _mode_of(env: Any) -> str:
  """Returns its autoreset mode, by Gymnasium's names in lower case; "next_step" by default."""
  mode = (getattr(env, "metadata", None) or {}).get("autoreset_mode")
  return "next_step" if mode is None else str(getattr(mode, "name", mode)).lower()


def reset(env: Any, *, seed: Any, options: dict[str, Any] | None, mask: Any) -> tuple[Any, Any]:
  """Resets the environments of `mask`, a bool array, or all; results have a row for each of all."""
  more: dict[str, Any] = {}
  if is_pool(env):
    if mask is not None:
      more["env_id"] = np.flatnonzero(mask).astype(np.int32)
    if options:
      more["options"] = options
    seen, info = results.of_reset(env.reset(**more))
    return _in_order(seen, info, mask)
  if seed is not None:
    more["seed"] = seed
  if mask is not None:
    more["options"] = {**(options or {}), "reset_mask": mask}
  elif options is not None:
    more["options"] = dict(options)
  return results.of_reset(env.reset(**more))


def step(env: Any, actions: Any) -> tuple[Any, ...]:
  """Steps all; results have a row for each, in order."""
  found = results.of_steps(env.step(actions))
  if not is_pool(env):
    return found
  order = _order(found[-1])
  return found if order is None else tuple(rows_of(one, order) for one in found)


def _in_order(seen: Any, info: Any, mask: Any) -> tuple[Any, Any]:
  if (order := _order(info)) is not None:
    seen, info = rows_of(seen, order), rows_of(info, order)
  if mask is None:
    return seen, info
  # The other rows are never read.
  places = np.maximum(np.cumsum(mask) - 1, 0)
  return rows_of(seen, places), rows_of(info, places)


def _order(info: Any) -> Any:
  """Returns the places of EnvPool's results by environment number, if it has them."""
  numbers = info.get("env_id") if isinstance(info, Mapping) else None  # pyright: ignore
  return None if numbers is None else np.argsort(np.asarray(numbers), kind="stable")


def rows_of(tree: Any, rows: Any) -> Any:
  """Returns rows of all arrays in dictionaries and tuples."""
  if isinstance(tree, Mapping):
    return {key: rows_of(value, rows) for key, value in tree.items()}  # pyright: ignore
  if isinstance(tree, tuple):
    return tuple(rows_of(value, rows) for value in tree)  # pyright: ignore
  return np.asarray(tree)[rows]


def seed_of(env: Any, seeds: list[Any], whole: int | None) -> Any:
  """Returns the seed for a reset: one for each environment, or the one from which all were made.

  Gymnasium's vectors of single environments take a list. Other vector environments have a single
  random generator, and take `whole`, if the caller passed it.
  """
  gymnasium: Any = spaces.gymnasium("envs")
  single = (gymnasium.vector.SyncVectorEnv, gymnasium.vector.AsyncVectorEnv)
  of_each = isinstance(getattr(env, "unwrapped", env), single) or whole is None
  return seeds if of_each else whole


def seed_of_make(seeds: list[Any], whole: int | None) -> int:
  """Returns the seed for `make`, of 31 bits."""
  seed = seeds[0] if whole is None else whole
  return seed if seed < _MOST_SEED else int(np.random.SeedSequence(seed).generate_state(1)[0] >> 1)


def final_row(values: Any, row: int) -> Any:
  """Returns one environment's part of "final_obs", an array of objects or of rows."""
  if isinstance(values, Mapping):
    return {key: final_row(value, row) for key, value in values.items()}  # pyright: ignore
  if isinstance(values, tuple):
    return tuple(final_row(value, row) for value in values)  # pyright: ignore
  return values[row]
