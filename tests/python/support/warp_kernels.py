# SPDX-License-Identifier: Apache-2.0
"""Kernels of Warp for tests; to import where warp is installed."""

from __future__ import annotations

import warp as wp

wp.config.quiet = True


@wp.kernel
def saxpy(a: float, x: wp.array(dtype=float), y: wp.array(dtype=float), z: wp.array(dtype=float)):
  i = wp.tid()
  z[i] = a * x[i] + y[i]


@wp.kernel
def lengths(points: wp.array(dtype=wp.vec3), out: wp.array(dtype=float)):
  i = wp.tid()
  out[i] = wp.length(points[i])


@wp.kernel
def total(x: wp.array2d(dtype=float), out: wp.array(dtype=float)):
  i, j = wp.tid()
  wp.atomic_add(out, 0, x[i, j])
