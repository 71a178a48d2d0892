# SPDX-License-Identifier: Apache-2.0
"""`callgate.stop`, `stop_requested` and `stop_reason`: programs that end early.

A program that checks for requests counts them from its dispatch on, and stops at later ones. So
each such program has a callee of its own in the runtime, which gets notified of each dispatch.
"""

from __future__ import annotations

import dataclasses
import threading
from typing import Any

import jax
import numpy as np

from callgate import _callgate, _part
from callgate._call.function import ArrayFunction
from callgate._call.site import Call, Emission
from callgate._core import options, registry
from callgate._jax import execution
from callgate._part import Part, joins
from callgate._steer.cell import CellGate, agreed

_NAME = "callgate.stop"
_reason: str | None = None  # atomic: one assignment
# Stops of programs of other processes. Guarded by _lock; never emptied: one entry for each stop
# that a loaded program names, since no event reports the program's end.
_found: dict[str, _callgate.Stop] = {}
_lock = threading.Lock()


class _Dispatches(execution.Watcher):
  """Tells a program's stop, or a program that uses JAX's callbacks, of its executions."""

  def __init__(self, stop: _callgate.Stop | None = None) -> None:
    self.stop, self.requests = stop, 0

  def before(self, devices: Any) -> None:
    del devices
    self.requests = _callgate.stop_requests()


class _Asking(CellGate):
  """The gate behind `stop_requested`."""

  def __init__(self) -> None:
    self.watcher_of_jax = _Dispatches()
    super().__init__(_NAME, self._ask_on_host, np.bool_)

  def _ask_on_host(self) -> Any:
    return np.bool_(_callgate.stop_requests() != self.watcher_of_jax.requests)

  def cell(self) -> _callgate.Stop:
    return _callgate.Stop(registry.free_name(_NAME))

  def _emission(self, call: Call, *, on_cuda: bool) -> Emission:
    emission = super()._emission(call, on_cuda=on_cuda)
    return dataclasses.replace(emission, watcher=_Dispatches(emission.callee))


@_part.once
def _asking() -> ArrayFunction[..., Any]:
  return ArrayFunction(_Asking())


def stop(reason: str = "") -> None:
  """Asks all running and waiting programs that check for it to stop.

  Call it in any thread, in a tap's consumer, or in a signal handler. A program checks by
  `stop_requested`, or by a `scan` with `stoppable=True`. A call of `stop` affects only programs
  that were dispatched before it.

  ```python
  import callgate as cg, jax, jax.numpy as jnp

  def watch(loss):
    if loss < 1e-3:
      cg.stop("the loss is small enough")

  def step(x, _):
    x = x - 0.1 * 2 * x
    cg.tap(x * x, watch)
    return x, x

  train = jax.jit(lambda x: cg.scan(step, x, length=1_000_000, stoppable=True))
  x, xs, steps = train(1.0)
  assert steps < 1_000_000 and x * x < 1e-3
  assert cg.stop_reason() == "the loss is small enough"
  ```

  In a multi-host program that XLA partitions, only calls in process 0 have an effect. Inside
  `jax.shard_map` a call stops only its own process.

  Args:
    reason: the text that `stop_reason` returns from then on.

  Raises:
    GateDefinitionError: the reason isn't a string.
  """
  global _reason
  _reason = options.text("stop", "reason", reason)
  _callgate.request_stop()


def stop_reason() -> str | None:
  """Returns the reason of the last `stop`; None before the first.

  ```python
  import callgate as cg

  cg.stop("time is up")
  assert cg.stop_reason() == "time is up"
  ```
  """
  return _reason


def stop_requested() -> jax.Array:
  """True if `stop` has been called since the program was dispatched.

  ```python
  import callgate as cg, jax

  @jax.jit
  def wait(n):
    return jax.lax.while_loop(lambda i: (i < n) & ~cg.stop_requested(), lambda i: i + 1, 0)

  assert wait(10) == 10
  ```

  A check takes a fraction of a microsecond. On several devices all get the same answer at the same
  check, so their loops end together. Outside compiled code the result is always False.

  Returns:
    A bool of shape ().
  """
  return agreed(_asking()())


@joins("stops")
class Stops(Part):
  """Defines the stops of programs of other processes."""

  def define(self, name: str) -> Any:
    if name != _NAME and not name.startswith(f"{_NAME}#"):
      return None
    with _lock:
      if name not in _found and not _callgate.is_registered(name):
        _found[name] = _callgate.Stop(name)
    return _asking()
