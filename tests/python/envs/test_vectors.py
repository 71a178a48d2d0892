# SPDX-License-Identifier: Apache-2.0
"""Vector environments, of Gymnasium's interface and of EnvPool's."""

from __future__ import annotations

from collections.abc import Callable
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

N, STEPS = 3, 30
WHERE = pytest.mark.parametrize("where", ["xla", "own", "thread", "workers"])
INFO = {
  "begun": jnp.int32, "inner": {"total": jnp.float32},
  "vector": jax.ShapeDtypeStruct((2,), jnp.float32),
}  # fmt: skip


def vector(make: Callable[[], Any], mode: str = "NEXT_STEP", n: int = N) -> Callable[[], Any]:
  return lambda: SyncVectorEnv([make] * n, autoreset_mode=AutoresetMode[mode])


def cart_poles() -> Any:
  return gymnasium.make_vec("CartPole-v1", num_envs=N)  # one that is a vector by itself


def actions_of(space: Any, steps: int = STEPS) -> Any:
  space.seed(1)
  return jax.tree.map(lambda *xs: np.stack(xs), *[space.sample() for _ in range(steps)])


def program(env: Any) -> Callable[[Any, Any], Any]:
  def run(key: Any, actions: Any) -> Any:
    first = env.reset(key)
    return first, jax.lax.scan(lambda _, action: (None, env.step(action)), None, actions)[1]

  return run


def assert_same(got: Any, want: Any) -> None:
  assert jax.tree.structure(got) == jax.tree.structure(want)
  for one, other in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
    np.testing.assert_array_equal(one, np.asarray(other).astype(one.dtype))


def place(where: str, workers: cg.Workers) -> Any:
  return {"workers": workers, "thread": cg.thread("of vectors")}.get(where, where)


@WHERE
@pytest.mark.parametrize("mode", ["next_step", "same_step"])
@pytest.mark.parametrize("what", ["CartPole", "composite"])
def test_a_vector_gives_what_its_environments_give(
  what: str, mode: Any, where: str, two: cg.Workers, engine: str
) -> None:
  make: Any = {"CartPole": environments.cart_pole, "composite": environments.Composite}[what]
  options: Any = {"info": INFO if what == "composite" else None, "autoreset": mode}
  with cg.envs(make, n=N, **options) as single:
    actions = actions_of(single.action_space)
    want = jax.jit(program(single))(3, actions)
    run_on = place(where, two)
    with cg.envs(vector(make, mode.upper()), vector=True, run_on=run_on, **options) as env:
      assert env.num_envs == N
      assert env.single_observation_space == single.single_observation_space
      assert env.action_space == single.action_space
      run = jax.jit(program(env))
      for _ in range(2):
        assert_same(run(3, actions), want)
      keys = jnp.arange(2)
      both = jax.jit(jax.vmap(program(env), (0, None)))(keys, actions)
      for key in range(2):
        assert_same(jax.tree.map(lambda x, key=key: x[key], both), run(key, actions))


def test_a_vector_by_itself_gets_the_number_as_its_seed(engine: str) -> None:
  oracle = cart_poles()
  want = [oracle.reset(seed=7)[0]]
  actions = np.random.default_rng(0).integers(0, 2, (STEPS, N))
  want += [oracle.step(one)[0] for one in actions]
  with cg.envs(cart_poles, vector=True) as env:
    (first, _), (seen, *_) = jax.jit(program(env))(jax.random.key(7), actions)
    np.testing.assert_array_equal(first, want[0])
    np.testing.assert_array_equal(seen, np.stack(want[1:]))
    env.reset(None)
    with pytest.raises(gymnasium.error.Error, match="integer"), cg.errors():
      jax.block_until_ready(env.reset([1, 2, 3]))  # it has one generator


@WHERE
def test_envpool_s_interface(where: str, two: cg.Workers, engine: str) -> None:
  oracle = SyncVectorEnv([environments.cart_pole] * N)
  first, _ = oracle.reset(seed=[5, 6, 7])
  actions = np.random.default_rng(0).integers(0, 2, (STEPS, N))
  steps = [oracle.step(one)[:4] for one in actions]
  want = [np.stack(part) for part in zip(*steps, strict=True)]

  def make(seed: int = 0) -> Any:
    return environments.Pool(N, seed)

  info = {"twice": jnp.int32}
  with cg.envs(make, vector=True, run_on=place(where, two), info=info) as env:
    run = jax.jit(program(env))
    for _ in range(2):
      (seen, told), (*found, more) = run(5, actions)
      np.testing.assert_array_equal(seen, first)
      for one, other in zip(found, want, strict=True):
        np.testing.assert_array_equal(one, other)
      assert told["twice"].tolist() == [0, 2, 4]
      assert (more["twice"] == np.array([0, 2, 4])).all()
      assert more["_twice"].all()
  with cg.envs(lambda: environments.Pool(N, 5), vector=True) as env:  # its own seed
    np.testing.assert_array_equal(env.reset()[0], first)
    assert env.num_envs == N


def test_records_are_those_of_single_environments() -> None:
  found: dict[bool, list[Any]] = {True: [], False: []}
  for mode in ("next_step", "same_step"):
    makes = environments.cart_pole, vector(environments.cart_pole, mode.upper())
    for is_vector, make in enumerate(makes):
      to = found[bool(is_vector)].append
      n: Any = {} if is_vector else {"n": N}
      options: Any = {**n, "vector": bool(is_vector), "autoreset": mode, "record": to}
      with cg.envs(make, **options) as env:
        jax.jit(program(env))(0, np.ones((STEPS, N), np.int32))
        cg.barrier()
  as_sets = [sorted(tuple(map(float, one.values())) for one in those) for those in found.values()]
  assert as_sets[0] == as_sets[1]
  assert len(as_sets[0]) > 2 * N


@pytest.mark.skipif(len(jax.devices()) < 4, reason="needs several devices")
@WHERE
def test_each_device_has_a_vector_of_its_own(where: str, two: cg.Workers) -> None:
  mesh = Mesh(np.array(jax.devices()[:4]), ("d",))
  sharding = NamedSharding(mesh, P("d"))
  actions = np.random.default_rng(0).integers(0, 2, (STEPS, 4 * N))
  with cg.envs(environments.cart_pole, n=4 * N) as single:
    want = jax.jit(program(single))(3, actions)
  made = vector(environments.cart_pole)
  with cg.envs(made, vector=True, run_on=place(where, two), sharding=sharding) as env:
    assert env.num_envs == 4 * N
    assert_same(jax.jit(program(env))(3, actions), want)
    over = P(None, "d")
    specs = (P("d"), P("d")), ((over,) * 4 + (P(),))
    mapped = jax.shard_map(program(env), mesh=mesh, in_specs=(P(), over), out_specs=specs)
    assert_same(jax.jit(mapped)(3, actions), want)


def test_a_vector_is_closed_and_rendered(tmp_path: Any) -> None:
  made: list[Any] = []

  class Closing(SyncVectorEnv):
    def close(self, **options: Any) -> None:
      made.append(self)
      super().close(**options)

  make = lambda: Closing([environments.Drawn] * 2)
  with cg.envs(make, vector=True) as env:
    assert len(made) == 1  # the one whose spaces were looked at
    env.reset([1, 2])
    env.step(jnp.zeros(2, jnp.int32))
    assert env.render(1).shape == (16, 24, 3)
    assert env.render(1)[0, 0].tolist() == [255, 20, 0]
  assert len(made) == 2


def test_an_exception_of_a_vector_is_the_user_s() -> None:
  class Fails(SyncVectorEnv):
    def step(self, actions: Any) -> Any:
      if self.fails:
        raise ArithmeticError("it has diverged")
      return super().step(actions)

    fails = False

  made: list[Any] = []

  def make() -> Any:
    made.append(Fails([environments.simple] * 2))
    return made[-1]

  with cg.envs(make, vector=True) as env:
    env.reset(0)
    made[-1].fails = True
    with pytest.raises(ArithmeticError, match="diverged") as info, cg.errors():
      jax.block_until_ready(env.step(jnp.zeros(2, jnp.int32)))
    assert "raised this in step()" in str(info.value.__notes__)
    made[-1].fails = False
    env.reset(0)
    assert env.step(jnp.zeros(2, jnp.int32))[0][:, 1].tolist() == [1, 1]


def test_a_pool_may_tell_by_its_length_how_many_it_has() -> None:
  class Long(environments.Pool):
    def __init__(self) -> None:
      super().__init__(N)
      del self.config

    def __len__(self) -> int:
      return N

  with cg.envs(Long, vector=True) as env:
    assert env.num_envs == N
    assert env.reset(0)[0].shape == (N, 4)


def test_the_wrong_kinds_of_make_are_refused() -> None:
  with pytest.raises(cg.GateDefinitionError, match="expected a vector environment with vector=Tr"):
    cg.envs(environments.cart_pole, vector=True)
  with pytest.raises(cg.GateDefinitionError, match=r"got a vector of 3"):
    cg.envs(cart_poles)
  with pytest.raises(
    cg.GateDefinitionError, match=r"n: expected no n= with vector=True.*3 lanes, got n=2"
  ):
    cg.envs(cart_poles, vector=True, n=2)
  with pytest.raises(cg.GateDefinitionError, match=r"that mode, got one with 'next_step'; make it"):
    cg.envs(cart_poles, vector=True, autoreset="same_step")
  with pytest.raises(cg.GateDefinitionError, match=r"pass autoreset='disabled'"):
    cg.envs(vector(environments.cart_pole, "DISABLED"), vector=True)
  with pytest.raises(cg.GateDefinitionError, match=r"or with seed=, that returns a vector envi"):
    cg.envs(lambda count: environments.Pool(count), vector=True)

  class Async(environments.Pool):
    def __init__(self) -> None:
      super().__init__(3)
      self.config["batch_size"] = 2

  with pytest.raises(cg.GateDefinitionError, match="batch_size=3, got batch_size=2"):
    cg.envs(Async, vector=True)
