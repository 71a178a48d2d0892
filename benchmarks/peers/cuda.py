# SPDX-License-Identifier: Apache-2.0
"""Identity functions of arrays on a GPU, one per way of reaching them, and empty kernels.

As in `adapters.py`: each takes the ShapeDtypeStruct of its one argument and returns a traceable
function. All copy their argument to their result, but those whose name ends in `_aliased` or
`_empty`.
"""

from __future__ import annotations

import functools
from typing import Any

import jax

from benchmarks import harness
from benchmarks.peers import adapters
from benchmarks.peers.adapters import Function, Spec
from benchmarks.peers.kernels import kind

EMPTY_CUDA = "__global__ void nothing(const float* x, float* z) {}"
_PACKAGES = {"cupy": "cupy-cuda12x", "torch": "torch"}


# -- gates ---
def gate_empty(spec: Spec, **options: Any) -> Function:
  """An in-place gate on the device's arrays with an empty body."""

  def nothing(out: Any, x: Any) -> None:
    pass

  options = {"arrays": "buffer", **options}
  if options["arrays"] in _PACKAGES:
    harness.require(options["arrays"], _PACKAGES[options["arrays"]])
  return adapters.callgate().gate(nothing, out=lambda x: x, style="inplace", **options)


def gate_aliased(spec: Spec) -> Function:
  """The same, whose result is its argument's memory: there is nothing left to do."""
  return gate_empty(spec, aliases={0: 0})


def gate_cupy(spec: Spec) -> Function:
  """An in-place gate that copies with CuPy."""
  harness.require("cupy", "cupy-cuda12x")

  def copy(out: Any, x: Any) -> None:
    out[...] = x

  return adapters.callgate().gate(copy, out=lambda x: x, style="inplace", arrays="cupy")


def gate_numpy(spec: Spec) -> Function:
  """An in-place gate on copies on the host."""
  return adapters.callgate_inplace(spec)


def gate_numpy_aliased(spec: Spec) -> Function:
  """The same, whose result is its argument's copy: only the copies to and from the device."""
  return gate_empty(spec, arrays="numpy", aliases={0: 0})


# -- peers of gates ---
def buffer_callback_cupy(spec: Spec) -> Function:
  """JAX's `buffer_callback` of a copy with CuPy."""
  module = harness.require("jax.experimental.buffer_callback", "jax")
  cupy = harness.require("cupy", "cupy-cuda12x")

  def copy(ctx: Any, out: Any, x: Any) -> None:
    with cupy.cuda.ExternalStream(ctx.stream):
      cupy.asarray(out)[...] = cupy.asarray(x)

  return module.buffer_callback(copy, spec)


def buffer_callback_empty(spec: Spec) -> Function:
  """JAX's `buffer_callback` with an empty body."""
  module = harness.require("jax.experimental.buffer_callback", "jax")
  return module.buffer_callback(lambda ctx, out, x: None, spec)


# -- empty kernels ---
def cuda_empty(spec: Spec) -> Function:
  """`callgate.cuda`."""
  return kind("cuda")(EMPTY_CUDA, grid=1, block=32, out=spec)


def triton_empty(spec: Spec) -> Function:
  """`callgate.triton`."""
  return kind("triton")(_triton_function(), grid=1, num_warps=1, out=spec)


def numba_empty(spec: Spec) -> Function:
  """`callgate.numba_cuda`."""
  cuda = harness.require("numba.cuda", "numba-cuda")

  @cuda.jit
  def nothing(x: Any, z: Any) -> None:
    pass

  return kind("numba_cuda")(nothing, griddim=1, blockdim=32, out=spec)


def warp_empty(spec: Spec) -> Function:
  """Warp's `jax_kernel`."""
  warp = harness.require("warp", "warp-lang")
  warp.config.log_level = warp.LOG_ERROR
  array = warp.array(dtype=warp.float32, ndim=len(spec.shape))

  def nothing(x, z):
    pass

  nothing.__annotations__ = {"x": array, "z": array}
  jax_kernel = harness.require("warp.jax_experimental.ffi", "warp-lang").jax_kernel
  function = jax_kernel(warp.kernel(nothing), launch_dims=1)
  return lambda x: function(x)[0]


def jax_triton_empty(spec: Spec) -> Function:
  """jax-triton's `triton_call`."""
  jax_triton = harness.require("jax_triton", "jax-triton")
  kernel = _triton_function()
  return lambda x: jax_triton.triton_call(x, kernel=kernel, out_shape=spec, grid=1, num_warps=1)


def tvm_ffi_empty(spec: Spec) -> Function:
  """jax-tvm-ffi: a C++ function that launches an empty kernel, compiled with nvcc."""
  harness.require("jax_tvm_ffi", "jax-tvm-ffi")
  cpp = harness.require("tvm_ffi.cpp", "apache-tvm-ffi")
  source = """
    #include <cuda_runtime.h>
    #include <tvm/ffi/container/tensor.h>
    #include <tvm/ffi/extra/c_env_api.h>
    __global__ void nothing(const float* x, float* z) {}
    void launch(tvm::ffi::TensorView x, tvm::ffi::TensorView z) {
      auto stream = static_cast<cudaStream_t>(
          TVMFFIEnvGetStream(x.device().device_type, x.device().device_id));
      nothing<<<1, 32, 0, stream>>>(static_cast<const float*>(x.data_ptr()),
                                    static_cast<float*>(z.data_ptr()));
    }"""
  library = cpp.load_inline("bench_cuda_nothing", cuda_sources=source, functions=["launch"])
  harness.require("jax_tvm_ffi", "jax-tvm-ffi").register_ffi_target(
    "bench_cuda_tvm", library.launch, platform="gpu"
  )
  return jax.ffi.ffi_call("bench_cuda_tvm", spec)


@functools.cache
def _triton_function() -> Any:
  triton = harness.require("triton", "triton")

  def nothing(x, z):
    pass

  return triton.jit(nothing)
