# SPDX-License-Identifier: Apache-2.0
"""The executions of compiled programs: the only place that wraps them (JAX 0.10 to 0.12).

JAX has no public hook at an execution. `start` wraps each function below once; a row lists the
layers from the outside in.

| function of JAX | layers |
|---|---|
| `ExecuteReplicated.__init__` | watchers, signs (`cpp_path`) |
| `ExecuteReplicated.__call__` | `Watcher.before`, signs and turns (`cpp_path`), `Watcher.waits` |
| `LoadedExecutable.execute_sharded` | `Watcher.stop` |
| `MeshExecutable.create_cpp_call` | ordered effects, signs (`cpp_path`) |
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Sequence
from typing import Any

from jax._src.interpreters import pxla as _pxla
from jax._src.lib import _jax as _jaxlib  # pyright: ignore[reportPrivateImportUsage, reportPrivateUsage]

from callgate import _callgate
from callgate._jax import cpp_path, dispatch, lowering


class Watcher:
  """Takes part in the executions of each program that keeps it.

  The program uses JAX's Python dispatch and returns a runtime token, like programs with effects.

  Attributes:
    stop: a callee of the runtime that gets the number of each execution before it begins, but after
      JAX has accepted the arguments. None for no such callee.
    waits: True if a program must end before its dispatch returns. XLA's CPU client runs programs
      with JAX's own callbacks in this way. The program must have effects, and so a token. An error
      stays with the program's values and tokens.
  """

  stop: _callgate.Stop | None = None
  waits = False

  def before(self, devices: Sequence[Any]) -> None:
    """Runs before each execution on `devices`. Its exceptions reach the program's caller."""


def watch(context: Any, watcher: Watcher | None) -> None:
  """Makes the program being lowered keep a watcher, except for `jax.export`, which can't."""
  if watcher is not None and not lowering.is_export(context):
    lowering.add_keepalive(context, watcher)


def is_watched(compiled: Any) -> bool:
  """Returns True if a compiled program's watchers keep it off JAX's C++ dispatch."""
  program = getattr(getattr(compiled, "_executable", None), "unsafe_call", None)
  return not all(watcher.waits for watcher in _watchers(program))


def _watchers(program: Any) -> list[Watcher]:
  return [kept for kept in getattr(program, "keepalive", None) or () if isinstance(kept, Watcher)]


def start() -> None:
  """Wraps JAX's functions, once for the process."""
  local = threading.local()
  init, call = _pxla.ExecuteReplicated.__init__, _pxla.ExecuteReplicated.__call__
  execute = _jaxlib.LoadedExecutable.execute_sharded
  make_cpp_call = _pxla.MeshExecutable.create_cpp_call

  def __init__(
    self: Any, xla_executable: Any, name: Any, backend: Any, in_handler: Any, out_handler: Any,
    unordered_effects: list[Any], *args: Any, **kwargs: Any,
  ) -> None:  # fmt: skip
    given = in_handler, out_handler, unordered_effects
    init(self, xla_executable, name, backend, *given, *args, **kwargs)
    cpp_path.note_loaded(self, out_handler, unordered_effects)
    if not all(watcher.waits for watcher in _watchers(self)):
      self.has_unordered_effects = True

  def call_and_wait(self: Any, *args: Any) -> Any:
    out = call(self, *args)
    if any(watcher.waits for watcher in _watchers(self)):
      for value in (*out, *dispatch.own_tokens()):
        with contextlib.suppress(Exception):  # the waits for the program raise it
          value.block_until_ready()
    return out

  def __call__(self: Any, *args: Any) -> Any:
    if not (watchers := _watchers(self)):
      return cpp_path.run(call, self, args)
    for watcher in watchers:
      watcher.before(self._local_devices)
    stops = [watcher.stop for watcher in watchers if watcher.stop is not None]
    outer, local.dispatched = getattr(local, "dispatched", None), (self.xla_executable, stops)
    try:
      return cpp_path.run(call_and_wait, self, args)
    finally:
      local.dispatched = outer

  def execute_sharded(self: Any, *args: Any, **kwargs: Any) -> Any:
    program, stops = getattr(local, "dispatched", None) or (None, ())
    if program is not self or not stops:
      return execute(self, *args, **kwargs)
    return _callgate.run_dispatched(stops, execute, self, *args, **kwargs)

  def create_cpp_call(self: Any, params: Any) -> Any:
    # JAX checks only for host callbacks, because its own ordered effects belong to them. With other
    # ordered effects, a compiled program would get no token from its second call on.
    if getattr(self.unsafe_call, "ordered_effects", None):
      return None
    return cpp_path.make_cpp_call(make_cpp_call, self, params)

  _pxla.ExecuteReplicated.__init__ = __init__
  _pxla.ExecuteReplicated.__call__ = __call__  # pyright: ignore[reportAttributeAccessIssue]
  _jaxlib.LoadedExecutable.execute_sharded = execute_sharded
  _pxla.MeshExecutable.create_cpp_call = create_cpp_call
