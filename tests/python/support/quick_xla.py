# SPDX-License-Identifier: Apache-2.0
"""Options with which XLA compiles quickly: for programs whose arithmetic is not what is tested.

`make examples`, `make matrix` and `make soak` run programs with XLA's defaults.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Mapping
from typing import Any

import jax
import pytest
from jax._src.interpreters import mlir

QUICKLY_COMPILED: dict[str, int | bool] = {
  "xla_backend_optimization_level": 0,
  "xla_cpu_parallel_codegen_split_count": 1,
}
if jax.__version_info__ < (0, 11):  # later XLA has no other emitters
  QUICKLY_COMPILED["xla_cpu_use_fusion_emitters"] = False
# How many programs the main thread lowers in one context of MLIR: to make a context takes five
# milliseconds, six times what a small program takes; its constants live as long as itself.
_PROGRAMS_OF_A_CONTEXT = 32


def use() -> None:
  """Has this process compile all programs so."""
  mlir.make_ir_context = _shared(mlir.make_ir_context)
  with pytest.MonkeyPatch.context() as patch:
    patch.setenv("XLA_FLAGS", _flags(os.environ))
    jax.devices()  # reads them


def of_process(variables: Mapping[str, str]) -> dict[str, str]:
  """The variables of another process, which compiles as this one does."""
  if os.environ.get("CALLGATE_TEST_XLA") == "quick":
    return {**variables, "XLA_FLAGS": _flags(variables)}
  return dict(variables)


def _flags(variables: Mapping[str, str]) -> str:
  named = (f"--{name}={str(value).lower()}" for name, value in QUICKLY_COMPILED.items())
  return " ".join(filter(None, [variables.get("XLA_FLAGS"), *named]))


def _shared(make_context: Callable[[], Any]) -> Callable[[], Any]:
  """Makes a context for several programs of the main thread.

  Another thread's programs get their own: a thread's state may end where MLIR's Python objects
  can't be freed.
  """
  number, context = 0, None

  def shared() -> Any:
    nonlocal number, context
    if threading.current_thread() is not threading.main_thread():
      return make_context()
    if number % _PROGRAMS_OF_A_CONTEXT == 0:
      context = make_context()
    number += 1
    return context

  return shared
