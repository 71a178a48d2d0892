# SPDX-License-Identifier: Apache-2.0
"""`callgate.cupy`: kernels written for CuPy, compiled and launched by callgate."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any, cast

from callgate._core import extras, factories
from callgate._core import options as check
from callgate._core.errors import GateDefinitionError
from callgate._kernel.cuda.cuda import make_kernel
from callgate._kernel.cuda.options import CupyOptions
from callgate._kernel.elementwise.elementwise import elementwise
from callgate._kernel.elementwise.params import is_letter
from callgate._kernel.kernel import Kernel

# CuPy's defaults: denormal numbers are zero, functions are device functions. Sources may define a
# `cg` of their own.
_OPTIONS = ("-ftz=true", "-default-device", "-DCALLGATE_NO_CG")
_OLD_STANDARD = re.compile(r"^--?std=(?:c|gnu)\+\+(?:03|0x|11|14)$")
_REFUSED = re.compile(r"^(?:-dc|-rdc|--relocatable-device-code|--device-c|-dlto|--dlink-time-opt)")
_CUPY_HEADERS = re.compile(r"#\s*include\s*[<\"](?:cupy|cub|thrust|cuda)/")
# ElementwiseKernel's keywords with an equivalent in callgate, and one that has no effect here.
_ELEMENTWISE = {"loop_prep", "after_loop", "options", "reduce_dims"}


def _source_of(what: str, kernel: Any, function: str | None) -> tuple[str, str]:
  """Returns the source of a RawKernel or RawModule, and the kernel's name in it."""
  faults = {
    'a kernel with its source, got one without; use callgate.cupy(module, "name", ...) with a '
    "RawModule made from code=": kernel.file_path is not None or not kernel.code,
    f"backend='nvrtc', got '{kernel.backend}'": kernel.backend != "nvrtc",
    "a kernel without enable_cooperative_groups, since callgate doesn't support cooperative "
    "launches":
      kernel.enable_cooperative_groups,
  }  # fmt: skip
  names = ", ".join(getattr(kernel, "name_expressions", None) or ())
  known = f" (its name_expressions are {names})" if names else ""
  missing = f"the name of the RawModule's function as second argument{known}"
  faults[missing] = function is None and hasattr(kernel, "get_function")
  for expected in (text for text, wrong in faults.items() if wrong):
    raise GateDefinitionError(f"{what}: expected {expected}")
  return str(kernel.code), str(kernel.name) if function is None else function


def _params(label: str, parameters: Sequence[Any]) -> str:
  found: list[str] = []
  for p in (p for p in parameters if p.ctype is not None):
    kind = str(p.ctype if p.dtype is None else p.dtype.name)
    if p.dtype is None and not is_letter(kind):
      expected = "a dtype or a capital letter as its type"
      check.refuse(label, f"parameter '{p.name}'", expected, kind)
    found.append(f"{'raw ' if p.raw else ''}{kind} {p.name}")
  return ", ".join(found)


def _elementwise(kernel: Any, name: str, options: CupyOptions) -> Kernel:
  """Makes a callgate.elementwise kernel of an ElementwiseKernel, for the CPU too."""
  label = f"kernel '{name}'"
  given = dict(kernel.kwargs)
  wrong = sorted(given.keys() - _ELEMENTWISE)
  wrong += [flag for flag in ("no_return", "return_tuple") if getattr(kernel, flag)]
  if wrong:
    raise GateDefinitionError(f"{label}: expected an ElementwiseKernel without {', '.join(wrong)}")
  return elementwise(
    _params(label, kernel.in_params), _params(label, kernel.out_params), str(kernel.operation),
    name, preamble=str(kernel.preamble), loop_prep=str(given.get("loop_prep", "")),
    after_loop=str(given.get("after_loop", "")), cuda_options=tuple(given.get("options", ())),
    jvp=options.jvp, like=options.like, effect=options.effect, aliases=options.aliases,
    sharding=options.sharding, gradient=options.gradient, arch=options.arch,
  )  # fmt: skip


@factories.of_two(CupyOptions)
def cupy(kernel: Any, function: str | None = None, /, *, options: CupyOptions) -> Kernel:
  """Makes a JAX function of a kernel that was written for CuPy.

  ```python
  import callgate as cg, cupy

  scale = cupy.RawKernel(
    'extern "C" __global__ void scale(const float* x, float* y, float a, int n) {'
    "  int i = blockIdx.x * blockDim.x + threadIdx.x;"
    "  if (i < n) y[i] = a * x[i];"
    "}",
    "scale",
  )
  run = cg.cupy(scale, grid=lambda x: -(-x.size // 256), block=256, out=lambda x, a, n: x)
  # jax.jit(lambda x: run(x, 2.0, x.size))
  ```

  - A `RawKernel`, or a `RawModule` with the name of its function ("scale" or "scale<float>"): the
    kernel's parameters define the call, as in `callgate.cuda`. `const T*` is an operand, `T*` is a
    result, and a number is static.
  - An `ElementwiseKernel`: the same as a kernel of `callgate.elementwise`, for the CPU as well. It
    takes no `grid`, `block` and `out`. Floating-point literals have the operands' precision, as in
    JAX.

  callgate reads the source, the options and the name, compiles with NVRTC, and launches on XLA's
  stream without CuPy and Python. It respects CuPy's options (with `-ftz=true`) and headers
  (`#include <cupy/complex.cuh>`), and compiles older standards as C++17. It rejects cooperative
  launches, separate compilation, nvcc and jitify.

  Args:
    kernel: a `cupy.RawKernel`, `cupy.RawModule` or `cupy.ElementwiseKernel`.
    function: the function of a RawModule.

  Returns:
    A `Kernel`.

  Raises:
    CompileError: when a call is lowered: the compiler rejects the source.
    GateDefinitionError: an argument is wrong, or CuPy is not installed.
  """
  what = options.label("callgate.cupy")
  module = extras.library("cupy", "CuPy", "cupy", by=what)
  if isinstance(kernel, module.ElementwiseKernel):
    refused = ("grid", "block", "cluster", "scratch", "out", "vmap", "linear")
    given = [n for n in refused if getattr(options, n) != getattr(CupyOptions(), n)]
    if given := given + ["function"] * (function is not None):
      fault = f"expected no {', '.join(given)} for an ElementwiseKernel, which broadcasts"
      raise GateDefinitionError(f"{what}: {fault}")
    return _elementwise(kernel, options.named(kernel.name), options)
  if not isinstance(kernel, (module.RawKernel, module.RawModule)):
    got = type(kernel).__name__
    if isinstance(kernel, module.ReductionKernel):
      got += "; use callgate.gate(arrays='cupy') to call a ReductionKernel"
    kinds = "a cupy.RawKernel, cupy.RawModule or cupy.ElementwiseKernel"
    raise GateDefinitionError(f"{what}: expected {kinds}, got {got}")
  if options.grid is None or options.block is None or options.jvp is not None:
    got = "jvp=" if options.jvp is not None else "none" if options.grid is None else "no block="
    raise GateDefinitionError(f"{what}: expected grid= and block= for a raw kernel, got {got}")
  source, named = _source_of(what, kernel, function)
  given = cast("Sequence[str]", kernel.options)
  for option in given:
    if _REFUSED.match(option):
      fault = f"expected compiler options that need no linker, got '{option}'"
      raise GateDefinitionError(f"{what}: {fault}")
    if "CUPY_USE_JITIFY" in option:
      raise GateDefinitionError(f"{what}: expected a kernel without jitify=True")
  # C++17 includes the older standards.
  flags = (*_OPTIONS, *(option for option in given if not _OLD_STANDARD.match(option)))
  folders: list[Path] = []
  if _CUPY_HEADERS.search(source):
    base = Path(module.__file__).parent / "_core" / "include"
    bundled = (base / "cupy" / "_cccl" / name for name in ("libcudacxx", "thrust", "cub"))
    folders = [folder for folder in (base, *bundled) if folder.is_dir()]
  return make_kernel(
    what, source, named, check.checked(what, options), flags, list(map(str, folders))
  )
