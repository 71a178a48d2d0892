"""The runtime's life in this process: registered at import, ended in phases before Python ends.

Nothing here starts a JAX backend.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import sys
import threading
import time
import traceback
from collections.abc import Callable
from typing import Literal, get_args

import jax

from callgate import _callgate
from callgate._arrays import escape, gpu
from callgate._core import environment, kept, paths, registry
from callgate._core.dtypes import dtypes
from callgate._core.errors import CaptureError, GateTimeoutError, InputWriteError, ResultError
from callgate._core.failures import (
  defer,
  describe_failure,
  keep_consumer_failure,
  kernel_failed,
  kernel_raised,
  print_deferred,
  raise_interrupt,
)
from callgate._jax import dispatch
from callgate._runtime import fence, self_wait
from callgate._runtime.targets import OWN, PARTITIONED, sites
from callgate._sharding import partitioner, tiles

_process = os.getpid()
Phase = Literal["hurry", "leave", "draw", "deliver", "join"]
_at_end: dict[Phase, list[Callable[[float], object]]] = {phase: [] for phase in get_args(Phase)}
# For what comes when others have used the time up: a channel's consumers' close(), a last call.
LAST_SECONDS = 0.05


def _failed(
  exception: BaseException, gate: str, site: str, layout: str, shard: int, run: int, thread: int
) -> str:
  if isinstance(exception, self_wait.Ended):
    return str(exception)
  where = sites.get(site, site)
  return describe_failure(exception, gate, where, tiles.describe(layout, shard), run, thread)


def _kernel_failed(kernel: str, message: str, site: str) -> str:
  return kernel_failed(kernel, message, sites.get(site, site))


def _result_error(gate: str, spec: str, index: int, expected: str, got: str) -> None:
  where = "its return value" if index < 0 else registry.of(gate, spec, "result", index)
  hint = "" if index < 0 else " (results are never cast silently: see cast=True)"
  raise ResultError(f"gate '{gate}': {where}: expected {expected}, got {got}{hint}")


def _input_written(gate: str, spec: str, index: int) -> None:
  raise InputWriteError(
    f"gate '{gate}': {registry.of(gate, spec, 'argument', index)} was written to. Inputs are XLA's "
    "own memory, shared with the rest of the program; declare aliases={input: output} to work in "
    "place"
  )


def thread_stacks() -> str:
  """Every other Python thread's stack, as text."""
  with escape.reading_frames:
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    return "\n".join(
      f"Thread {names.get(ident, 'of XLA or callgate')} ({ident}):\n"
      + "".join(traceback.format_stack(frame))
      for ident, frame in sys._current_frames().items()  # pyright: ignore[reportPrivateUsage]
      if ident != threading.get_ident()
    )


def _stalled(what: str, call: str, timed_out: bool) -> str:
  limit = "its timeout" if timed_out else "stall_seconds"
  report = (
    f"{what} called with {call} has run longer than {limit}.\nPython's threads:\n{thread_stacks()}"
  )
  if not timed_out:
    return f"callgate: {report}"
  return f"[callgate error #{kept.keep(GateTimeoutError(report))}] {report}"


_worker = threading.local()


def _device_worker(begin: bool) -> None:
  """Has JAX use the CPU on this thread, unless told otherwise, until it serves the CPU's programs.

  A GPU's stream waits for the call that the thread is about to make: what the call gave the same
  GPU to do would wait for the call.
  """
  if not begin:
    _worker.scope.close()
    return
  _worker.scope = contextlib.ExitStack()
  for cpu in dispatch.cpu_devices()[:1]:
    _worker.scope.enter_context(jax.default_device(cpu))


def _end() -> None:
  """Before Python ends, in phases; in a fork's child, which has no threads, and on an embedder's
  thread what the runtime has is left alone.
  """
  interrupted = _ends_by_interrupt()
  seconds = environment.seconds("CALLGATE_EXIT_SECONDS", 1 if interrupted else 5)
  _run("hurry", seconds)
  _run("leave", seconds)
  try:
    if os.getpid() == _process and threading.current_thread() is threading.main_thread():
      _let_effects_finish(seconds, interrupted)
      _run("draw", seconds)
      deadline = time.monotonic() + seconds
      _run("deliver", seconds)
      _refuse_calls(deadline, seconds)
  finally:
    _run("join", seconds)


def _run(phase: Phase, seconds: float) -> None:
  for end in _at_end[phase]:
    try:
      end(seconds)
    except BaseException:  # noqa: BLE001 - the program's own error, Ctrl-C must not hide the exit
      traceback.print_exc()


def _let_effects_finish(seconds: float, interrupted: bool) -> None:
  try:
    if interrupted:
      _end_programs(seconds)
    else:
      dispatch.wait_for_effects(seconds)
      dispatch.effects_barrier_alone()
    if not _callgate.drain_devices(seconds):
      print("callgate: not delivered at the end of the program: taps on a GPU", file=sys.stderr)
  except BaseException:  # noqa: BLE001 - as above
    traceback.print_exc()


def _refuse_calls(deadline: float, seconds: float) -> None:
  """From here on handlers return without touching Python; waits for the calls that still run."""
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
    dispatch.wait_for_effects(seconds)
    dispatch.forget_effects()
  finally:
    _callgate.end_programs(False)


def at_end(phase: Phase, end: Callable[[float], object]) -> None:
  """Has `end(seconds)` called before Python ends; seconds: how long it may take.

  The phases come in this order, whatever was registered when:
    hurry: programs still run, and may not wait for ever.
    leave: other processes are told, while their service still runs.
    (The runtime lets effects finish.)
    draw: effects have finished, and calls still come in.
    deliver: what was tapped gets to its consumers, while Python still runs.
    (The runtime refuses further calls, and waits for those that run.)
    join: programs have ended, and threads can.
  """
  _at_end[phase].append(end)


def start() -> None:
  """Registers the FFI targets and hooks; called once by `import callgate`."""
  for code, dtype in dtypes().items():
    _callgate.set_dtype(code, dtype)
  _callgate.set_hooks(
    failed=_failed,
    deferred=defer,
    escaped=escape.settle,
    result_error=_result_error,
    input_written=_input_written,
    stalled=_stalled,
    kernel_failed=_kernel_failed,
    kernel_raised=kernel_raised,
    interrupted=raise_interrupt,
    undefined=registry.undefined,
    device_worker=_device_worker,
    self_wait=self_wait.report,
    stream_as=gpu.stream_as,
    capture_error=CaptureError,
  )
  for platform, targets in _callgate.targets().items():
    for target, handlers in targets.items():
      jax.ffi.register_ffi_target(target, handlers, platform=platform)
      # Unpartitioned after all, where XLA has but one device for it.
      jax.ffi.register_ffi_target(target + PARTITIONED, handlers, platform=platform)
  for target in OWN:
    partitioner.register(target, target + PARTITIONED)
  dispatch.exclude_from_tracebacks(f"{paths.ROOT}{os.sep}")
  if stall := environment.seconds("CALLGATE_STALL_SECONDS", 0):
    _callgate.set_stall_seconds(stall)
  _callgate.set_consumer_failed(keep_consumer_failure)
  dispatch.remember_effects()
  os.register_at_fork(after_in_child=_callgate.abandon_channels)
  os.register_at_fork(after_in_child=_callgate.abandon_devices)
  os.register_at_fork(after_in_child=dispatch.forget_waiters)
  os.register_at_fork(after_in_child=fence.after_fork)
  atexit.register(_end)  # runs before JAX's own, which was registered earlier
