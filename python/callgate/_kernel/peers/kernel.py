# SPDX-License-Identifier: Apache-2.0
"""`callgate.kernel`: kernels from compiled functions of other libraries, by their type."""

from __future__ import annotations

import sys
from typing import Any

from callgate._core import factories
from callgate._core import options as check
from callgate._core.errors import GateDefinitionError
from callgate._kernel.kernel import Kernel
from callgate._kernel.peers import options as _options
from callgate._kernel.peers.options import PeerOptions
from callgate._kernel.peers.tvm_ffi import TvmFfiKernel
from callgate._kernel.peers.warp import WarpKernel

# The makers of kernels, by the module of the other library's type.
_OTHERS = {
  "triton": "callgate.triton", "numba": "callgate.numba_cuda or callgate.numba",
  "cupy": "callgate.cupy", "ctypes": "callgate.cfunc",
}  # fmt: skip


@factories.of_one(PeerOptions)
def kernel(function: Any, /, *, options: PeerOptions) -> Kernel:
  """Makes a JAX function of a tvm_ffi function or a Warp kernel, called without Python.

  ```python
  import callgate as cg, jax, jax.numpy as jnp
  import warp as wp

  @wp.kernel
  def scale(x: wp.array(dtype=float), a: float, y: wp.array(dtype=float)):
    i = wp.tid()
    y[i] = a * x[i]

  run = cg.kernel(scale, out=lambda x, a: x, like=lambda x, a: a * x)
  # jax.jit(jax.grad(lambda x: run(x, 2.0).sum()))(jnp.ones(3))
  ```

  - A `tvm_ffi.Function` gets contiguous DLPack tensors over XLA's memory: the arrays of the call,
    then the results, which it fills. `arg_spec` gives another order. The function returns nothing;
    it must not write to its operands or keep them. In programs for CUDA the tensors are device
    arrays, and tvm_ffi's current stream is XLA's.
  - A `warp.Kernel` gets arrays as operands and results; with `inouts` both share memory. A number
    is fixed when the program is traced. An array of vectors or matrices has their dimensions as its
    last axes: `wp.array(dtype=wp.vec3)` is float32[n, 3]. Warp compiles for the CPU and for CUDA.

  Args:
    function: a `tvm_ffi.Function`, or a `@wp.kernel` without generic types.

  Returns:
    A `Kernel`.

  Raises:
    CompileError: when a call is lowered: Warp rejects the kernel.
    GateDefinitionError: an argument is wrong, or callgate doesn't support the installed version of
      the library.
  """
  label = options.label("callgate.kernel")
  for module, kind, made, other in (
    ("tvm_ffi", "Function", TvmFfiKernel, _options.WARP),
    ("warp", "Kernel", WarpKernel, _options.TVM_FFI),
  ):
    # An object of a library exists only if the library was imported.
    library = sys.modules.get(module)
    if library is None or not isinstance(function, getattr(library, kind)):
      continue
    default = PeerOptions()
    for option in other:
      if (given := getattr(options, option)) is not getattr(default, option):
        check.refuse(label, option, f"nothing for a {module}.{kind}", given)
    if isinstance(options.vmap, str) and options.vmap == "grid":
      expected = "'each', 'whole', 'broadcast' or a rule"
      check.refuse(label, "vmap", f"{expected} for a {module}.{kind}", options.vmap)
    own = getattr(function, "key", module).rpartition(".")[2]
    return Kernel(made(options.named(own), function, check.checked(label, options)))
  kind = type(function)
  taker = _OTHERS.get(kind.__module__.partition(".")[0])
  hint = f"; use {taker}" if taker else ""
  got = f"{kind.__module__}.{kind.__qualname__}"
  raise GateDefinitionError(
    f"{label}: expected a tvm_ffi.Function or a warp.Kernel, got {got}{hint}"
  )
