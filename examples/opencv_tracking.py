# SPDX-License-Identifier: Apache-2.0
"""Tracks a disc that moves behind a pillar: OpenCV finds it, a Kalman filter bridges gaps.

JAX draws each frame, and OpenCV reads it in a gate without a copy: blur, Otsu's threshold,
contours, the smallest circle around the largest contour. The whole pipeline is one compiled scan.
"""

import cv2
import jax
import jax.numpy as jnp
import numpy as np

import callgate as cg

SIZE, FRAMES, RADIUS, SPEED = 128, 60, 9.0, 1.5
FOUND = jax.ShapeDtypeStruct((2,), np.float32), jax.ShapeDtypeStruct((), np.bool_)


@cg.gate(out=FOUND, cast=True)
def found(image):
  """The middle of the disc, and True if all of it is visible."""
  _, mask = cv2.threshold(cv2.GaussianBlur(image, (5, 5), 0), 0, 255, cv2.THRESH_OTSU)
  contours, _ = cv2.findContours(mask, cv2.RETR_EXTERNAL, cv2.CHAIN_APPROX_NONE)
  largest = max(contours, key=cv2.contourArea)
  (middle, radius), area = cv2.minEnclosingCircle(largest), cv2.contourArea(largest)
  return np.array(middle), np.bool_(abs(radius - RADIUS) < 2 and area > 0.8 * np.pi * RADIUS**2)


def path(i):
  return jnp.array([20.0 + SPEED * i, 64.0 + 12.0 * jnp.sin(i / 12.0)])


def frame(i, key):
  """A bright disc on a dark ground, a pillar before it, and noise."""
  x, y = path(i)
  row, column = jnp.mgrid[:SIZE, :SIZE]
  inside = jnp.clip(RADIUS - jnp.hypot(column - x, row - y), 0, 1)
  shown = jnp.where((column > 62) & (column < 66), 0, inside)
  noise = 12 * jax.random.normal(key, (SIZE, SIZE))
  return jnp.clip(40 + 150 * shown + noise, 0, 255).astype(jnp.uint8)


MOVE = jnp.eye(4).at[0, 2].set(1.0).at[1, 3].set(1.0)
SEE = jnp.eye(2, 4)


def kalman(mean, covariance, seen, usable):
  mean, covariance = MOVE @ mean, MOVE @ covariance @ MOVE.T + 0.01 * jnp.eye(4)
  gain = covariance @ SEE.T @ jnp.linalg.inv(SEE @ covariance @ SEE.T + 0.5 * jnp.eye(2))
  gain = jnp.where(usable, gain, 0.0)
  return mean + gain @ (seen - SEE @ mean), covariance - gain @ SEE @ covariance


@jax.jit
def follow(key):
  def one(state, i):
    seen, usable = found(frame(i, jax.random.fold_in(key, i)))
    mean, covariance = kalman(*state, seen, usable)
    error = jnp.linalg.norm(mean[:2] - path(i))
    cg.tap({"error": error, "usable": usable}, "track")
    return (mean, covariance), error

  start = jnp.concatenate([path(0), jnp.array([SPEED, 0.0])]), jnp.eye(4)
  return jax.lax.scan(one, start, jnp.arange(1, FRAMES))[1]


def main():
  records = []
  with cg.channel("track", to=records.append):
    errors = follow(jax.random.key(0))
  seen = sum(bool(record["usable"]) for record in records)
  print(f"{len(records)} frames, the disc whole in {seen} of them")
  print(f"mean error {errors.mean():.2f} pixels, {errors.max():.2f} at most")


if __name__ == "__main__":
  main()
