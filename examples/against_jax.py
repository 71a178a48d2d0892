# SPDX-License-Identifier: Apache-2.0
"""The demo's tables: one program through JAX's own callbacks and through callgate.

JAX's callbacks get jax.Arrays and return fresh ones: one call for each image, as callgate does it,
or one for each batch with a loop in Python, which is quicker.
"""

import functools

import digits
import jax
import numpy as np
import taps_against_jax
from taps_against_jax import microseconds, no_tap


def copy(out, image, angle, shift):
  """Replaces SciPy's transform, so that a step has only the network and the calls."""
  out[...] = image


def jax_each(host, metric):
  """(augment, score) with one `pure_callback` an image."""

  def augment(*args):
    arrays = [np.asarray(arg) for arg in args]
    out = np.empty_like(arrays[0])
    host(out, *arrays)
    return out

  call = functools.partial(jax.pure_callback, augment, vmap_method="sequential")
  return jax.vmap(lambda *args: call(args[0], *args)), jax_score(metric)


def jax_batch(host, metric):
  """(augment, score) with one `pure_callback` a batch."""

  def augment(*args):
    arrays = [np.asarray(arg) for arg in args]
    out = np.empty_like(arrays[0])
    for lane in zip(out, *arrays, strict=True):
      host(*lane)
    return out

  return lambda *args: jax.pure_callback(augment, args[0], *args), jax_score(metric)


def jax_score(metric):
  return lambda *args: jax.experimental.io_callback(metric, np.float32(0), *args)


def report(gates, warp, metric, train, steps=42):
  """Prints the tables; `train(augment, score, tap=...)` is a compiled program of `steps` steps."""
  params = digits.init()
  none = train(lambda images, *_: images, gates(copy)[1], tap=no_tap)
  print(f"{'µs a step of 64 images':26}  JAX, each  JAX, batch  callgate         ratios")
  for name, host in (("SciPy's transform", warp), ("a copy in its place", copy)):
    ways = jax_each(host, metric), jax_batch(host, metric), gates(host)
    programs = [train(*way, tap=no_tap) for way in ways]
    trained = [jax.tree.leaves(program(params)[0]) for program in programs]
    assert all(map(np.array_equal, trained[0] + trained[1], trained[2] * 2)), "results differ"
    *times, alone = microseconds([*programs, none], params, steps)
    line(name, *times)
  line("  of it, the calls alone", *(t - alone for t in times))
  print(f"The network alone takes {alone:.0f} µs. All ways train the same parameters, bit for bit.")
  taps_against_jax.report(gates(copy)[1], train, params, steps)


def line(name, each, batch, ours):
  print(f"{name:26}{each:11.0f}{batch:12.0f}{ours:10.0f}{each / ours:9.1f}{batch / ours:6.1f}")
