# SPDX-License-Identifier: Apache-2.0
"""Environments that raise, lie, hang or die, and calls that can't be."""

from __future__ import annotations

import copy
import functools
import os
import pathlib
import pickle
import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

pytest.importorskip("gymnasium")
pytest.importorskip("cloudpickle")

import environments
import gymnasium
import interpreters
import waiting
from environments import Simple
from gymnasium import spaces

import callgate as cg

WHERE = pytest.mark.parametrize("where", ["xla", "own", "workers"])


def run_on(where: str, workers: cg.Workers) -> Any:
  return workers if where == "workers" else where


def zeros(count: int) -> jax.Array:
  return jnp.zeros(count, jnp.int32)


def stepped(env: cg.Envs, count: int = 4) -> Any:
  return jax.jit(env.step)(zeros(count))


# -- while programs run --------------------------------------------------------------------------
@WHERE
def test_an_environments_exception_says_which_one_it_was(
  where: str, two: cg.Workers, engine: str
) -> None:
  make = functools.partial(Simple, environments.fail)
  with cg.envs(make, n=4, run_on=run_on(where, two)) as env:
    env.reset([1, 2, 3, 4])
    stepped(env)
    with pytest.raises(ArithmeticError, match="has diverged") as info, cg.errors():
      jax.block_until_ready(stepped(env))
    assert f"environment 2 of 4 of envs '{env.name}' raised this in step()" in str(
      info.value.__notes__
    )
    seen, _ = env.reset([1, 2, 5, 4])  # all is well again
    assert seen[:, 1].tolist() == [0] * 4
    for count in range(1, 4):
      assert stepped(env)[0][:, 1].tolist() == [count] * 4


def test_a_worker_that_dies_takes_its_environments_along() -> None:
  make = functools.partial(Simple, environments.die)
  with cg.workers(2) as workers, cg.envs(make, n=4, run_on=workers) as env:
    env.reset([3, 2, 1, 0])
    stepped(env)
    with pytest.raises(cg.WorkerError, match="SIGKILL") as info, cg.errors():
      jax.block_until_ready(stepped(env))
    assert info.value.signal == "SIGKILL"
    said = "environment [01] has not been reset, or its worker has ended"
    with pytest.raises(cg.GateError, match=said), cg.errors():
      jax.block_until_ready(stepped(env))
    assert env.reset([5, 6, 7, 8])[0].tolist() == [[5, 0], [6, 0], [7, 0], [8, 0]]
    assert stepped(env)[0][:, 1].tolist() == [1] * 4


def test_an_environment_that_hangs_is_ended_after_the_timeout(
  monkeypatch: pytest.MonkeyPatch,
) -> None:
  monkeypatch.setattr("callgate._envs.programs.LOADING_SECONDS", 1.0)  # what a reset has at least
  make = functools.partial(Simple, environments.hang)
  with cg.workers(2) as workers, cg.envs(make, n=2, run_on=workers, timeout=5) as env:
    env.reset([3, 2])
    stepped(env, 2)
    with pytest.raises(cg.GateTimeoutError, match="timeout, 5 s") as info, cg.errors():
      jax.block_until_ready(stepped(env, 2))
    assert "in hang" in str(info.value)  # where it stood
    assert env.reset([1, 2])[0][:, 0].tolist() == [1, 2]
    with pytest.raises(cg.GateTimeoutError, match="timeout, 5 s") as info, cg.errors():
      jax.block_until_ready(env.reset([environments.HANGS, 2]))
    assert "in reset" in str(info.value)


@WHERE
def test_a_step_before_the_reset_is_told(where: str, two: cg.Workers, engine: str) -> None:
  with cg.envs(environments.simple, n=3, run_on=run_on(where, two)) as env:
    with pytest.raises(cg.GateError, match=r"environment \d has not been reset"), cg.errors():
      jax.block_until_ready(stepped(env, 3))
    env.reset(0)
    stepped(env, 3)


@pytest.mark.parametrize(
  ("seen", "said"),
  [
    (np.zeros(3, np.float32), r"observation: expected float32\[2\], got float32\[3\]"),
    (np.zeros(2, complex), r"expected float32\[2\], got complex128\[2\]"),
    ("text", r"expected float32\[2\], got"),
    (None, r"expected float32\[2\], got object"),
  ],
)
@WHERE
def test_an_action_out_of_the_space_is_told(
  where: str, seen: Any, said: str, two: cg.Workers
) -> None:
  with cg.envs(functools.partial(environments.Odd, seen), n=2, run_on=run_on(where, two)) as env:
    env.reset(0)
    with pytest.raises(cg.ResultError, match=said) as info, cg.errors():
      jax.block_until_ready(stepped(env, 2))
    assert "environment 0 of 2" in str(info.value.__notes__)


def test_actions_out_of_the_space_are_the_environment_s_own_error() -> None:
  with cg.envs(environments.cart_pole, n=3) as env:
    env.reset(0)
    with pytest.raises(AssertionError, match="invalid") as info, cg.errors():
      jax.block_until_ready(env.step(jnp.array([0, 5, 1])))
    assert "environment 1 of 3" in str(info.value.__notes__)


def test_infos_of_another_shape_are_told() -> None:
  with cg.envs(environments.simple, n=2, info={"pid": jax.ShapeDtypeStruct((2,), np.int32)}) as env:
    env.reset(0)
    with pytest.raises(cg.ResultError, match=r"info\['pid'\]: expected int32\[2\]"), cg.errors():
      jax.block_until_ready(stepped(env, 2))


# -- before anything runs ------------------------------------------------------------------------
@pytest.mark.parametrize(
  ("actions", "said"),
  [
    (jnp.zeros(4, jnp.int32), r"actions: expected int32\[3\], .* got int32\[4\]"),
    (jnp.zeros(3), r"actions: expected int32\[3\], .* got float32\[3\]"),
    (jnp.zeros(3, bool), r"actions: expected int32\[3\], .* got bool\[3\]"),
    (jnp.zeros((), jnp.int32), r"got int32\[\]"),
    ({"a": jnp.zeros(3, jnp.int32)}, r"expected the structure of Discrete\(3\)"),
  ],
)
@WHERE
def test_actions_of_another_form_are_refused(
  where: str, actions: Any, said: str, two: cg.Workers, engine: str
) -> None:
  with cg.envs(environments.simple, n=3, run_on=run_on(where, two)) as env:
    env.reset(0)
    for step in (env.step, jax.jit(env.step)):
      with pytest.raises(cg.GateDefinitionError, match=said):
        step(actions)
    assert stepped(env, 3)[0][:, 1].tolist() == [1] * 3  # nothing had run


@pytest.mark.parametrize("actions", ["left", {"a": None, "b": [object()]}, np.array(["a"] * 3)])
def test_actions_that_are_no_numbers_are_refused_in_the_users_words(actions: Any) -> None:
  with cg.envs(environments.simple, n=3) as env:
    for step in (env.step, lambda actions: jax.jit(lambda: env.step(actions))()):
      with pytest.raises(cg.GateDefinitionError, match=r"envs '.*': actions.*of numbers, got"):
        step(actions)


def test_a_loop_that_steps_and_is_linearized_is_refused_by_its_step() -> None:
  with cg.envs(environments.pendulum, n=2, name="pole") as env:

    def loop(x: Any) -> Any:
      step = lambda c: (c[0] * env.step(jnp.zeros((2, 1)))[1].sum(), c[1] + 1)
      return jax.lax.while_loop(lambda c: c[1] < 2, step, (x, 0))[0]

    with pytest.raises(cg.GateDefinitionError, match=r"calls envs 'pole\.step'"):
      jax.linearize(loop, 1.0)


def test_environments_say_why_they_have_no_pickle() -> None:
  with cg.envs(environments.simple, n=2, name="left") as env:
    assert copy.deepcopy(env) is env
    for held in (env, cg.envs.episode_statistics(env)):
      with pytest.raises(pickle.PicklingError, match=r"'left' of 2> can't .*environments live in"):
        pickle.dumps(held)


def test_actions_of_parts_are_named() -> None:
  with cg.envs(environments.Composite, n=2) as env:
    actions = jax.tree.map(jnp.asarray, env.action_space.sample())
    actions["push"] = (actions["push"][0][:, :1], actions["push"][1])
    with pytest.raises(cg.GateDefinitionError, match=r"actions\['push'\]\[0\]: .* float32\[2,1\]"):
      env.step(dict(actions))


def test_integers_of_fewer_bits_serve_as_actions() -> None:
  with cg.envs(environments.simple, n=2) as env:
    env.reset(0)
    for dtype in (jnp.int8, jnp.uint8, jnp.uint16, jnp.int32):
      assert env.step(jnp.array([1, 0], dtype))[1].tolist() == [1, 0]


@WHERE
def test_derivatives_are_refused_with_the_way(where: str, two: cg.Workers) -> None:
  with cg.envs(environments.pendulum, n=2, run_on=run_on(where, two)) as env:
    env.reset(0)
    reward = lambda actions: env.step(actions)[1].sum()
    with pytest.raises(cg.GateDefinitionError, match=r"stop_gradient\(actions\)"):
      jax.grad(reward)(jnp.ones((2, 1)))
    slope = jax.grad(lambda a: reward(jax.lax.stop_gradient(a)) + a.sum())(jnp.ones((2, 1)))
    assert slope.tolist() == [[1], [1]]


class Unmapped(Simple):
  def __init__(self, space: Any, which: str) -> None:
    super().__init__()
    setattr(self, which, space)


@pytest.mark.parametrize("which", ["observation_space", "action_space"])
@pytest.mark.parametrize(
  ("space", "part"),
  [
    (spaces.Text(4), ""),
    (spaces.Dict(b=spaces.Tuple((spaces.Discrete(2), spaces.Sequence(spaces.Discrete(3))))),
     "['b'][1]"),
    (spaces.Dict(g=spaces.Graph(spaces.Discrete(2), None)), "['g']"),
  ],
)  # fmt: skip
def test_spaces_without_fixed_shapes_are_named(space: Any, part: str, which: str) -> None:
  said = re.escape(f"{which}{part}: expected a space with a fixed shape and dtype")
  with pytest.raises(cg.GateDefinitionError, match=said):
    cg.envs(lambda: Unmapped(space, which))


@pytest.mark.parametrize(
  "space",
  [
    spaces.Discrete(2, start=2**31 - 1), spaces.Box(0, 2**40, (2,), np.int64),
    spaces.MultiDiscrete([3, 2**33]),
  ],
)  # fmt: skip
def test_integers_that_jax_s_dtype_does_not_hold_are_refused(space: Any) -> None:
  with pytest.raises(cg.GateDefinitionError, match="int32 holds"):
    cg.envs(lambda: Unmapped(space, "observation_space"))


def test_an_object_that_is_no_environment_is_refused() -> None:
  with pytest.raises(cg.GateDefinitionError, match="got 3 without reset, step, observation_space"):
    cg.envs(lambda: 3)
  with pytest.raises(cg.GateDefinitionError, match="make: expected a function without arguments"):
    cg.envs(lambda x: x)
  with pytest.raises(gymnasium.error.NameNotFound):
    cg.envs(lambda: gymnasium.make("NoSuchThing-v0"))


def test_a_vector_of_environments_is_refused() -> None:
  make = lambda: gymnasium.make_vec("CartPole-v1", num_envs=3)
  with pytest.raises(cg.GateDefinitionError, match="expected a single environment"):
    cg.envs(make, n=2)


def test_options_that_do_not_go_together() -> None:
  from concurrent.futures import ThreadPoolExecutor

  with pytest.raises(cg.GateDefinitionError, match=r"run_on: expected .*got <concurrent"):
    cg.envs(environments.simple, run_on=ThreadPoolExecutor(1))  # pyright: ignore
  with pytest.raises(cg.GateDefinitionError, match="record_steps=True: expected record="):
    cg.envs(environments.simple, record_steps=True)
  with pytest.raises(cg.GateDefinitionError, match="expected names without '_x'"):
    cg.envs(environments.simple, info={"x": np.int32, "_x": np.int32})
  with pytest.raises(cg.GateDefinitionError, match=r"info\['x'\]: float64 needs jax_enable_x64"):
    cg.envs(environments.simple, info={"x": np.float64})
  with pytest.raises(cg.GateDefinitionError, match=r"info\['x'\]\['y'\]: expected .*got 'words'"):
    cg.envs(environments.simple, info={"x": {"y": "words"}})


def test_a_missing_gymnasium_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
  import sys

  monkeypatch.setitem(sys.modules, "gymnasium", None)
  with pytest.raises(cg.GateDefinitionError, match=r"pip install 'callgate\[envs\]'"):
    cg.envs(environments.simple)


# -- the end -------------------------------------------------------------------------------------
@WHERE
def test_close_closes_each_environment_and_later_calls_fail(
  where: str, two: cg.Workers, tmp_path: pathlib.Path
) -> None:
  make = functools.partial(Simple, folder=str(tmp_path))
  env = cg.envs(make, n=3, run_on=run_on(where, two))
  (tmp_path / "closed--1").unlink()  # the one whose spaces were looked at
  compiled = jax.jit(lambda: env.step(zeros(3))[0])
  with env:
    env.reset([10, 11, 12])
    compiled()
  assert sorted(os.listdir(tmp_path)) == ["closed-10", "closed-11", "closed-12"]
  with pytest.raises(cg.GateError, match="are closed; step them before"):
    env.step(zeros(3))
  with pytest.raises(cg.GateError, match="are closed; step them before"), cg.errors():
    jax.block_until_ready(compiled())
  env.close()
  with cg.envs(environments.simple, n=1, run_on=run_on(where, two)) as other:  # others go on
    other.reset(0)


def test_close_after_the_workers_have_been_closed() -> None:
  with cg.workers(1) as workers:
    env = cg.envs(environments.simple, n=1, run_on=workers)
    env.reset(0)
  env.close()


def gone(pid: int) -> bool:
  """True if a process has ended, and its parent may or may not know."""
  try:
    return (
      pathlib.Path(f"/proc/{pid}/stat").read_text(encoding="utf-8").rsplit(")", 1)[1].split()[0]
      == "Z"
    )
  except (FileNotFoundError, ProcessLookupError):
    return True


def test_the_end_of_a_process_leaves_no_worker() -> None:
  code = """
    import callgate as cg, environments, jax.numpy as jnp
    workers = cg.workers(1)
    env = cg.envs(environments.simple, n=2, run_on=workers)
    env.reset(0)
    env.step(jnp.zeros(2, jnp.int32))
    print(*workers.pids)
  """
  folder = pathlib.Path(environments.__file__).parent
  pids = interpreters.output_of(code, **interpreters.same_path(folder)).split()
  assert len(pids) == 1
  waiting.until(lambda: all(gone(int(pid)) for pid in pids), "without workers")
