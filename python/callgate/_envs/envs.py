# SPDX-License-Identifier: Apache-2.0
"""`callgate.envs`: Gymnasium's environments in compiled programs."""

# Annotations are evaluated here, for `typing.get_type_hints` of the functions that take these.

import contextlib
import dataclasses
import functools
import pickle
from collections.abc import Callable, Mapping
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np

from callgate._call.function import ArrayFunction
from callgate._core import factories, registry
from callgate._core import options as check
from callgate._core.errors import GateDefinitionError, GateError
from callgate._core.failures import raise_deferred
from callgate._core.public import Closing
from callgate._envs import infos, seeds, spaces
from callgate._envs.calls import EnvGate, EnvLayout
from callgate._envs.lanes import EnvLanes, EnvPlan, LanesMethod, plan_of
from callgate._gate.options import GateOptions, place_of
from callgate._jax import tracing
from callgate._places import objects
from callgate._places.remote import LOADING_SECONDS
from callgate._places.threads import Thread
from callgate._places.workers import Workers, shared
from callgate._runtime import config
from callgate._runtime.barrier import errors, wait_for_programs
from callgate._tap.channel import Channel
from callgate._tap.tap import tap

RunOn = Literal["xla", "own", "processes"] | Workers | Thread


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class EnvsOptions:
  """The options of `callgate.envs`.

  Attributes:
    n: how many environments there are.
    run_on: where they are: "xla", on XLA's calling thread; "own", on a thread of callgate's;
      on the one of `callgate.thread`, where they are also made, rendered and closed; "processes",
      in as many worker processes as CPUs; or in those of `callgate.workers`, each of which has its
      share of them and steps it in one message.
    info: what of environments' infos programs get: names to anything with `.shape` and `.dtype`, to
      dtypes, or to dictionaries of such. Default: nothing.
    record: where episodes go when they end, as values with "return", "length" and "lane": a
      function, a channel, or a channel's name, as `to` of `callgate.tap`.
    record_steps: also send each step, all environments at once: "observation", "action",
      "reward", "terminated" and "truncated".
    sharding: a NamedSharding whose spec is the mesh's axis, or axes, over which the environments
      are split: each device steps its own. In a `jax.shard_map` over these axes a call is for those
      of its device.
    timeout: seconds after which a step fails; a reset, which may have to make environments, has 30
      at least. See `callgate.gate`.
    name: what programs and messages call them; unique. Default: as for `callgate.gate`, of `make`.
  """

  n: int = check.option(1, check.count, least=1, most=2**31 - 2)
  run_on: RunOn = "xla"
  info: Mapping[str, Any] | None = None
  record: Callable[..., Any] | Channel | str | None = None
  record_steps: bool = check.option(False, check.boolean)
  sharding: jax.sharding.NamedSharding | None = None
  timeout: float | None = check.option(None, check.seconds)
  name: str | None = None


@factories.of_one(EnvsOptions)
def envs(make: Callable[[], Any], /, *, options: EnvsOptions) -> "Envs":
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
  returned with `terminated` or `truncated` is the episode's final observation. With equal seeds the
  trajectories are those of `gymnasium.vector.SyncVectorEnv`.

  Args:
    make: returns an environment: `reset(seed=)`, `step(action)`, and Gymnasium's spaces. It is
      called once here, for these, and once for each environment where that runs.

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
  count, steps = options.n, options.record_steps
  run_on: Any = options.run_on
  if not isinstance(run_on, (Workers, Thread)):
    places = "'xla', 'own', 'processes', callgate.workers(...) or callgate.thread(...)"
    run_on = check.choice(label, "run_on", run_on, ("xla", "own", "processes"), what=places)
    run_on = shared() if run_on == "processes" else run_on
  to: Any = options.record
  if to is not None and not callable(to) and not isinstance(to, Channel):
    expected = "a function, a channel or a channel's name"
    check.text(label, "record", to, expected)
    if not to or "\n" in to:
      check.refuse(label, "record", expected, to)
  if steps and to is None:
    raise GateDefinitionError(f"{label}: record_steps=True: expected record=, got None")
  workers = run_on.count if isinstance(run_on, Workers) else 0
  layout = EnvLayout.checked(label, count, options.sharding, workers)
  info = infos.declared(label, options.info)
  plan = place_of(run_on).run(functools.partial(plan_of, label, make, count, info, to is not None))
  return Envs(name, _Programs(name, plan, layout, run_on, options.timeout, to, steps))


class _Programs:
  """The traced part: the gates and the arrays around their calls."""

  def __init__(
    self, name: str, plan: EnvPlan, layout: EnvLayout, run_on: Any, timeout: float | None, to: Any,
    steps: bool,
  ) -> None:  # fmt: skip
    self.plan, self.layout, self.to, self.steps = plan, layout, to, steps
    self.run_on, self.place = run_on, place_of(run_on)
    self.instances = objects.Instances(functools.partial(EnvLanes, plan), by_lane=False)
    outs: dict[str, Callable[..., Any]] = {
      "reset": lambda lanes, given: plan.of_reset(lanes.shape[-1]),
      "step": lambda lanes, actions: plan.of_step(lanes.shape[-1]),
      "shut": lambda lanes: jax.ShapeDtypeStruct(lanes.shape[-1:], np.bool_),
      "rendered": lambda lanes: jax.ShapeDtypeStruct((), np.int32),
      "picture": lambda lanes, *, room: jax.ShapeDtypeStruct((room,), np.uint8),
    }
    limits = {"reset": timeout and max(timeout, LOADING_SECONDS), "step": timeout}

    def gate(method: str, suffix: str = "", **more: Any) -> ArrayFunction:
      function = LanesMethod(self.instances, method)
      options = GateOptions(
        out=outs[method], name=f"{name}.{method}{suffix}", style="inplace", effect="ordered",
        timeout=limits.get(method), **more,
      )  # fmt: skip
      return ArrayFunction(EnvGate(function, options, plan.label))

    self._there: dict[str, ArrayFunction] = {}
    here: dict[str, Any] = {"sharding": "shard" if layout.sharding is not None else None}
    if isinstance(run_on, Workers):
      self._there = {method: gate(method, run_on=run_on, affinity="lane") for method in outs}
      here["suffix"] = ".here"
    else:
      here["run_on"] = run_on
    self._here = {method: gate(method, **here) for method in ("reset", "step")}

  def call(self, method: str, *args: Any, **static: Any) -> Any:
    there = self._there.get(method)
    return self.layout.call(self._here[method], there, *args, **static)

  def reset(self, given: Any, how: seeds.How) -> tuple[Any, Any]:
    lanes = self.layout.lanes()
    rows = lanes.shape[0]
    if how == "none":
      given = lanes
    elif how == "lanes":
      given = given[lanes] if self.layout.is_local() else given
    else:
      given = jnp.broadcast_to(given, (rows, *given.shape))
    seen, info = self.call("reset", lanes, given, how=how)
    if self.steps:
      to: Any = self.to
      tap({"observation": seen}, to, name="reset")
    return seen, info

  def step(self, actions: Any) -> tuple[Any, Any, Any, Any, Any]:
    plan = self.plan
    lanes = self.layout.lanes()
    actions = jax.tree.map(jnp.asarray, actions)
    spaces.check_actions(plan.label, plan.action_space, plan.actions, actions, lanes.shape[0])
    seen, reward, terminated, truncated, info, episodes = self.call("step", lanes, actions)
    to: Any = self.to
    if to is not None:
      ended = {**episodes, "lane": self.layout.split(lanes)}
      jax.vmap(lambda one, where: tap(one, to, name="episode", where=where))(
        ended, terminated | truncated
      )
    if to is not None and self.steps:
      values = {
        "observation": seen, "action": actions, "reward": reward, "terminated": terminated,
        "truncated": truncated,
      }  # fmt: skip
      tap(values, to, name="step")
    return seen, reward, terminated, truncated, info

  def shut(self) -> Any:
    """Closes the environments of each worker."""
    count = self.run_on.count
    return self._there["shut"](jnp.zeros((count, 1), np.int32))

  def render(self, number: int) -> Any:
    """The picture of a worker's environment, which comes as a pickle."""
    worker = self.layout.worker_of(number)
    lanes = np.full((self.run_on.count, 1), self.plan.count, np.int32)  # of none
    lanes[worker] = number
    with errors():
      size = int(jax.jit(self._there["rendered"])(lanes)[worker])
      room = 1 << size.bit_length()  # few programs, whatever the sizes
      picture = jax.jit(self._there["picture"], static_argnames="room")
      rows = np.asarray(picture(lanes, room=room))
    return pickle.loads(rows[worker, :size].tobytes())


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

  def __init__(self, name: str, programs: _Programs) -> None:
    plan = programs.plan
    self.name, self.num_envs = name, plan.count
    self.single_observation_space = plan.observation_space
    self.single_action_space = plan.action_space
    batch = spaces.gymnasium(plan.label).vector.utils.batch_space
    self.observation_space = batch(plan.observation_space, plan.count)
    self.action_space = batch(plan.action_space, plan.count)
    self._programs, self._closed, self._called = programs, False, False
    # Outside of programs a call is a program of its own.
    self._reset = jax.jit(programs.reset, static_argnums=1)
    self._step = jax.jit(programs.step)

  def reset(self, key: Any = None) -> tuple[Any, dict[str, Any]]:
    """Resets all environments, and makes them the first time.

    Args:
      key: a PRNG key, typed or raw (a `jax.Array` uint32[2]); an integer, traced or not; or a seed
        for each environment, a list or an integer array of shape (n,). With a key or an integer,
        environment i gets the i-th of `np.random.SeedSequence(integer).generate_state(n)`; a key's
        integer is that of its words, the first of most weight: of `jax.random.key(7)` it is 7. None
        leaves the environments' random generators as they are.

    Returns:
      Observations, a pytree as `observation_space`, of JAX's canonical dtypes, with n rows each;
      and the infos that `info=` names, with a mask `_name` beside each.

    Raises:
      GateDefinitionError: (while tracing) the key is none, or the call is under `jax.vmap`.
      BaseException: (fails the program) what an environment raises, with a note of its number.
    """
    programs = self._open()
    how, given = seeds.operand(programs.plan.label, key, self.num_envs)
    made = self._reset if tracing.in_no_trace() else programs.reset
    return made(given, how)

  def step(self, actions: Any) -> tuple[Any, jax.Array, jax.Array, jax.Array, dict[str, Any]]:
    """Steps all environments, each with its action; one whose episode has ended is reset instead.

    Args:
      actions: a pytree as `action_space`, of JAX's canonical dtypes, with n rows each. Integers may
        have fewer bits.

    Returns:
      Observations and infos as `reset`; rewards, float32[n] (float64 with jax_enable_x64);
      terminated and truncated, bool[n].

    Raises:
      GateDefinitionError: (while tracing) actions have another structure, shape or dtype, or the
        call is under `jax.vmap` or differentiated.
      GateError: (fails the program) an environment has not been reset.
      BaseException: (fails the program) what an environment raises, with a note of its number.
      WorkerError: (fails the program) a worker has ended, and its environments with it: the next
        `reset` makes others.
    """
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

  def _open(self) -> _Programs:
    raise_deferred()
    if self._closed:
      raise GateError(f"{self._programs.plan.label}: the environments have been closed")
    self._called = True
    return self._programs
