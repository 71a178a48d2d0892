# SPDX-License-Identifier: Apache-2.0
"""Kernels of CuPy: compiled by NVRTC without a device, and the launches that programs hold."""

from __future__ import annotations

import warnings
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cuda_images import call, check_plan, struct
from fake_cuda import FakeCuda
from fake_programs import run

import callgate as cg
from callgate._build import nvrtc
from callgate._core.public import core

with warnings.catch_warnings():
  warnings.simplefilter("ignore")  # where there is no device, or CUDA's toolkit is not found
  cupy = pytest.importorskip("cupy", exc_type=ImportError)

try:
  nvrtc.compiler()
except cg.CompileError:
  pytest.skip("NVRTC is not installed", allow_module_level=True)

SCALE = """
extern "C" __global__ void scale(const float* x, float* y, float a, int n) {
  int i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i < n) y[i] = a * x[i];
}
"""
TEMPLATES = """
#include <cupy/complex.cuh>
#include <cooperative_groups.h>
namespace cg = cooperative_groups;
template <class T> __device__ T twice(T x) { return x + x; }
float helper(float x) { return 3 * x; }
template <class T> __global__ void sum(const T* x, T* y, int n) {
  for (int i = 0; i < n; ++i) y[0] += twice(x[i]);
}
__global__ void magnitude(const complex<float>* x, float* y, const int n) {
  int i = threadIdx.x;
  if (i < n) y[i] = helper(abs(x[i]));
}
"""


def made_scale(raw: Any = None, **options: Any) -> Any:
  raw = cupy.RawKernel(SCALE, "scale") if raw is None else raw
  options = {"grid": lambda x: -(-x.size // 256), "block": 256, "out": lambda x, a, n: x, **options}
  return cg.cupy(raw, **options)


@pytest.mark.parametrize("capabilities", [(90,), (75, 90), ()], ids=str)
def test_a_raw_kernels_image_declares_what_its_launch_passes(capabilities: Any) -> None:
  x = struct((1000,))
  plan = made_scale().plan(call((x,), (x,), capabilities, a=2.0, n=1000))
  check_plan(plan)
  (launch,) = plan.launches
  assert (launch.entry, launch.grid, launch.block) == ("scale", (4, 1, 1), (256, 1, 1))
  assert [[a.of for a in p.addresses] for p in launch.parameters] == [
    ["operand"],
    ["result"],
    [],
    [],
  ]


def test_a_raw_modules_functions_are_named_and_may_be_templates() -> None:
  module = cupy.RawModule(
    code=TEMPLATES, options=("-std=c++14",), name_expressions=["sum<float>", "sum<double>"]
  )
  for function, dtype in (("sum<float>", np.float32), ("sum<double>", np.float64)):
    kernel = cg.cupy(module, function, grid=1, block=1, out=struct((1,), dtype), zeroed=[0])
    plan = core(kernel).plan(call((struct((9,), dtype),), (struct((1,), dtype),), n=9))
    check_plan(plan)
    assert plan.zeroed == (0,)
  kernel = cg.cupy(module, "magnitude", grid=1, block=32, out=lambda x, n: x.real)
  check_plan(core(kernel).plan(call((struct((9,), np.complex64),), (struct((9,)),), n=9)))


def test_cupys_options_reach_the_compiler() -> None:
  source = SCALE.replace("a *", "FACTOR *")
  raw = cupy.RawKernel(source, "scale", options=("-DFACTOR=2.0f", "--use_fast_math"))
  x = struct((8,))
  check_plan(made_scale(raw, name="optioned").plan(call((x,), (x,), a=2.0, n=8)))
  without = cupy.RawKernel(source, "scale")
  with pytest.raises(cg.CompileError, match=r"(?s)kernel 'without': .*FACTOR"):
    made_scale(without, name="without").plan(call((x,), (x,), a=2.0, n=8))


def test_an_elementwise_kernel_runs_on_the_cpu_and_is_compiled_for_cuda() -> None:
  made = cupy.ElementwiseKernel(
    "T x, raw float32 y, int32 j", "T z, float32 w", "z = x * y[j] + A; w = i + unused",
    "weighted", preamble="#define A 1", loop_prep="const float unused = 2;", reduce_dims=False,
  )  # fmt: skip
  kernel = cg.cupy(made, jvp="dz = y[j] * dx; dw = 0 * dx")
  x, y = np.arange(6, dtype=np.float32).reshape(2, 3), np.array([3.0, 5.0], np.float32)
  j = np.array([0, 1, 1], np.int32)
  z, w = kernel(x, y, j)
  np.testing.assert_array_equal(z, x * y[j] + 1)
  np.testing.assert_array_equal(w, np.arange(6).reshape(2, 3) + 2)
  slope = jax.grad(lambda x: jnp.sum(kernel(x, y, j)[0]))(jnp.asarray(x))
  np.testing.assert_array_equal(slope, np.broadcast_to(y[j], (2, 3)))
  structs = [struct(a.shape, a.dtype) for a in (x, y, j)]
  check_plan(core(kernel).cuda.plan(call(structs, (struct((2, 3)), struct((2, 3))))))


def test_options_that_callgate_cannot_respect_are_refused_by_name() -> None:
  for options, said in (
    ({"backend": "nvcc"}, "expected backend='nvrtc', got 'nvcc'"),
    ({"enable_cooperative_groups": True}, "enable_cooperative_groups"),
    ({"options": ("-dc",)}, "need no linker, got '-dc'"),
  ):
    raw = cupy.RawKernel(SCALE, "scale", **options)
    with pytest.raises(cg.GateDefinitionError, match=said):
      made_scale(raw)
  module = cupy.RawModule(code=SCALE)
  with pytest.raises(cg.GateDefinitionError, match="expected the name of the RawModule's function"):
    made_scale(module)
  with pytest.raises(cg.GateDefinitionError, match="got one without; use callgate"):
    made_scale(cupy.RawModule(path="/nowhere.cubin"))
  reduction = cupy.ReductionKernel("T x", "T y", "x", "a + b", "y = a", "0", "total")
  with pytest.raises(cg.GateDefinitionError, match=r"got ReductionKernel; callgate\.gate"):
    cg.cupy(reduction)
  with pytest.raises(cg.GateDefinitionError, match="expected grid= and block="):
    cg.cupy(cupy.RawKernel(SCALE, "scale"))
  element = cupy.ElementwiseKernel("T x", "T y", "y = x", "same")
  with pytest.raises(cg.GateDefinitionError, match="expected no grid, block, out"):
    made_scale(element)
  lower = cupy.ElementwiseKernel("t x", "t y", "y = x", "lower")
  with pytest.raises(cg.GateDefinitionError, match="a capital letter as its type, got 't'"):
    cg.cupy(lower)


def test_a_traced_number_is_refused() -> None:
  kernel = made_scale(name="by_value")
  with pytest.raises(cg.GateDefinitionError, match="argument 'a': expected a number that is known"):
    jax.eval_shape(lambda a: kernel(jnp.ones(3), a, 3), 1.0)


def test_a_program_launches_the_kernel_with_its_arrays(fake: FakeCuda) -> None:
  kernel = made_scale(name="launched", arch="sm_90")

  def compute(values: list[bytes], grid: Any, block: Any) -> None:
    x, y = (fake.view(int.from_bytes(v, "little"), (1000,), np.float32) for v in values[:2])
    assert (grid, block) == ((4, 1, 1), (256, 1, 1))
    n = np.frombuffer(values[3], np.int32)[0]
    y[:n] = np.frombuffer(values[2], np.float32)[0] * x[:n]

  fake.register_kernel("scale", compute, [8, 8, 4, 4], reads=(0,), writes=(1,))
  x = np.arange(1000, dtype=np.float32)
  np.testing.assert_array_equal(run(fake, lambda x: kernel(x, 2.0, 1000), x), 2 * x)
