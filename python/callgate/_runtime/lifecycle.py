# SPDX-License-Identifier: Apache-2.0
"""The runtime's life in this process: registered at import, shut down in phases before Python ends.

Nothing here starts a JAX backend.
"""

from __future__ import annotations

import contextlib
import functools
import os
import sys
import threading
import traceback
from collections.abc import Callable

import jax

from callgate import _callgate, _part
from callgate._arrays import escape, gpu
from callgate._core import environment, failures, foreign, kept, registry, where
from callgate._core.errors import (
  CaptureError,
  GateError,
  GateTimeoutError,
  InputWriteError,
  Interruption,
  ResultError,
)
from callgate._jax import compiling, dispatch, garbage
from callgate._part import Phase, Wait
from callgate._runtime import fence, self_wait, timeline
from callgate._runtime.targets import traceback_line
from callgate._sharding import tiles

_process = os.getpid()
_started = False  # guarded by _attach._loading
# For steps that come after the time is used up: a consumer's close(), a last call.
LAST_SECONDS = 0.05


def _failed(
  exception: BaseException, gate: str, site: str, layout: str, shard: int, run: int, thread: int,
  lane: str,
) -> str:  # fmt: skip
  if foreign.is_a(exception, self_wait.Ended):
    return str(exception)
  where, part = traceback_line(site), tiles.describe(layout, shard)
  return failures.describe_failure(exception, gate, where, part, run, thread, lane)


def _program_failed(error: BaseException) -> None:
  """Remembers the error of a program that the user's code waits for, not callgate itself."""
  if where.is_users_call():
    kept.see(error)


def _kernel_failed(kernel: str, message: str, site: str, lane: str) -> str:
  return failures.kernel_failed(kernel, message, traceback_line(site), lane)


def _result_error(gate: str, spec: str, index: int, expected: str, got: str) -> None:
  where = "its return value" if index < 0 else registry.of(gate, spec, "result", index)
  hint = "; use gate.start(...) for an async function" if got == "coroutine" else ""
  raise ResultError(f"gate '{gate}': {where}: expected {expected}, got {got}{hint}")


def _input_written(gate: str, spec: str, index: int) -> None:
  what = f"gate '{gate}': {registry.of(gate, spec, 'argument', index)} was written to"
  why = "Inputs are XLA's own memory, shared with the rest of the program"
  raise InputWriteError(f"{what}. {why}; pass aliases={{input: output}} to work in place")


def _stalled(what: str, call: str, timed_out: bool) -> str:
  limit = "its timeout" if timed_out else "stall_seconds"
  with escape.reading_frames:
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    stacks = [
      f"Thread {names.get(ident, 'of XLA or callgate')} ({ident}):\n"
      + "".join(traceback.format_stack(frame))
      for ident, frame in sys._current_frames().items()  # pyright: ignore[reportPrivateUsage]
      if ident != threading.get_ident()
    ]
  head = f"{what} called with {call} has run longer than {limit}.\nPython's threads:"
  report = "\n".join([head, *stacks])
  if not timed_out:
    return f"callgate: {report}"
  return f"[callgate error #{kept.keep(GateTimeoutError(report))}] {report}"


def _closed_thread(name: str) -> None:
  raise GateError(
    f"<callgate.thread({name!r})>: the thread is closed; call it before close(), or make another"
  )


_worker = threading.local()


def _device_worker(begin: bool) -> None:
  """Makes JAX use the CPU on this thread by default, while it serves a GPU's call."""
  # The GPU's stream waits for the call that this thread is about to make. Work that the call gives
  # to the same GPU would wait for the call, which is a deadlock.
  if begin:
    _worker.scope = contextlib.ExitStack()
    for cpu in dispatch.cpu_devices()[:1]:
      _worker.scope.enter_context(jax.default_device(cpu))
  else:
    _worker.scope.close()


def end() -> None:
  """Shuts the runtime down before Python ends; not in a forked child or on an embedder's thread."""
  interrupted = is_interrupted()
  seconds = environment.seconds("CALLGATE_EXIT_SECONDS", 1 if interrupted else 5)
  _run(_ends("hurry"), seconds)
  _run(_ends("leave"), seconds)
  try:
    if os.getpid() == _process and threading.current_thread() is threading.main_thread():
      _run([functools.partial(_let_effects_finish, interrupted)], seconds)
      _run(_ends("draw"), seconds)
      wait = Wait(seconds)
      _run([*_ends("deliver"), _raise_consumer_errors], seconds)
      _refuse_calls(wait)
  finally:
    _run(_ends("join"), seconds)


def is_interrupted() -> bool:
  """Returns True at the end of the process after Ctrl-C, when waits are shorter."""
  return isinstance(_uncaught(), KeyboardInterrupt) or bool(_callgate.interrupted_recently())


def _uncaught() -> BaseException | None:
  """Returns the exception that ended the main module."""
  return getattr(sys, "last_exc", getattr(sys, "last_value", None))


def _run(ends: list[Callable[[Wait], object]], seconds: float) -> None:
  """Runs the functions; each may take `seconds`."""
  for end in ends:
    try:
      end(Wait(seconds))
    except BaseException as error:  # noqa: BLE001 - the program's own, Ctrl-C must not hide the exit
      foreign.print_traceback(error)


def _let_effects_finish(interrupted: bool, wait: Wait) -> None:
  if interrupted:  # programs end at their next call; others are abandoned
    _callgate.end_programs(True)
    try:
      dispatch.wait_for_effects(wait)
      dispatch.forget_effects()
    finally:
      _callgate.end_programs(False)
  else:
    dispatch.wait_for_effects(wait)
    try:
      dispatch.effects_barrier_alone(but=kept.is_seen)
    except Exception as error:
      if str(error) != str(_uncaught()):  # Python has printed that one
        if failures.original_of(error) is not error:  # JAX's own errors keep JAX's exit status
          _callgate.fail_exit()
        raise
    finally:
      dispatch.forget_effects()  # JAX's exit handler would raise the errors again
      # Python's end destroys XLA's client, which then starts no further device of a program. The
      # other devices would wait for it in a collective.
      fence.pass_by(wait)
  if not _callgate.drain_devices(max(wait.left, LAST_SECONDS)):
    print("callgate: not delivered at the end of the program: taps on a GPU", file=sys.stderr)


def _raise_consumer_errors(wait: Wait) -> None:
  """Raises consumers' errors, so that the process exits with status 1, as for a gate's failure."""
  del wait
  try:
    failures.raise_consumer_errors()
  except BaseException:
    _callgate.fail_exit()
    raise


def _refuse_calls(wait: Wait) -> None:
  """Makes handlers return without touching Python from now on; waits for running calls."""
  _callgate.watch_exit()  # counts later records as too late
  if failures.print_deferred():
    _callgate.fail_exit()
  # A hanging call may be a consumer's, whose time is over.
  if not _callgate.shut_down(max(wait.left, LAST_SECONDS)):
    late = f"still ran {wait.seconds:g} s after the end of the program and were abandoned"
    print(f"callgate: {_callgate.active_calls()} call(s) {late}", file=sys.stderr)


def _ends(phase: Phase) -> list[Callable[[Wait], object]]:
  parts = reversed(_part.parts()) if phase == "join" else _part.parts()
  return [functools.partial(part.end, phase) for part in parts]


def _set_main_thread() -> None:
  """Sets the main thread: at import, and in a forked child to the thread that forked."""
  _callgate.set_main_thread(threading.main_thread().ident or 0)


def _forked() -> None:
  for part in _part.parts():
    part.forked()


def start() -> None:
  """Sets the hooks for calls, forks and exit; called once by `_start.py`.

  Raises:
    ImportError: an earlier call stopped halfway, and can't be repeated.
  """
  global _started
  if _started:
    raise ImportError(
      "callgate: its first use in this process was interrupted; start a new process, or restart "
      "the notebook's kernel"
    )
  _started = True
  _callgate.set_hooks(
    failed=_failed, result_error=_result_error, input_written=_input_written, stalled=_stalled,
    kernel_failed=_kernel_failed, device_worker=_device_worker,
    deferred=failures.defer, kernel_raised=failures.kernel_raised,
    interrupted=kept.take_for_main, handled=failures.describe_handled,
    unheard=failures.keep_unheard, escaped=escape.settle,
    self_wait=self_wait.report, stream_as=gpu.stream_as, capture_error=CaptureError,
    closed_thread=_closed_thread,
    profiled=timeline.profiled, interruption=Interruption,
  )  # fmt: skip
  _set_main_thread()
  _callgate.raise_instead(jax.errors.JaxRuntimeError, _program_failed)
  garbage.start()
  if stall := environment.seconds("CALLGATE_STALL_SECONDS", 0):
    _callgate.set_stall_seconds(stall)
  _callgate.set_consumer_failed(failures.keep_consumer_failure)
  abandon = (_callgate.abandon_channels, _callgate.abandon_devices)
  for forget in (*abandon, compiling.after_fork, fence.after_fork, _set_main_thread, _forked):
    os.register_at_fork(after_in_child=forget)
