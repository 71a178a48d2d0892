# SPDX-License-Identifier: Apache-2.0
"""Environments whose `reset` or `step` returns something else than Gymnasium's interface says."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

pytest.importorskip("gymnasium")
pytest.importorskip("cloudpickle")

import environments

import callgate as cg

WHERE = pytest.mark.parametrize("where", ["xla", "workers"])
_STEP = r"step: expected a tuple \(observation, reward, terminated, truncated, info\), got "
_RESET = r"reset: expected a tuple \(observation, info\), got "


def first(found: Any) -> Any:
  return found[0]


def without_info(found: Any) -> Any:
  return found[0], None


def stepped(env: cg.Envs) -> Any:
  with cg.errors():
    return jax.block_until_ready(jax.jit(env.step)(jnp.zeros(2, jnp.int32)))


def place(where: str, workers: cg.Workers) -> Any:
  return workers if where == "workers" else where


@pytest.mark.parametrize(
  ("values", "said"),
  [
    ({1: None}, "reward: expected a number, got None"),
    ({1: "1.5"}, "reward: expected a number, got '1.5'"),
    ({1: 1j}, "reward: expected a number, got 1j"),
    ({1: np.zeros(2)}, r"reward: expected a number, got float64\[2\]"),
    ({2: None}, "terminated: expected a bool, got None"),
    ({2: 1.0}, "terminated: expected a bool, got 1.0"),
    ({3: None}, "truncated: expected a bool, got None"),
    ({3: "no"}, "truncated: expected a bool, got 'no'"),
    ({4: None}, "step: info: expected a dict, got None"),
    ({-1: 4}, _STEP + "4 values"),
  ],
)
@WHERE
def test_results_of_a_step_of_another_form_name_the_part(
  where: str, values: Any, said: str, two: cg.Workers
) -> None:
  make = functools.partial(environments.Changed, values)
  with cg.envs(make, n=2, run_on=place(where, two)) as env:
    env.reset(0)
    with pytest.raises(cg.ResultError, match=said) as caught:
      stepped(env)
    assert any("environment 0 of 2" in note for note in caught.value.__notes__)


@pytest.mark.parametrize(
  "values",
  [
    {1: np.float32(1), 2: np.False_, 3: np.True_},
    {1: np.array(1), 2: np.array(False)},
    {1: jnp.float32(1), 3: jnp.bool_(True)},
    {1: True},
    {1: np.float16(1)},
    {1: 1, 2: 0, 3: 1},  # as old environments have them
  ],
)
def test_scalars_of_numpy_and_jax_serve_as_rewards_and_flags(values: Any) -> None:
  with cg.envs(functools.partial(environments.Changed, values), n=2) as env:
    env.reset(0)
    _, reward, terminated, truncated, _ = stepped(env)
    assert reward.tolist() == [1, 1]
    assert terminated.tolist() == [False] * 2
    assert truncated.tolist() == [3 in values] * 2


@pytest.mark.parametrize(
  ("values", "said"),
  [
    ({1: None}, r"reward: expected float64\[2\], got None"),
    ({1: [1.0, None]}, "reward: expected a number, got None"),
    ({1: np.zeros((2, 1))}, r"reward: expected float64\[2\], got float64\[2,1\]"),
    ({2: np.zeros(2)}, r"terminated: expected a bool, got .*0\.0"),
    ({3: None}, r"truncated: expected bool\[2\], got None"),
    ({4: None}, "step: info: expected a dict, got None"),
    ({-1: 4}, _STEP + "4 values"),
  ],
)
def test_results_of_a_vector_s_step_are_checked(values: Any, said: str) -> None:
  with cg.envs(functools.partial(environments.ChangedVector, values), vector=True) as env:
    env.reset(0)
    with pytest.raises(cg.ResultError, match=said) as caught:
      stepped(env)
    number = 1 if type(values.get(1)) is list else 0
    assert any(f"environment {number} of 2" in note for note in caught.value.__notes__)


@pytest.mark.parametrize(
  ("reset", "said"),
  [(first, _RESET + "float32"), (without_info, "reset: info: expected a dict, got None")],
)
@pytest.mark.parametrize("kind", ["single", "workers", "vector"])
def test_results_of_a_reset_are_checked(kind: str, reset: Any, said: str, two: cg.Workers) -> None:
  vector = kind == "vector"
  make = environments.ChangedVector if vector else environments.Changed
  options: Any = {"vector": True} if vector else {"n": 2, "run_on": place(kind, two)}
  options["run_on"] = place(kind, two) if kind == "workers" else "xla"
  env = cg.envs(functools.partial(make, {}, reset), **options)
  with env, pytest.raises(cg.ResultError, match=said), cg.errors():
    jax.block_until_ready(env.reset(0))


def test_bools_are_no_actions_of_a_vector() -> None:
  with cg.envs(functools.partial(environments.ChangedVector, {}), vector=True) as env:
    env.reset(0)
    with pytest.raises(cg.GateDefinitionError, match=r"expected int32\[2\], .* got bool\[2\]"):
      env.step(jnp.zeros(2, bool))
