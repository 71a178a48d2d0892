# SPDX-License-Identifier: Apache-2.0
"""`callgate.cuda`: kernels in CUDA C++, compiled when a call is lowered."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from callgate._build.nvrtc import CompiledImage
from callgate._core import factories
from callgate._core import options as check
from callgate._kernel.cuda import part as _part
from callgate._kernel.cuda import source as _source
from callgate._kernel.cuda.kernel import CudaKernel
from callgate._kernel.cuda.options import CudaOptions, CudaSourceOptions, CupyOptions
from callgate._kernel.cuda.part import SourcePart
from callgate._kernel.files import no_new_calls
from callgate._kernel.kernel import Kernel
from callgate._kernel.launch import CudaCall, LaunchPlan
from callgate._kernel.options import Paths


class CudaSourceKernel(CudaKernel):
  """A kernel from CUDA C++; see `callgate.cuda`."""

  def __init__(self, name: str, part: SourcePart, options: CudaOptions) -> None:
    self.part = part
    self._template = part.function.template
    super().__init__(name, part.signature(), options)

  def plan(self, call: CudaCall) -> LaunchPlan:
    return self.part.plan(call)

  def images(self, key: str, capabilities: tuple[int, ...]) -> tuple[CompiledImage, ...] | None:
    return self.part.images(key, capabilities)

  def saved_form(self) -> dict[str, Any] | None:
    return {"kind": "cuda", "name": self.name, "cuda": _part.saved(self.part)}


def restore(form: dict[str, Any]) -> CudaSourceKernel:
  """Makes a kernel of its saved form, for loaded programs."""
  part = _part.restored(f"kernel '{form['name']}'", form["cuda"])
  options = CudaOptions(out=no_new_calls(form["name"]), aliases=part.aliases, arch=part.arch)
  return CudaSourceKernel(form["name"], part, options)


@factories.of_two(CudaSourceOptions)
def cuda(source: str, kernel: str | None = None, /, *, options: CudaSourceOptions) -> Kernel:
  """Makes a JAX function of a CUDA C++ kernel, launched on XLA's stream without Python.

  ```python
  import callgate as cg, jax, jax.numpy as jnp

  saxpy = cg.cuda(\"\"\"
    __global__ void saxpy(float a, const float* x, const float* y, float* z, int n) {
      int i = blockIdx.x * blockDim.x + threadIdx.x;
      if (i < n) z[i] = a * x[i] + y[i];
    }\"\"\",
    grid=lambda x, y: -(-x.size // 256), block=256,
    out=lambda a, x, y, n: x, arch="sm_90")

  step = jax.jit(lambda x, y: saxpy(2.0, x, y, n=x.size))
  traced = step.trace(jnp.ones(1000), jnp.ones(1000))
  # On a machine with a GPU, step(x, y) runs it. Compiling needs none:
  # traced.lower(lowering_platforms=("cuda",))
  ```

  callgate compiles the source once and keeps the result on disk. A launch makes no copies, doesn't
  synchronize, and may become part of a CUDA graph. The parameters of the `__global__` function
  define the arguments and results of a call, in order:

  - `const T*`: the next operand, an array of any rank.
  - `T*`: the next result. With `aliases` it is an operand and a result in the same memory.
  - `cg::In<T, Rank>`, `cg::Out<T, Rank>`, `cg::InOut<T, Rank>`: the same as views, with shapes.
    callgate includes their header, callgate/kernel_device.h.
  - A number by value (`float a`, `int n`): a static number, by position or by keyword, fixed when
    the program is traced. Declare a value that the program computes as `const float*`.
  - A pointer that `scratch` names: memory for the launch.

  `T` may be a template parameter of the kernel; callgate compiles the template for the dtypes of a
  call. `__half` and `__nv_bfloat16` are float16 and bfloat16; `float2` and `double2` are complex64
  and complex128. callgate includes the headers of types that the source names. A pointer to another
  type, such as `float4` or a struct, takes arrays of any dtype.

  Args:
    source: CUDA C++17 source with the kernel. It is compiled by NVRTC, from the extra
      callgate[cuda], pip's nvidia-cuda-nvrtc or the CUDA toolkit.
    kernel: the kernel's name, if the source has several. Add the template arguments that the calls
      don't determine: "scale<float, 4>".

  Returns:
    A `Kernel`.

  Raises:
    GateDefinitionError: an option or a parameter's type is wrong. When a call is lowered: `grid` or
      `block` exceeds CUDA's limits.
    CompileError: when a call is lowered: NVRTC rejects the source (the message has your line
      numbers), or there is no NVRTC.
  """
  what = options.label("cuda")
  check.text("cuda", "source", source)
  check.optional_texts("cuda", kernel=kernel)
  options = check.checked(what, options)
  return make_kernel(what, source, kernel, options, options.options, options.include_dirs)


def make_kernel(
  what: str, source: str, kernel: str | None, options: CudaSourceOptions | CupyOptions,
  flags: Sequence[str], folders: Paths,
) -> Kernel:  # fmt: skip
  """Makes the kernel of a source, named after the user's module unless the options have a name."""
  name = options.named(_source.find(what, source, kernel).name)
  label = f"kernel '{name}'"
  building = _part.BuildOptions(tuple(flags), tuple(map(str, folders)), options.capabilities(label))
  part = SourcePart(label, source, kernel, options, building, options.aliases or {})
  return Kernel(CudaSourceKernel(name, part, options))
