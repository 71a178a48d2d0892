"""`Kernel.benchmark`: how fast a kernel is, next to its reference."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable
from typing import Any

import jax

from callgate._call import derivatives


@dataclasses.dataclass(frozen=True)
class BenchmarkResult:
  """What `Kernel.benchmark` measured.

  Attributes:
    seconds: of one call of the jitted kernel, JAX's dispatch included.
    bytes: of its operands and results.
    like_seconds: of one call of the jitted reference; None without one.
  """

  seconds: float
  bytes: int
  like_seconds: float | None

  @property
  def gigabytes_per_second(self) -> float:
    """Operands and results per time, 1e9 bytes a second."""
    return self.bytes / self.seconds / 1e9

  @property
  def ratio(self) -> float | None:
    """The reference's time by the kernel's: above 1 where the kernel is faster; None without."""
    return None if self.like_seconds is None else self.like_seconds / self.seconds


def benchmark(
  kernel: Any, operands: tuple[Any, ...], static: tuple[tuple[str, Any], ...], seconds: float
) -> BenchmarkResult:
  """See `Kernel.benchmark`."""
  operands = jax.tree.map(jax.numpy.asarray, operands)
  jitted = [jax.jit(lambda *xs: derivatives.apply(kernel, kernel.rules, xs, {}, static))]
  if kernel.like is not None:
    jitted.append(jax.jit(lambda *xs: kernel.call_rule(kernel.like, (), xs, {}, static)))
  results = [jax.block_until_ready(function(*operands)) for function in jitted]  # compiles
  moved = sum(x.nbytes for x in jax.tree.leaves((operands, results[0])))

  def measured(function: Callable[..., Any], times: int) -> float:
    start = time.perf_counter()
    for _ in range(times):
      jax.block_until_ready(function(*operands))
    return (time.perf_counter() - start) / times

  batches = [max(1, int(1e-4 / max(measured(function, 1), 1e-9))) for function in jitted]
  fastest = [float("inf")] * len(jitted)
  end = time.perf_counter() + seconds
  while True:  # they take turns, so that a busy moment hits all
    for i, (function, batch) in enumerate(zip(jitted, batches, strict=True)):
      fastest[i] = min(fastest[i], measured(function, batch))
    if time.perf_counter() > end:
      break
  result = BenchmarkResult(fastest[0], moved, fastest[1] if len(fastest) > 1 else None)
  ratio = "" if result.ratio is None else f", {result.ratio:.2f} times as fast as like"
  units = (("s", 1.0), ("ms", 1e-3), ("µs", 1e-6), ("ns", 1e-9))
  unit, scale = next((u for u in units if fastest[0] >= u[1]), units[-1])
  print(
    f"{kernel.label}: {fastest[0] / scale:.3g} {unit} a call, "
    f"{result.gigabytes_per_second:.3g} GB/s{ratio}"
  )
  return result
