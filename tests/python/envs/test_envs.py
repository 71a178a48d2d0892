# SPDX-License-Identifier: Apache-2.0
"""Environments in compiled programs, compared with Gymnasium's own vector environments."""

from __future__ import annotations

import contextlib
import functools
import gc
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

pytest.importorskip("gymnasium")
pytest.importorskip("cloudpickle")

import environments
import gymnasium
from gymnasium.vector import SyncVectorEnv

import callgate as cg

N, STEPS = 5, 40
INFO = {
  "begun": jnp.int32, "inner": {"total": jnp.float32},
  "vector": jax.ShapeDtypeStruct((2,), jnp.float32),
}  # fmt: skip
MAKERS = {
  "CartPole": (environments.cart_pole, {}),
  "Pendulum": (environments.pendulum, {}),
  "composite": (environments.Composite, INFO),
}


def sampled(make: Callable[[], Any], steps: int = STEPS, n: int = N) -> list[Any]:
  """Actions of all environments for each step."""
  space = gymnasium.vector.utils.batch_space(make().action_space, n)
  space.seed(1)
  return [space.sample() for _ in range(steps)]


def by_gymnasium(make: Callable[[], Any], seeds: list[int], actions: list[Any]) -> list[Any]:
  """The reset and all steps of the oracle, without infos."""
  oracle = SyncVectorEnv([make] * len(seeds))
  first, info = oracle.reset(seed=seeds)
  made = [(first, info), *(oracle.step(action) for action in actions)]
  oracle.close()
  return made


def stacked(values: list[Any]) -> Any:
  return jax.tree.map(lambda *xs: np.stack(xs), *values)


def program(env: cg.Envs) -> Callable[[Any, Any], Any]:
  @jax.jit
  def run(key: Any, actions: Any) -> Any:
    first = env.reset(key)
    return first, jax.lax.scan(lambda _, action: (None, env.step(action)), None, actions)[1]

  return run


def plain(tree: Any) -> Any:
  """The same values in dictionaries of Python's and tuples, in JAX's dtypes."""
  if isinstance(tree, dict):
    return {key: plain(value) for key, value in tree.items()}
  if isinstance(tree, (tuple, list)):
    return tuple(map(plain, tree))
  return np.asarray(tree)


def assert_same(got: Any, want: Any) -> None:
  """Equal in structure and in each value, after the cast to JAX's dtypes."""
  assert jax.tree.structure(got) == jax.tree.structure(want)
  for one, other in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
    dtype = jax.dtypes.canonicalize_dtype(other.dtype)
    assert one.dtype == dtype
    np.testing.assert_array_equal(one, other.astype(dtype))


def seeds_of(seed: int, n: int = N) -> list[int]:
  return np.random.SeedSequence(seed).generate_state(n).tolist()


@contextlib.contextmanager
def environment(where: str, workers: cg.Workers, make: Any, **options: Any) -> Iterator[cg.Envs]:
  run_on = workers if where == "workers" else where
  with cg.envs(make, **{"n": N, "run_on": run_on, **options}) as env:
    yield env


WHERE = pytest.mark.parametrize("where", ["xla", "own", "workers"])


@WHERE
@pytest.mark.parametrize("what", MAKERS)
def test_trajectories_are_those_of_gymnasium_s_vector_environment(
  what: str, where: str, two: cg.Workers, engine: str
) -> None:
  make, info = MAKERS[what]
  actions = sampled(make)
  (first, first_info), *steps = by_gymnasium(make, seeds_of(3), actions)
  with environment(where, two, make, info=info) as env:
    (seen, info_of_reset), got = program(env)(jax.random.key(3), stacked(actions))
  assert_same(seen, plain(first))
  assert_same(got[:4], stacked([plain(step[:4]) for step in steps]))
  assert sum(int((step[2] | step[3]).sum()) for step in steps) > N  # the episodes went on
  if what == "composite":
    compare_infos(info_of_reset, got[4], first_info, [step[4] for step in steps])


def compare_infos(reset: Any, steps: Any, of_reset: Any, of_steps: list[Any]) -> None:
  np.testing.assert_array_equal(reset["inner"]["total"], np.float32(of_reset["inner"]["total"]))
  for name in ("_begun", "_inner"):
    np.testing.assert_array_equal(reset[name], np.ones(N, bool))
  assert not reset["_vector"].any()
  some = 0
  for row, info in enumerate(of_steps):
    for name in ("begun", "vector"):
      mask = info.get(f"_{name}", np.zeros(N, bool))
      np.testing.assert_array_equal(steps[f"_{name}"][row], mask)
      value = np.asarray(steps[name][row])
      assert not value[~mask].any()
      if mask.any():
        some += 1
        np.testing.assert_array_equal(value[mask], info[name][mask].astype(value.dtype))
  assert some > STEPS / 2


@WHERE
def test_steps_without_data_between_them_come_in_order(
  where: str, two: cg.Workers, engine: str
) -> None:
  with environment(where, two, environments.simple) as env:

    @jax.jit
    def several() -> Any:
      env.reset([0, 1, 2, 3, 4])
      return [env.step(jnp.zeros(N, jnp.int32))[0][:, 1] for _ in range(5)]

    @jax.jit
    def one() -> Any:
      return env.step(jnp.zeros(N, jnp.int32))[0]

    assert [seen.tolist() for seen in several()] == [[float(i)] * N for i in range(1, 6)]
    for count in range(6, 9):  # programs go on with the same environments
      assert one().tolist() == [[float(i), count] for i in range(N)]
    assert one.lower is not None
    assert env.step(jnp.zeros(N, jnp.int32))[0][:, 1].tolist() == [9.0] * N  # and eager calls


@WHERE
def test_in_cond_and_while(where: str, two: cg.Workers, engine: str) -> None:
  with environment(where, two, environments.simple) as env:

    @jax.jit
    def run(stop: Any, moves: Any) -> Any:
      seen, _ = env.reset([4, 3, 2, 1, 0])
      step = lambda seen: env.step(jnp.full(N, 2, jnp.int32))[0]
      seen = jax.lax.while_loop(lambda seen: seen[0, 1] < stop, step, seen)
      return jax.lax.cond(moves, step, lambda seen: seen, seen)

    assert run(3.0, False).tolist() == [[4.0 - i, 3] for i in range(N)]
    assert run(3.0, True).tolist() == [[4.0 - i, 4] for i in range(N)]


@pytest.mark.parametrize("count", [1, 2, 3, 7])
def test_any_number_of_environments_on_any_number_of_workers(count: int, two: cg.Workers) -> None:
  with cg.envs(environments.simple, n=count, run_on=two) as env:
    seen, _ = env.reset(list(range(count)))
    assert seen[:, 0].tolist() == list(range(count))
    for step in range(1, 4):
      seen, reward, *_ = env.step(jnp.arange(count) % 3)
      assert seen.tolist() == [[i, step] for i in range(count)]
      assert reward.tolist() == [i % 3 for i in range(count)]


def test_workers_step_their_shares_at_the_same_time(two: cg.Workers, tmp_path: Any) -> None:
  meeting = environments.Meeting(str(tmp_path), 2)
  make = functools.partial(environments.Simple, meeting)
  with cg.envs(make, n=6, run_on=two, info={"pid": jnp.int32}) as env:
    env.reset(0)
    *_, info = env.step(jnp.zeros(6, jnp.int32))
  pids = info["pid"].tolist()
  assert pids == [pids[0]] * 3 + [pids[5]] * 3
  assert set(pids) == set(two.pids)


def test_processes_are_shared_by_all() -> None:
  with cg.envs(environments.simple, n=3, run_on="processes", info={"pid": jnp.int32}) as env:
    env.reset(0)
    *_, info = env.step(jnp.zeros(3, jnp.int32))
    assert info["_pid"].all()
  with cg.envs(environments.simple, n=3, info={"pid": jnp.int32}) as here:
    here.reset(0)
    assert here.step(jnp.zeros(3, jnp.int32))[4]["pid"][0] not in info["pid"]


# -- records -------------------------------------------------------------------------------------
@WHERE
def test_records_have_each_episode_once(where: str, two: cg.Workers, engine: str) -> None:
  make, actions = environments.cart_pole, sampled(environments.cart_pole, 80)
  _, *steps = by_gymnasium(make, seeds_of(0), actions)
  want, total = [], np.zeros(N)
  ended = np.zeros(N, bool)
  for _, reward, terminated, truncated, _ in steps:
    total = np.where(ended, 0, total) + reward
    ended = terminated | truncated
    want += [(int(lane), total[lane]) for lane in np.flatnonzero(ended)]
  records: list[Any] = []
  with environment(where, two, make, record=lambda one, info: records.append((one, info))) as env:
    program(env)(0, stacked(actions))
    cg.barrier()
  assert {info.name for _, info in records} == {"episode"}
  found = [(int(one["lane"]), float(one["return"])) for one, _ in records]
  assert len(want) > N
  assert sorted(found) == sorted(want)
  assert all(one["length"] == one["return"] for one, _ in records)  # a reward of 1 a step


def test_steps_are_recorded_to_a_channel_where_asked_for() -> None:
  records: list[Any] = []
  keep = lambda value, info: records.append((info.name, value))
  with (
    cg.channel("envs.steps", to=keep) as channel,
    cg.envs(environments.simple, n=2, record=channel, record_steps=True) as env,
  ):
    env.reset([5, 6])
    env.step(jnp.array([1, 2]))
    cg.barrier()
  (first, reset), (second, step) = records
  assert (first, second) == ("reset", "step")
  assert reset["observation"].tolist() == [[5, 0], [6, 0]]
  assert step["observation"].tolist() == [[5, 1], [6, 1]]
  assert step["action"].tolist() == step["reward"].tolist() == [1, 2]
  assert not step["terminated"].any()


def test_a_new_reset_begins_new_episodes() -> None:
  records: list[Any] = []
  with cg.envs(environments.pendulum, n=1, record=records.append) as env:
    env.reset(0)
    for _ in range(5):
      env.step(jnp.zeros((1, 1)))
    env.reset(0)
    for _ in range(7):
      env.step(jnp.zeros((1, 1)))
    cg.barrier()
  assert [int(one["length"]) for one in records] == [7]


# -- seeds ---------------------------------------------------------------------------------------
def test_keys_and_numbers_seed_as_they_say(engine: str) -> None:
  with cg.envs(environments.simple, n=3) as env:
    seeds = lambda key: jax.jit(env.reset)(key)[0][:, 0].tolist()
    want = np.float32(seeds_of(7, 3)).tolist()
    for key in (jax.random.key(7), jax.random.PRNGKey(7), 7, np.uint8(7), jnp.int32(7)):
      assert seeds(key) == want
      assert env.reset(key)[0][:, 0].tolist() == want
    words = jax.random.key_data(key := jax.random.fold_in(jax.random.key(1), 2)).tolist()
    assert seeds(key) == np.float32(seeds_of(words[0] * 2**32 + words[1], 3)).tolist()
    assert env.reset(2**80 + 5)[0][:, 0].tolist() == np.float32(seeds_of(2**80 + 5, 3)).tolist()
    for given in ([1, 2, 3], (1, 2, 3), np.array([1, 2, 3]), jnp.array([1, 2, 3])):
      assert env.reset(given)[0][:, 0].tolist() == [1, 2, 3]
    assert env.reset([2**40, 0, 1])[0][:, 0].tolist() == [float(2**40), 0, 1]
    assert env.reset()[0][:, 0].tolist() == [float(2**40), 0, 1]  # as they are


@pytest.mark.parametrize(
  ("key", "said"),
  [
    (-1, "of at least 0, got -1"), (True, "got True"), (1.5, "got 1.5"), ("x", "got 'x'"),
    ([1, 2], r"3 seeds, from 0 .* got \[1, 2\]"), ([1, 2, -3], "3 seeds"), ([1, 2, 2**64], "3 se"),
    ([1, 2, 0.5], r"got \[1, 2, 0.5\]"), (jnp.ones(3), r"got float32\[3\]"),
    ([True, False, True], r"got \[True"), ([1, np.True_, 2], "got"), (jnp.array([1, 2, -3]), "-3"),
    (jnp.int32(-4), "-4"), (jnp.ones((2, 2), int), r"got int32\[2, 2\]"),
    (jax.random.split(jax.random.key(0), 3), "got"),
  ],
)  # fmt: skip
def test_a_wrong_seed_is_refused(key: Any, said: str) -> None:
  with cg.envs(environments.simple, n=3) as env:
    with pytest.raises(cg.GateDefinitionError, match=f"key: expected .*{said}"):
      env.reset(key)
    assert env.reset(0)[0].shape == (3, 2)


def test_a_traced_seed_below_zero_fails_the_program() -> None:
  with (
    cg.envs(environments.simple, n=3) as env,
    pytest.raises(ValueError, match="got -4"),
    cg.errors(),
  ):
    jax.block_until_ready(jax.jit(env.reset)(-4 * jnp.ones((), jnp.int32)))


# -- what is around ------------------------------------------------------------------------------
@pytest.mark.parametrize("there", [False, True])
def test_environments_render(there: bool, two: cg.Workers, engine: str) -> None:
  class Drawn(environments.Simple):
    def render(self) -> Any:
      if self.seed == 9:
        raise KeyError("nothing to see")
      return f"{self.seed} at {self.count}" * (1 if self.seed == 8 else 100)

  with cg.envs(Drawn, n=5, run_on=two if there else "xla") as env:
    with pytest.raises(cg.GateError, match="environment 1 has not been reset"):
      env.render(1)
    env.reset([7, 8, 9, 8, 7])
    jax.jit(env.step)(jnp.zeros(5, jnp.int32))
    assert [env.render(i) for i in (4, 3, 0)] == ["7 at 1" * 100, "8 at 1", "7 at 1" * 100]
    with pytest.raises(KeyError, match="nothing to see"):
      env.render(2)
    with pytest.raises(cg.GateDefinitionError, match=r"lane: expected .* at most 4, got 5"):
      env.render(5)


def test_spaces_are_those_of_gymnasium_s_vector_environment() -> None:
  with cg.envs(environments.Composite, n=3) as env:
    oracle = SyncVectorEnv([environments.Composite] * 3)
    for name in ("observation_space", "action_space"):
      assert getattr(env, name) == getattr(oracle, name)
      assert getattr(env, f"single_{name}") == getattr(oracle, f"single_{name}")
    assert env.num_envs == oracle.num_envs == 3


class Empty(gymnasium.Env[Any, Any]):
  observation_space = action_space = gymnasium.spaces.Box(-1, 1, (3, 0), np.float32)

  def reset(self, **_: Any) -> Any:
    return np.zeros((3, 0), np.float32), {}

  def step(self, action: Any) -> Any:
    return action, 1.0, False, False, {}


def test_observations_may_be_empty() -> None:
  with cg.envs(Empty, n=2) as env:
    assert env.reset(0)[0].shape == (2, 3, 0)
    assert env.step(jnp.zeros((2, 3, 0)))[0].shape == (2, 3, 0)


def test_with_64_bits_nothing_is_cast() -> None:
  with jax.enable_x64(True), cg.envs(environments.Composite, n=2) as env:
    seen, _ = env.reset(1)
    oracle, _ = SyncVectorEnv([environments.Composite] * 2).reset(seed=seeds_of(1, 2))
    assert seen["z"].dtype == np.float64
    assert seen["a"]["many"].dtype == np.int64
    np.testing.assert_array_equal(seen["z"], oracle["z"])
    assert env.step(env.action_space.sample())[1].dtype == np.float64


def test_environments_that_are_dropped_are_freed() -> None:
  env = cg.envs(environments.simple, n=2)
  env.reset(0)
  env.step(jnp.zeros(2, jnp.int32))
  lane = weakref.ref(env._programs.instances.get())
  jax.effects_barrier()
  del env
  gc.collect()
  assert lane() is None
