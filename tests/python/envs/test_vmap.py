# SPDX-License-Identifier: Apache-2.0
"""Environments under `jax.vmap`: each lane has environments of its own."""

from __future__ import annotations

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

import callgate as cg

N, LANES, STEPS = 3, 4, 40
# XLA of JAX 0.12 aborts where a function that is jitted in another one has ordered calls, JAX's own
# callbacks too, and a constant twice: it removes a constant that has a control dependency.
inner_jit = jax.jit if jax.__version_info__ < (0, 12) else lambda f: f
WHERE = pytest.mark.parametrize("where", ["xla", "own", "thread", "workers"])
WEIGHTS = np.array([[0.1, 0.2, 1.0, 0.5], [-1.0, 0.3, 0.2, 0.1]], np.float32)


def training(env: Any) -> Any:
  """A program whose actions depend on what was seen, by weights."""

  def train(key: Any, weights: Any) -> Any:
    def step(seen: Any, _: Any) -> Any:
      seen, *rest, _ = env.step((seen @ weights > 0).astype(jnp.int32))
      return seen, (seen, *rest)

    first, _ = env.reset(key)
    return first, jax.lax.scan(step, first, length=STEPS)[1]

  return train


def of_gymnasium(seed: int, weights: Any, n: int = N) -> Any:
  """The same by Gymnasium's vector environment."""
  env = gymnasium.vector.SyncVectorEnv([environments.cart_pole] * n)
  seen, _ = env.reset(seed=np.random.SeedSequence(seed).generate_state(n).tolist())
  first, steps = seen, []
  for _ in range(STEPS):
    seen, *rest, _ = env.step((np.asarray(jnp.asarray(seen) @ weights) > 0).astype(np.int64))
    steps.append((seen, *rest))
  return first, tuple(np.stack(part) for part in zip(*steps, strict=True))


def assert_same(got: Any, want: Any) -> None:
  for one, other in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
    np.testing.assert_array_equal(one, np.asarray(other).astype(one.dtype))


def stacked(values: list[Any]) -> Any:
  return jax.tree.map(lambda *xs: np.stack(xs), *values)


@WHERE
def test_each_lane_has_environments_of_its_own(where: str, two: cg.Workers, engine: str) -> None:
  places: Any = {"workers": two, "thread": cg.thread("of lanes")}
  want = stacked([of_gymnasium(seed, WEIGHTS[0]) for seed in range(LANES)])
  with cg.envs(environments.cart_pole, n=N, run_on=places.get(where, where)) as env:
    run = jax.jit(jax.vmap(training(env), (0, None)))
    for _ in range(2):  # and again
      assert_same(run(jnp.arange(LANES), WEIGHTS[0]), want)
    assert_same(jax.jit(training(env))(1, WEIGHTS[1]), of_gymnasium(1, WEIGHTS[1]))
    assert_same(run(jnp.arange(LANES), WEIGHTS[0]), want)


def test_they_are_made_when_the_program_is_traced_and_closed_with_the_others(
  tmp_path: Any,
) -> None:
  made: list[Any] = []

  def make() -> Any:
    made.append(environments.Simple(folder=str(tmp_path)))
    return made[-1]

  with cg.envs(make, n=2) as env:
    run = jax.jit(jax.vmap(lambda seeds: env.reset(seeds)[0])).lower(jnp.ones((3, 2), int))
    assert len(made) == 1 + 2 * 3
    seen = run.compile()(jnp.arange(6).reshape(3, 2))
    assert seen[..., 0].tolist() == [[0, 1], [2, 3], [4, 5]]
    assert len(made) == 1 + 2 * 3
  closed = {path.name for path in tmp_path.iterdir()}
  assert closed == {"closed--1", *(f"closed-{i}" for i in range(6))}


@WHERE
def test_a_reset_that_no_lane_changes_is_each_lane_s(
  where: str, two: cg.Workers, engine: str
) -> None:
  want = stacked([of_gymnasium(7, weights) for weights in WEIGHTS])
  places: Any = {"workers": two, "thread": cg.thread("of lanes")}
  with cg.envs(environments.cart_pole, n=N, run_on=places.get(where, where)) as env:
    run = jax.jit(jax.vmap(training(env), (None, 0)))
    for _ in range(2):
      first, steps = run(7, WEIGHTS)
      assert_same((first, steps), want)


@WHERE
def test_calls_that_no_lane_changes_are_each_lane_s(
  where: str, two: cg.Workers, engine: str
) -> None:
  """The environments differ, whatever the program's values say."""
  places: Any = {"workers": two, "thread": cg.thread("of lanes")}
  with cg.envs(environments.simple, n=2, run_on=places.get(where, where)) as env:
    step = inner_jit(lambda: env.step(jnp.zeros(2, jnp.int32))[0])
    inner = inner_jit(lambda: jax.lax.scan(lambda _, __: (None, step()), None, length=3)[1])

    def run(key: Any) -> Any:
      env.reset(key)
      step()
      return inner()

    want = [[[[2 * lane + i, 2 + k] for i in range(2)] for k in range(3)] for lane in range(3)]
    keys = jnp.arange(6).reshape(3, 2)
    assert jax.jit(jax.vmap(run))(keys).tolist() == want
    assert jax.vmap(run)(keys).tolist() == want
    assert jax.jit(run)(keys[1]).tolist() == want[1]
    both = jax.jit(jax.vmap(jax.vmap(lambda key, x: run(key) + x, (None, 0)), (0, None)))
    assert both(keys, jnp.zeros(2)).tolist() == [[one] * 2 for one in want]


def test_lanes_have_their_own_for_as_long_as_the_environments_live() -> None:
  with cg.envs(environments.simple, n=2) as env:
    reset = jax.jit(jax.vmap(lambda seeds: env.reset(seeds)[0]))
    step = jax.jit(jax.vmap(lambda x: env.step(jnp.zeros(2, jnp.int32))[0] + x))
    with pytest.raises(cg.GateError, match="environment 0 has not been reset"), cg.errors():
      jax.block_until_ready(step(jnp.zeros(3)))
    reset(jnp.arange(6).reshape(3, 2))
    for count in (1, 2):
      assert step(jnp.zeros(3)).tolist() == [
        [[2 * i + j, count] for j in range(2)] for i in range(3)
      ]


@pytest.mark.parametrize("inner", [0, 1])
def test_vmap_in_vmap_and_other_axes(inner: int) -> None:
  want = stacked([stacked([of_gymnasium(3 * i + j, WEIGHTS[i]) for j in range(3)]) for i in (0, 1)])
  with cg.envs(environments.cart_pole, n=N) as env:
    keys = jnp.arange(6).reshape(2, 3)
    run = jax.vmap(training(env), (0, None), out_axes=inner)
    run = jax.jit(jax.vmap(run, (0, 0)))
    got = run(keys, WEIGHTS)
    assert_same(jax.tree.map(lambda x: jnp.moveaxis(x, 1 + inner, 1), got), want)


@WHERE
def test_lanes_that_a_branch_or_a_loop_parts(where: str, two: cg.Workers) -> None:
  places: Any = {"workers": two, "thread": cg.thread("of lanes")}
  with cg.envs(environments.simple, n=2, run_on=places.get(where, where)) as env:

    def run(key: Any, count: Any, moves: Any) -> Any:
      first, _ = env.reset(key)
      step = lambda _: env.step(jnp.zeros(2, jnp.int32))[0]
      seen = jax.lax.while_loop(lambda seen: seen[0, 1] < count, step, first)
      return jax.lax.cond(moves, step, lambda seen: seen, seen)

    keys = jnp.arange(6).reshape(3, 2)
    got = jax.jit(jax.vmap(run))(keys, jnp.array([3.0, 0.0, 5.0]), jnp.array([True, False, False]))
    counts = [4, 0, 5]
    assert got.tolist() == [[[2 * i + j, counts[i]] for j in range(2)] for i in range(3)]


@WHERE
def test_an_exception_names_the_lane(where: str, two: cg.Workers) -> None:
  import functools

  places: Any = {"workers": two, "thread": cg.thread("of lanes")}
  make = functools.partial(environments.Simple, environments.fail)
  with cg.envs(make, n=2, run_on=places.get(where, where)) as env:

    @jax.jit
    @jax.vmap
    def run(key: Any) -> Any:
      env.reset(key)
      env.step(jnp.zeros(2, jnp.int32) + key * 0)
      return env.step(jnp.zeros(2, jnp.int32) + key * 0)[0]

    with pytest.raises(ArithmeticError) as info, cg.errors():
      jax.block_until_ready(run(jnp.array([[1, 2], [2, 3], [1, 1]])))
    said = f"environment 1 of 2 of envs '{env.name}', in lane 1 raised this in step()"
    assert said in str(info.value.__notes__)
    assert run(jnp.zeros((3, 2), jnp.int32))[..., 1].tolist() == [[2, 2]] * 3


@WHERE
@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit], ids=["auto", "explicit"])
@pytest.mark.skipif(len(jax.devices()) < 4, reason="needs several devices")
@pytest.mark.filterwarnings("ignore")
def test_lanes_of_environments_that_are_split_over_devices(
  where: str, kind: AxisType, two: cg.Workers
) -> None:
  mesh = Mesh(np.array(jax.devices()[:4]), ("d",), axis_types=(kind,))
  want = stacked([of_gymnasium(seed, WEIGHTS[0], 4) for seed in range(LANES)])
  places: Any = {"workers": two, "thread": cg.thread("of lanes")}
  with jax.set_mesh(mesh), cg.envs(
    environments.cart_pole, n=4, run_on=places.get(where, where),
    sharding=NamedSharding(mesh, P("d")),
  ) as env:  # fmt: skip
    train = training(env)
    assert_same(jax.jit(jax.vmap(train, (0, None)))(jnp.arange(LANES), WEIGHTS[0]), want)
    if kind == AxisType.Explicit:
      return
    over = P(None, None, "d")
    mapped = jax.shard_map(
      jax.vmap(train, (0, None)), mesh=mesh, in_specs=(P(), P()),
      out_specs=(P(None, "d"), (over,) * 4),
    )  # fmt: skip
    assert_same(jax.jit(mapped)(jnp.arange(LANES), WEIGHTS[0]), want)


def test_records_of_lanes_are_told_apart() -> None:
  records: list[Any] = []
  with cg.envs(environments.Drawn, n=2, record=records.append) as env:

    @jax.jit
    @jax.vmap
    def run(key: Any) -> Any:
      env.reset(key)
      act = lambda _, __: (None, env.step(jnp.arange(2) + key)[1])
      return jax.lax.scan(act, None, length=4)[1]

    run(jnp.array([[0, 0], [1, 1]]))
    cg.barrier()
  found = sorted((int(one["lane"]), float(one["return"])) for one in records)
  assert found == [(0, 0.0), (0, 3.0), (1, 3.0), (1, 6.0)]
  assert {int(one["length"]) for one in records} == {3}


def test_derivatives_of_what_is_around(two: cg.Workers) -> None:
  with cg.envs(environments.cart_pole, n=N) as env:

    def loss(weights: Any, key: Any) -> Any:
      def step(seen: Any, _: Any) -> Any:
        scores = seen @ weights
        actions = (jax.lax.stop_gradient(scores) > 0).astype(jnp.int32)
        seen, reward, *_ = env.step(actions)
        return seen, (scores * reward).sum()

      return jax.lax.scan(step, env.reset(key)[0], length=10)[1].sum()

    grads = jax.jit(jax.vmap(jax.grad(loss), (None, 0)))(WEIGHTS[0], jnp.arange(3))
    for seed in range(3):
      np.testing.assert_allclose(
        grads[seed], jax.jit(jax.grad(loss))(WEIGHTS[0], seed), rtol=1e-5, atol=1e-5
      )
