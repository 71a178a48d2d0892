# SPDX-License-Identifier: Apache-2.0
"""Wrappers whose state a program carries, compared with Gymnasium's."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

pytest.importorskip("gymnasium")
pytest.importorskip("cloudpickle")

import environments
import gymnasium
from gymnasium.vector import AutoresetMode, SyncVectorEnv
from gymnasium.wrappers import vector as wrappers

import callgate as cg

N, STEPS = 4, 60
ACTIONS = np.random.default_rng(0).integers(0, 2, (STEPS, N)).astype(np.int32)
CLOSE = {"rtol": 2e-4, "atol": 2e-5}


def all_three(env: Any) -> Any:
  env = cg.envs.episode_statistics(env)
  env = cg.envs.normalize_observation(env, epsilon=1e-6)
  return cg.envs.normalize_reward(env, gamma=0.9, epsilon=1e-6)


def roll_out(env: Any, more: Any = None) -> Callable[[Any, Any], Any]:
  def run(key: Any, actions: Any) -> Any:
    def step(carry: Any, one: Any) -> Any:
      seen, info = carry
      seen, *rest, info = env.step(one, info)
      return (seen, info), (seen, *rest, info.get("episode"), info.get("_episode"))

    first = env.reset(key, info=more)
    return first[0], jax.lax.scan(step, first, actions)

  return run


def oracle_of(mode: str, n: int = N) -> Any:
  made = SyncVectorEnv([environments.cart_pole] * n, autoreset_mode=AutoresetMode[mode.upper()])
  made = wrappers.RecordEpisodeStatistics(made)
  if mode == "next_step":  # the only one that it takes
    made = wrappers.NormalizeObservation(made, epsilon=1e-6)
  return wrappers.NormalizeReward(made, gamma=0.9, epsilon=1e-6)


def of_gymnasium(mode: str, seed: int, actions: Any = ACTIONS, oracle: Any = None) -> Any:
  n = actions.shape[1]
  oracle = oracle or oracle_of(mode, n)
  first, _ = oracle.reset(seed=np.random.SeedSequence(seed).generate_state(n).tolist())
  steps = [oracle.step(one) for one in actions]
  none = {"r": np.zeros(n), "l": np.zeros(n)}
  parts = [
    (
      *step,
      {k: info.get("episode", none)[k] for k in "rl"},
      info.get("_episode", np.zeros(n, bool)),
    )
    for *step, info in steps
  ]
  return first, jax.tree.map(lambda *xs: np.stack(xs), *parts)


def assert_close(got: Any, want: Any) -> None:
  for one, other in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
    np.testing.assert_allclose(one, other, **CLOSE)


@pytest.mark.parametrize("mode", ["next_step", "same_step"])
def test_all_are_those_of_gymnasium(mode: Any, engine: str) -> None:
  wrap = all_three
  if mode == "same_step":
    wrap = lambda env: cg.envs.normalize_reward(cg.envs.episode_statistics(env), 0.9, 1e-6)
  first, steps = of_gymnasium(mode, 3)
  assert steps[-1].sum() > N
  with wrap(cg.envs(environments.cart_pole, n=N, autoreset=mode)) as env:
    run = jax.jit(roll_out(env))
    for _ in range(2):
      seen, (_, got) = run(3, ACTIONS)
      assert_close((seen, got), (first, tuple(steps)))


def test_statistics_go_on_over_resets_where_asked_for() -> None:
  oracle = oracle_of("next_step")
  of_gymnasium("next_step", 3, oracle=oracle)
  first, steps = of_gymnasium("next_step", 4, oracle=oracle)
  with all_three(cg.envs(environments.cart_pole, n=N)) as env:
    _, ((_, info), _) = jax.jit(roll_out(env))(3, ACTIONS)
    run = jax.jit(lambda info: roll_out(env, info)(4, ACTIONS))
    seen, (_, got) = run(info)
    assert_close((seen, got), (first, tuple(steps)))
    fresh = jax.jit(roll_out(env))(4, ACTIONS)[0]
    assert not np.allclose(fresh, first, **CLOSE)


def test_outside_of_programs_and_in_loops_of_python() -> None:
  first, steps = of_gymnasium("next_step", 3, ACTIONS[:15])
  with all_three(cg.envs(environments.cart_pole, n=N)) as env:
    seen, info = env.reset(3)
    np.testing.assert_allclose(seen, first, **CLOSE)
    for row, action in enumerate(ACTIONS[:15]):
      seen, reward, *_, info = env.step(action, info)
      np.testing.assert_allclose(seen, steps[0][row], **CLOSE)
      np.testing.assert_allclose(reward, steps[1][row], **CLOSE)


def test_each_lane_of_vmap_has_its_own_statistics() -> None:
  with all_three(cg.envs(environments.cart_pole, n=N)) as env:
    seen, (_, got) = jax.jit(jax.vmap(roll_out(env), (0, None)))(jnp.arange(3), ACTIONS)
    for lane in range(3):
      first, steps = of_gymnasium("next_step", lane)
      assert_close(jax.tree.map(lambda x, i=lane: x[i], (seen, got)), (first, tuple(steps)))


@pytest.mark.skipif(len(jax.devices()) < 4, reason="needs several devices")
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("way", ["auto", "explicit", "shard_map"])
def test_statistics_are_of_all_devices(way: str) -> None:
  kind = AxisType.Explicit if way == "explicit" else AxisType.Auto
  mesh = Mesh(np.array(jax.devices()[:4]), ("d",), axis_types=(kind,))
  actions = np.tile(ACTIONS, (1, 2))
  first, steps = of_gymnasium("next_step", 3, actions)
  sharding = NamedSharding(mesh, P("d"))
  with (
    jax.set_mesh(mesh),
    all_three(cg.envs(environments.cart_pole, n=2 * N, sharding=sharding)) as env,
  ):
    run = lambda key, actions: (lambda seen, found: (seen, found[1]))(*roll_out(env)(key, actions))
    if way == "shard_map":
      over = P(None, "d")
      specs = P("d"), (over, over, over, over, {"r": over, "l": over}, over)
      run = jax.shard_map(run, mesh=mesh, in_specs=(P(), over), out_specs=specs)
    seen, got = jax.jit(run)(3, actions)
    assert_close((seen, got), (first, tuple(steps)))


def test_derivatives_go_through_what_is_around() -> None:
  with cg.envs.normalize_observation(cg.envs(environments.cart_pole, n=N)) as env:

    def loss(weights: Any, stop: Any) -> Any:
      def step(carry: Any, _: Any) -> Any:
        seen, info = carry
        scores = stop(seen) @ weights
        actions = (jax.lax.stop_gradient(scores) > 0).astype(jnp.int32)
        seen, _, _, _, info = env.step(actions, info)
        return (seen, info), scores.sum()

      return jax.lax.scan(step, env.reset(0), length=8)[1].sum()

    weights = jnp.ones(4)
    plain = jax.jit(jax.grad(lambda w: loss(w, lambda x: x)))(weights)
    stopped = jax.jit(jax.grad(lambda w: loss(w, jax.lax.stop_gradient)))(weights)
    np.testing.assert_array_equal(plain, stopped)
    assert np.isfinite(plain).all()
    assert plain.any()


def test_environments_at_their_ends_count_once() -> None:
  make = lambda: cg.envs(environments.Drawn, n=2, autoreset="disabled")
  with all_three(make()) as env, make() as plain:

    @jax.jit
    def run() -> Any:
      seen, info = env.reset([1, 2])
      raw, _ = plain.reset([1, 2])
      rows, episodes = [raw], []
      for index in range(5):  # three steps are an episode
        seen, _, _, _, info = env.step(jnp.array([1, 2]), info)
        raw, *_ = plain.step(jnp.array([1, 2]))
        rows += [raw] if index < 3 else []
        episodes.append((info["episode"], info["_episode"]))
      mask = jnp.array([False, True])
      seen, info = env.reset([5, 6], mask=mask, info=info)
      raw, _ = plain.reset([5, 6], mask=mask)
      return jnp.concatenate([*rows, raw[1:]]), seen, info, episodes

    rows, seen, info, episodes = run()
    moments = info["normalize_observation"]["moments"]
    np.testing.assert_allclose(moments["mean"], rows.mean(0), rtol=1e-3)
    np.testing.assert_allclose(moments["var"], rows.var(0), rtol=1e-3)
    assert moments["count"] == pytest.approx(9, abs=1e-3)
    assert [has.tolist() for _, has in episodes] == [[i == 2] * 2 for i in range(5)]
    assert episodes[2][0]["r"].tolist() == [3, 6]
    assert episodes[2][0]["l"].tolist() == [3, 3]
    want = (np.array([[1, 3], [6, 0]]) - moments["mean"]) / np.sqrt(moments["var"] + 1e-6)
    np.testing.assert_allclose(seen, want, rtol=1e-3)
    assert info["episode_statistics"]["length"].tolist() == [3, 0]
    assert info["normalize_reward"]["ended"].tolist() == [True, False]


def test_last_observations_are_normalized() -> None:
  with cg.envs.normalize_observation(
    cg.envs(environments.Drawn, n=2, autoreset="same_step")
  ) as env:
    _, info = env.reset([1, 2])
    for _ in range(3):
      seen, _, _, _, info = env.step(jnp.zeros(2, jnp.int32), info)
    has = info["normalize_observation"]["moments"]
    scaled = lambda raw: (np.array(raw) - has["mean"]) / np.sqrt(has["var"] + 1e-8)
    np.testing.assert_allclose(info["final_obs"], scaled([[1, 3], [2, 3]]), rtol=1e-4)
    np.testing.assert_allclose(seen, scaled([[1, 0], [2, 0]]), rtol=1e-4)
    *_, info = env.step(jnp.zeros(2, jnp.int32), info)
    assert not info["final_obs"].any()


class Pair(gymnasium.Env[Any, Any]):
  observation_space = gymnasium.spaces.Dict(
    a=gymnasium.spaces.Box(0, 255, (2, 2), np.uint8),
    b=gymnasium.spaces.Tuple((gymnasium.spaces.Box(-1, 1, (3,), np.float64),)),
  )
  action_space = gymnasium.spaces.Discrete(2)

  def reset(self, **_: Any) -> Any:
    return self.observation_space.sample(), {}

  def step(self, action: Any) -> Any:
    return self.observation_space.sample(), 1.0, False, False, {}


def test_parts_of_observations_are_normalized_each() -> None:
  with cg.envs.normalize_observation(cg.envs(Pair, n=3)) as env:
    seen, (_, steps) = jax.jit(roll_out(env))(0, np.zeros((STEPS, 3), np.int32))
    assert seen["a"].dtype == seen["b"][0].dtype == np.float32
    assert abs(steps[0]["a"].mean()) < 0.2
    assert abs(steps[0]["a"][20:].std() - 1) < 0.2
    assert env.observation_space.contains(jax.tree.map(np.asarray, seen))
    assert env.single_observation_space["a"].dtype == np.float32
    assert env.num_envs == 3


def test_a_vector_and_workers_are_wrapped_alike(two: cg.Workers) -> None:
  first, steps = of_gymnasium("next_step", 3)
  vector = lambda: SyncVectorEnv([environments.cart_pole] * N)
  for env in (
    cg.envs(vector, vector=True), cg.envs(environments.cart_pole, n=N, run_on=two)
  ):  # fmt: skip
    with all_three(env) as wrapped:
      seen, (_, got) = jax.jit(roll_out(wrapped))(3, ACTIONS)
      assert_close((seen, got), (first, tuple(steps)))
      assert wrapped.name == env.name
    with pytest.raises(cg.GateError, match="are closed; step them before"):
      env.reset(0)


def test_a_loop_that_passes_infos_on_is_the_same_without_a_wrapper() -> None:
  for mode in ("next_step", "same_step"):
    with cg.envs(environments.cart_pole, n=N, autoreset=mode) as env:
      want = jax.jit(lambda env=env: jax.lax.scan(
        lambda _, a: (None, env.step(a)[:4]), env.reset(3) and None, ACTIONS
      )[1])()  # fmt: skip
      _, (_, got) = jax.jit(roll_out(env))(3, ACTIONS)
      for one, other in zip(got[:4], want, strict=True):
        np.testing.assert_array_equal(one, other)


def test_what_wrappers_do_not_take_is_refused() -> None:
  with cg.envs(environments.cart_pole, n=2, info={"episode": np.int32}) as env:
    with pytest.raises(
      cg.GateDefinitionError, match=r"expected infos with other names.*\['episode'\]"
    ):
      cg.envs.episode_statistics(env)
    wrapped = cg.envs.normalize_observation(env)
    with pytest.raises(cg.GateDefinitionError, match=r"\['normalize_observation'\] in info= or in"):
      cg.envs.normalize_observation(wrapped)
    _, info = env.reset(0)
    for given in (None, info, 3):
      with pytest.raises(cg.GateDefinitionError, match=r"call env.step\(actions, info\)"):
        wrapped.step(jnp.zeros(2, jnp.int32), given)
    with pytest.raises(cg.GateDefinitionError, match="mask: expected info= as well"):
      wrapped.reset(0, mask=jnp.ones(2, bool))
    for wrong in (0, -1.0, "x", float("nan")):
      with pytest.raises(cg.GateDefinitionError, match="epsilon: expected a number above 0"):
        cg.envs.normalize_observation(env, epsilon=wrong)  # pyright: ignore
      with pytest.raises(cg.GateDefinitionError, match="epsilon: expected a number above 0"):
        cg.envs.normalize_reward(env, epsilon=wrong)  # pyright: ignore
    for wrong in (-0.1, 1.5, "x"):
      with pytest.raises(cg.GateDefinitionError, match="gamma: expected a number from 0 to 1"):
        cg.envs.normalize_reward(env, gamma=wrong)  # pyright: ignore
  with pytest.raises(
    cg.GateDefinitionError, match=r"env: expected environments of callgate\.envs or a"
  ):
    cg.envs.normalize_reward(environments.cart_pole())
  with (
    cg.envs(environments.Composite) as env,
    pytest.raises(
      cg.GateDefinitionError, match=r"observation_space\['a'\]\['many'\]: expected a Box"
    ),
  ):
    cg.envs.normalize_observation(env)
