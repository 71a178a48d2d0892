# SPDX-License-Identifier: Apache-2.0
"""Sharpens a blurred picture on the GPU, in a compiled JAX program whose blur is CuPy's.

The blur is a gate over `cupy.fft`. It is linear and its own transpose, so JAX can differentiate it.
Two hundred steps of accelerated gradient descent run as one program on XLA's stream, and no array
leaves the device. The same blur by `jnp.fft` checks the result.
"""

import jax
import jax.numpy as jnp
import numpy as np

import callgate as cg

try:
  import cupy
except ImportError:
  cupy = None

SIZE, WIDTH, STEPS = 512, 2.0, 200


def response(xp):
  """The response of a Gaussian blur of WIDTH pixels, at the frequencies of a real transform."""
  rows, columns = xp.fft.fftfreq(SIZE), xp.fft.rfftfreq(SIZE)
  squares = rows[:, None] ** 2 + columns**2
  return xp.exp(-2 * (np.pi * WIDTH) ** 2 * squares).astype("float32")


@cg.gate(out=lambda x: x, arrays="cupy", linear=True)
def blur(x):
  return cupy.fft.irfft2(cupy.fft.rfft2(x) * response(cupy), x.shape).astype(x.dtype)


@blur.deftranspose
def _(cotangent, x):
  return blur(cotangent)  # the response is real and even


def blur_in_jax(x):
  return jnp.fft.irfft2(jnp.fft.rfft2(x) * response(jnp), x.shape)


def sharpened(blurred, blur):
  def loss(x):
    return 0.5 * jnp.sum((blur(x) - blurred) ** 2)

  def step(_, carry):
    x, ahead, t = carry
    new = ahead - jax.grad(loss)(ahead)
    after = (1 + jnp.sqrt(1 + 4 * t * t)) / 2
    return new, new + (t - 1) / after * (new - x), after

  return jax.lax.fori_loop(0, STEPS, step, (blurred, blurred, jnp.float32(1)))[0]


def main():
  if cupy is None:
    return print("skipped: CuPy is not installed (pip install 'callgate[cupy]')")
  if jax.default_backend() != "gpu":
    return print("skipped: there is no CUDA device, or JAX has no CUDA here")
  at = jnp.linspace(-1, 1, SIZE)
  radius = jnp.hypot(at[:, None], at)
  picture = (jnp.sin(60 * radius**2) > 0).astype(jnp.float32)  # ever finer rings
  blurred = jax.jit(blur_in_jax)(picture)
  with cg.errors():
    ours = jax.jit(lambda b: sharpened(b, blur))(blurred)
  theirs = jax.jit(lambda b: sharpened(b, blur_in_jax))(blurred)

  def error(x):
    return float(jnp.linalg.norm(x - picture) / jnp.linalg.norm(picture))

  print(f"error of the blurred picture {error(blurred):.3f}, sharpened {error(ours):.3f}")
  print(f"with jnp.fft {error(theirs):.3f}; they differ by {float(abs(ours - theirs).max()):.1e}")


if __name__ == "__main__":
  main()
