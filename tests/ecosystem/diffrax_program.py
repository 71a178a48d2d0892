# SPDX-License-Identifier: Apache-2.0
"""An ODE with a progress meter, and its gradient."""

import diffrax
import jax
import jax.numpy as jnp


def solve(rate):
  return diffrax.diffeqsolve(
    diffrax.ODETerm(lambda t, y, args: -rate * y), diffrax.Tsit5(), 0.0, 2.0, 0.1, jnp.ones(3),
    saveat=diffrax.SaveAt(ts=jnp.linspace(0, 2, 5)),
    progress_meter=diffrax.TextProgressMeter(minimum_increase=0.1),
    stepsize_controller=diffrax.PIDController(rtol=1e-5, atol=1e-5),
  ).ys  # fmt: skip


def run():
  found = jax.jit(solve)(0.7)
  return {"ys": found, "gradient": jax.grad(lambda rate: solve(rate).sum())(0.7)}
