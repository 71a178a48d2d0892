# SPDX-License-Identifier: Apache-2.0
"""`callgate.config`: options of the process, set globally or for a block."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable
from typing import Any, Literal

from callgate import _callgate
from callgate._core import options
from callgate._core.effects import GateEffect, HandleEffect, ProgressEffect
from callgate._jax import cpp_path, execution, tracing

# Set once: JAX holds their values. All are here, as a new option changes the keys of JAX's caches:
# what was compiled before would be compiled once more.
_engine = tracing.define_enum(
  "callgate_engine", ("callgate", "jax"), "callgate",
  "What runs gates: callgate's FFI runtime, or JAX's own callbacks.",
)  # fmt: skip
_fast_dispatch = tracing.define_bool(
  "callgate_fast_dispatch", True, "Dispatch programs with effects through JAX's C++ path."
)
_installed = tracing.define_bool(
  "callgate_install",
  False,
  "Run jax.pure_callback, io_callback and debug.callback on callgate's engine (callgate.install).",
)
_cast = tracing.define_bool("callgate_cast", False, "The default of `cast=` of gates.")
NO_BARS = -1
# Set once: JAX holds its values, one for each thread (`_loops/everywhere.py`).
least_steps_of_bars = tracing.define_int(
  "callgate_bars", NO_BARS, "Progress bars for JAX's loops of at least so many steps; -1: none."
)
_in_jax = {"engine": _engine, "fast_dispatch": _fast_dispatch, "cast": _cast}
# The others, which `_callgate` has a setter for. Under the GIL: single steps; at most one entry for
# each option.
_values: dict[str, Any] = dict.fromkeys(("check_writes", "check_memory", "crash_report"), False)
_values |= {"timing": False, "stall_seconds": 0.0, "checks": True, "breakpoints": True}
_lock = threading.RLock()  # a signal's handler may set options, too
_open: list[_Block] = []  # entered, oldest first. Guarded by _lock; emptied by the ends of blocks
_checks: dict[str, Callable[..., Any]] = {  # of what is no bool
  "engine": functools.partial(options.choice, allowed=("callgate", "jax")),
  "stall_seconds": functools.partial(options.seconds, zero=True),
}


def engine() -> str:
  """The engine that calls traced now are bound to."""
  return _engine.value


def cast() -> bool:
  """True if gates without `cast=` that are traced now cast their results."""
  return bool(_cast.value)


def fast_dispatch() -> bool:
  """True if programs that are compiled now take JAX's C++ path where they can."""
  return bool(_fast_dispatch.value)


def installed() -> bool:
  """True if JAX's own callbacks, where they are traced now, run on callgate's engine."""
  return bool(_installed.value)


def looks(kind: Literal["checks", "breakpoints"]) -> bool:
  """True if such calls look at their predicates."""
  return bool(_values[kind])


def switch_installed(on: bool) -> None:
  """For what is traced from now on."""
  tracing.update_option("callgate_install", on)


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
    fast_dispatch: False to leave the dispatch of programs with effects to JAX. By default those
      for the CPU whose effects are callgate's take JAX's C++ path (5 µs a call instead of 50 µs),
      ordered ones where the process has one device. Programs are traced again after a change.
    cast: the default of `cast=` of gates: allow casts of results of the same kind, as of NumPy's
      float64 to float32. Programs are traced again after a change.
    check_writes: checksum every input before and after each call, and raise `InputWriteError` when
      a gate wrote to one through a library without read-only arrays. Slow; for debugging.
    check_memory: run kernels on guarded copies of their arrays, and raise `KernelError` where one
      writes outside of an array or into an input, leaves elements of a result unwritten, or reads
      memory that nobody has written. Pure kernels run two or three times. Slow; for debugging.
    crash_report: on SIGSEGV, SIGBUS, SIGFPE, SIGILL or SIGABRT in a kernel, print its name and its
      arrays' shapes, dtypes and addresses on stderr, before other handlers (`faulthandler`'s).
    checks: False to have every `callgate.check` hold, also in programs that are compiled already.
    breakpoints: False to have programs go on at every `callgate.breakpoint`, likewise.
    timing: measure time in Python and time waiting for the GIL (`callgate.stats()`).
    stall_seconds: print a report on stderr (gate or kernel, argument shapes, every Python thread's
      stack) when a call takes longer, but for CUDA kernels', which only enqueue work; 0 for never.
      Also `CALLGATE_STALL_SECONDS`.
  """

  def __init__(
    self, *, engine: Literal["callgate", "jax"] | None = None, fast_dispatch: bool | None = None,
    cast: bool | None = None, check_writes: bool | None = None, check_memory: bool | None = None,
    crash_report: bool | None = None, checks: bool | None = None, breakpoints: bool | None = None,
    timing: bool | None = None, stall_seconds: float | None = None,
  ) -> None:  # fmt: skip
    given = {k: v for k, v in locals().items() if k != "self" and v is not None}
    given = {k: _checks.get(k, options.boolean)("config", k, v) for k, v in given.items()}
    self._given, self._begun, self._is_entered = given, [_Block(given)], False

  def __enter__(self) -> config:
    if self._is_entered:  # once before
      self._begun.append(_Block(self._given))
    self._is_entered = True
    self._begun[-1].enter()
    return self

  def __exit__(self, *_: object) -> None:
    self._begun.pop().end()


class _Block:
  """Options that are set, and their values before; blocks of several threads may overlap."""

  def __init__(self, given: dict[str, Any]) -> None:
    with _lock:
      self._before = {k: _in_jax[k].value if k in _in_jax else _values[k] for k in given}
      _apply(given)

  def enter(self) -> None:
    with _lock:
      _open.append(self)

  def end(self) -> None:
    """Puts each option back; where a later block has set it too, that block will do so."""
    with _lock:
      later = _open[_open.index(self) + 1 :]
      _open.remove(self)
      for name, value in self._before.items():
        heir = next((block for block in later if name in block._before), None)
        if heir is None:
          _apply({name: value})
        else:
          heir._before[name] = value


def _apply(changes: dict[str, Any]) -> None:
  for name, value in changes.items():
    if name in _in_jax:
      tracing.update_option(f"callgate_{name}", value)
    else:
      _values[name] = value
      getattr(_callgate, f"set_{name}")(value)


def start() -> None:
  """Has programs with gates' and taps' effects take JAX's C++ dispatch path."""
  cpp_path.start(
    is_free=lambda effect: isinstance(effect, ProgressEffect),
    is_waited_for=lambda effect: isinstance(effect, (GateEffect, HandleEffect)),
    enabled=fast_dispatch,
  )
  execution.start()
