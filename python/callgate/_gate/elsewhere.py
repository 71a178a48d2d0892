# SPDX-License-Identifier: Apache-2.0
"""Gates that run in other processes: what stands for them in this one."""

from __future__ import annotations

from typing import Any, NoReturn, cast

from callgate import _callgate
from callgate._core.errors import GateDefinitionError
from callgate._workers import objects
from callgate._workers.executors import OnExecutor
from callgate._workers.remote import Description, Remote
from callgate._workers.workers import Workers


def callee(gate: Any, retries: int, in_flight: int | None) -> tuple[Remote | OnExecutor, Any]:
  """Returns the gate's function for other processes, and the runtime's handle on it."""
  described = Description(
    gate.name, gate.function, gate.style, gate.arrays, gate.copy, gate.parameters
  )
  in_order = gate.effect == "ordered" and gate.affinity is None
  if not isinstance(gate.run_on, Workers):
    on = OnExecutor(
      gate.label, described, gate.run_on, timeout=gate.timeout, in_flight=in_flight,
      in_order=in_order, aliases=gate.aliases, retries=retries,
    )  # fmt: skip
    return on, _callgate.ExecutorCallee(gate.name, on.run)
  remote = Remote(gate.label, described, gate.run_on, gate.timeout)
  by_lane = gate.affinity == "lane"
  return remote, on_workers(remote, gate.name, retries=retries, in_order=in_order, by_lane=by_lane)


def on_workers(remote: Remote, name: str, *, retries: int, in_order: bool, by_lane: bool) -> Any:
  """The runtime's handle on a function of workers."""
  seconds = remote.timeout
  return _callgate.WorkerCallee(
    name, start=remote.start, describe=remote.describe, failed=remote.failed, timeout=seconds,
    loading=remote.loading, retries=retries, in_order=in_order,
    by_lane=by_lane,
  )  # fmt: skip


# -- classes ---------------------------------------------------------------------------------------
def has_objects(function: Any, run_on: Any) -> bool:
  """True for a class whose objects are to live in workers."""
  on_workers = isinstance(run_on, Workers) or (isinstance(run_on, str) and run_on == "processes")
  return on_workers and objects.class_of(function) is not None


def outs_by_method(kind: type, out: Any) -> dict[str, Any] | None:
  """The results of each method, where `out` is a dictionary of them."""
  if type(out) is not dict or not out:
    return None
  given = cast("dict[Any, Any]", out)
  methods = all(isinstance(name, str) and callable(getattr(kind, name, None)) for name in given)
  return given if methods else None


def refuse_hidden(made: Any, out: Any, own: set[str]) -> None:
  """Raises where `out` names a method that a name of a gate's own hides."""
  kind: Any = objects.class_of(made)
  if hidden := sorted(own & (outs_by_method(kind, out) or {}).keys()):
    raise GateDefinitionError(
      f"gate of {kind.__qualname__}: out names the method '{hidden[0]}', and gates have such a "
      f"name of their own; expected none of {', '.join(sorted(own))}: a subclass may call it by "
      "another name"
    )


def no_results(kind: type, method: str, *_: Any, **__: Any) -> NoReturn:
  """The results of a method that `out` does not name."""
  raise GateDefinitionError(
    f"gate of {kind.__qualname__}: the results of '{method}' are not known; expected "
    f"out={{..., {method!r}: ...}}"
  )
