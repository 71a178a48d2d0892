# SPDX-License-Identifier: Apache-2.0
"""The demo's second table: each step's loss to Python by jax.debug.callback and by taps."""

import time

import jax
import numpy as np

import callgate as cg


def no_tap(values, name):
  """Sends nothing."""
  return values


def microseconds(programs, params, steps):
  """Least time a step of each program, over rounds in which they take turns."""

  def seconds(program):
    start = time.perf_counter()
    jax.block_until_ready(program(params))
    return time.perf_counter() - start

  times = [[seconds(program) for program in programs] for _ in range(7)]
  return np.min(times, axis=0) / steps * 1e6


def report(score, train, params, steps):
  """The time for handing every step's loss and gradient norm to a Python function."""
  seen = []

  def callback(values, name):
    jax.debug.callback(seen.append, values)
    return values

  ways = {
    "not at all": no_tap,
    "by jax.debug.callback": callback,
    "by cg.tap": lambda values, name: cg.tap(values, seen.append, name=name),
  }
  programs = [train(lambda images, *_: images, score, tap=way) for way in ways.values()]
  alone, *times = microseconds(programs, params, steps)
  jax.effects_barrier()
  cg.barrier()
  print(f"\n{'loss and norm to Python':26}    µs a step  of it, the sending")
  for name, one in zip(ways, (alone, *times), strict=True):
    print(f"{name:26}{one:13.1f}{one - alone:20.1f}")
