# SPDX-License-Identifier: Apache-2.0
"""When episodes begin anew: in the same step, or when the program says."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

pytest.importorskip("gymnasium")
pytest.importorskip("cloudpickle")

import environments
import gymnasium
from gymnasium.vector import AutoresetMode, SyncVectorEnv

import callgate as cg

N, STEPS = 4, 50
WHERE = pytest.mark.parametrize("where", ["xla", "own", "workers"])


def run_on(where: str, workers: cg.Workers) -> Any:
  return workers if where == "workers" else where


def seeds_of(seed: int) -> list[int]:
  return np.random.SeedSequence(seed).generate_state(N).tolist()


def oracle_of(make: Any, mode: AutoresetMode) -> SyncVectorEnv:
  return SyncVectorEnv([make] * N, autoreset_mode=mode)


def actions_of(make: Any) -> list[Any]:
  space = gymnasium.vector.utils.batch_space(make().action_space, N)
  space.seed(1)
  return [space.sample() for _ in range(STEPS)]


def stacked(values: list[Any]) -> Any:
  return jax.tree.map(lambda *xs: np.stack(xs), *values)


def as_arrays(tree: Any) -> Any:
  if isinstance(tree, dict):
    return {key: as_arrays(value) for key, value in tree.items()}
  return tuple(map(as_arrays, tree)) if isinstance(tree, tuple) else np.asarray(tree)


def assert_same(got: Any, want: Any) -> None:
  assert jax.tree.structure(got) == jax.tree.structure(want)
  for one, other in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
    np.testing.assert_array_equal(one, np.asarray(other).astype(one.dtype))


# -- in the same step ------------------------------------------------------------------------------
@WHERE
@pytest.mark.parametrize("what", ["CartPole", "composite"])
def test_the_step_that_ends_an_episode_begins_the_next(
  what: str, where: str, two: cg.Workers, engine: str
) -> None:
  make: Any = {"CartPole": environments.cart_pole, "composite": environments.Composite}[what]
  info = {"vector": jax.ShapeDtypeStruct((2,), jnp.float32)} if what == "composite" else None
  oracle = oracle_of(make, AutoresetMode.SAME_STEP)
  first, _ = oracle.reset(seed=seeds_of(3))
  actions = actions_of(make)
  steps = [oracle.step(one) for one in actions]
  with cg.envs(make, n=N, autoreset="same_step", info=info, run_on=run_on(where, two)) as env:

    @jax.jit
    def run(key: Any, actions: Any) -> Any:
      # The infos of both have one structure.
      def step(carry: Any, one: Any) -> Any:
        del carry
        seen, *rest, info = env.step(one)
        return (seen, info), (seen, *rest, info)

      carry = env.reset(key)
      return carry, jax.lax.scan(step, carry, actions)[1]

    for _ in range(2):
      (seen, told), (*found, infos) = run(3, stacked([as_arrays(one) for one in actions]))
      assert_same(seen, as_arrays(first))
      assert not told["_final_obs"].any()
      assert_same(tuple(found), stacked([as_arrays(step[:4]) for step in steps]))
      ends = 0
      for row, (*_, terminated, truncated, own) in enumerate(steps):
        over = terminated | truncated
        np.testing.assert_array_equal(infos["_final_obs"][row], over)
        for lane in range(N):
          got = jax.tree.map(lambda x, r=row, i=lane: x[r, i], infos["final_obs"])
          if over[lane]:
            ends += 1
            assert_same(got, as_arrays(own["final_obs"][lane]))
          else:
            assert not any(np.any(one) for one in jax.tree.leaves(got))
        if info:
          mask = own.get("final_info", {}).get("_vector", np.zeros(N, bool))
          np.testing.assert_array_equal(infos["final_info"]["_vector"][row], mask)
          np.testing.assert_array_equal(infos["_final_info"][row], over)
      assert ends > N


def test_records_of_the_same_step() -> None:
  records: list[Any] = []
  make = environments.Drawn
  with cg.envs(make, n=2, autoreset="same_step", record=records.append) as env:
    env.reset([1, 2])
    for _ in range(6):
      env.step(jnp.array([1, 2]))
    cg.barrier()
  found = [(int(one["lane"]), float(one["return"]), int(one["length"])) for one in records]
  assert sorted(found) == [(0, 3.0, 3), (0, 3.0, 3), (1, 6.0, 3), (1, 6.0, 3)]


def test_names_that_the_mode_gives_are_refused() -> None:
  for name in ("final_obs", "_final_info"):
    with pytest.raises(cg.GateDefinitionError, match=rf"info: expected names other.*'{name}'\]"):
      cg.envs(environments.simple, autoreset="same_step", info={name: np.int32})


# -- when the program says -------------------------------------------------------------------------
@WHERE
def test_environments_stay_at_their_ends_until_their_reset(
  where: str, two: cg.Workers, engine: str
) -> None:
  oracle = [environments.cart_pole() for _ in range(N)]
  seen = np.stack([env.reset(seed=s)[0] for env, s in zip(oracle, seeds_of(3), strict=True)])
  want, ended = [seen], np.zeros(N, bool)
  actions = np.random.default_rng(0).integers(0, 2, (STEPS, N)).astype(np.int32)
  kinds = [(np.zeros(N), ended, ended)]
  flags = np.zeros((2, N), bool)
  for index, row in enumerate(actions):
    reward = np.zeros(N)
    seen, flags = seen.copy(), flags.copy()
    for i, env in enumerate(oracle):
      if not ended[i]:
        seen[i], reward[i], flags[0, i], flags[1, i], _ = env.step(int(row[i]))
    ended = flags.any(0)
    want.append(seen)
    kinds.append((reward, flags[0], flags[1]))
    if index % 5 == 4:  # now and then
      seen, flags = seen.copy(), flags.copy()
      fresh = seeds_of(index)
      for i in np.flatnonzero(ended):
        seen[i] = oracle[i].reset(seed=fresh[i])[0]
      flags[:, ended] = False
      ended = flags.any(0)

  with cg.envs(environments.cart_pole, n=N, autoreset="disabled", run_on=run_on(where, two)) as env:

    @jax.jit
    def run() -> Any:
      first, _ = env.reset(3)

      def step(seen: Any, indexed: Any) -> Any:
        index, action = indexed
        seen, reward, terminated, truncated, _ = env.step(action)
        done = terminated | truncated
        fresh = lambda seen: env.reset(index, mask=done)[0]
        after = jax.lax.cond(index % 5 == 4, fresh, lambda seen: seen, seen)
        return after, (seen, reward, terminated, truncated)

      return first, jax.lax.scan(step, first, (jnp.arange(STEPS), actions))[1]

    for _ in range(2):
      first, (seen, *rest) = run()
      np.testing.assert_array_equal(first, want[0])
      np.testing.assert_array_equal(seen, np.stack(want[1:]))
      assert_same(tuple(rest), stacked(kinds[1:]))


@WHERE
def test_a_vector_is_reset_by_a_mask(where: str, two: cg.Workers, engine: str) -> None:
  oracle = oracle_of(environments.cart_pole, AutoresetMode.DISABLED)
  seen, _ = oracle.reset(seed=seeds_of(3))
  actions = np.random.default_rng(0).integers(0, 2, (STEPS, N)).astype(np.int32)
  want, keys = [seen], []
  for index, row in enumerate(actions):
    seen, _, terminated, truncated, _ = oracle.step(row)
    if (over := terminated | truncated).any():
      seen, _ = oracle.reset(seed=seeds_of(index), options={"reset_mask": over})
    want.append(seen)
    keys.append(index)
  make = lambda: oracle_of(environments.cart_pole, AutoresetMode.DISABLED)
  with cg.envs(make, vector=True, autoreset="disabled", run_on=run_on(where, two)) as env:

    def run(key: Any) -> Any:
      first, _ = env.reset(key)

      def step(_: Any, indexed: Any) -> Any:
        index, action = indexed
        *_, terminated, truncated, _ = env.step(action)
        return None, env.reset(index, mask=terminated | truncated)[0]

      return first, jax.lax.scan(step, None, (jnp.array(keys), actions))[1]

    for _ in range(2):
      first, seen = jax.jit(run)(3)
      np.testing.assert_array_equal(first, want[0])
      np.testing.assert_array_equal(seen, np.stack(want[1:]))
    first, seen = jax.jit(jax.vmap(run))(jnp.array([3, 3]))
    for lane in range(2):
      np.testing.assert_array_equal(seen[lane], np.stack(want[1:]))
    step = lambda: env.step(jnp.ones(N, jnp.int32))
    with pytest.raises(cg.GateError, match=r"at the end of its episode.*mask=term"), cg.errors():
      jax.block_until_ready([step() for _ in range(STEPS)])


@WHERE
def test_a_mask_resets_the_environments_that_it_says(
  where: str, two: cg.Workers, engine: str
) -> None:
  with cg.envs(environments.simple, n=3, autoreset="disabled", run_on=run_on(where, two)) as env:
    mask = jnp.array([True, False, True])
    with pytest.raises(cg.GateError, match="environment 1 has not been reset"), cg.errors():
      jax.block_until_ready(env.reset([1, 2, 3], mask=mask))
    env.reset([1, 2, 3])
    env.step(jnp.zeros(3, jnp.int32))
    for reset in (env.reset, lambda key, mask: jax.jit(env.reset)(key, mask=mask)):
      assert reset([4, 5, 6], mask=mask)[0].tolist() == [[4, 0], [2, 1], [6, 0]]
    assert env.reset([7, 8, 9], mask=~(mask | True))[0].tolist() == [[4, 0], [2, 1], [6, 0]]
    both = jax.jit(jax.vmap(lambda seeds, mask: (env.reset(seeds), env.reset(seeds, mask=mask))[1]))
    seen, _ = both(jnp.arange(6).reshape(2, 3), jnp.array([[True] * 3, [False] * 3]))
    assert seen[..., 0].tolist() == [[0, 1, 2], [3, 4, 5]]


def test_episodes_are_recorded_once() -> None:
  records: list[Any] = []
  with cg.envs(environments.Drawn, n=1, autoreset="disabled", record=records.append) as env:
    env.reset([1])
    for _ in range(5):
      env.step(jnp.array([1]))
    env.reset([1], mask=np.array([True]))
    for _ in range(3):
      env.step(jnp.array([2]))
    cg.barrier()
  assert [(float(one["return"]), int(one["length"])) for one in records] == [(3.0, 3), (6.0, 3)]


@pytest.mark.skipif(len(jax.devices()) < 4, reason="needs several devices")
def test_a_mask_in_a_shard_map_is_of_the_device_s_own() -> None:
  mesh = Mesh(np.array(jax.devices()[:4]), ("d",))
  sharding = NamedSharding(mesh, P("d"))
  with cg.envs(environments.simple, n=8, autoreset="disabled", sharding=sharding) as env:
    env.reset(list(range(8)))
    jax.block_until_ready(env.step(jnp.zeros(8, jnp.int32)))
    fresh = list(range(8, 16))
    own = lambda mask: env.reset(fresh, mask=mask)[0]
    mask = jnp.arange(8) % 3 == 0
    mapped = jax.jit(jax.shard_map(own, mesh=mesh, in_specs=P("d"), out_specs=P("d")))
    want = [[i + 8, 0] if i % 3 == 0 else [i, 1] for i in range(8)]
    assert mapped(mask).tolist() == want
    assert jax.jit(own)(mask).tolist() == want


# -- options ---------------------------------------------------------------------------------------
class Optional(environments.Simple):
  """Shows the options of its reset."""

  def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
    _, info = super().reset(seed=seed)
    self.options = options
    assert options is None or options["kind"] in ("a", 1, 1.0, True)
    code = 0 if options is None else {str: 1, int: 2, float: 3, bool: 4}[type(options["kind"])]
    level = 0 if options is None else options["inner"][0]
    assert isinstance(level, (int, float))
    return np.array([level, code], np.float32), info


@WHERE
def test_options_go_to_each_environment(where: str, two: cg.Workers, engine: str) -> None:
  with cg.envs(Optional, n=2, run_on=run_on(where, two)) as env:
    for code, kind in enumerate(("a", 1, 1.0, True), 1):
      reset = lambda level, kind=kind: env.reset(
        0, options={"kind": kind, "inner": (level, None, np.ones(3))}
      )[0]
      for how in (reset, jax.jit(reset)):
        assert how(jnp.float32(2.5)).tolist() == [[2.5, code]] * 2
        assert how(3.5).tolist() == [[3.5, code]] * 2
    lanes = jax.jit(jax.vmap(reset))(jnp.array([1.0, 2.0, 3.0]))
    assert lanes[..., 0].tolist() == [[1, 1], [2, 2], [3, 3]]
    assert env.reset(0)[0].tolist() == [[0, 0]] * 2


def test_options_of_cart_pole_are_those_of_gymnasium() -> None:
  oracle = oracle_of(environments.cart_pole, AutoresetMode.NEXT_STEP)
  want, _ = oracle.reset(seed=seeds_of(1), options={"low": -0.2, "high": 0.1})
  make = lambda: oracle_of(environments.cart_pole, AutoresetMode.NEXT_STEP)
  for more in ({"n": N}, {"vector": True}):
    with cg.envs(make if "vector" in more else environments.cart_pole, **more) as env:
      reset = jax.jit(lambda low: env.reset(1, options={"low": low, "high": 0.1})[0])
      np.testing.assert_allclose(reset(-0.2), want, rtol=1e-5)


@pytest.mark.parametrize(
  ("given", "said"),
  [
    ({"mask": jnp.ones(2)}, r"mask: expected bool\[2\].*got float32\[2\]"),
    ({"mask": jnp.ones(3, bool)}, r"got bool\[3\]"), ({"mask": "x"}, "got 'x'"),
    ({"options": 3}, "options: expected a dictionary"),
    ({"options": {"reset_mask": jnp.ones(2, bool)}}, "pass mask="),
    ({"options": {"a": {1, 2}}}, r"options\['a'\]: expected arrays"),
  ],
)  # fmt: skip
def test_wrong_masks_and_options_are_refused(given: Any, said: str) -> None:
  with cg.envs(environments.simple, n=2, autoreset="disabled") as env:
    with pytest.raises(cg.GateDefinitionError, match=said):
      env.reset(0, **given)
    assert env.reset(0)[0].shape == (2, 2)


def test_a_mask_where_episodes_begin_by_themselves_is_refused() -> None:
  for mode in ("next_step", "same_step"):
    with (
      cg.envs(environments.simple, n=2, autoreset=mode) as env,
      pytest.raises(cg.GateDefinitionError, match=f"expected autoreset='disabled'.*'{mode}'"),
    ):
      env.reset(0, mask=jnp.ones(2, bool))
  with pytest.raises(cg.GateDefinitionError, match="autoreset: expected one of"):
    cg.envs(environments.simple, autoreset="never")  # pyright: ignore
