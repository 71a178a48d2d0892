# SPDX-License-Identifier: Apache-2.0
"""Swings a MuJoCo pendulum up by gradient descent through the simulator.

MuJoCo's step is a gate, and MuJoCo's own Jacobian of a step, `mjd_transitionFD`, is its derivative.
`jax.grad` of a `lax.scan` over 60 steps gives the derivative of the end state by every torque.
"""

import jax
import jax.numpy as jnp
import mujoco
import numpy as np

import callgate as cg

MODEL = mujoco.MjModel.from_xml_string("""
<mujoco>
  <option timestep="0.02"/>
  <worldbody><body>
    <joint name="hinge" type="hinge" axis="0 1 0" damping="0.02"/>
    <geom type="capsule" fromto="0 0 0 0 0 -0.5" size="0.03" mass="0.3"/>
  </body></worldbody>
  <actuator><motor joint="hinge" gear="1"/></actuator>
</mujoco>
""")
DATA, STEPS, RATE = mujoco.MjData(MODEL), 60, 0.02


def put(state, torque):
  mujoco.mj_resetData(MODEL, DATA)
  DATA.qpos[0], DATA.qvel[0], DATA.ctrl[0] = state[0], state[1], torque


@cg.gate(out=lambda state, torque: state, cast=True)
def step(state, torque):
  put(state, torque)
  mujoco.mj_step(MODEL, DATA)
  return np.array([DATA.qpos[0], DATA.qvel[0]])


@cg.gate(out=jax.ShapeDtypeStruct((2, 3), np.float32), cast=True)
def jacobians(state, torque):
  put(state, torque)
  by_state, by_torque = np.zeros((2, 2)), np.zeros((2, 1))
  mujoco.mjd_transitionFD(MODEL, DATA, 1e-6, True, by_state, by_torque, None, None)
  return np.hstack([by_state, by_torque])


@step.defjvp
def _(primals, tangents):
  (state, torque), (d_state, d_torque) = primals, tangents
  return step(state, torque), jacobians(state, torque) @ jnp.append(d_state, d_torque)


def end(torques):
  return jax.lax.scan(lambda state, torque: (step(state, torque), None), jnp.zeros(2), torques)[0]


def cost(torques):
  angle, speed = end(torques)
  return (angle - jnp.pi) ** 2 + 0.1 * speed**2 + 0.01 * jnp.mean(torques**2)


@jax.jit
def optimised(torques):
  def descend(torques, _):
    value, slope = jax.value_and_grad(cost)(torques)
    return torques - RATE * slope / (1e-3 + jnp.linalg.norm(slope)), value

  return jax.lax.scan(descend, torques, length=400)


def main():
  torques, costs = optimised(jnp.full(STEPS, 0.01))
  print("cost:", ", ".join(f"{costs[i]:.4f} at {i}" for i in (0, 100, 200, 399)))
  angle, speed = end(torques)
  print(f"at the end {np.degrees(angle):.1f} degrees from hanging, {abs(speed):.2f} rad/s")


if __name__ == "__main__":
  main()
