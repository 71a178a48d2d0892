"""`callgate.config`: options of the process, set for good or for a block."""

from __future__ import annotations

from types import TracebackType
from typing import Any, Literal

from callgate import _callgate
from callgate._core import options
from callgate._core.effects import GateEffect, ProgressEffect
from callgate._jax import dispatch, tracing

_engine = tracing.define_enum(
  "callgate_engine",
  ("callgate", "jax"),
  "callgate",
  "What runs gates: callgate's FFI runtime, or JAX's own callbacks.",
)
_fast_dispatch = tracing.define_bool(
  "callgate_fast_dispatch", False, "Dispatch programs with io gates through JAX's C++ path."
)
_values: dict[str, Any] = {
  "check_writes": False,
  "check_memory": False,
  "crash_report": False,
  "timing": False,
  "stall_seconds": 0.0,
}
_filtered = False


def engine() -> str:
  """The engine that calls traced now are bound to."""
  return _engine.value


def fast_dispatch() -> bool:
  """Whether effects of io gates are hidden from JAX's dispatch."""
  return _fast_dispatch.value


class config:
  """Sets options now; as a context manager, puts them back at the end of the block.

  ```python
  cg.config(engine="jax")              # from here on
  with cg.config(check_writes=True):   # in this block
    step(x)
  ```

  Args:
    engine: `"callgate"`, or `"jax"` to run every gate through JAX's own callbacks: an oracle for
      tests, and the way to run on platforms without FFI. Programs are traced again after a change.
    fast_dispatch: let programs whose only effects are io gates take JAX's C++ dispatch path (5 µs
      instead of 50 µs a call). `jax.effects_barrier()` then no longer waits for them:
      wait for a result of the program, or use `callgate.barrier()`, which waits for all arrays.
      Programs that return nothing can't be waited for. Ordered gates are not affected.
    check_writes: checksum every input before and after each call, and raise `InputWriteError` when
      a gate wrote to one through a library without read-only arrays. Slow; for debugging.
    check_memory: run kernels on guarded copies of their arrays, and raise `KernelError` where one
      writes outside of an array or into an input, leaves elements of a result unwritten, or reads
      memory that nobody has written. Pure kernels run two or three times. Slow; for debugging.
    crash_report: when the process gets SIGSEGV, SIGBUS, SIGFPE, SIGILL or SIGABRT in a kernel,
      print its name and its arrays' shapes, dtypes and addresses on stderr. The signal then goes to
      whoever handled it before, as `faulthandler`.
    timing: measure time in Python and time waiting for the GIL (`callgate.stats()`).
    stall_seconds: print a report on stderr (gate or kernel, argument shapes, every Python thread's
      stack) when a call takes longer, also one of a kernel that waits for its turn; 0 for never.
      Calls of CUDA kernels only enqueue work, and are not watched. Also `CALLGATE_STALL_SECONDS`.
  """

  def __init__(
    self,
    *,
    engine: Literal["callgate", "jax"] | None = None,
    fast_dispatch: bool | None = None,
    check_writes: bool | None = None,
    check_memory: bool | None = None,
    crash_report: bool | None = None,
    timing: bool | None = None,
    stall_seconds: float | None = None,
  ) -> None:
    given = {
      "engine": engine,
      "fast_dispatch": fast_dispatch,
      "check_writes": check_writes,
      "check_memory": check_memory,
      "crash_report": crash_report,
      "timing": timing,
      "stall_seconds": stall_seconds,
    }
    changes = {name: value for name, value in given.items() if value is not None}
    _check(changes)
    self._before = {name: _current(name) for name in changes}
    _apply(changes)

  def __enter__(self) -> config:
    return self

  def __exit__(
    self,
    kind: type[BaseException] | None,
    error: BaseException | None,
    traceback: TracebackType | None,
  ) -> None:
    _apply(self._before)


def _check(changes: dict[str, Any]) -> None:
  options.choice("config", "engine", changes.get("engine", "jax"), ("callgate", "jax"))
  for name in ("fast_dispatch", "check_writes", "check_memory", "crash_report", "timing"):
    if name in changes:
      changes[name] = options.boolean("config", name, changes[name])  # NumPy's are bools, too
  options.seconds("config", "stall_seconds", changes.get("stall_seconds", 0.0), zero=True)


def _current(name: str) -> Any:
  if name == "engine":
    return _engine.value
  if name == "fast_dispatch":
    return _fast_dispatch.value
  return _values[name]


def start() -> None:
  """Puts fast_dispatch's filter in place once it is on; at import by CALLGATE_FAST_DISPATCH=1."""
  if fast_dispatch():
    filter_dispatch()


def filter_dispatch() -> None:
  """Puts the filter of dispatch effects in place, once for the process."""
  global _filtered
  if not _filtered:
    _filtered = True
    dispatch.filter_dispatch_effects(_keeps_dispatch_slow)


def _apply(changes: dict[str, Any]) -> None:
  for name, value in changes.items():
    if name == "engine":
      tracing.update_option("callgate_engine", value)
    elif name == "fast_dispatch":
      tracing.update_option("callgate_fast_dispatch", value)
      start()
    else:
      _values[name] = value
      _set = {
        "check_writes": _callgate.set_check_writes,
        "check_memory": _callgate.set_check_memory,
        "crash_report": _callgate.set_crash_report,
        "timing": _callgate.set_timing,
        "stall_seconds": _callgate.set_stall_seconds,
      }[name]
      _set(value)


def _keeps_dispatch_slow(effect: Any) -> bool:

  if isinstance(effect, ProgressEffect):
    return False
  return not (fast_dispatch() and isinstance(effect, GateEffect))
