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

# Set once: JAX holds their values. They are defined together, because a new option changes the keys
# of JAX's caches, and programs compiled before would be compiled again.
_engine = tracing.define_enum(
  "callgate_engine", ("callgate", "jax"), "callgate",
  "Engine that runs gates: callgate's FFI runtime, or JAX's own callbacks.",
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
  "callgate_bars",
  NO_BARS,
  "Progress bars for JAX's loops of at least so many steps; -1 for no bars.",
)
_in_jax = {"engine": _engine, "fast_dispatch": _fast_dispatch, "cast": _cast}
# The other options, which `_callgate` sets. Atomic: single steps; at most one entry for each
# option.
_values: dict[str, Any] = dict.fromkeys(("check_writes", "check_memory", "crash_report"), False)
_values |= {"timing": False, "stall_seconds": 0.0, "checks": True, "breakpoints": True}
_lock = threading.RLock()  # a signal handler may set options, too
_open: list[
  _Block
] = []  # open blocks, oldest first. Guarded by _lock; emptied by the ends of blocks
_checks: dict[str, Callable[..., Any]] = {  # for options that are not bool
  "engine": functools.partial(options.choice, allowed=("callgate", "jax")),
  "stall_seconds": functools.partial(options.seconds, zero=True),
}


def engine() -> str:
  """Returns the engine of calls traced now."""
  return _engine.value


def cast() -> bool:
  """Returns True if gates without `cast=` that are traced now cast their results."""
  return bool(_cast.value)


def fast_dispatch() -> bool:
  """Returns True if programs compiled now may use JAX's C++ dispatch."""
  return bool(_fast_dispatch.value)


def installed() -> bool:
  """Returns True if JAX's own callbacks traced now run on callgate's engine."""
  return bool(_installed.value)


def looks(kind: Literal["checks", "breakpoints"]) -> bool:
  """Returns True if such calls evaluate their predicates."""
  return bool(_values[kind])


def switch_installed(on: bool) -> None:
  """Sets the engine of JAX's own callbacks for programs traced from now on."""
  tracing.update_option("callgate_install", on)


class config:
  """Sets options of the process, globally or for a block.

  ```python
  cg.config(engine="jax")              # from here on
  with cg.config(check_writes=True):   # in this block
    step(x)
  ```

  A change of `engine`, `fast_dispatch` or `cast` makes JAX trace programs again.

  Args:
    engine: "callgate", or "jax" to run every gate through JAX's own callbacks: a reference for
      tests, and the way to run on platforms without FFI.
    fast_dispatch: False leaves the dispatch of programs with effects to JAX. By default CPU
      programs whose effects are all callgate's use JAX's C++ dispatch (5 µs a call instead of 50
      µs). Programs with ordered effects use it in processes with one device.
    cast: the default of `cast` for gates: True allows casts of results within a kind, such as
      NumPy's float64 to float32.
    check_writes: True checks each input before and after each call, and raises `InputWriteError` if
      a gate wrote to it through a library without read-only arrays. Slow; for debugging.
    check_memory: True runs kernels on guarded copies of their arrays. It raises `KernelError` if a
      kernel writes outside an array or to an input, leaves elements of a result unwritten, or reads
      uninitialized memory. Pure kernels run two or three times. Slow; for debugging.
    crash_report: True prints the name of a kernel that crashes (SIGSEGV, SIGBUS, SIGFPE, SIGILL or
      SIGABRT), and its arrays' shapes, dtypes and addresses, to stderr. Other handlers, such as
      `faulthandler`'s, run afterwards.
    checks: False makes every `callgate.check` pass, also in compiled programs.
    breakpoints: False makes programs skip every `callgate.breakpoint`, also in compiled programs.
    timing: True measures the time in Python and the time waiting for the GIL; see `callgate.stats`.
    stall_seconds: prints a report to stderr if a call takes longer than this: the gate or kernel,
      the argument shapes, and the stack of every Python thread. 0 turns it off. CUDA kernels have
      no report, because their calls only enqueue work. The environment variable
      `CALLGATE_STALL_SECONDS` sets it too.

  Raises:
    GateDefinitionError: an option has a wrong value.
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
    if self._is_entered:  # entered before
      self._begun.append(_Block(self._given))
    self._is_entered = True
    self._begun[-1].enter()
    return self

  def __exit__(self, *_: object) -> None:
    self._begun.pop().end()


class _Block:
  """The options that a block sets, and their previous values; blocks of threads may overlap."""

  def __init__(self, given: dict[str, Any]) -> None:
    with _lock:
      self._before = {k: _in_jax[k].value if k in _in_jax else _values[k] for k in given}
      _apply(given)

  def enter(self) -> None:
    with _lock:
      _open.append(self)

  def end(self) -> None:
    """Restores each option, unless a later block has set it too; that block then restores it."""
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
  """Lets programs with the effects of gates and taps use JAX's C++ dispatch."""
  cpp_path.start(
    is_free=lambda effect: isinstance(effect, ProgressEffect),
    is_waited_for=lambda effect: isinstance(effect, (GateEffect, HandleEffect)),
    enabled=fast_dispatch,
  )
  execution.start()
