# SPDX-License-Identifier: Apache-2.0
"""Attaches the runtime to NumPy, JAX and XLA: all that `import callgate` does.

A program of another process may be the first to need callgate. Before that program is compiled, XLA
must know callgate's targets, JAX must know its effects, and JAX's dispatch must be wrapped.
Everything else (`_start.py`) is imported at the first use of a name of the package, when a program
names a gate, and before the first gate, kernel or tap is made by a directly imported module.
"""

from __future__ import annotations

import atexit
import functools
import gc
import importlib
import os
import threading
from types import ModuleType
from typing import Any

import jax

from callgate import _callgate, _part
from callgate._core import dtypes, effects
from callgate._jax import collected, cpp_path, dispatch, early, partitioner, versions
from callgate._runtime import config, targets


def load() -> None:
  """Imports the rest of callgate, once; waits for a thread that is importing it."""
  global _rest
  if _rest is not None:
    return
  with _loading:
    collects = gc.isenabled()
    gc.disable()  # a full collection of JAX's objects takes as long as the import
    try:
      with versions.needs_its_versions():
        module = importlib.import_module("callgate._start")
    finally:
      if collects:
        gc.enable()
    if module.done:  # False while this thread imports it
      _rest = module


def start() -> None:
  """Attaches the runtime; called once by `import callgate`.

  Raises:
    ImportError: `importlib.reload` calls it again.
  """
  global _started
  if _started:
    raise ImportError(
      "importlib.reload(callgate): callgate can be imported only once in a process, because it "
      "changes JAX; start a new process, or restart the notebook's kernel"
    )
  _started = True
  for code, dtype in dtypes.dtypes().items():
    _callgate.set_dtype(code, dtype)
  for platform, handlers_of in _callgate.targets().items():
    for target, handlers in handlers_of.items():
      jax.ffi.register_ffi_target(target, handlers, platform=platform)
      # A partitioned call stays unpartitioned if XLA has only one device for it.
      jax.ffi.register_ffi_target(target + targets.PARTITIONED, handlers, platform=platform)
  for target in targets.OWN:
    # A sharding that the results' users want is passed back to the call unchanged.
    partitioner.register_partitioner(
      target + targets.PARTITIONED, lambda sharding, *_: sharding,
      functools.partial(_partition, target), _infer,
    )  # fmt: skip
  effects.allow()
  _callgate.set_resolver(_define)
  dispatch.exclude_from_tracebacks(f"{os.path.dirname(__file__)}{os.sep}")
  dispatch.remember_effects()
  collected.start()
  dispatch.run_after_failures(effects.OrderedGateEffect)
  config.start()
  _callgate.at_first_callee(_before_first_callee)
  os.register_at_fork(after_in_child=dispatch.forget_waiters)
  os.register_at_fork(after_in_child=cpp_path.after_fork)
  atexit.register(end)  # runs before JAX's own handler, which was registered earlier
  if config.installed():  # by CALLGATE_INSTALL
    load()


_started = False  # set once: by the import of the package
# Held by the first `load`: another thread would take the paused collector for the user's setting.
_loading = threading.RLock()
_rest: ModuleType | None = None  # `_start.py`. Guarded by _loading


def _before_first_callee() -> None:
  load()
  early.adopt()


def end() -> None:
  """Ends the process's runtime; the import of callgate determines its order in `atexit`."""
  if _rest is not None:
    _rest.lifecycle.end()
  else:  # later calls are too late
    _callgate.watch_exit()
    _callgate.shut_down(0.0)


def _define(name: str) -> Any:
  """Returns the gate, kernel or tap of a name in a program; if there is none, all defined names."""
  load()
  from callgate._core import registry

  _part.load_for(name)
  found = registry.defined(name)
  return registry.names_like(name) if found is None else found


def _partition(*asked: Any) -> Any:
  from callgate._sharding import partitioner as ours

  return ours.partition(*asked)


def _infer(*asked: Any) -> Any:
  from callgate._sharding import partitioner as ours

  return ours.infer(*asked)
