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
from callgate._core.errors import GateDefinitionError, GateError
from callgate._core.failures import raise_deferred
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
  """Makes environments with Gymnasium's interface that compiled programs reset and step.

  ```python
  import callgate as cg, gymnasium, jax, jax.numpy as jnp

  with cg.envs(lambda: gymnasium.make("CartPole-v1"), n=8) as env:

    @jax.jit
    def rollout(key):
      def step(observation, _):
        actions = (observation[:, 2] > 0).astype(jnp.int32)  # towards where the pole leans
        observation, reward, terminated, truncated, info = env.step(actions)
        return observation, reward

      observation, info = env.reset(key)
      return jax.lax.scan(step, observation, length=100)[1]

    assert rollout(jax.random.key(0)).shape == (100, 8)
  ```

  An episode that has ended begins anew with the next step, which ignores its action and returns
  that reset's observation, with reward 0: Gymnasium's `AutoresetMode.NEXT_STEP`. So what is
  returned with `terminated` or `truncated` is the episode's final observation. `autoreset=` has the
  other modes. With equal seeds the trajectories are those of `gymnasium.vector.SyncVectorEnv`.

  Under `jax.vmap` each lane has n environments of its own. `callgate.envs.normalize_observation`,
  `normalize_reward` and `episode_statistics` wrap what this returns.

  Args:
    make: returns an environment: `reset(seed=)`, `step(action)`, and Gymnasium's spaces. It is
      called once here, for these, and once for each environment where that runs. With `vector` it
      returns a vector environment, and may have a parameter `seed`, for one that is seeded there.

  Returns:
    `Envs`, also a context manager.

  Raises:
    GateDefinitionError: an option is wrong, Gymnasium is not installed, or a space has no fixed
      shape and dtype.
    ValueError: the name is taken.
  """
  name = check.name("envs", options.name) or registry.unique_name(
    check.function("envs", "make", make)
  )
  label = f"envs '{name}'"
  options = check.checked(label, options)
  run_on, to = place_given(label, options.run_on), options.record
  check_records(label, to)
  if options.record_steps and to is None:
    raise GateDefinitionError(f"{label}: record_steps=True: expected record=, got None")
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


class Envs(Closing):
  """Environments that compiled programs reset and step; made by `callgate.envs`.

  Calls are ordered: in a program, and from program to program, each device's come in the order in
  which they were traced and dispatched, whatever their data say. A program that runs again goes on
  with the environments as the last one left them.

  Attributes:
    name: as programs and messages call them.
    num_envs: how many there are.
    single_observation_space, single_action_space: Gymnasium's spaces of one.
    observation_space, action_space: those of all.
  """

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
    """Resets all environments, or those of a mask, and makes them the first time.

    Args:
      key: a PRNG key, typed or raw (a `jax.Array` uint32[2]); an integer, traced or not; or a seed
        for each environment, a list or an integer array of shape (n,). With a key or an integer,
        environment i gets the i-th of `np.random.SeedSequence(integer).generate_state(n)`; a key's
        integer is that of its words, the first of most weight: of `jax.random.key(7)` it is 7. None
        leaves the environments' random generators as they are.
      mask: bool[n], with autoreset="disabled": True for those to reset. The observations of the
        others are what they were.
      options: a dictionary, for the environments' `reset(options=)`. Its arrays may be traced.
      info: ignored; wrapped environments have their state there.

    Returns:
      Observations, a pytree as `observation_space`, of JAX's canonical dtypes, with n rows each;
      and the infos that `info=` names, with a mask `_name` beside each. With
      autoreset="same_step" infos have the parts that a step's have, too.

    Raises:
      GateDefinitionError: (while tracing) the key, the mask or the options are none.
      GateError: (fails the program) an environment out of the mask has not been reset.
      BaseException: (fails the program) what an environment raises, with a note of its number.
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
    """Steps all environments, each with its action; `autoreset=` says when episodes begin anew.

    Args:
      actions: a pytree as `action_space`, of JAX's canonical dtypes, with n rows each. Integers may
        have fewer bits.
      info: ignored; wrapped environments have their state there.

    Returns:
      Observations and infos as `reset`; rewards, float32[n] (float64 with jax_enable_x64);
      terminated and truncated, bool[n]. With autoreset="same_step" infos have "final_obs", the last
      observations of the episodes that this step has ended, its mask "_final_obs" and, with
      `info=`, "final_info" and "_final_info".

    Raises:
      GateDefinitionError: (while tracing) actions have another structure, shape or dtype, or the
        call is differentiated.
      GateError: (fails the program) an environment has not been reset.
      BaseException: (fails the program) what an environment raises, with a note of its number.
      WorkerError: (fails the program) a worker has ended, and its environments with it: the next
        `reset` makes others.
    """
    del info
    programs = self._open()
    return (self._step if tracing.in_no_trace() else programs.step)(actions)

  def render(self, lane: int = 0) -> Any:
    """Waits for programs, and returns what environment `lane` renders, as its `render()` does.

    The picture of one in a worker comes as a copy, by pickle.

    Raises:
      GateError: it has not been reset.
      BaseException: what the environment raises.
      WorkerError: its worker ends meanwhile.
    """
    programs = self._open()
    label = programs.plan.label
    number = check.count(label, "lane", lane, most=self.num_envs - 1)
    wait_for_programs()
    if isinstance(programs.run_on, Workers) and config.engine() != "jax":
      return programs.render(number)
    return programs.place.run(lambda: programs.instances.get().render(number))

  def close(self) -> None:
    """Waits for programs, and closes the environments, also in workers. Calls fail from then on."""
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
      raise GateError(f"{self._programs.plan.label}: the environments have been closed")
    self._called = True
    return self._programs
