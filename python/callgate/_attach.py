# SPDX-License-Identifier: Apache-2.0
"""Attaches the runtime to JAX and XLA: all that `import callgate` does.

A program of another process may be the first to need callgate: XLA has to know its targets and JAX
its effects, and JAX's dispatch is wrapped before that program is compiled. Everything else
(`_start.py`) is imported before the first name of the package is used, before the first of its
other modules is imported, and when a program names a gate.
"""

from __future__ import annotations

import functools
import importlib
import os
import sys
from importlib.abc import MetaPathFinder
from typing import Any

import jax

from callgate import _callgate
from callgate._core.effects import OrderedGateEffect
from callgate._jax import cpp_path, dispatch, early, partitioner
from callgate._runtime import config, targets

_START = "callgate._start"


def load() -> None:
  """Imports the rest of callgate, once for the process; waits for a thread that does."""
  importlib.import_module(_START)


class _BeforeModules(MetaPathFinder):
  """Imports the rest before any of its modules. Finds nothing itself."""

  def __init__(self) -> None:
    self.begun = False

  def find_spec(self, fullname: str, path: Any, target: Any = None) -> None:
    del path, target
    # A thread that comes while another imports goes on: each would wait for a module of the other.
    if fullname.startswith("callgate.") and not self.begun:
      self.begun = True
      load()


def start() -> None:
  """Called once by `import callgate`.

  Raises:
    ImportError: `importlib.reload` calls it again.
  """
  if _before_modules in sys.meta_path:
    raise ImportError(
      "importlib.reload(callgate): expected one import in a process, since the first has changed "
      "JAX; start a new process, or restart the notebook's kernel"
    )
  for platform, handlers_of in _callgate.targets().items():
    for target, handlers in handlers_of.items():
      jax.ffi.register_ffi_target(target, handlers, platform=platform)
      # Unpartitioned after all, where XLA has but one device for it.
      jax.ffi.register_ffi_target(target + targets.PARTITIONED, handlers, platform=platform)
  for target in targets.OWN:
    # What users of the results ask for goes back to the call as it is.
    partitioner.register_partitioner(
      target + targets.PARTITIONED, lambda sharding, *_: sharding,
      functools.partial(_partition, target), _infer,
    )  # fmt: skip
  _callgate.set_resolver(_define)
  dispatch.exclude_from_tracebacks(f"{os.path.dirname(__file__)}{os.sep}")
  dispatch.remember_effects()
  dispatch.run_after_failures(OrderedGateEffect)
  config.start()
  early.start()
  os.register_at_fork(after_in_child=dispatch.forget_waiters)
  os.register_at_fork(after_in_child=cpp_path.after_fork)
  sys.meta_path.insert(0, _before_modules)
  if config.installed():  # by CALLGATE_INSTALL
    load()


_before_modules = _BeforeModules()


def _define(name: str) -> bool:
  """True if a name in a program is defined now."""
  from callgate._core import registry

  return registry.undefined(name)


def _partition(*asked: Any) -> Any:
  from callgate._sharding import partitioner as ours

  return ours.partition(*asked)


def _infer(*asked: Any) -> Any:
  from callgate._sharding import partitioner as ours

  return ours.infer(*asked)
