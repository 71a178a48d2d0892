# SPDX-License-Identifier: Apache-2.0
"""The identity on arrays of 4 and 32 MiB on a GPU, 100 calls in one program, as once published.

In 2022 a callback on the GPU took 0.20 s and 4.6 s for these hundred calls, and host_callback 0.25
and 1.5 s. Rows *on the device* enqueue and go on; the program is waited for at its end. Rows *on
the host* copy both ways, and "pinned copy" is what the driver alone takes for that. Aliased
contestants have their argument's memory for a result; their programs are donated it. Unit:
milliseconds a call.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from benchmarks import harness
from benchmarks.peers import adapters, cuda, raw_cuda

SHAPES = {"4 MiB": (1, 1024, 1024), "32 MiB": (8, 1024, 1024)}
ALIASED = "callgate gate on the device, aliased"
STAGED = "callgate numpy gate, aliased"
PINNED = "pinned copy there and back"
PURE = "jax pure_callback"
BUFFER = "jax buffer_callback, CuPy copies"
CUPY = "callgate gate, CuPy copies"

# Name, adapter, and whether the argument is donated.
CONTESTANTS = (
  (ALIASED, cuda.gate_aliased, True),
  (CUPY, cuda.gate_cupy, False),
  (STAGED, cuda.gate_numpy_aliased, True),
  ("callgate numpy gate, copies", cuda.gate_numpy, False),
  (BUFFER, cuda.buffer_callback_cupy, False),
  ("torch2jax (rdyro)", adapters.torch2jax, False),
  (PURE, adapters.pure_callback, False),
)

TARGETS = tuple(
  target
  for size in SHAPES
  for target in (
    harness.Target(f"on the device, {size}, 100 calls in 5 ms", f"{ALIASED}, {size}", at_most=0.05),
    harness.Target(
      f"numpy over the pinned copies, {size}",
      f"{STAGED}, {size}",
      f"{PINNED}, {size}",
      at_most=1 / 0.9,
    ),
    harness.Target(
      f"pure_callback over the numpy gate, {size}",
      f"{PURE}, {size}",
      f"{STAGED}, {size}",
      at_least=2.0,
    ),
    harness.Target(
      f"the CuPy gate over buffer_callback, {size}",
      f"{CUPY}, {size}",
      f"{BUFFER}, {size}",
      at_most=1.0,
    ),
  )
)


def run(options: harness.Options) -> harness.Report:
  """Measures both sizes in the same rounds."""
  device = raw_cuda.device()
  calls = options.pick(100, 5)
  contestants = [
    harness.Contestant(
      f"{name}, {size}", functools.partial(_loop, adapter, donate, shape, calls, device)
    )
    for size, shape in SHAPES.items()
    for name, adapter, donate in CONTESTANTS
  ]
  for size, shape in SHAPES.items():
    nbytes = 4 * int(np.prod(shape))
    contestants.append(
      harness.Contestant(f"{PINNED}, {size}", functools.partial(_pinned, nbytes, calls))
    )
  rows = harness.measure(contestants, rounds=options.rounds_or(10), unit="ms")
  raw_cuda.room(0)
  title = f"Identity on a GPU, f32 of 4 and 32 MiB, {calls} calls in a program"
  report = harness.Report("cuda_identity", title, "ms", rows, None, TARGETS, quick=options.quick)
  report.settings = {"calls": calls, "shapes": [list(shape) for shape in SHAPES.values()]}
  report.device = raw_cuda.described()
  report.references = {
    f"{name}, {size}": f"{PINNED}, {size}" for name, *_ in CONTESTANTS for size in SHAPES
  }
  report.facts = _seconds(report, calls)
  return report


def _seconds(report: harness.Report, calls: int) -> dict[str, float]:
  """The published numbers are seconds for a hundred calls."""
  return {
    f"{row.name}, seconds for {calls} calls": round(row.minimum * calls / 1e3, 4)
    for row in report.rows
    if row.minimum is not None
  }


def _loop(
  adapter: adapters.Adapter, donate: bool, shape: tuple[int, ...], calls: int, device: jax.Device
) -> harness.Work:
  """One program of `calls` calls; a donated argument is the last run's result."""
  function = adapter(jax.ShapeDtypeStruct(shape, jnp.float32))
  program = jax.jit(
    lambda x: lax.fori_loop(0, calls, lambda _, carry: function(carry), x),
    donate_argnums=(0,) if donate else (),
  )
  host = np.arange(np.prod(shape), dtype=np.float32).reshape(shape)
  held = jax.device_put(host, device)
  compiled = program.lower(held).compile()
  held = jax.block_until_ready(compiled(held))
  harness.check(np.array_equal(held, host), "the result is not the argument")

  def thunk() -> None:
    nonlocal held
    held = jax.block_until_ready(compiled(held))

  return harness.Work(thunk, calls)


def _pinned(nbytes: int, calls: int) -> harness.Work:
  return harness.Work(raw_cuda.copies(nbytes, raw_cuda.THERE_AND_BACK, calls), calls)
