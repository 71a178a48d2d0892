# SPDX-License-Identifier: Apache-2.0
"""When double pendulums flip: SymPy derives their motion, one kernel computes 40,000 of them.

SymPy derives the accelerations from the Lagrangian and writes them as C. `cg.elementwise` makes a
kernel from that C code, and a JAX scan calls it in each step of a Runge-Kutta method. The picture
shows how long it takes until an arm goes over the top, for each pair of initial angles. Small
swings have exactly known frequencies, which check the result.
"""

from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import sympy
from matplotlib import image

import callgate as cg

GRAVITY, STEP, STEPS = 9.81, 0.01, 1000


def accelerations():
  """Statements in C that set `da` and `db`, from the angles a, b and their speeds p, q."""
  a, b, p, q = symbols = sympy.symbols("a b p q")
  angles, speeds = symbols[:2], symbols[2:]
  kinetic = p**2 + q**2 / 2 + p * q * sympy.cos(a - b)  # masses and lengths are 1
  lagrangian = kinetic + GRAVITY * (2 * sympy.cos(a) + sympy.cos(b))
  pull, momenta = (sympy.Matrix([lagrangian]).jacobian(x).T for x in (angles, speeds))
  forces = pull - momenta.jacobian(angles) * sympy.Matrix(speeds)
  found = sympy.hessian(kinetic, speeds).LUsolve(forces)
  parts, (found,) = sympy.cse(sympy.simplify(found))
  lines = [f"const T {name} = {sympy.ccode(value)};" for name, value in parts]
  return "\n".join([*lines, f"da = {sympy.ccode(found[0])};", f"db = {sympy.ccode(found[1])};"])


code = accelerations()
kernel = cg.elementwise("T a, T b, T p, T q", "T da, T db", code, "pendulum")


def advance(state):
  def motion(state):
    return jnp.stack([*state[2:], *kernel(*state)])

  k1 = motion(state)
  k2 = motion(state + STEP / 2 * k1)
  k3 = motion(state + STEP / 2 * k2)
  k4 = motion(state + STEP * k3)
  return state + STEP / 6 * (k1 + 2 * k2 + 2 * k3 + k4)


@jax.jit
def swing(a, b):  # the first angle over time
  start = jnp.stack([a, b, 0 * a, 0 * b])
  return jax.lax.scan(lambda state, _: (advance(state), state[0]), start, length=STEPS)[1]


@jax.jit
def flips(a, b):  # the number of steps until an arm goes over the top
  def step(carry, i):
    state, first = carry
    over = (jnp.abs(state[:2]) > jnp.pi).any(0)
    return (advance(state), jnp.where(over & (first == STEPS), i, first)), None

  begin = jnp.stack([a, b, 0 * a, 0 * b]), jnp.full(a.shape, STEPS)
  return jax.lax.scan(step, begin, jnp.arange(STEPS))[0][1]


print(f"SymPy wrote {len(code.splitlines())} lines of C")
for sign in (1, -1):  # the second arm swings with the first, or against it
  curve = np.asarray(swing(jnp.float32(0.01), jnp.float32(sign * 0.01 * np.sqrt(2))))
  crossings = np.flatnonzero((curve[1:] < 0) & (curve[:-1] >= 0))
  between = crossings + curve[crossings] / (curve[crossings] - curve[crossings + 1])
  rate = 2 * np.pi / (np.diff(between).mean() * STEP)
  print(f"frequency {rate:.3f}, exactly {np.sqrt(GRAVITY * (2 - sign * np.sqrt(2))):.3f}")
side = jnp.linspace(-3.1, 3.1, 200)
first = flips(*jnp.meshgrid(side, side))
print(f"{100 * float((first < STEPS).mean()):.0f} % of 40,000 pendulums flip within 10 s")
Path("out").mkdir(exist_ok=True)
picture = np.log(1 + np.asarray(first))
image.imsave("out/pendulum.png", np.kron(picture, np.ones((2, 2))), cmap="magma")
