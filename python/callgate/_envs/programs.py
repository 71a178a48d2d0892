# SPDX-License-Identifier: Apache-2.0
"""The traced part of environments: the gates and the arrays around their calls."""

from __future__ import annotations

import functools
import pickle
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from callgate._call.function import ArrayFunction
from callgate._envs import seeds, spaces
from callgate._envs.calls import EnvGate, EnvLayout
from callgate._envs.hosts import NONE, LanesMethod, rows_of
from callgate._envs.lanes import EnvLanes
from callgate._envs.plans import EnvPlan
from callgate._envs.pools import EnvVectors
from callgate._gate.options import GateOptions, place_of
from callgate._places import objects
from callgate._places.remote import LOADING_SECONDS
from callgate._places.workers import Workers
from callgate._runtime.barrier import errors
from callgate._tap.tap import tap


class Programs:
  """Makes the calls of environments in programs."""

  def __init__(
    self, name: str, plan: EnvPlan, layout: EnvLayout, run_on: Any, timeout: float | None, to: Any,
    steps: bool,
  ) -> None:  # fmt: skip
    self.plan, self.layout, self.to, self.steps = plan, layout, to, steps
    self.run_on, self.place = run_on, place_of(run_on)
    kind = EnvVectors if plan.width else EnvLanes
    self.instances = objects.Instances(functools.partial(kind, plan), by_lane=False)
    outs: dict[str, Callable[..., Any]] = {
      "reset": lambda lanes, *_, levels: plan.of_reset(lanes.shape[-1] * rows_of(levels)),
      "step": lambda lanes, *_, levels: plan.of_step(lanes.shape[-1] * rows_of(levels)),
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
      return ArrayFunction(EnvGate(function, options, layout))

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
    return self.layout.call(self._here[method], there, *args, **static, levels=())

  def reset(
    self, given: Any, mask: Any, options: list[Any], how: seeds.How, form: Any
  ) -> tuple[Any, Any]:
    lanes = self.layout.lanes()
    rows = lanes.shape[0]
    each = functools.partial(_for_each, rows)
    if how == "none":
      given = lanes
    elif how == "lanes":
      given = given[lanes] if self.layout.is_local() else given
    else:
      given = each(given)
    more = jax.tree.map(each, options)
    seen, info = self.call("reset", lanes, given, mask, more, how=how, form=form and form.value)
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
        ended, (terminated | truncated) & (episodes["length"] > 0)
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
    """Returns the picture of a worker's environment, by a pickle."""
    worker = self.layout.worker_of(number)
    lanes = np.full((self.run_on.count, 1), NONE, np.int32)
    lanes[worker] = number
    with errors():
      size = int(jax.jit(self._there["rendered"])(lanes)[worker])
      room = 1 << size.bit_length()  # a few programs serve all sizes
      picture = jax.jit(self._there["picture"], static_argnames="room")
      rows = np.asarray(picture(lanes, room=room))
    return pickle.loads(rows[worker, :size].tobytes())


def _for_each(rows: int, value: Any) -> Any:
  """Returns a value as an operand with a row for each environment."""
  return jnp.broadcast_to(value, (rows, *value.shape))
