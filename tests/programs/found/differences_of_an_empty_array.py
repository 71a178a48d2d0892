# SPDX-License-Identifier: Apache-2.0
"""Finite differences looked at elements of an argument that has none."""

import jax
import jax.numpy as jnp

import callgate as cg

gate = cg.gate(lambda x: x, out=lambda x: x, gradient="finite-difference")
assert jax.jit(jax.grad(lambda x: gate(x).sum()))(jnp.zeros((3, 0))).shape == (3, 0)
