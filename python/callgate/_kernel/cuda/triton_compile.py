# SPDX-License-Identifier: Apache-2.0
"""The only module that depends on the installed Triton; tested with versions 3.2 to 3.9.

It compiles under one lock, on the lowering thread, with or without a device. It unwraps the
decorators. `@triton.autotune` has configurations: the fastest is measured if this process has a
device, and kept on disk. `@triton.heuristics` computes values from the arguments.
"""

# pyright: reportMissingImports=false, reportAttributeAccessIssue=false
# These packages need not be installed where types are checked.

from __future__ import annotations

import contextlib
import json
import logging
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.runtime import Autotuner, Heuristics, JITFunction

from callgate._build import cache, files
from callgate._build.nvrtc import CompiledImage
from callgate._core.dtypes import dtype_named
from callgate._core.errors import CompileError, GateDefinitionError, GateError
from callgate._kernel.cuda.kernel import entries
from callgate._kernel.launch import CudaCall

_DTYPES = {
  "bool": "i1", "bfloat16": "bf16",
  **{f"int{bits}": f"i{bits}" for bits in (8, 16, 32, 64)},
  **{f"uint{bits}": f"u{bits}" for bits in (8, 16, 32, 64)},
  **{f"float{bits}": f"fp{bits}" for bits in (16, 32, 64)},
  "float8_e4m3fn": "fp8e4nv", "float8_e4m3fnuz": "fp8e4b8",
  "float8_e5m2": "fp8e5", "float8_e5m2fnuz": "fp8e5b16",
}  # fmt: skip
# The types of scalar parameters.
_SCALARS = {c: n for n, c in _DTYPES.items() if c[:3] != "fp8"} | {"i1": "int8", "u1": "uint8"}
_LOG = logging.getLogger("callgate")
_COMPILING = threading.Lock()
_PRUNING = threading.Lock()  # Triton's autotuner stores the arguments in itself
_ROUNDS, _LAUNCHES = 3, 20
Settings = dict[str, Any]


class TritonArgument(NamedTuple):
  name: str
  type: str  # Triton's type, such as "*fp32" or "i32"; "constexpr" for a constant
  value: Any = None  # the value of a scalar or constant
  divisible: bool = False  # True if the address or integer is a multiple of 16

  @property
  def dtype(self) -> np.dtype[Any]:
    """A scalar's format in memory."""
    return dtype_named(_SCALARS[self.type])


class TritonCompiled(NamedTuple):
  image: CompiledImage  # the image for one capability
  entry: str  # its name in the image
  threads: int  # threads of a block
  shared: int  # bytes of dynamic shared memory
  cluster: tuple[int, int, int]  # blocks of a cluster
  # For each pointer after the user's parameters: bytes for each block of the grid; 0 for null.
  scratch: tuple[int, ...]


def layers(kernel: Any) -> Iterator[Any]:
  """Yields a kernel's decorators, the outermost first, and the JITFunction below, if any."""
  while kernel is not None:
    yield kernel
    kernel = None if isinstance(kernel, JITFunction) else getattr(kernel, "fn", None)


def base_function(kernel: Any) -> Any:
  """Returns the JITFunction below decorators; None for values that are no Triton kernel."""
  return next((layer for layer in layers(kernel) if isinstance(layer, JITFunction)), None)


def automatic(kernel: Any) -> set[str]:
  """Returns the parameters that decorators give values."""
  found: set[str] = set()
  for layer in layers(kernel):
    found.update(layer.values if isinstance(layer, Heuristics) else ())
    found.update(*(c.kwargs for c in layer.configs) if isinstance(layer, Autotuner) else ())
  return found


def pointer(parameter: Any, dtype: np.dtype[Any], label: str, divisible: bool) -> TritonArgument:
  code, what = _DTYPES.get(dtype.name), f"{label}: parameter '{parameter.name}'"
  if code is None:
    fault = f"Triton has no pointers to {dtype.name}; expected one of {', '.join(_DTYPES)}"
    raise GateDefinitionError(f"{what}: {fault}")
  if parameter.annotation_type:
    fault = f"expected a static number, as its annotation {parameter.annotation_type} says"
    raise GateDefinitionError(f"{what}: {fault}, got an array")
  aligned = divisible and _by_alignment(parameter)
  return TritonArgument(parameter.name, ("*k" if parameter.is_const else "*") + code, None, aligned)


def scalar(parameter: Any, value: Any, label: str) -> TritonArgument:
  """Returns a number or constant as an argument, specialized as Triton's launcher does."""
  name, what = parameter.name, f"{label}: parameter '{parameter.name}'"
  if parameter.is_constexpr or value is None:
    return TritonArgument(name, "constexpr", value)
  if not isinstance(value, (bool, int, float, np.generic)):
    expected = "expected an array, a number, or the annotation tl.constexpr"
    raise GateDefinitionError(f"{what}: {expected}; got {value!r}")
  number = value.item() if isinstance(value, np.generic) else value
  whole = isinstance(number, int) and not isinstance(number, bool)
  code = parameter.annotation_type or ""
  one = whole and number == 1 and not parameter.do_not_specialize
  if one and code[:2] not in ("fp", "bf", "u1"):
    return TritonArgument(name, "constexpr", 1)
  if not code and isinstance(value, np.generic):
    code = _DTYPES.get(value.dtype.name, value.dtype.name)
  elif not code and whole:
    code = "i32" if -(2**31) <= number < 2**31 else "u64" if number >= 2**63 else "i64"
  elif not code:
    code = "fp32" if isinstance(value, float) else "i1"
  if code not in _SCALARS:
    expected = f"expected a type among {', '.join(_SCALARS)}"
    raise GateDefinitionError(f"{what}: {expected}, got {code}")
  return TritonArgument(name, code, number, whole and _by_alignment(parameter) and number % 16 == 0)


def _by_alignment(parameter: Any) -> bool:
  unaligned = getattr(parameter, "do_not_specialize_on_alignment", False)
  return not (parameter.do_not_specialize or unaligned)


def compile_for(
  label: str, function: Any, arguments: Sequence[TritonArgument], options: Mapping[str, Any],
  capability: int, *, ptx: bool,
) -> TritonCompiled:  # fmt: skip
  """Compiles a JITFunction for a capability, such as 90; with `ptx` for it and newer devices."""
  target = GPUTarget("cuda", capability, 32)
  with _COMPILING:
    try:
      made = triton.compile(_source(function, arguments), target=target, options=dict(options))
    except Exception as error:  # Triton raises many kinds
      text = f"{type(error).__name__}: {error}"
      what = f"Triton {triton.__version__} can't compile '{function.__name__}' for sm_{capability}"
      raise CompileError(f"{label}: {what}: {text}", text) from error
  metadata = made.metadata
  if getattr(metadata, "launch_cooperative_grid", False):
    fault = "expected a kernel without launch_cooperative_grid, which callgate doesn't support"
    raise GateDefinitionError(f"{label}: {fault}")
  declared = entries(made.asm["ptx"]).get(metadata.name)
  sizes = None if declared is None else [size for size, _ in declared]
  wanted = [8 if a.type[0] == "*" else a.dtype.itemsize for a in passed(arguments)]
  if sizes not in [wanted + [8] * more for more in range(3)]:
    fault = f"expected a kernel by Triton {triton.__version__} with parameters of {wanted}"
    more = (
      f"bytes and at most two more pointers, got {sizes}; callgate doesn't support this version. "
      "pip install 'callgate[triton]' installs one that it supports"
    )
    raise CompileError(f"{label}: {fault} {more}", "")
  cluster = getattr(metadata, "cluster_dims", None) or (getattr(metadata, "num_ctas", 1), 1, 1)
  x, y, z = map(int, cluster)
  of_block = (getattr(metadata, f"{n}_scratch_size", 0) or 0 for n in ("global", "profile"))
  scratch = [int(size) * x * y * z for size in of_block][: len(sizes or ()) - len(wanted)]
  text, code = str(made.asm["ptx"]).encode() + b"\0", bytes(made.asm["cubin"])
  image = CompiledImage(text, 0) if ptx else CompiledImage(code, capability)
  threads, shared = int(metadata.num_warps) * 32, int(metadata.shared)
  return TritonCompiled(image, metadata.name, threads, shared, (x, y, z), tuple(scratch))


def _source(function: Any, arguments: Sequence[TritonArgument]) -> Any:
  aligned = [i for i, a in enumerate(arguments) if a.divisible]
  # Triton 3.2 takes its source in another form.
  if tuple(int(part) for part in triton.__version__.split(".")[:2]) < (3, 3):
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


def passed(arguments: Sequence[TritonArgument]) -> list[TritonArgument]:
  """Returns the arguments that a launch passes."""
  return [a for a in arguments if a.type != "constexpr"]


# -- configurations ------------------------------------------------------------------------------
def candidates(
  label: str, kernel: Any, arguments: Mapping[str, Any], settings: Mapping[str, Any]
) -> list[Settings]:
  """Returns constants and options for a call; `settings` are known beside the arguments."""
  if isinstance(kernel, Heuristics):
    known = dict(settings)
    for name, value in kernel.values.items():
      known[name] = value({**arguments, **known})
    return candidates(label, kernel.fn, arguments, known)
  if not isinstance(kernel, Autotuner):
    return [dict(settings)]
  configs: list[Any] = list(kernel.configs)
  if len(configs) > 1:
    with _PRUNING:
      kernel.nargs = dict(arguments)
      try:
        configs = list(kernel.prune_configs(dict(settings)))
      finally:
        kernel.nargs = None
  if not configs:
    raise GateDefinitionError(
      f"{label}: expected at least one configuration after pruning, got none"
    )
  found: list[Settings] = []
  for config in configs:
    if config.pre_hook is not None:
      why = "a Python function that would run before each launch"
      expected = "use zeroed_outputs= to set results to zero"
      raise GateDefinitionError(
        f"{label}: expected a triton.Config without pre_hook, {why}; {expected}"
      )
    if twice := ", ".join(sorted(config.kwargs.keys() & (settings.keys() | arguments.keys()))):
      fault = f"expected {twice} from @triton.autotune or from the call, got both"
      raise GateDefinitionError(f"{label}: {fault}")
    found += candidates(label, kernel.fn, arguments, {**settings, **config.all_kwargs()})
  return found


def chosen(
  label: str, kernel: Any, function: Any, found: Sequence[Settings], arguments: Mapping[str, Any],
  measure: Callable[[Settings], float] | None,
) -> Settings:  # fmt: skip
  """Returns the fastest candidate, from disk or measured now; without a device the first one."""
  if len(found) == 1:
    return found[0]
  # Triton's tuning key: the arguments named in `key`, all dtypes, and the device.
  tuners = (layer for layer in layers(kernel) if isinstance(layer, Autotuner))
  about = [f"{n}={_text(arguments.get(str(n)))}" for tuner in tuners for n in tuner.keys]
  about += [f"{n}:{v.dtype}" for n, v in arguments.items() if hasattr(v, "dtype")]
  if (device := cuda_device()) is not None:
    about.append(str(device.device_kind))
  settings = [repr(sorted(each.items(), key=lambda item: item[0])) for each in found]
  key = cache.digest([triton.__version__, function.cache_key, about, settings])
  with contextlib.suppress(OSError, ValueError, KeyError, TypeError, RecursionError):
    content = files.read(files.kept_folder("triton", key[:2]) / f"{key}.json")
    best = json.loads(content)["chosen"]
    if isinstance(best, int) and 0 <= best < len(found):
      return found[best]
  if measure is None:
    tried = f"no device to measure the {len(found)} configurations of @triton.autotune"
    _LOG.warning("%s: %s; using the first: %s", label, tried, found[0])
    return found[0]
  times = [measure(settings) for settings in found]
  best = times.index(min(times))
  if times[best] == float("inf"):
    raise GateDefinitionError(
      f"{label}: expected a configuration that runs, but all of them failed"
    )
  finite = [None if seconds == float("inf") else seconds for seconds in times]
  with contextlib.suppress(OSError):
    content = json.dumps({"chosen": best, "seconds": finite}).encode()
    files.write(files.made_folder("triton", key[:2], quiet=True) / f"{key}.json", content)
  _LOG.info("%s: %s takes %.1f µs, the fastest", label, found[best], times[best] * 1e6)
  return found[best]


def _text(value: Any) -> str:
  shape = getattr(value, "shape", None)
  return f"{value.dtype}{list(shape)}" if shape else repr(value)


def cuda_device() -> Any:
  """Returns the device to measure on; None if JAX has none."""
  try:
    return jax.local_devices(backend="cuda")[0]
  except (RuntimeError, IndexError):
    return None


def seconds_of(function: Callable[..., Any], call: CudaCall, device: Any) -> float:
  """Returns the time of a launch with arrays of a call's shapes; infinity if it fails."""
  found: list[float] = []

  def run() -> None:
    try:
      with jax.default_device(device):
        arrays = [jnp.zeros(x.shape, x.dtype) for x in call.operands]
        compiled = jax.jit(function)
        last = jax.block_until_ready(compiled(*arrays))
        for _ in range(_ROUNDS):
          begin = time.perf_counter()
          for _ in range(_LAUNCHES):
            last = compiled(*arrays)
          jax.block_until_ready(last)
          found.append((time.perf_counter() - begin) / _LAUNCHES)
    except (CompileError, GateError, jax.errors.JaxRuntimeError) as error:
      _LOG.info("a configuration that can't be run: %s", error)

  # The lowering thread is inside a trace; this thread is not.
  worker = threading.Thread(target=run, name="callgate-tune")
  worker.start()
  worker.join()
  return min(found, default=float("inf"))
