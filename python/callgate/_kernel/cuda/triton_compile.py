"""Compiles Triton kernels for a compute capability, with or without a device.

All that depends on the installed Triton is here: how its compiler takes types, constants and what
is known of alignment, and what a compiled kernel wants at launch. The parameters that a version
adds behind the user's (scratch memory) are counted in the PTX that it made. Versions 3.2 to 3.9
are known to work. Imported with the first kernel; compiles under one lock, on the tracing thread.
"""

# pyright: reportMissingImports=false, reportAttributeAccessIssue=false
# What is imported here need not be installed where types are checked.

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from callgate._core.errors import CompileError, GateDefinitionError
from callgate._kernel.cuda import named

_DTYPES = {
  "bool": "i1",
  "int8": "i8",
  "int16": "i16",
  "int32": "i32",
  "int64": "i64",
  "uint8": "u8",
  "uint16": "u16",
  "uint32": "u32",
  "uint64": "u64",
  "float16": "fp16",
  "bfloat16": "bf16",
  "float32": "fp32",
  "float64": "fp64",
  "float8_e4m3fn": "fp8e4nv",
  "float8_e4m3fnuz": "fp8e4b8",
  "float8_e5m2": "fp8e5",
  "float8_e5m2fnuz": "fp8e5b16",
}
# What scalars are passed as.
_SCALARS = {
  "i1": "int8",
  "u1": "uint8",
  **{code: name for name, code in _DTYPES.items() if code[:3] != "fp8" and name != "bool"},
}
_COMPILING = threading.Lock()


@dataclasses.dataclass(frozen=True)
class Argument:
  """What a kernel's parameter is given.

  Attributes:
    name: of the parameter.
    type: Triton's, such as "*fp32" or "i32"; "constexpr" for what is compiled in.
    value: of a scalar or constant.
    divisible: the address or integer is a multiple of 16.
  """

  name: str
  type: str
  value: Any = None
  divisible: bool = False


@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class Compiled:
  """A kernel compiled for one capability.

  Attributes:
    entry: its name in the image.
    cubin: the image.
    ptx: the same as text that ends in a zero byte.
    threads: of a block.
    shared: bytes of dynamic shared memory.
    cluster: blocks of a cluster.
    scratch: bytes of scratch memory for each block of the grid, for each of the pointers that come
      behind the user's parameters; 0 for a null pointer.
  """

  entry: str
  cubin: bytes
  ptx: bytes
  threads: int
  shared: int
  cluster: tuple[int, int, int]
  scratch: tuple[int, ...]


def parameters_of(function: Any) -> list[Any]:
  """The parameters of a JITFunction, as Triton describes them."""
  return list(function.params)


def base_function(kernel: Any) -> Any:
  """The JITFunction below decorators; None for what is no Triton kernel."""
  while kernel is not None and not isinstance(kernel, triton.runtime.JITFunction):
    kernel = getattr(kernel, "fn", None)
  return kernel


def automatic(kernel: Any) -> set[str]:
  """The parameters that decorators give values."""
  found: set[str] = set()
  while kernel is not None and not isinstance(kernel, triton.runtime.JITFunction):
    if isinstance(kernel, triton.runtime.Heuristics):
      found |= set(kernel.values)
    if isinstance(kernel, triton.runtime.Autotuner):
      found |= {name for config in kernel.configs for name in config.kwargs}
    kernel = getattr(kernel, "fn", None)
  return found


def pointer(parameter: Any, dtype: np.dtype[Any], label: str, divisible: bool) -> Argument:
  """An array as an argument."""
  code = _DTYPES.get(dtype.name)
  if code is None:
    raise GateDefinitionError(
      f"{label}: parameter '{parameter.name}': Triton has no pointers to {dtype.name}; expected "
      f"one of {', '.join(_DTYPES)}"
    )
  if parameter.annotation_type:
    raise GateDefinitionError(
      f"{label}: parameter '{parameter.name}' is annotated as a {parameter.annotation_type}, so a "
      "number that is known when the call is traced; expected one (static), got an array"
    )
  aligned = divisible and not (
    parameter.do_not_specialize or getattr(parameter, "do_not_specialize_on_alignment", False)
  )
  return Argument(parameter.name, ("*k" if parameter.is_const else "*") + code, None, aligned)


def scalar(parameter: Any, value: Any, label: str) -> Argument:
  """A number or constant as an argument, specialised as Triton's launcher does it."""
  if parameter.is_constexpr or value is None:
    return Argument(parameter.name, "constexpr", value)
  if not isinstance(value, (bool, int, float, np.generic)):
    raise GateDefinitionError(
      f"{label}: parameter '{parameter.name}': expected an array or a number, or the parameter "
      f"annotated tl.constexpr; got {value!r}"
    )
  special = not parameter.do_not_specialize
  number = value.item() if isinstance(value, np.generic) else value
  whole = isinstance(number, int) and not isinstance(number, bool)
  declared = parameter.annotation_type or ""
  if whole and number == 1 and special and declared[:2] not in ("fp", "bf", "u1"):
    return Argument(parameter.name, "constexpr", 1)
  code = declared or _scalar_type(value)
  if code not in _SCALARS:
    raise GateDefinitionError(
      f"{label}: parameter '{parameter.name}': expected a type among {', '.join(_SCALARS)}, got "
      f"{code}"
    )
  unaligned = getattr(parameter, "do_not_specialize_on_alignment", False)
  divisible = whole and special and not unaligned and number % 16 == 0
  return Argument(parameter.name, code, number, divisible)


def _scalar_type(value: Any) -> str:
  if isinstance(value, np.generic):
    return _DTYPES.get(value.dtype.name, value.dtype.name)
  if isinstance(value, bool):
    return "i1"
  if isinstance(value, float):
    return "fp32"
  if -(2**31) <= value < 2**31:
    return "i32"
  return "u64" if value >= 2**63 else "i64"


def scalar_dtype(argument: Argument) -> Any:
  """The dtype that a scalar lies in memory with."""
  name = _SCALARS[argument.type]
  if name != "bfloat16":
    return np.dtype(name)
  import ml_dtypes

  return np.dtype(ml_dtypes.bfloat16)


def compile_for(
  label: str,
  function: Any,
  arguments: Sequence[Argument],
  options: Mapping[str, Any],
  capability: int,
) -> Compiled:
  """Compiles a JITFunction for a device.

  Args:
    label: of the kernel, for messages.
    function: the JITFunction.
    arguments: one for each parameter.
    options: Triton's, such as num_warps.
    capability: such as 90.

  Raises:
    CompileError: Triton refuses the kernel.
  """
  target = GPUTarget("cuda", capability, 32)
  with _COMPILING:
    try:
      made = triton.compile(_source(function, arguments), target=target, options=dict(options))
    except Exception as error:  # Triton raises many kinds
      text = f"{type(error).__name__}: {error}"
      raise CompileError(
        f"{label}: Triton {triton.__version__} can't compile '{function.__name__}' for sm_"
        f"{capability}: {text}",
        text,
      ) from error
  return _compiled(label, made, arguments)


def _source(function: Any, arguments: Sequence[Argument]) -> Any:
  aligned = [i for i, a in enumerate(arguments) if a.divisible]
  if _old():
    from triton.backends.compiler import AttrsDescriptor  # pyright: ignore

    return ASTSource(
      function,
      {a.name: a.type for a in passed(arguments)},
      constants={a.name: a.value for a in arguments if a.type == "constexpr"},
      attrs=AttrsDescriptor.from_hints(dict.fromkeys(aligned, 16)),
    )
  return ASTSource(
    function,
    {a.name: a.type for a in arguments},
    constexprs={(i,): a.value for i, a in enumerate(arguments) if a.type == "constexpr"},
    attrs={(i,): [["tt.divisibility", 16]] for i in aligned},
  )


def _old() -> bool:
  """Whether this is Triton 3.2, whose compiler takes its source in another form."""
  return tuple(int(part) for part in triton.__version__.split(".")[:2]) < (3, 3)


def _compiled(label: str, made: Any, arguments: Sequence[Argument]) -> Compiled:
  metadata = made.metadata
  if getattr(metadata, "launch_cooperative_grid", False):
    raise GateDefinitionError(
      f"{label}: expected a kernel without launch_cooperative_grid, which callgate's launches "
      "don't have"
    )
  declared = named.entries(made.asm["ptx"]).get(metadata.name)
  wanted = [8 if a.type[0] == "*" else scalar_dtype(a).itemsize for a in passed(arguments)]
  sizes = None if declared is None else [d.size for d in declared]
  more = [] if sizes is None else sizes[len(wanted) :]
  if sizes is None or sizes[: len(wanted)] != wanted or more != [8] * len(more) or len(more) > 2:
    raise CompileError(
      f"{label}: expected that Triton {triton.__version__} makes a kernel with parameters of "
      f"{wanted} bytes and at most two pointers more, got {sizes}; this version is unknown to "
      "callgate",
      "",
    )
  blocks = _cluster(metadata)
  per_block = [
    int(getattr(metadata, f"{name}_scratch_size", 0) or 0) for name in ("global", "profile")
  ]
  return Compiled(
    metadata.name,
    bytes(made.asm["cubin"]),
    str(made.asm["ptx"]).encode() + b"\0",
    int(metadata.num_warps) * 32,
    int(metadata.shared),
    blocks,
    tuple(size * int(np.prod(blocks)) for size in per_block[: len(more)]),
  )


def _cluster(metadata: Any) -> tuple[int, int, int]:
  given = getattr(metadata, "cluster_dims", None)
  if given:
    x, y, z = given
    return int(x), int(y), int(z)
  return int(getattr(metadata, "num_ctas", 1)), 1, 1


def passed(arguments: Sequence[Argument]) -> list[Argument]:
  """The arguments that a launch passes."""
  return [a for a in arguments if a.type != "constexpr"]
