# SPDX-License-Identifier: Apache-2.0
"""PyTorch makes a float64 tangent of a float32 scalar that a number multiplies."""

import importlib.util

import jax
import jax.numpy as jnp
import numpy as np

import callgate as cg

if importlib.util.find_spec("torch"):
  import torch

  half_sine = cg.torch(lambda x: torch.sin(x) * 0.5)
  x = jnp.float32(0.4)
  slope = jax.jit(lambda x: jax.jvp(half_sine, (x,), (jnp.ones_like(x),))[1])(x)
  np.testing.assert_allclose(slope, 0.5 * np.cos(0.4), rtol=1e-6)
