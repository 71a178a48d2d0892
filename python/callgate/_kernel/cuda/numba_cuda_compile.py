# SPDX-License-Identifier: Apache-2.0
"""The only module that depends on the installed numba-cuda: compiles `@numba.cuda.jit` functions.

numba-cuda's public interface makes PTX. The entry is renamed, so that it is the same in every
process. numba-cuda's linker makes a cubin with the files of `link=`. All of this runs under Numba's
own lock, on the lowering thread.
"""

# pyright: reportMissingImports=false, reportAttributeAccessIssue=false, reportOptionalCall=false
# These packages need not be installed where types are checked.

from __future__ import annotations

import hashlib
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
from numba import cuda, types
from numba.cuda import compiler as numba_compiler
from numba.cuda.np.numpy_support import from_dtype

from callgate._build.nvrtc import CompiledImage
from callgate._core import static_values
from callgate._core.dtypes import dtype_named
from callgate._core.errors import CompileError, GateDefinitionError
from callgate._kernel.cuda.kernel import entries
from callgate._kernel.launch import LaunchParameter

# Options of the decorator that the compilation uses, and those without effect on it.
_COMPILED = ("debug", "lineinfo", "fastmath", "opt", "launch_bounds")
_REFUSED_CODE = {
  "cudaCGGetIntrinsicHandle|cudaCGSynchronize":
    "without cuda.cg.this_grid(), since callgate doesn't support cooperative launches",
  r"\.extern\s+\.func[^;]*\bNRT_":
    "that makes no arrays on the heap, which need Numba's runtime on the device; use "
"cuda.local.array or cuda.shared.array",
}  # fmt: skip
_REFUSED = {
  "device": "that is launched, got a device function (@cuda.jit(device=True))",
  "debug": "without debug=True, whose errors only Numba's own launcher reads back",
  "extensions": "without extensions=, which convert arguments at each launch",
}


def check(label: str, function: Any) -> None:
  """Raises for values that are no Numba kernel, or kernels that a program can't launch."""
  if not isinstance(function, cuda.dispatcher.CUDADispatcher):
    expected = "expected a kernel of @numba.cuda.jit"
    raise GateDefinitionError(f"{label}: {expected}, got {function!r}")
  for option, why in _REFUSED.items():
    if function.targetoptions.get(option):
      raise GateDefinitionError(f"{label}: expected a kernel {why}")


def type_of(label: str, name: str, dtype: str, rank: int, written: int) -> Any:
  """Returns Numba's type of a number (rank -1) or of a contiguous array; inputs are read-only."""
  if rank < 0:
    return getattr(types, "boolean" if dtype == "bool" else dtype)
  try:
    element = from_dtype(dtype_named(dtype))
  except Exception as error:
    fault = f"Numba has no arrays of {dtype} on CUDA; convert it with astype"
    raise GateDefinitionError(f"{label}: parameter '{name}': {fault}") from error
  return types.Array(element, rank, "C", readonly=not written)


def scalar_type(label: str, name: str, value: Any) -> Any:
  if isinstance(value, (bool, int, float, complex, np.generic)):
    return from_dtype(np.asarray(value).dtype)
  expected = f"parameter '{name}': expected an array or a number, got {value!r}"
  hint = "use a global or closure variable of the function for a constant"
  raise GateDefinitionError(f"{label}: {expected}; {hint}")


def parameter_types(label: str, function: Any, held: Iterable[Sequence[Any]]) -> list[Any]:
  """Returns Numba's types of all parameters: the call's, or the decorator's."""
  own = [type_of(label, *entry) for entry in held]
  if function._can_compile:
    return own
  for signature in function.signatures:
    if len(signature) == len(own) and all(map(_accepts, signature, own)):
      return [a if hasattr(a, "ndim") else d for a, d in zip(own, signature, strict=True)]
  known = "; ".join(str(tuple(s)) for s in function.signatures)
  expected = f"expected arguments that match a signature of @cuda.jit ({known})"
  raise GateDefinitionError(f"{label}: {expected}, got {own}")


def _accepts(declared: Any, own: Any) -> bool:
  """Returns True if a declared parameter accepts an argument; numbers are converted."""
  rank = getattr(own, "ndim", None)
  same_rank = getattr(declared, "ndim", None) == rank
  return same_rank and (rank is None or declared.dtype == own.dtype)


def array_parameters(
  shape: Sequence[int], itemsize: int, of: Any, index: int
) -> list[LaunchParameter]:
  """Returns an array as Numba's kernels take it: the parts of its struct as separate parameters."""
  strides = (itemsize * math.prod(shape[axis:]) for axis in range(1, len(shape) + 1))
  numbers = (math.prod(shape), itemsize, *shape, *strides)
  size, item, *rest = (LaunchParameter.scalar(n, np.int64) for n in numbers)
  null = LaunchParameter(bytes(8))  # the owner's bookkeeping exists only on the host
  return [null, null, size, item, LaunchParameter.pointer(of, index), *rest]


def scalar_parameters(value: Any, numba_type: Any) -> list[LaunchParameter]:
  """Returns a number by value; a complex number has two parameters."""
  if numba_type == types.boolean:
    return [LaunchParameter.scalar(bool(value), np.uint8)]
  dtype = np.dtype(str(numba_type))
  number = static_values.in_dtype(value, dtype)
  parts = (number.real, number.imag) if dtype.kind == "c" else (number,)
  return [LaunchParameter.scalar(part, part.dtype) for part in parts]


def compile_for(
  label: str, function: Any, argument_types: Sequence[Any], capability: int, *, ptx: bool
) -> tuple[str, list[int], CompiledImage]:
  """Returns the entry's name, its parameters' sizes, and an image, or PTX for newer devices."""
  given, name = function.targetoptions, function.py_func.__name__
  options = {k: given[k] for k in _COMPILED if given.get(k) is not None}
  cc = divmod(capability, 10)
  try:
    text, _ = numba_compiler.compile(
      function.py_func, tuple(argument_types), cc=cc, output="ptx", abi="numba", device=False,
      **options,
    )  # fmt: skip
  except Exception as error:  # Numba raises many kinds
    fault = f"Numba can't compile '{name}' for sm_{capability}: {error}"
    raise CompileError(f"{label}: {fault}", str(error)) from error
  text = text if isinstance(text, str) else text.decode()
  ((entry, declared),) = entries(text).items()
  # Numba's name depends on earlier compilations; this one does not.
  digest = hashlib.sha256(repr([str(t) for t in argument_types]).encode()).hexdigest()[:16]
  renamed = f"callgate_{re.sub(r'[^A-Za-z0-9_]', '_', name)}_{digest}"
  text = text.replace(entry, renamed)
  for pattern, why in _REFUSED_CODE.items():
    if re.search(pattern, text):
      raise GateDefinitionError(f"{label}: expected a kernel {why}")
  only_ptx = ptx and not given.get("link")
  code = text.encode() + b"\0" if only_ptx else _linked(label, text, cc, given)
  return renamed, [size for size, _ in declared], CompiledImage(code, 0 if only_ptx else capability)


def _linked(label: str, text: str, cc: tuple[int, int], options: Mapping[str, Any]) -> bytes:
  from numba.cuda.cudadrv import driver

  try:
    linker = driver._Linker(max_registers=options.get("max_registers"), cc=(*cc, ""), lto=False)
    linker.add_ptx(text.encode())
    for path in options.get("link") or ():
      linker.add_file_guess_ext(path, False)
    made = linker.complete()
  except Exception as error:  # the linker's libraries may raise anything
    raise CompileError(f"{label}: numba-cuda can't link the kernel: {error}", str(error)) from error
  return bytes(getattr(made, "code", made))
