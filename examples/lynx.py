# SPDX-License-Identifier: Apache-2.0
"""Fits a predator-prey model to 21 years of hare and lynx furs with SciPy's stiff ODE solver.

One gate integrates the equations with LSODA. A second gate integrates their sensitivities and is
the first one's derivative rule, so jax.jacfwd works through SciPy. The whole Levenberg-Marquardt
fit is one compiled scan. Data: thousands of furs of the Hudson's Bay Company, 1900 to 1920.
"""

import jax
import jax.numpy as jnp
import numpy as np
from scipy.integrate import solve_ivp

import callgate as cg

jax.config.update("jax_enable_x64", True)

HARE = """30 47.2 70.2 77.4 36.3 20.6 18.1 21.4 22 25.4 27.1 40.3 57 76.6 52.3 19.5 11.2 7.6 14.6
  16.2 24.7"""
LYNX = "4 6.1 9.8 35.2 59.4 41.7 19 13 8.3 9.1 7.4 8 12.3 19.5 45.7 51.1 29.7 15.8 9.7 10.1 8.6"
FURS = np.array([HARE.split(), LYNX.split()], float).T


def slope(state, birth, hunt, death, feed):
  hare, lynx = state
  return np.array([birth * hare - hunt * hare * lynx, feed * hare * lynx - death * lynx])


def integrate(function, start):
  return solve_ivp(function, (0, 20), start, "LSODA", np.arange(21.0), rtol=1e-8).y.T.copy()


@cg.gate(out=jax.ShapeDtypeStruct((21, 2), np.float64))
def solve(theta):
  """Hares and lynxes f64[21,2] for four rates and two initial numbers f64[6]."""
  return integrate(lambda t, y: slope(y, *theta[:4]), theta[4:])


@cg.gate(out=jax.ShapeDtypeStruct((21, 2, 6), np.float64))
def sensitivity(theta):
  """d solve / d theta: S' = J S + df/dtheta along the solution."""

  def both(t, packed):
    (birth, hunt, death, feed), (hare, lynx), s = theta[:4], packed[:2], packed[2:].reshape(2, 6)
    jacobian = np.array([[birth - hunt * lynx, -hunt * hare], [feed * lynx, feed * hare - death]])
    by_theta = np.array([[hare, -hare * lynx, 0, 0, 0, 0], [0, 0, -lynx, hare * lynx, 0, 0]])
    return np.append(slope(packed[:2], *theta[:4]), jacobian @ s + by_theta)

  return integrate(both, np.append(theta[4:], np.eye(2, 6, k=4)))[:, 2:].reshape(21, 2, 6)


@solve.defjvp
def _(primals, tangents):
  (theta,), (dtheta,) = primals, tangents
  return solve(theta), sensitivity(theta) @ dtheta


def error(log_theta):
  return (jnp.log(solve(jnp.exp(log_theta))) - jnp.log(FURS)).ravel()


def improve(carry, _):
  """A step of Levenberg and Marquardt: taken when it lowers the error."""
  x, damping = carry
  e, jacobian = error(x), jax.jacfwd(error)(x)
  normal = jacobian.T @ jacobian
  tried = x - jnp.linalg.solve(normal + damping * jnp.diag(jnp.diag(normal)), jacobian.T @ e)
  better = jnp.sum(error(tried) ** 2) < jnp.sum(e**2)
  carry = jnp.where(better, tried, x), jnp.where(better, damping / 3, damping * 4)
  return carry, jnp.sqrt(jnp.mean(e**2))


def main():
  start = jnp.log(jnp.array([0.6, 0.03, 0.8, 0.02, 30.0, 4.0]))
  (x, _), errors = jax.jit(lambda x: jax.lax.scan(improve, (x, 0.01), length=40))(start)
  print("births, hunting, deaths, feeding, hares and lynxes in 1900:", *np.exp(x).round(4))
  print(f"error of the logarithms: {errors[0]:.3f} before, {errors[-1]:.3f} after")


if __name__ == "__main__":
  main()
