"""`callgate.numba`: kernels from Python functions that Numba compiles when a call is traced."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from callgate._core import factories
from callgate._kernel.numba.kernel import NumbaKernel
from callgate._kernel.numba.options import NumbaOptions


@factories.decorator(NumbaOptions)
def numba(fn: Callable[..., Any], /, *, options: NumbaOptions) -> NumbaKernel:
  """Makes a Python function a JAX function that Numba compiles: no interpreter at run time.

  ```python
  import callgate as cg, jax, jax.numpy as jnp

  @cg.numba(out=lambda x: x)
  def running_maximum(out, x):
    largest = x[0]
    for i in range(x.size):
      largest = max(largest, x[i])
      out[i] = largest

  assert jax.jit(running_maximum)(jnp.array([1.0, 3.0, 2.0])).tolist() == [1.0, 3.0, 3.0]
  ```

  It is compiled once for the dtypes and ranks of a call, and kept on disk for the next process.

  Args:
    fn: a function in Numba's subset of Python, or one that Numba's `@njit` or `@cfunc` has made;
      leave it out to use the result as a decorator. It gets read-only arrays (numbers for arguments
      of rank 0), and writes its result into a first parameter more, or returns it. Several results
      are a tuple. Keyword arguments that are no arrays are constants of the compilation.

  Returns:
    A `Kernel`, or a decorator that makes one.

  Raises:
    GateDefinitionError: an option is wrong; Numba is not installed; or, when a call is traced,
      Numba refuses the function for the call's types.
  """
  return NumbaKernel(fn, options)
