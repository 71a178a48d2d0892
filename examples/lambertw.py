# SPDX-License-Identifier: Apache-2.0
"""Fits the current of a solar cell with SciPy's Lambert W function inside JAX.

JAX has no Lambert W. A gate calls SciPy's, and one derivative rule makes it work under grad, vmap
and scan. With it the single-diode equation has a closed form (Jain and Kapoor, 2004,
doi:10.1016/j.solmat.2003.11.018). The example fits it to the 26 points that Easwarakhanthan et al.
(1986) measured on a 57 mm silicon cell (R.T.C. France, 33 °C).
"""

import jax
import jax.numpy as jnp
import numpy as np
import scipy.optimize
import scipy.special

import callgate as cg

jax.config.update("jax_enable_x64", True)

VOLTS = np.array(
  [-0.2057, -0.1291, -0.0588, 0.0057, 0.0646, 0.1185, 0.1678, 0.2132, 0.2545, 0.2924, 0.3269,
   0.3585, 0.3873, 0.4137, 0.4373, 0.4590, 0.4784, 0.4960, 0.5119, 0.5265, 0.5398, 0.5521,
   0.5633, 0.5736, 0.5833, 0.5900]
)  # fmt: skip
AMPERES = np.array(
  [0.7640, 0.7620, 0.7605, 0.7605, 0.7600, 0.7590, 0.7570, 0.7570, 0.7555, 0.7540, 0.7505, 0.7465,
   0.7385, 0.7280, 0.7065, 0.6755, 0.6320, 0.5730, 0.4990, 0.4130, 0.3165, 0.2120, 0.1035, -0.0100,
   -0.1230, -0.2100]
)  # fmt: skip
THERMAL = 1.380649e-23 * 306.15 / 1.602176634e-19  # volts, at 33 °C


@cg.gate(out=lambda x: x, vmap="whole")  # SciPy is vectorised: under vmap, one call with all lanes
def lambertw(x):
  return scipy.special.lambertw(x).real


@lambertw.defjvp
def _(primals, tangents):
  (x,), (dx,) = primals, tangents
  w = lambertw(x)
  return w, dx / (x + jnp.exp(w))  # from w exp(w) = x


def current(theta, volts):
  """Amperes; theta: photocurrent, log10 of saturation current, series and shunt ohms, ideality."""
  photo, log_saturation, series, shunt, ideality = theta
  saturation, slope = 10.0**log_saturation, ideality * THERMAL
  total = series + shunt
  argument = series * saturation * shunt / (slope * total)
  argument *= jnp.exp(shunt * (series * (photo + saturation) + volts) / (slope * total))
  return (shunt * (photo + saturation) - volts) / total - slope / series * lambertw(argument)


@jax.jit
def residuals(theta):
  return jax.vmap(lambda v, i: current(theta, v) - i)(VOLTS, AMPERES)


def main():
  jacobian = jax.jit(jax.jacrev(residuals))
  start = jnp.array([0.7, -6.0, 0.05, 40.0, 1.5])
  fit = scipy.optimize.least_squares(residuals, start, jac=jacobian, x_scale="jac", xtol=1e-12)
  for name, value in zip(("photo", "log10 I0", "series", "shunt", "ideality"), fit.x, strict=True):
    print(f"{name:10}{value:10.4f}")
  print(f"root mean square error {np.sqrt(np.mean(fit.fun**2)):.4e} A")


if __name__ == "__main__":
  main()
