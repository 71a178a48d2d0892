# SPDX-License-Identifier: Apache-2.0
"""The cost of a step of 64 of Gymnasium's environments, in a compiled loop and from Python.

`callgate.envs` in a scan, in this process and on two workers, beside `SyncVectorEnv` and
`AsyncVectorEnv` stepped from Python, and reached from a scan by an ordered `io_callback`. CartPole,
and one that takes a millisecond of pure Python a step. Unit: microseconds, per environment's step.
"""

from __future__ import annotations

import atexit
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import io_callback

from benchmarks import harness, worker_environments
from benchmarks.peers import adapters

N, WORKERS = 64, 2
HERE, THERE = "callgate envs, in this process", f"callgate envs, {WORKERS} workers"
SYNC, ASYNC = "SyncVectorEnv", "AsyncVectorEnv"
FROM_PYTHON = "{} from Python"
BY_CALLBACK = "{} by io_callback in a scan"
KINDS = {
  "CartPole": (worker_environments.cart_pole, 50),
  "1 ms a step": (worker_environments.busy, 2),
}


def named(who: str, what: str) -> str:
  """A row's name."""
  return f"{who}: {what}"


TARGETS = tuple(
  harness.Target(
    f"{what}: {way.format(vector)} over two workers", named(way.format(vector), what),
    named(THERE, what), at_least=1.5,
  )
  for what in KINDS
  for way in (FROM_PYTHON, BY_CALLBACK)
  for vector in (SYNC, ASYNC)
)  # fmt: skip


def run(options: harness.Options) -> harness.Report:
  """Each way with each kind of environment."""
  harness.require("gymnasium", "gymnasium")
  rows: list[harness.Row] = []
  for what, (make, steps) in KINDS.items():
    ways: dict[str, Callable[[], harness.Work]] = {
      HERE: functools.partial(_ours, make, steps, "xla"),
      THERE: functools.partial(_ours, make, steps, None),
    }
    for vector in (SYNC, ASYNC):
      ways[FROM_PYTHON.format(vector)] = functools.partial(_from_python, vector, make, steps)
      ways[BY_CALLBACK.format(vector)] = functools.partial(_by_callback, vector, make, steps)
    contestants = [harness.Contestant(named(who, what), build) for who, build in ways.items()]
    rows += harness.measure(contestants, rounds=options.rounds_or(15))
    for vector in (SYNC, ASYNC):  # 64 processes
      _vector(vector, make).close()
  title = f"A step of one of {N} environments"
  settings = {"environments": N, "workers": WORKERS}
  return harness.Report("envs", title, "us", rows, None, TARGETS, settings, quick=options.quick)


def _actions(steps: int) -> np.ndarray:
  return np.random.default_rng(0).integers(0, 2, (steps, N)).astype(np.int32)


def _scanned(step: Callable[[Any], Any], steps: int) -> harness.Work:
  """A program of so many steps, whose observations are its result."""
  body = lambda _, actions: (None, step(actions))
  program = jax.jit(lambda actions: jax.lax.scan(body, None, actions)[1])
  actions = jnp.asarray(_actions(steps))
  seen = jax.block_until_ready(program(actions))[0]
  harness.check(seen.shape[:2] == (steps, N) and bool(jnp.any(seen)), "nothing was seen")
  return harness.Work(lambda: jax.block_until_ready(program(actions)), steps * N)


def _ours(make: Any, steps: int, run_on: Any) -> harness.Work:
  env = adapters.callgate().envs(make, n=N, run_on=run_on or _workers())
  atexit.register(env.close)
  env.reset(0)
  return _scanned(lambda actions: env.step(actions)[:4], steps)


@functools.cache
def _workers() -> Any:
  return adapters.callgate().workers(WORKERS)


# -- peers
@functools.cache
def _vector(kind: str, make: Any) -> Any:
  made = getattr(harness.require("gymnasium", "gymnasium").vector, kind)
  options = {"context": "spawn"} if kind == ASYNC else {}  # JAX and fork don't go together
  env = made([make] * N, **options)
  env.reset(seed=0)
  return env


def _from_python(kind: str, make: Any, steps: int) -> harness.Work:
  env, actions = _vector(kind, make), _actions(steps)

  def thunk() -> None:
    for one in actions:
      env.step(one)

  return harness.Work(thunk, steps * N)


def _by_callback(kind: str, make: Any, steps: int) -> harness.Work:
  env = _vector(kind, make)
  shape = env.single_observation_space.shape
  flag, number = (jax.ShapeDtypeStruct((N,), d) for d in (np.bool_, np.float32))
  types = (jax.ShapeDtypeStruct((N, *shape), np.float32), number, flag, flag)

  def on_host(actions: Any) -> Any:
    seen, reward, terminated, truncated, _ = env.step(np.asarray(actions))
    return seen, reward.astype(np.float32), terminated, truncated

  return _scanned(lambda actions: io_callback(on_host, types, actions, ordered=True), steps)
