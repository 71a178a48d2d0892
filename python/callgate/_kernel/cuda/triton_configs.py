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
  if isinstance(kernel, Autotuner):
    return [
      settled
      for config in _pruned(label, kernel, arguments, settings)
      for settled in candidates(
        label, kernel.fn, arguments, _with_config(label, settings, arguments, config)
      )
    ]
  if isinstance(kernel, Heuristics):
    known = dict(settings)
    for name, value in kernel.values.items():
      known[name] = value({**arguments, **known})
    return candidates(label, kernel.fn, arguments, known)
  return [dict(settings)]


def _pruned(
  label: str, tuner: Any, arguments: Mapping[str, Any], settings: Mapping[str, Any]
) -> list[Any]:
  configs = list(tuner.configs)
  if len(configs) > 1:
    with _PRUNING:
      tuner.nargs = dict(arguments)
      try:
        configs = list(tuner.prune_configs(dict(settings)))
      finally:
        tuner.nargs = None
  if not configs:
    raise GateDefinitionError(f"{label}: expected that pruning leaves a configuration, got none")
  for config in configs:
    if config.pre_hook is not None:
      raise GateDefinitionError(
        f"{label}: got a triton.Config with pre_hook, which is Python that would run before each "
        "launch; expected none. zeroed_outputs= sets results to zero"
      )
  return configs


def _with_config(
  label: str, settings: Mapping[str, Any], arguments: Mapping[str, Any], config: Any
) -> Settings:
  twice = sorted(config.kwargs.keys() & (settings.keys() | arguments.keys()))
  if twice:
    raise GateDefinitionError(
      f"{label}: got {', '.join(twice)} both from @triton.autotune and from the call; expected one"
    )
  return {**settings, **config.all_kwargs()}


def chosen(
  label: str,
  kernel: Any,
  function: Any,
  found: Sequence[Settings],
  arguments: Mapping[str, Any],
  measure: Callable[[Settings], float] | None,
) -> Settings:
  """One of the candidates.

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
  key = cache.digest([
    triton.__version__,
    function.cache_key,
    _tuning_key(kernel, arguments),
    [repr(sorted(settings.items(), key=lambda item: item[0])) for settings in found],
  ])  # fmt: skip
  known = _known(key, len(found))
  if known is not None:
    return found[known]
  if measure is None:
    _LOG.warning(
      "%s: no device to try the %d configurations of @triton.autotune on; taking the first: %s",
      label,
      len(found),
      found[0],
    )
    return found[0]
  times = [measure(settings) for settings in found]
  best = min(range(len(found)), key=times.__getitem__)
  if times[best] == float("inf"):
    raise GateDefinitionError(f"{label}: expected a configuration that runs, got none that does")
  _keep(key, best, times)
  _LOG.info("%s: %s takes %.1f µs, the fastest", label, found[best], times[best] * 1e6)
  return found[best]


def _known(key: str, candidates: int) -> int | None:
  """The candidate that was the fastest when they were tried; None where that is not kept."""
  try:
    content = files.read(files.kept_folder("triton", key[:2]) / f"{key}.json")
    best = json.loads(content)["chosen"]
  except (OSError, ValueError, KeyError, TypeError, RecursionError):
    return None
  return best if isinstance(best, int) and 0 <= best < candidates else None


def _keep(key: str, best: int, times: Sequence[float]) -> None:
  finite = [None if seconds == float("inf") else seconds for seconds in times]
  content = json.dumps({"chosen": best, "seconds": finite}).encode()
  with contextlib.suppress(OSError):
    folder = files.made_folder("triton", key[:2], quiet=True)
    files.write(folder / f"{key}.json", content)


def _tuning_key(kernel: Any, arguments: Mapping[str, Any]) -> list[str]:
  """What Triton tunes by, the arguments named as `key` and all dtypes; and the device."""
  names: list[str] = []
  while kernel is not None and not isinstance(kernel, triton.runtime.JITFunction):
    if isinstance(kernel, Autotuner):
      names += [str(name) for name in kernel.keys]
    kernel = getattr(kernel, "fn", None)
  values = [f"{name}={_text(arguments.get(name))}" for name in names]
  types = [f"{n}:{v.dtype}" for n, v in arguments.items() if hasattr(v, "dtype")]
  return [*values, *types, *_device()]


def _text(value: Any) -> str:
  shape = getattr(value, "shape", None)
  return repr(value) if not shape else f"{value.dtype}{list(shape)}"


def _device() -> list[str]:
  found = cuda_device()
  return [] if found is None else [str(found.device_kind)]


def cuda_device() -> Any:
  """The device to measure on; None where JAX has none."""
  try:
    return jax.local_devices(backend="cuda")[0]
  except (RuntimeError, IndexError):
    return None


def seconds_of(function: Callable[..., Any], call: CudaCall, device: Any) -> float:
  """How long one launch takes, the least of several rounds; infinity for one that fails.

  Args:
    function: the kernel with its settings fixed.
    call: whose shapes the arrays have.
    device: to run on.
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
