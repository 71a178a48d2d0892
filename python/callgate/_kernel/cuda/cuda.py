"""Kernels in CUDA C++, compiled when they are first called."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

import jax.core
import numpy as np

from callgate._call.operation import Effect, Vmap
from callgate._core import options as _options
from callgate._core import registry
from callgate._core.errors import GateDefinitionError
from callgate._core.registry import caller_module
from callgate._kernel.cuda import part as _part
from callgate._kernel.cuda import source as _source
from callgate._kernel.cuda.kernel import CudaKernel
from callgate._kernel.cuda.part import SourcePart
from callgate._kernel.files import no_new_calls
from callgate._kernel.kernel import Kernel
from callgate._kernel.launch import Image, Plan
from callgate._kernel.program import CudaCall, parse_arch
from callgate._kernel.variants import Static


class CudaSourceKernel(CudaKernel):
  """A kernel from CUDA C++; see `callgate.cuda`.

  Attributes:
    part: the source with its options.
  """

  def __init__(self, name: str, part: SourcePart, **options: Any) -> None:
    self.part = part
    super().__init__(name, part.signature(), arch=part.arch(), **options)

  # -- calls -------------------------------------------------------------------------------------
  def _arguments(
    self, args: tuple[Any, ...], kwargs: dict[str, Any]
  ) -> tuple[tuple[Any, ...], Static]:
    template = {p.name: p for p in self.part.function.template}
    given = {name: kwargs.pop(name) for name in template if name in kwargs}
    operands, static = super()._arguments(args, kwargs)
    bound = {name: _template_value(self.label, name, value) for name, value in given.items()}
    return operands, tuple(sorted({**dict(static), **bound}.items()))

  # -- the CUDA part -----------------------------------------------------------------------------
  def plan(self, call: CudaCall) -> Plan:
    return self.part.plan(call)

  def images(self, key: str, capabilities: tuple[int, ...]) -> tuple[Image, ...] | None:
    return self.part.images(key, capabilities)

  # -- files -------------------------------------------------------------------------------------
  def saved_form(self) -> dict[str, Any] | None:
    return {"kind": "cuda", "name": self.name, "cuda": _part.saved(self.part)}


def _template_value(label: str, name: str, value: Any) -> int | str:
  """A template argument as calls hold it: an integer, or a dtype's name."""
  if isinstance(value, (bool, int, np.integer)):
    return int(value)
  if not isinstance(value, (float, jax.core.Tracer)) and value is not None:
    try:
      return _source.dtype_by_name(value).name
    except TypeError:
      pass
  raise GateDefinitionError(
    f"{label}: template parameter '{name}': expected a dtype or an integer, got {value!r}"
  )


def restore(form: dict[str, Any]) -> CudaSourceKernel:
  """A kernel from its saved form: for programs, which hold all else that a call needs."""
  part = _part.restored(f"kernel '{form['name']}'", form["cuda"])
  return CudaSourceKernel(form["name"], part, out=no_new_calls(form["name"]), aliases=part.aliases)


def cuda(
  source: str,
  kernel: str | None = None,
  /,
  *,
  grid: Any,
  block: Any,
  shared: Any = 0,
  cluster: Any = None,
  zeroed: Sequence[int] = (),
  scratch: Mapping[str, Any] | None = None,
  out: Any = None,
  like: Callable[..., Any] | None = None,
  name: str | None = None,
  effect: Effect = "pure",
  aliases: Mapping[int, int] | None = None,
  vmap: Vmap | Callable[..., Any] = "each",
  sharding: Any = None,
  linear: bool | int | Sequence[int] = False,
  gradient: Literal["finite-difference"] | None = None,
  options: Sequence[str] = (),
  include_dirs: Sequence[str | os.PathLike[str]] = (),
  arch: str | int | Sequence[str | int] | None = None,
) -> Kernel:
  """Makes a kernel in CUDA C++ a JAX function: compiled once, launched on XLA's stream.

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

  A program launches the kernel from the runtime: no Python, no copy, no synchronisation, and the
  launch may become part of a CUDA graph. The parameters of the `__global__` function say what a
  call gives and gets, in their order:

  - `const T*`: the next operand, an array of any rank. `T*`: the next result; an operand and a
    result in one memory where `aliases` says that the operand at its place is that result.
  - `cg::In<T, Rank>`, `cg::Out<T, Rank>`, `cg::InOut<T, Rank>`: the same as views, which know their
    extents (callgate/kernel_device.h, which is included).
  - numbers by value (`float a`, `int n`): fixed when the program is traced, given at their place or
    by keyword. What a program computes is passed as an array, `const float*`.
  - pointers that `scratch` names: memory for the launch alone.

  `T` may be a parameter of the kernel's template: each call compiles it for the dtypes of its
  arrays. `__half` and `__nv_bfloat16` are float16 and bfloat16, `float2` and `double2` complex64
  and complex128; CUDA's headers of them are included where the source names them. A pointer to
  another type, `float4` or a struct, takes arrays of any dtype.

  Args:
    source: CUDA C++17 with the kernel, for NVRTC (pip's nvidia-cuda-nvrtc, which the extra
      callgate[cuda] brings, or CUDA's toolkit). Compiled kernels are kept on disk.
    kernel: which kernel, where the source has several; with template arguments if the calls don't
      tell them: "scale<float, 4>".
    grid: blocks: an int, a tuple of up to three, or a function from the operands'
      ShapeDtypeStructs (of one lane, under vmap) to one; a static argument that the function has a
      parameter for is passed by name. Of 0 blocks nothing is launched, and where all results are
      empty neither.
    block: threads of a block, likewise; at most 1024.
    shared: bytes of dynamic shared memory, likewise; more than 48 KiB is asked for from the driver.
    cluster: blocks of a cluster (compute capability 9.0), likewise; None for none.
    zeroed: flat positions of results that are set to zero first, for kernels that add to them.
    scratch: bytes of the memory behind parameters `T*` by their names, likewise; not initialised.
      With vmap="grid" there is as much for each lane.
    out: the results: a pytree of anything with `.shape` and `.dtype`, or a function from the
      arguments to one: arrays are ShapeDtypeStructs.
    like: a JAX-traceable reference of the same signature: gives the results' shapes when `out` is
      not given, derivatives when the kernel has no rule of its own, and `check`'s truth.
    name: what programs call the kernel by. Default: the calling module and the kernel's name.
    effect: "pure", "io" or "ordered", as for `callgate.gate`.
    aliases: flat operand position to flat result position: both are one memory. An `InOut` is
      aliased without being named here.
    vmap: "each" (a launch for each lane, by the runtime), "grid" (one launch: the lanes are the
      grid's z axis, so the kernel adds `blockIdx.z` times a lane's elements to each pointer; views
      have a lane's extents), "whole" (batched arguments have a leading axis), "broadcast" (all
      have) or a rule, as for `callgate.gate`.
    sharding: which dimensions may stay split over devices, as for `callgate.gate`; the grid is
      then worked out for each device's part.
    linear: True, a position or positions of arguments in which the kernel is linear.
    gradient: "finite-difference": derivatives by central differences.
    options: for NVRTC, after callgate's own: "--use_fast_math", "-DN=4", "-lineinfo"; one with
      "--gpu-architecture=sm_90a" replaces callgate's choice.
    include_dirs: folders of headers.
    arch: what to compile for where the process has no CUDA device: "sm_90", 90, or several.
      Default there: PTX, which the driver compiles when the program is loaded.

  Returns:
    A `Kernel`.

  Raises:
    GateDefinitionError: an option is wrong, or a parameter's type; when a call is lowered also: the
      grid or block that its function gave is outside CUDA's limits.
    CompileError: when a call is lowered: NVRTC refuses the source, with its message and your line
      numbers; or there is no NVRTC.
  """
  name = _options.name("cuda", name)
  _options.text("cuda", "source", source)
  _options.optional_texts("cuda", kernel=kernel)
  known = _source.find("cuda" if name is None else f"kernel '{name}'", source, kernel)
  label = f"kernel '{name or known.name}'"
  building = _part.build_options(
    _options.strings(label, "options", options),
    _options.strings(label, "include_dirs", include_dirs),
    parse_arch(label, arch),
  )
  launching = _part.launch_options(label, grid, block, shared, cluster, zeroed, scratch)
  if name is None:
    name = registry.free_name(f"{caller_module()}.{known.name}")
  part = SourcePart(
    f"kernel '{name}'", source, kernel, launching, building, _options.aliases(label, aliases)
  )
  return CudaSourceKernel(
    name,
    part,
    out=out,
    like=like,
    effect=effect,
    aliases=aliases,
    vmap=vmap,
    sharding=sharding,
    linear=linear,
    gradient=gradient,
  )
