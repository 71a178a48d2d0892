# SPDX-License-Identifier: Apache-2.0
"""An error in a step of a stoppable loop had no line: JAX 0.10 gave it that of the call."""

import jax
import jax.numpy as jnp

import callgate as cg


def fails(x):
  raise ValueError("no")


fails = cg.gate(fails, out=lambda x: x)


def step(carry, _):
  return fails(carry), None


def step_with_a_nan(carry, _):
  return jnp.log(-1 - carry * carry), None


def loop(step, x):
  return cg.scan(step, x, None, length=3, stoppable=True)[0]


notes = []
try:
  with cg.errors():
    jax.block_until_ready(jax.jit(lambda x: loop(step, x))(1.0))
except ValueError as error:
  notes = error.__notes__
assert any(" in step" in note for note in notes), notes
report = cg.find_nan(lambda x: loop(step_with_a_nan, x))(1.0)
assert "step_with_a_nan" in report.source, report
