# SPDX-License-Identifier: Apache-2.0
"""`callgate.envs`: Gymnasium's environments in compiled programs."""

# Annotations are evaluated here, for `typing.get_type_hints` of the functions that take these.

import contextlib
import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax

from callgate._core import exact, factories, registry
from callgate._core import options as check
from callgate._core.errors import GateDefinitionError
from callgate._core.failures import raise_deferred
from callgate._core.pickling import Stays
from callgate._core.public import Closing
from callgate._envs import infos, plans, resets, seeds, spaces, wrappers
from callgate._envs.calls import EnvLayout
from callgate._envs.options import EnvsOptions, check_records, place_given
from callgate._envs.programs import Programs
from callgate._envs.videos import VideoPlan
from callgate._gate.options import place_of
from callgate._jax import tracing
from callgate._places.workers import Workers
from callgate._runtime import config
from callgate._runtime.barrier import wait_for_programs


@wrappers.reachable
@factories.of_one(EnvsOptions)
def envs(make: Callable[..., Any], /, *, options: EnvsOptions) -> "Envs":
  """Makes Gymnasium environments that compiled programs can reset and step.

  ```python
  import callgate as cg, gymnasium, jax, jax.numpy as jnp

  with cg.envs(lambda: gymnasium.make("CartPole-v1"), n=8) as env:

    @jax.jit
    def rollout(key):
      def step(observation, _):
        actions = (observation[:, 2] > 0).astype(jnp.int32)  # push to where the pole leans
        observation, reward, terminated, truncated, info = env.step(actions)
        return observation, reward

      observation, info = env.reset(key)
      return jax.lax.scan(step, observation, length=100)[1]

    assert rollout(jax.random.key(0)).shape == (100, 8)
  ```

  By default, the step after the end of an episode starts the next one, as Gymnasium's
  `AutoresetMode.NEXT_STEP` does. This step ignores its action and returns the new episode's first
  observation, with reward 0. The observation that comes with `terminated` or `truncated` is the
  final one of its episode. `autoreset=` has the other modes. With equal seeds the trajectories
  equal those of `gymnasium.vector.SyncVectorEnv`.

  Under `jax.vmap` each lane has n environments of its own. `callgate.envs.normalize_observation`,
  `normalize_reward` and `episode_statistics` wrap environments.

  Args:
    make: a function that returns an environment with `reset(seed=)`, `step(action)`, and
      Gymnasium's spaces. `envs` calls it once to read the spaces, and once for each environment,
      where that runs. With `vector` it returns a vector environment, and may have a parameter
      `seed`, for vector environments that are seeded when they are made.

  Returns:
    `Envs`, also a context manager.

  Raises:
    GateDefinitionError: an option is wrong, Gymnasium is not installed, or a space has no fixed
      shape and dtype.
    ValueError: another live gate or environment has the name.
  """
  name = check.name("envs", options.name) or registry.unique_name(
    check.function("envs", "make", make)
  )
  label = f"envs '{name}'"
  options = check.checked(label, options)
  run_on, to = place_given(label, options.run_on), options.record
  check_records(label, to)
  if options.record_steps and to is None:
    raise GateDefinitionError(
      f"{label}: record_steps=True: expected record=, got None; pass record= or drop record_steps="
    )
  workers = run_on.count if isinstance(run_on, Workers) else 0
  layout = EnvLayout.checked(
    label, options.n, options.sharding, workers, together=options.vector
  )  # fmt: skip
  plan = place_of(run_on).run(
    functools.partial(
      plans.plan_of, label, make, options.n, infos.declared(label, options.info),
      devices=layout.devices, vector=options.vector, autoreset=options.autoreset,
      episodes=to is not None, video=VideoPlan.checked(label, options.record_video),
    )
  )  # fmt: skip
  layout = dataclasses.replace(layout, count=plan.count)
  return Envs(name, Programs(name, plan, layout, run_on, options.timeout, to, options.record_steps))


class Envs(Closing, Stays):
  """Environments that compiled programs reset and step; made by `callgate.envs`.

  Calls run in program order on each device, also from one program to the next. The environments
  keep their state between programs.

  Attributes:
    name: the name in programs and messages.
    num_envs: the number of environments.
    single_observation_space, single_action_space: Gymnasium's spaces of one environment.
    observation_space, action_space: Gymnasium's spaces of all environments.
  """

  _stays = "its environments live in this process; call callgate.envs in the other process"

  def __init__(self, name: str, programs: Programs) -> None:
    plan = programs.plan
    self.name, self.num_envs = name, plan.count
    self.single_observation_space = plan.observation_space
    self.single_action_space = plan.action_space
    batch = spaces.gymnasium(plan.label).vector.utils.batch_space
    self.observation_space = batch(plan.observation_space, plan.count)
    self.action_space = batch(plan.action_space, plan.count)
    self._programs, self._closed, self._called = programs, False, False
    # Outside of programs a call is a program of its own.
    self._reset = jax.jit(programs.reset, static_argnums=(3, 4))
    self._step = jax.jit(programs.step)

  def reset(
    self, key: Any = None, *, mask: Any = None, options: Any = None, info: Any = None
  ) -> tuple[Any, dict[str, Any]]:
    """Resets all environments, or those of a mask. The first reset makes them.

    Args:
      key: the source of seeds: a PRNG key, typed or raw (a `jax.Array` uint32[2]); an integer,
        which may be traced; or n seeds, as a list or an integer array of shape (n,). With a key or
        an integer, environment i gets the i-th number of
        `np.random.SeedSequence(integer).generate_state(n)`. A key's integer consists of its words,
        the most significant word first: 7 for `jax.random.key(7)`. None keeps the environments'
        random generators.
      mask: bool[n], for autoreset="disabled": True for the environments to reset. The observations
        of the others stay as they were.
      options: a dictionary for the environments' `reset(options=)`. Its arrays may be traced.
      info: ignored. Wrapped environments keep their state there.

    Returns:
      (observations, infos). Observations are a pytree like `observation_space`, of JAX's canonical
      dtypes, with n rows. Infos have the entries of `info=`, with a mask `_name` for each. With
      autoreset="same_step" they also have the entries of a step's infos.

    Raises:
      GateDefinitionError: while tracing: the key, the mask or the options are wrong.
      GateError: (fails the program) an environment outside the mask has not been reset before.
      BaseException: (fails the program) an environment raised it; a note has the environment's
        number.
    """
    del info
    programs = self._open()
    plan = programs.plan
    how, given = seeds.operand(plan.label, key, self.num_envs)
    chosen = resets.mask_of(plan.label, mask, plan.autoreset, programs.layout.rows)
    form, arrays = resets.form_of(plan.label, options)
    if tracing.in_no_trace():
      return self._reset(given, chosen, arrays, how, form and exact.exact(form))
    return programs.reset(given, chosen, arrays, how, form and exact.exact(form))

  def step(
    self, actions: Any, info: Any = None
  ) -> tuple[Any, jax.Array, jax.Array, jax.Array, dict[str, Any]]:
    """Steps all environments, each with its action.

    Args:
      actions: a pytree like `action_space`, of JAX's canonical dtypes, with n rows. Integers may
        have fewer bits.
      info: ignored. Wrapped environments keep their state there.

    Returns:
      (observations, rewards, terminated, truncated, infos). Observations and infos are as for
      `reset`. Rewards are float32[n] (float64 with jax_enable_x64); terminated and truncated are
      bool[n]. With autoreset="same_step" the infos have "final_obs", the final observations of the
      episodes that this step ended, with the mask "_final_obs"; and, with `info=`, "final_info" and
      "_final_info".

    Raises:
      GateDefinitionError: while tracing: the actions have another structure, shape or dtype, or the
        call is differentiated.
      GateError: (fails the program) an environment has not been reset.
      BaseException: (fails the program) an environment raised it; a note has the environment's
        number.
      WorkerError: (fails the program) a worker has ended, with its environments. The next `reset`
        makes new ones.
    """
    del info
    programs = self._open()
    spaces.check_numbers(programs.plan.label, actions)
    return (self._step if tracing.in_no_trace() else programs.step)(actions)

  def render(self, lane: int = 0) -> Any:
    """Waits for programs, and returns the result of `render()` of environment `lane`.

    A picture from a worker is copied by pickle.

    Raises:
      GateError: the environment has not been reset.
      BaseException: the environment raised it.
      WorkerError: the environment's worker has ended.
    """
    programs = self._open()
    label = programs.plan.label
    number = check.count(label, "lane", lane, most=self.num_envs - 1)
    wait_for_programs()
    if isinstance(programs.run_on, Workers) and config.engine() != "jax":
      return programs.render(number)
    return programs.place.run(lambda: programs.instances.get().render(number))

  def close(self) -> None:
    """Waits for programs and closes all environments, also in workers. Later calls fail."""
    if self._closed:
      return
    self._closed = True
    programs = self._programs
    if self._called:
      wait_for_programs()
    if self._called and isinstance(programs.run_on, Workers) and config.engine() != "jax":
      with contextlib.suppress(Exception):  # workers that have ended have no environments
        jax.block_until_ready(jax.jit(programs.shut)())
    programs.place.run(lambda: programs.instances.get().close())

  def __repr__(self) -> str:
    return f"<callgate.envs '{self.name}' of {self.num_envs}>"

  @property
  def _layout(self) -> EnvLayout:
    return self._programs.layout

  @property
  def _plan(self) -> plans.EnvPlan:
    return self._programs.plan

  def _open(self) -> Programs:
    raise_deferred()
    if self._closed:
      raise self._plan.closed_error()
    self._called = True
    return self._programs
