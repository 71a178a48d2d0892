# SPDX-License-Identifier: Apache-2.0
"""Environments that are split over devices: each steps its own."""

from __future__ import annotations

import threading
from collections.abc import Iterator
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
from gymnasium.vector import SyncVectorEnv

import callgate as cg

DEVICES, N, STEPS = 4, 8, 30
pytestmark = pytest.mark.skipif(len(jax.devices()) < DEVICES, reason="needs several devices")
WHERE = pytest.mark.parametrize("where", ["xla", "own", "workers"])


@pytest.fixture(scope="module")
def three() -> Iterator[cg.Workers]:
  with cg.workers(3) as workers:
    yield workers


def mesh_of(kind: AxisType) -> Mesh:
  return Mesh(np.array(jax.devices()[:DEVICES]), ("d",), axis_types=(kind,))


def oracle() -> tuple[Any, Any, Any]:
  """Actions, and what Gymnasium's vector environment makes of them."""
  actions = np.random.default_rng(0).integers(0, 2, (STEPS, N)).astype(np.int32)
  envs = SyncVectorEnv([environments.cart_pole] * N)
  first, _ = envs.reset(seed=np.random.SeedSequence(7).generate_state(N).tolist())
  steps = [envs.step(one)[:4] for one in actions]
  return actions, first, [np.stack(part) for part in zip(*steps, strict=True)]


def roll_out(env: cg.Envs, key: Any, actions: Any) -> Any:
  first, _ = env.reset(key)
  return first, jax.lax.scan(lambda _, one: (None, env.step(one)[:4]), None, actions)[1]


def assert_equal(got: Any, want: Any) -> None:
  for one, other in zip(got, want, strict=True):
    np.testing.assert_array_equal(one, other)


@WHERE
@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit], ids=["auto", "explicit"])
@pytest.mark.filterwarnings("ignore")
def test_in_jit_each_device_steps_its_own(where: str, kind: AxisType, three: cg.Workers) -> None:
  actions, first, steps = oracle()
  mesh = mesh_of(kind)
  episodes: list[Any] = []
  with jax.set_mesh(mesh), cg.envs(
    environments.cart_pole, n=N, run_on=three if where == "workers" else where,
    sharding=NamedSharding(mesh, P("d")), record=episodes.append,
  ) as env:  # fmt: skip
    seen, got = jax.jit(lambda key: roll_out(env, key, actions))(jax.random.key(7))
    assert len({str(shard.index) for shard in seen.addressable_shards}) == DEVICES
    np.testing.assert_array_equal(seen, first)
    assert_equal(got, steps)
    cg.barrier()
  assert len(episodes) == (steps[2] | steps[3]).sum() > 0


@WHERE
def test_in_a_shard_map_a_call_is_for_the_device_s_own(where: str, three: cg.Workers) -> None:
  actions, first, steps = oracle()
  mesh = mesh_of(AxisType.Auto)
  with cg.envs(
    environments.cart_pole, n=N, run_on=three if where == "workers" else where,
    sharding=NamedSharding(mesh, P("d")),
  ) as env:  # fmt: skip

    def program(key: Any, actions: Any) -> Any:
      seen, got = roll_out(env, key, actions)
      assert seen.shape == (N // DEVICES, 4)
      return seen, got

    over = P(None, "d")
    mapped = jax.shard_map(
      program, mesh=mesh, in_specs=(P(), over), out_specs=(P("d"), (over,) * 4)
    )
    seen, got = jax.jit(mapped)(jax.random.key(7), actions)
    np.testing.assert_array_equal(seen, first)
    assert_equal(got, steps)
    # A program for all devices goes on with the same environments.
    again, _ = env.reset(jax.random.key(7))
    np.testing.assert_array_equal(again, first)
    for index in range(3):
      np.testing.assert_array_equal(env.step(actions[index])[0], steps[0][index])
    # And a list of seeds is that of all.
    seeds = np.random.SeedSequence(7).generate_state(N).tolist()
    reset = jax.shard_map(lambda: env.reset(seeds)[0], mesh=mesh, in_specs=(), out_specs=P("d"))
    np.testing.assert_array_equal(jax.jit(reset)(), first)


def test_devices_step_at_the_same_time() -> None:
  mesh = mesh_of(AxisType.Auto)
  barrier = threading.Barrier(DEVICES, timeout=60)
  met: list[int] = []

  class Meets(environments.Simple):
    def step(self, action: Any) -> Any:
      met.append(barrier.wait())
      return super().step(action)

  with cg.envs(Meets, n=DEVICES, sharding=NamedSharding(mesh, P("d"))) as env:
    env.reset(list(range(DEVICES)))
    jax.block_until_ready(jax.jit(env.step)(jnp.zeros(DEVICES, jnp.int32)))
  assert sorted(met) == list(range(DEVICES))


def test_the_oracle_engine_gives_the_same() -> None:
  actions, first, steps = oracle()
  sharding = NamedSharding(mesh_of(AxisType.Auto), P("d"))
  with cg.config(engine="jax"), cg.envs(environments.cart_pole, n=N, sharding=sharding) as env:
    seen, got = jax.jit(lambda key: roll_out(env, key, actions))(jax.random.key(7))
    np.testing.assert_array_equal(seen, first)
    assert_equal(got, steps)


@pytest.mark.parametrize(
  ("spec", "n", "said"),
  [
    (P(), 8, "sharding: expected .*, such as NamedSharding"),
    (P(None, "d"), 8, "sharding: expected a sharding"),
    (P("d", "e"), 8, "sharding: expected a sharding"),
    (P("d"), 6, "a multiple of the number of devices, 4, got n=6"),
  ],
)
def test_shardings_that_do_not_split_environments_are_refused(spec: Any, n: int, said: str) -> None:
  mesh = Mesh(np.array(jax.devices()[:DEVICES]).reshape(DEVICES, 1), ("d", "e"))
  with pytest.raises(cg.GateDefinitionError, match=said):
    cg.envs(environments.simple, n=n, sharding=NamedSharding(mesh, spec))


def test_environments_over_two_axes() -> None:
  mesh = Mesh(np.array(jax.devices()[:DEVICES]).reshape(2, 2), ("a", "b"))
  with cg.envs(environments.simple, n=N, sharding=NamedSharding(mesh, P(("a", "b")))) as env:
    jax.jit(env.reset)(list(range(N)))
    for mapped in (False, True):
      step = lambda actions: env.step(actions)[0]
      if mapped:
        over = P(("a", "b"))
        step = jax.shard_map(step, mesh=mesh, in_specs=over, out_specs=over)
      seen = jax.jit(step)(jnp.zeros(N, jnp.int32))
      assert seen.tolist() == [[i, 1 + mapped] for i in range(N)]
