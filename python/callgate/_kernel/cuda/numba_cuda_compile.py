"""Compiles functions of `@numba.cuda.jit` for a compute capability, with or without a device.

All that depends on the installed numba-cuda is here. The function is compiled to PTX by its public
interface, its entry renamed so that it is the same in every process, and linked to a cubin by
numba-cuda's linker, with what the decorator's `link=` names. Imported with the first kernel;
compiles under Numba's own lock, on the lowering thread.
"""

# pyright: reportMissingImports=false, reportAttributeAccessIssue=false, reportOptionalCall=false
# What is imported here need not be installed where types are checked.

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numba import cuda, types
from numba.cuda import compiler as numba_compiler
from numba.cuda.np.numpy_support import from_dtype

from callgate._build.nvrtc import Image
from callgate._core.errors import CompileError, GateDefinitionError
from callgate._kernel.cuda import named
from callgate._kernel.launch import Address, Parameter

# Options of the decorator that the compilation takes, and those that say nothing about it.
_COMPILED = ("debug", "lineinfo", "fastmath", "opt", "launch_bounds")
_WORD = 8  # bytes of each part of an array's struct


def is_dispatcher(function: Any) -> bool:
  """Whether it is what `@numba.cuda.jit` makes."""
  return isinstance(function, cuda.dispatcher.CUDADispatcher)


def check_options(label: str, options: Mapping[str, Any]) -> None:
  """Raises for what the decorator was given that a launch from a program can't respect."""
  if options.get("device"):
    raise GateDefinitionError(
      f"{label}: expected a kernel, got a device function (@cuda.jit(device=True))"
    )
  if options.get("debug"):
    raise GateDefinitionError(
      f"{label}: expected a kernel without debug=True, whose errors Numba's own launcher reads back"
    )
  if options.get("extensions"):
    raise GateDefinitionError(
      f"{label}: expected a kernel without extensions=, which convert arguments at each launch"
    )


def array_type(label: str, name: str, dtype: np.dtype[Any], rank: int, *, written: bool) -> Any:
  """Numba's type of a contiguous array; inputs are read-only."""
  try:
    element = from_dtype(dtype)
  except Exception as error:
    raise GateDefinitionError(
      f"{label}: parameter '{name}': Numba has no arrays of {dtype.name} on CUDA; convert it with "
      "astype"
    ) from error
  return types.Array(element, rank, "C", readonly=not written)


def scalar_type(label: str, name: str, value: Any) -> Any:
  """Numba's type of a number."""
  if isinstance(value, (bool, np.bool_)):
    return types.boolean
  if isinstance(value, np.generic):
    return from_dtype(value.dtype)
  if isinstance(value, int):
    return types.uint64 if value >= 2**63 else types.int64
  if isinstance(value, (float, complex)):
    return types.float64 if isinstance(value, float) else types.complex128
  raise GateDefinitionError(
    f"{label}: parameter '{name}': expected an array or a number, got {value!r}; constants are "
    "globals or closure variables of the function"
  )


def declared_types(function: Any) -> list[tuple[Any, ...]]:
  """The signatures that the decorator was given; [] where it was given none."""
  return [] if function._can_compile else [tuple(s) for s in function.signatures]


def array_parameters(shape: Sequence[int], itemsize: int, of: Any, index: int) -> list[Parameter]:
  """An array as Numba's kernels take it: its struct's parts, one by one."""
  strides: list[int] = []
  step = itemsize
  for extent in reversed(shape):
    strides.insert(0, step)
    step *= extent
  size = int(np.prod(shape, dtype=np.int64)) if shape else 1
  numbers = [Parameter.scalar(n, np.int64) for n in (size, itemsize)]
  tail = [Parameter.scalar(n, np.int64) for n in (*shape, *strides)]
  null = Parameter.null()  # the owner's bookkeeping, which is the host's
  return [null, null, *numbers, Parameter(bytes(_WORD), (Address(0, of, index),)), *tail]


def scalar_parameters(value: Any, numba_type: Any) -> list[Parameter]:
  """A number by value; the parts of a complex one are two parameters."""
  if numba_type == types.boolean:
    return [Parameter.scalar(bool(value), np.uint8)]
  dtype = np.dtype(str(numba_type))
  if dtype.kind != "c":
    return [Parameter.scalar(value, dtype)]
  number = np.asarray(value, dtype)
  return [Parameter.scalar(part, part.dtype) for part in (number.real, number.imag)]


def compile_for(
  label: str, function: Any, argument_types: Sequence[Any], capability: int, *, ptx: bool
) -> tuple[str, tuple[named.Declared, ...], Image]:
  """Compiles a kernel for a device.

  Args:
    label: of the kernel, for messages.
    function: the dispatcher.
    argument_types: Numba's.
    capability: such as 90.
    ptx: the image is PTX, for any device that is not older.

  Returns:
    The name of the entry, its parameters as PTX declares them, and the image.

  Raises:
    CompileError: Numba refuses the function.
  """
  given = function.targetoptions
  options = {k: given[k] for k in _COMPILED if given.get(k) is not None}
  cc = divmod(capability, 10)
  try:
    text, _ = numba_compiler.compile(
      function.py_func,
      tuple(argument_types),
      cc=cc,
      output="ptx",
      abi="numba",
      device=False,
      **options,
    )
  except Exception as error:  # Numba raises many kinds
    raise CompileError(
      f"{label}: Numba can't compile '{function.py_func.__name__}' for sm_{capability}: {error}",
      str(error),
    ) from error
  text = text if isinstance(text, str) else text.decode()
  ((entry, declared),) = named.entries(text).items()
  renamed = _entry(function.py_func.__name__, argument_types)
  text = text.replace(entry, renamed)
  _check(label, text)
  if ptx and not given.get("link"):
    return renamed, declared, Image(text.encode() + b"\0", 0)
  return renamed, declared, Image(_linked(label, text, cc, given), capability)


def _entry(name: str, argument_types: Sequence[Any]) -> str:
  """A name that doesn't depend on what was compiled before, as Numba's does."""
  digest = hashlib.sha256(repr([str(t) for t in argument_types]).encode()).hexdigest()[:16]
  return f"callgate_{re.sub(r'[^A-Za-z0-9_]', '_', name)}_{digest}"


def _check(label: str, text: str) -> None:
  if "cudaCGGetIntrinsicHandle" in text or "cudaCGSynchronize" in text:
    raise GateDefinitionError(
      f"{label}: expected a kernel without cuda.cg.this_grid(), whose cooperative launch callgate "
      "doesn't have"
    )
  if re.search(r"\.extern\s+\.func[^;]*\bNRT_", text):
    raise GateDefinitionError(
      f"{label}: expected a kernel that makes no arrays on the heap, for which Numba needs a "
      "runtime of its own on the device; cuda.local.array and cuda.shared.array make others"
    )


def _linked(label: str, text: str, cc: tuple[int, int], options: Mapping[str, Any]) -> bytes:
  from numba.cuda.cudadrv import driver

  try:
    linker = driver._Linker(max_registers=options.get("max_registers"), cc=(*cc, ""), lto=False)
    linker.add_ptx(text.encode())
    for path in options.get("link") or ():
      linker.add_file_guess_ext(path, False)
    made = linker.complete()
  except Exception as error:  # the linker's libraries raise kinds of their own
    raise CompileError(f"{label}: numba-cuda can't link the kernel: {error}", str(error)) from error
  return bytes(getattr(made, "code", made))
