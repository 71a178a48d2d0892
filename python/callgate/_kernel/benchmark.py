"""`Kernel.benchmark`: how fast a kernel is, next to its reference."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable
from typing import Any

import jax


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
  kernel: Any, args: tuple[Any, ...], kwargs: dict[str, Any], seconds: float
) -> BenchmarkResult:
  """See `Kernel.benchmark`."""
  operands, static = kernel.split_call(args, kwargs)
  operands = jax.tree.map(jax.numpy.asarray, operands)
  calls: list[Callable[[], Any]] = [_call(lambda *xs: kernel.call_split(xs, static), operands)]
  if kernel.like is not None:
    calls.append(_call(lambda *xs: kernel.call_rule(kernel.like, (), xs, {}, static), operands))
  results = [jax.block_until_ready(call()) for call in calls]  # compiles
  moved = sum(x.nbytes for x in jax.tree.leaves((operands, results[0])))
  times = _fastest(calls, seconds)
  result = BenchmarkResult(times[0], moved, times[1] if len(times) > 1 else None)
  ratio = "" if result.ratio is None else f", {result.ratio:.2f} times as fast as like"
  print(
    f"{kernel.label}: {_duration(result.seconds)} a call, "
    f"{result.gigabytes_per_second:.3g} GB/s{ratio}"
  )
  return result


def _call(function: Callable[..., Any], operands: Any) -> Callable[[], Any]:
  jitted = jax.jit(function)
  return lambda: jitted(*operands)


def _fastest(calls: list[Callable[[], Any]], seconds: float) -> list[float]:
  """The shortest time of one call of each; they take turns, so that a busy moment hits all."""
  batches = [max(1, int(1e-4 / max(_seconds(call, 1), 1e-9))) for call in calls]
  fastest = [float("inf")] * len(calls)
  end = time.perf_counter() + seconds
  while True:
    for i, (call, batch) in enumerate(zip(calls, batches, strict=True)):
      fastest[i] = min(fastest[i], _seconds(call, batch) / batch)
    if time.perf_counter() > end:
      return fastest


def _seconds(call: Callable[[], Any], times: int) -> float:
  start = time.perf_counter()
  for _ in range(times):
    jax.block_until_ready(call())
  return time.perf_counter() - start


def _duration(seconds: float) -> str:
  for unit, scale in (("s", 1.0), ("ms", 1e-3), ("µs", 1e-6)):
    if seconds >= scale:
      return f"{seconds / scale:.3g} {unit}"
  return f"{seconds / 1e-9:.3g} ns"
