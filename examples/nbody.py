# SPDX-License-Identifier: Apache-2.0
"""Two star clusters that meet: gravity between all pairs by one `cg.elementwise` kernel.

The kernel is C++ for one pair of stars; broadcasting (n, 1) against (1, n) applies it to all pairs.
The kernel has a derivative, so jax.grad of the potential energy gives the forces. The potential is
softened as in Plummer (1911); the leapfrog method (Verlet, 1967) conserves the energy.
"""

import jax
import jax.numpy as jnp
import numpy as np

import callgate as cg

STARS, STEPS, STEP, SOFTENING = 128, 400, 0.01, 0.05

potential = cg.elementwise(
  "T xi, T yi, T zi, T xj, T yj, T zj, T mass, T softening",
  "T energy",
  """
  T dx = xj - xi, dy = yj - yi, dz = zj - zi;
  energy = -mass / sqrt(dx * dx + dy * dy + dz * dz + softening * softening)
  """,
  jvp="""
  T cube = energy * energy * energy / (mass * mass);
  denergy = -cube * ((xj - xi) * (dxj - dxi) + (yj - yi) * (dyj - dyi) + (zj - zi) * (dzj - dzi))
  """,
  name="nbody.potential",
)


def pairs_by_callgate(x, masses):
  columns, rows = x.T[:, :, None], x.T[:, None, :]  # of all pairs (i, j)
  return potential(*columns, *rows, masses[:, None] * masses, SOFTENING)


def pairs_by_jax(x, masses):
  d = x[None] - x[:, None]
  return -masses[:, None] * masses / jnp.sqrt((d**2).sum(-1) + SOFTENING**2)


def simulate(pairs, x, v, masses):
  """Positions and total energies along the way."""

  def energy(x):
    return 0.5 * pairs(x, masses).sum()

  def accelerate(x):
    return -jax.grad(energy)(x) / masses[:, None]

  def leap(state, _):
    x, v = state
    v = v + 0.5 * STEP * accelerate(x)
    x = x + STEP * v
    v = v + 0.5 * STEP * accelerate(x)
    kinetic = 0.5 * (masses[:, None] * v**2).sum()
    return (x, v), kinetic + energy(x)

  (x, _), energies = jax.lax.scan(leap, (x, v), length=STEPS)
  return x, energies


def main():
  rng = np.random.default_rng(0)
  side = np.where(np.arange(STARS) < STARS // 2, -1.0, 1.0)[:, None]
  x = jnp.asarray(0.4 * rng.normal(size=(STARS, 3)) + side * [1.0, 0.2, 0.0], jnp.float32)
  v = jnp.asarray(0.4 * rng.normal(size=(STARS, 3)) - side * [0.3, 0.0, 0.0], jnp.float32)
  masses = jnp.full(STARS, 1.0 / STARS)
  ours, energies = jax.jit(simulate, static_argnums=0)(pairs_by_callgate, x, v, masses)
  theirs, reference = jax.jit(simulate, static_argnums=0)(pairs_by_jax, x, v, masses)
  drift = np.abs(energies - energies[0]).max() / abs(energies[0])
  print(f"energy {energies[0]:.5f}, by plain JAX {reference[0]:.5f}")
  print(f"largest drift of the energy in {STEPS} steps {drift:.1e}")
  print(f"largest distance from plain JAX's positions {np.abs(ours - theirs).max():.1e}")


if __name__ == "__main__":
  main()
