"""The runtime's life in this process: registered at import, closed before the interpreter ends.

Nothing here starts a JAX backend.
"""

from __future__ import annotations

import atexit
import collections
import contextlib
import itertools
import os
import sys
import threading
import time
import traceback
from collections.abc import Callable, Generator, Iterator
from typing import Any

import jax
import ml_dtypes
import numpy as np

from callgate import (
  _callgate,
  _compat,
  _environment,
  _escape,
  _kept,
  _names,
  _partition,
  _self_wait,
  _shards,
)
from callgate.channel import LAST_SECONDS, close_all
from callgate.errors import (
  GateTimeoutError,
  InputWriteError,
  ResultError,
  defer,
  describe_failure,
  keep_consumer_failure,
  kernel_failed,
  kernel_raised,
  print_deferred,
  raise_consumer_errors,
  raise_interrupt,
)

GATE_TARGET = "callgate.gate"
TAP_TARGET = "callgate.tap"
KERNEL_TARGET = "callgate.kernel"
# On CUDA, a kernel with scratch memory, which a graph's replays would not have: never captured.
KERNEL_SCRATCH_TARGET = "callgate.kernel.scratch"
# A call that XLA's partitioner is still to make one of each device has this behind its target.
PARTITIONED = ".partitioned"
GRAPH_TARGET = "callgate.gate.graph"  # on CUDA alone
_OWN = (GATE_TARGET, TAP_TARGET, KERNEL_TARGET, KERNEL_SCRATCH_TARGET, GRAPH_TARGET)
TARGETS: tuple[str, ...] = (*_OWN, *(target + PARTITIONED for target in _OWN))

_counters: collections.Counter[str] = collections.Counter()
_sites: dict[str, str] = {}
_lock = threading.Lock()
_naming = threading.RLock()  # held from the choice of a name until it is taken
_process = os.getpid()
_at_close: list[Callable[[], None]] = []


def unique_name(function: Callable[..., Any], prefix: str = "") -> str:
  """A gate's name when the user gives none: module, qualified name and, from the second, a number.

  Numbers count gates of the same name in order of creation, so that the next run of the program
  gives the same names and finds its compiled programs in the persistent cache.
  """
  return free_name(f"{prefix}{_name_of(function)}")


def _name_of(function: Callable[..., Any]) -> str:
  function = getattr(function, "func", function)  # functools.partial
  module = getattr(function, "__module__", None) or type(function).__module__
  named = getattr(function, "__qualname__", None) or getattr(function, "__name__", None)
  return f"{module}.{named or type(function).__qualname__}"


@contextlib.contextmanager
def name_while_alive(function: Callable[..., Any], prefix: str) -> Generator[str]:
  """A name that nothing alive has; the block registers what is to have it.

  So a program that is lowered anew, when the last one is gone, has the same text, and is found in
  the persistent cache.
  """
  base = f"{prefix}{_name_of(function)}"
  with _naming:
    taken = set(_callgate.registered_names())
    yield next(name for name in _numbered(base) if name not in taken)


def _numbered(base: str) -> Iterator[str]:
  yield base
  for number in itertools.count(1):
    yield f"{base}#{number}"


def free_name(base: str) -> str:
  """`base`, with a number from the second time it is asked for."""
  taken = set(_callgate.registered_names())
  with _lock:
    while True:
      number = _counters[base]
      _counters[base] += 1
      name = base if number == 0 else f"{base}#{number}"
      if name not in taken:
        return name


def remember_site(site: tuple[str, int, str] | None) -> str:
  """A call site as programs hold it: without the directory, so that it is the same everywhere."""
  if site is None:
    return ""
  path, line, function = site
  key = f"{os.path.basename(path)}:{line} ({function})"
  _sites[key] = f'File "{path}", line {line}, in {function}'
  return key


def _failed(
  exception: BaseException, gate: str, site: str, layout: str, shard: int, run: int
) -> str:
  if isinstance(exception, _self_wait.Ended):
    return str(exception)
  where = _sites.get(site, site)
  return describe_failure(exception, gate, where, _shards.describe(layout, shard), run)


def _kernel_failed(kernel: str, message: str, site: str) -> str:
  return kernel_failed(kernel, message, _sites.get(site, site))


def _result_error(gate: str, spec: str, index: int, expected: str, got: str) -> None:
  where = "its return value" if index < 0 else _names.of(gate, spec, "result", index)
  hint = "" if index < 0 else " (results are never cast silently: see cast=True)"
  raise ResultError(f"gate '{gate}': {where}: expected {expected}, got {got}{hint}")


def _input_written(gate: str, spec: str, index: int) -> None:
  raise InputWriteError(
    f"gate '{gate}': {_names.of(gate, spec, 'argument', index)} was written to. Inputs are XLA's "
    "own memory, shared with the rest of the program; declare aliases={input: output} to work in "
    "place"
  )


def thread_stacks() -> str:
  """Every other Python thread's stack, as text."""
  with _escape.reading_frames:
    return "\n".join(_stacks())


def _stacks() -> list[str]:
  names = {thread.ident: thread.name for thread in threading.enumerate()}
  return [
    f"Thread {names.get(ident, 'of XLA or callgate')} ({ident}):\n"
    + "".join(traceback.format_stack(frame))
    for ident, frame in sys._current_frames().items()  # pyright: ignore[reportPrivateUsage]
    if ident != threading.get_ident()
  ]


def _stalled(what: str, call: str, timed_out: bool) -> str:
  limit = "its timeout" if timed_out else "stall_seconds"
  report = (
    f"{what} called with {call} has run longer than {limit}.\nPython's threads:\n{thread_stacks()}"
  )
  if not timed_out:
    return f"callgate: {report}"
  return f"[callgate error #{_kept.keep(GateTimeoutError(report))}] {report}"


def _device_worker() -> None:
  """Has JAX use the CPU on this thread, unless told otherwise.

  A GPU's stream waits for the call that the thread is about to make: what the call gave the same
  GPU to do would wait for the call.
  """
  try:
    cpu = jax.local_devices(backend="cpu")[0]
  except RuntimeError:  # JAX_PLATFORMS leaves it out
    return
  jax.default_device(cpu).__enter__()


def name_gpus() -> None:
  """Tells the runtime the GPUs' ids, where these are not CUDA's own numbers: over processes."""
  if not jax.distributed.is_initialized():
    return
  try:
    gpus = jax.local_devices(backend="cuda")
  except RuntimeError:  # lowered for another machine
    return
  for gpu in gpus:
    _callgate.set_device_id(gpu.local_hardware_id, gpu.id)


def _undefined(name: str) -> bool:
  from callgate.kernel import undefined

  return undefined(name)


def _set_dtypes() -> None:
  for code, name in _callgate.dtype_codes():
    scalar = getattr(ml_dtypes, name, None)
    try:
      dtype = np.dtype(scalar if scalar is not None else name)
    except TypeError:
      continue  # older ml_dtypes lack the newest types; arrays of them can't exist then
    _callgate.set_dtype(code, dtype)


def _close() -> None:
  """Before Python ends: lets effects finish, delivers taps, refuses new calls, waits for the rest.

  In this order: taps are delivered while Python still runs, and after that handlers return without
  touching it.
  """
  if os.getpid() != _process or threading.current_thread() is not threading.main_thread():
    return  # a fork's child, which has none of the threads, or an embedder's thread
  interrupted = _ends_by_interrupt()
  seconds = _environment.seconds("CALLGATE_EXIT_SECONDS", 1 if interrupted else 5)
  try:
    if interrupted:
      _end_programs(seconds)
    else:
      _compat.wait_for_effects(seconds)
      _compat.effects_barrier_alone()
    if not _callgate.drain_devices(seconds):
      print("callgate: not delivered at the end of the program: taps on a GPU", file=sys.stderr)
  except BaseException:  # noqa: BLE001 - the program's own error, Ctrl-C must not hide the exit
    traceback.print_exc()
  for end in _at_close:
    end()
  deadline = time.monotonic() + seconds
  try:
    for line in close_all(seconds):
      print(f"callgate: not delivered at the end of the program: {line}", file=sys.stderr)
    raise_consumer_errors()
  except BaseException:  # noqa: BLE001 - as above
    traceback.print_exc()
  _callgate.watch_exit()  # what comes now comes too late, and is counted
  if print_deferred():
    _callgate.fail_exit()
  # A call that hangs may be a consumer's, which has had its time.
  if not _callgate.shut_down(max(deadline - time.monotonic(), LAST_SECONDS)):
    print(
      f"callgate: {_callgate.active_calls()} call(s) still ran {seconds:g} s after the end of the "
      "program and were abandoned",
      file=sys.stderr,
    )


def _ends_by_interrupt() -> bool:
  """Whether Ctrl-C ends the process: nobody waits for it as for its normal end."""
  last = getattr(sys, "last_exc", getattr(sys, "last_value", None))  # what main was left by
  return isinstance(last, KeyboardInterrupt) or _callgate.interrupted_recently()


def _end_programs(seconds: float) -> None:
  """Ends the programs that run, at their next call; gives up those that make none."""
  _callgate.end_programs(True)
  try:
    _compat.wait_for_effects(seconds)
    _compat.forget_effects()
  finally:
    _callgate.end_programs(False)


def at_close(end: Callable[[], None]) -> None:
  """Has `end` called before Python ends, when effects have finished and calls still come in."""
  _at_close.append(end)


def start() -> None:
  """Registers the FFI targets and hooks; called once by `import callgate`."""
  _set_dtypes()
  _callgate.set_hooks(
    failed=_failed,
    deferred=defer,
    escaped=_escape.settle,
    result_error=_result_error,
    input_written=_input_written,
    stalled=_stalled,
    kernel_failed=_kernel_failed,
    kernel_raised=kernel_raised,
    interrupted=raise_interrupt,
    undefined=_undefined,
    device_worker=_device_worker,
    self_wait=_self_wait.report,
  )
  for platform, targets in _callgate.targets().items():
    for target, handlers in targets.items():
      jax.ffi.register_ffi_target(target, handlers, platform=platform)
      # Unpartitioned after all, where XLA has but one device for it.
      jax.ffi.register_ffi_target(target + PARTITIONED, handlers, platform=platform)
  for target in _OWN:
    _partition.register(target, target + PARTITIONED)
  _compat.exclude_from_tracebacks(os.path.dirname(__file__) + os.sep)
  if stall := _environment.seconds("CALLGATE_STALL_SECONDS", 0):
    _callgate.set_stall_seconds(stall)
  _callgate.set_consumer_failed(keep_consumer_failure)
  _compat.remember_effects()
  os.register_at_fork(after_in_child=_callgate.abandon_channels)
  os.register_at_fork(after_in_child=_callgate.abandon_devices)
  atexit.register(_close)  # runs before JAX's own, which was registered earlier
