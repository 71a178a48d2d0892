# SPDX-License-Identifier: Apache-2.0
"""Of JAX's Python dispatch: how the programs that keep something of ours are executed."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

from jax._src.interpreters import pxla as _pxla
from jax._src.lib import _jax as _jaxlib  # pyright: ignore[reportPrivateImportUsage, reportPrivateUsage]

from callgate._jax import dispatch

_local = threading.local()


def number_executions(kind: type[Any], execute: Callable[..., Any]) -> None:
  """Programs that keep a `kind` are executed by `execute(kept, run, *args, **kwargs)`.

  It calls `run(*args, **kwargs)`, which numbers the execution (jaxlib 0.10 to 0.12): not before, as
  arguments may be refused. `kept` are the program's own. Such programs take JAX's Python dispatch.
  """
  dispatch.ask_before_execution(kind)
  call = _pxla.ExecuteReplicated.__call__
  executable = _jaxlib.LoadedExecutable
  run = executable.execute_sharded

  def __call__(self: Any, *args: Any) -> Any:
    if not (kept := [one for one in self.keepalive or () if isinstance(one, kind)]):
      return call(self, *args)
    outer, _local.numbered = getattr(_local, "numbered", None), (self.xla_executable, kept)
    try:
      return call(self, *args)
    finally:
      _local.numbered = outer

  def execute_sharded(self: Any, *args: Any, **kwargs: Any) -> Any:
    of, kept = getattr(_local, "numbered", None) or (None, ())
    return execute(kept if of is self else (), run, self, *args, **kwargs)

  _pxla.ExecuteReplicated.__call__ = __call__  # pyright: ignore[reportAttributeAccessIssue]
  executable.execute_sharded = execute_sharded
