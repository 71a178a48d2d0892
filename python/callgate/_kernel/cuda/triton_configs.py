"""Which configuration of an autotuned Triton kernel a call gets.

Triton's decorators are taken apart: `@triton.autotune` names configurations, `@triton.heuristics`
computes values from the arguments. Where this process has a device, each configuration is launched
on it, by callgate, with arrays of the call's shapes, and the fastest is kept on disk; elsewhere the
first that the pruning leaves is taken, and a log message says so. Runs on the lowering thread; the
launches are made by a thread of their own, outside the trace.
"""

# pyright: reportMissingImports=false, reportAttributeAccessIssue=false
# What is imported here need not be installed where types are checked.

from __future__ import annotations

import contextlib
import json
import logging
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import triton
from triton.runtime import Autotuner, Heuristics

from callgate._build import cache, files
from callgate._core.errors import CompileError, GateDefinitionError, GateError
from callgate._kernel.cuda.triton_compile import layers
from callgate._kernel.program import CudaCall

_LOG = logging.getLogger("callgate")
_PRUNING = threading.Lock()  # Triton's autotuner keeps the arguments in itself
_ROUNDS, _LAUNCHES = 3, 20
Settings = dict[str, Any]


def candidates(
  label: str, kernel: Any, arguments: Mapping[str, Any], settings: Mapping[str, Any]
) -> list[Settings]:
  """The settings (constants of the kernel and options of its compilation) that a call may take.

  Args:
    label: of the kernel, for messages.
    kernel: as the user's decorators made it.
    arguments: of the call, by name; types for arrays.
    settings: what is known beside.
  """
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
    raise GateDefinitionError(f"{label}: expected that pruning leaves a configuration, got none")
  found: list[Settings] = []
  for config in configs:
    if config.pre_hook is not None:
      raise GateDefinitionError(
        f"{label}: got a triton.Config with pre_hook, which is Python that would run before each "
        "launch; expected none. zeroed_outputs= sets results to zero"
      )
    twice = sorted(config.kwargs.keys() & (settings.keys() | arguments.keys()))
    if twice:
      raise GateDefinitionError(
        f"{label}: got {', '.join(twice)} both from @triton.autotune and from the call; expected "
        "one"
      )
    found += candidates(label, kernel.fn, arguments, {**settings, **config.all_kwargs()})
  return found


def chosen(
  label: str,
  kernel: Any,
  function: Any,
  found: Sequence[Settings],
  arguments: Mapping[str, Any],
  measure: Callable[[Settings], float] | None,
) -> Settings:
  """One of the candidates: the fastest, as it is kept on disk or measured now, else the first.

  Args:
    label: of the kernel.
    kernel: as the user's decorators made it.
    function: the JITFunction below them.
    found: the candidates.
    arguments: of the call, by name.
    measure: seconds of a launch with some settings; None where there is no device.
  """
  if len(found) == 1:
    return found[0]
  # What Triton tunes by: the arguments named as `key`, all dtypes, and the device.
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
    _LOG.warning(
      "%s: no device to try the %d configurations of @triton.autotune on; taking the first: %s",
      label, len(found), found[0],
    )  # fmt: skip
    return found[0]
  times = [measure(settings) for settings in found]
  best = min(range(len(found)), key=times.__getitem__)
  if times[best] == float("inf"):
    raise GateDefinitionError(f"{label}: expected a configuration that runs, got none that does")
  finite = [None if seconds == float("inf") else seconds for seconds in times]
  with contextlib.suppress(OSError):
    content = json.dumps({"chosen": best, "seconds": finite}).encode()
    files.write(files.made_folder("triton", key[:2], quiet=True) / f"{key}.json", content)
  _LOG.info("%s: %s takes %.1f µs, the fastest", label, found[best], times[best] * 1e6)
  return found[best]


def _text(value: Any) -> str:
  shape = getattr(value, "shape", None)
  return repr(value) if not shape else f"{value.dtype}{list(shape)}"


def cuda_device() -> Any:
  """The device to measure on; None where JAX has none."""
  try:
    return jax.local_devices(backend="cuda")[0]
  except (RuntimeError, IndexError):
    return None


def seconds_of(function: Callable[..., Any], call: CudaCall, device: Any) -> float:
  """How long a launch with arrays of a call's shapes takes, the least of several rounds.

  `function` is the kernel with its settings fixed. Infinity for one that fails.
  """
  found: list[float] = []

  def run() -> None:
    try:
      with jax.default_device(device):
        arrays = [jnp.zeros(x.shape, x.dtype) for x in call.operands]
        compiled = jax.jit(function)
        jax.block_until_ready(compiled(*arrays))
        for _ in range(_ROUNDS):
          begin = time.perf_counter()
          last: Any = None
          for _ in range(_LAUNCHES):
            last = compiled(*arrays)
          jax.block_until_ready(last)
          found.append((time.perf_counter() - begin) / _LAUNCHES)
    except (CompileError, GateError, jax.errors.JaxRuntimeError) as error:
      _LOG.info("a configuration that can't be run: %s", error)

  # The lowering thread is inside a trace; this one is not.
  worker = threading.Thread(target=run, name="callgate-tune")
  worker.start()
  worker.join()
  return min(found, default=float("inf"))
