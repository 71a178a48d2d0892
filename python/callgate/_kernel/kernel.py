# SPDX-License-Identifier: Apache-2.0
"""Kernels: native functions that compiled JAX programs call without Python."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable
from typing import Any

import jax

from callgate._call import derivatives
from callgate._call.function import ArrayFunction
from callgate._call.generic import P, R


@dataclasses.dataclass(frozen=True)
class BenchmarkResult:
  """The times that `Kernel.benchmark` measured.

  Attributes:
    seconds: the time of one call of the jitted kernel, including JAX's dispatch.
    bytes: the size of the call's operands and results.
    like_seconds: the time of one call of the jitted reference; None without `like`.
  """

  seconds: float
  bytes: int
  like_seconds: float | None

  @property
  def gigabytes_per_second(self) -> float:
    """Bytes of the operands and results divided by the time, in 1e9 bytes per second."""
    return self.bytes / self.seconds / 1e9

  @property
  def ratio(self) -> float | None:
    """The reference's time divided by the kernel's, or None; above 1 if the kernel is faster."""
    return None if self.like_seconds is None else self.like_seconds / self.seconds


class Kernel(ArrayFunction[P, R]):
  """A native function that compiled programs call without Python; call it like any JAX function.

  `callgate.cpp`, `callgate.cuda`, `callgate.library`, `callgate.cfunc`, `callgate.numba`,
  `callgate.elementwise` and other functions make kernels.

  A call takes the arguments in the order of the parameters, or by the parameters' names. A Python
  scalar takes the parameter's dtype. A variadic parameter takes a sequence of arrays. Static values
  are passed in the same way.
  """

  _makers = "callgate.cpp, .cuda, .library, .cfunc, .numba, .elementwise or .kernel"

  @property
  def parameters(self) -> tuple[str, ...]:
    """The names of the array arguments."""
    return self._core.parameters

  @property
  def function(self) -> Any:
    """The wrapped Python function, or the function's name in a library.

    Raises:
      AttributeError: the kernel was made from source.
    """
    function = getattr(self._core, "function", None)
    if function is None:
      raise AttributeError(f"{self!r} was made from source and has no function", obj=self)
    return function

  @property
  def thread_safe(self) -> bool:
    """The option `thread_safe`: True if calls may run at the same time."""
    return self._core.thread_safe

  def benchmark(self, *args: Any, seconds: float = 0.5, **kwargs: Any) -> BenchmarkResult:
    """Measures calls with these arguments; prints the time, GB/s and the ratio to `like`.

    ```python
    import callgate as cg, jax.numpy as jnp

    double = cg.cpp(\"\"\"
      void twice(cg::In<float, 1> x, cg::Out<float, 1> y) {
        for (int64_t i = 0; i < x.size(); ++i) y[i] = 2 * x[i];
      }\"\"\", like=lambda x: 2 * x)

    measured = double.benchmark(jnp.ones(1000), seconds=0.01)
    assert measured.ratio > 0
    ```

    A measured call is a call of the jitted function, including JAX's dispatch (some microseconds).
    Calls of the kernel and of the reference alternate, and the fastest call of each counts.

    Args:
      *args: the arguments of a call.
      seconds: the approximate duration of the measurement.
      **kwargs: the keyword arguments of a call.

    Returns:
      A `BenchmarkResult`.
    """
    core = self._core
    operands, _, static = core.given(args, kwargs)
    operands = jax.tree.map(jax.numpy.asarray, operands)
    jitted = [jax.jit(lambda *xs: derivatives.apply(core, xs, {}, static))]
    if (like := core.like) is not None:
      jitted.append(jax.jit(lambda *xs: core.call_rule(like, (), xs, {}, static)))
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
    while fastest[-1] == float("inf") or time.perf_counter() <= end:
      for i, function in enumerate(jitted):  # alternating, so that a busy moment affects both
        fastest[i] = min(fastest[i], measured(function, batches[i]))
    result = BenchmarkResult(fastest[0], moved, fastest[1] if len(fastest) > 1 else None)
    ratio = "" if result.ratio is None else f", {result.ratio:.2f} times as fast as like"
    units = (("s", 1.0), ("ms", 1e-3), ("µs", 1e-6), ("ns", 1e-9))
    unit, scale = next((u for u in units if fastest[0] >= u[1]), units[-1])
    speed = f"{fastest[0] / scale:.3g} {unit} a call, {result.gigabytes_per_second:.3g} GB/s"
    print(f"{core.label}: {speed}{ratio}")
    return result
