# SPDX-License-Identifier: Apache-2.0
"""The cost of a progress bar for a step: a trivial scan of 100,000 steps, with and without one.

Bars are drawn into a file that is kept in memory. jax-tqdm is given its default rate, twenty
updates a loop; callgate updates by time. The claims are on what a step takes beyond the plain
loop's. Unit: nanoseconds per step.
"""

from __future__ import annotations

import functools
import io
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks import harness
from benchmarks.peers import adapters

PLAIN = "jax.lax.scan"
OURS = "callgate scan, progress=True"
DECORATED = "jax.lax.scan, body under callgate.progress"
PEER = "jax-tqdm scan_tqdm"
BEYOND = "callgate beyond the plain loop"
PEER_BEYOND = "jax-tqdm beyond the plain loop"

Make = Callable[[int], Callable[[Any, Any], Any]]

TARGETS = (
  harness.Target("a step's share of the bar, nanoseconds", BEYOND, at_most=50.0),
  harness.Target("callgate's bar against jax-tqdm's", OURS, PEER, at_most=1.0),
)


def run(options: harness.Options) -> harness.Report:
  """Measures one execution of each loop."""
  steps = options.pick(100_000, 5_000)
  contestants = [
    harness.Contestant(name, functools.partial(_program, make, steps)) for name, make in CONTESTANTS
  ]
  rows = harness.measure(contestants, rounds=options.rounds_or(50), unit="ns")
  rows += _beyond(rows, OURS, BEYOND) + _beyond(rows, PEER, PEER_BEYOND)
  title = f"One step of a trivial scan of {steps} steps, with a progress bar"
  settings = {"steps": steps}
  return harness.Report(
    "progress", title, "ns", rows, PLAIN, TARGETS, settings, quick=options.quick
  )


def _beyond(rows: list[harness.Row], name: str, difference: str) -> list[harness.Row]:
  """The minimum of a row less that of the plain loop's, as a row of its own."""
  minima = {row.name: row.minimum for row in rows}
  with_bar, plain = minima.get(name), minima.get(PLAIN)
  if with_bar is None or plain is None:
    return []
  return [
    harness.Row(difference, samples=(max(with_bar - plain, 0.0),), note="a difference of minima")
  ]


def _program(make: Make, steps: int) -> harness.Work:
  xs = jnp.arange(steps)
  program = jax.jit(make(steps))
  expected = jax.jit(_plain(steps))(jnp.float32(0), xs)
  got = program(jnp.float32(0), xs)
  harness.check(np.array_equal(got[1], expected[1]), "the loop's result is another")

  def thunk() -> None:
    jax.block_until_ready(program(jnp.float32(0), xs))

  return harness.Work(thunk, steps)


def _body(carry: Any, x: Any) -> Any:
  return carry * 0.5 + x, carry


def _plain(steps: int) -> Callable[[Any, Any], Any]:
  return lambda carry, xs: jax.lax.scan(_body, carry, xs)


def _ours(steps: int) -> Callable[[Any, Any], Any]:
  callgate = adapters.callgate()
  progress = callgate.Progress("bar", file=io.StringIO())
  return lambda carry, xs: callgate.scan(_body, carry, xs, progress=progress)


def _decorated(steps: int) -> Callable[[Any, Any], Any]:
  body = adapters.callgate().progress("bar", file=io.StringIO())(_body)
  return lambda carry, xs: jax.lax.scan(body, carry, xs)


def _jax_tqdm(steps: int) -> Callable[[Any, Any], Any]:
  try:
    from jax_tqdm import scan_tqdm
  except ImportError as error:
    raise harness.NotInstalled("jax-tqdm") from error
  body = scan_tqdm(steps, tqdm_type="std", file=io.StringIO())(_body)
  return lambda carry, xs: jax.lax.scan(body, carry, xs)


CONTESTANTS: tuple[tuple[str, Make], ...] = (
  (PLAIN, _plain),
  (OURS, _ours),
  (DECORATED, _decorated),
  (PEER, _jax_tqdm),
)
