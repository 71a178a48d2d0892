# SPDX-License-Identifier: Apache-2.0
"""`callgate.workers`: processes that gates run in."""

from __future__ import annotations

import itertools
import json
import os
import pickle
import subprocess
import sys
import threading
import uuid
import weakref
from collections.abc import Callable, Mapping
from typing import Any, Self

import jax

from callgate import _callgate
from callgate._core import options
from callgate._core.errors import GateDefinitionError, WorkerError
from callgate._core.public import Closing, Public, Uncopied, core
from callgate._part import Part, Phase, Wait, joins
from callgate._places import travel
from callgate._places.place import Place
from callgate._places.remote import Description, WorkerGate

# By their keys. Atomic: single steps, but for those of another process, by _placing.
_live: weakref.WeakValueDictionary[str, Workers] = weakref.WeakValueDictionary()
# By their names in programs. Guarded by _placing.
_places: weakref.WeakValueDictionary[str, Workers] = weakref.WeakValueDictionary()
_numbers = itertools.count()
_placing = threading.Lock()
_SECONDS = 5.0  # seconds that a worker gets to finish its call


class WorkerPlace(Uncopied, Place):
  """The core of `Workers`: the runtime's pool of processes, made at its first use.

  Attributes:
    count: the number of processes.
    key: a key that is unique over all processes.
  """

  is_here, takes = False, ("retries", "affinity")
  arrays = ("numpy", "buffer", "jax", "torch")

  def __init__(
    self,
    count: int,
    initializer: Callable[[], Any] | None,
    env: Mapping[str, str],
    key: str | None = None,
  ) -> None:
    self.count, self.key = count, key or uuid.uuid4().hex
    self.initializer, self.env = initializer, dict(env)
    self.as_held: str | None = None  # see `name_of`; guarded by _placing
    self.running: Any = None  # the pool, once it has been started
    self._lock = threading.Lock()
    self._closed = False
    self._process = os.getpid()

  def __repr__(self) -> str:
    return f"<callgate.workers({self.count})>"

  def bind(self, gate: Any) -> tuple[WorkerGate, Any]:
    remote = WorkerGate(gate.label, Description.of(gate), gate.run_on, gate.timeout)
    in_order = gate.effect == "ordered" and gate.affinity is None
    return remote, remote.callee(gate.name, gate.retries, in_order, gate.affinity == "lane")

  def pool(self) -> Any:
    with self._lock:
      if self._closed:
        raise WorkerError(
          f"{self!r}: the workers are closed; call them before close(), or make others"
        )
      if self.running is None:
        self.running = _callgate.WorkerPool(*self._command(), self._start_text(), self.count)
      return self.running

  def end(self, seconds: float) -> None:
    if os.getpid() != self._process:  # in a fork's child they belong to the parent
      return
    with self._lock:
      self._closed, pool = True, self.running
    if pool is not None:
      pool.close(seconds)

  def _command(self) -> tuple[list[str], list[str]]:
    flags: list[str] = subprocess._args_from_interpreter_flags()  # pyright: ignore
    path = json.dumps([os.getcwd() if one == "" else one for one in sys.path])
    code = (
      "import json, sys; sys.path[:] = json.loads(sys.argv.pop(1)); "
      "from callgate._places.worker import main; main(*map(int, sys.argv[1:]))"
    )
    environment = {**os.environ, **self.env}
    if "JAX_PLATFORMS" not in self.env:  # the GPU belongs to the parent
      environment["JAX_PLATFORMS"] = "cpu"
    texts = [f"{name}={value}" for name, value in environment.items()]
    return [sys.executable, *flags, "-c", code, path], texts

  def _start_text(self) -> bytes:
    initializer = self.initializer
    by = f"{self!r}: initializer"
    return pickle.dumps(
      {
        "jax": {"jax_enable_x64": bool(jax.config.read("jax_enable_x64"))},
        "initializer": None if initializer is None else travel.dumps(by, initializer),
      }
    )


class Workers(Public[WorkerPlace], Closing):
  """A pool of worker processes for gates; made by `callgate.workers`.

  The processes start when the first call is traced, or by `start()` or a `with` block. They end
  with `close()`, with the block, or with this process, even if it is killed.
  """

  _makers = "callgate.workers"

  def __init__(self, core: WorkerPlace) -> None:
    super().__init__(core)
    _live[core.key] = self

  @property
  def count(self) -> int:
    """The number of processes."""
    return self._core.count

  def __reduce__(self) -> Any:
    core = self._core
    return _in_another, (core.key, core.count, core.initializer, core.env)

  def __repr__(self) -> str:
    return repr(self._core)

  def start(self) -> Self:
    """Starts the processes, unless they run already, without waiting for them."""
    self._core.pool()
    return self

  def close(self) -> None:
    """Ends the processes; running calls have 5 seconds to finish. Later calls fail."""
    self._core.end(_SECONDS)

  @property
  def pids(self) -> list[int]:
    """The process ids of the running workers, in the workers' order."""
    return [] if self._core.running is None else self._core.running.pids()

  @property
  def replaced(self) -> int:
    """The number of workers that have ended and been replaced."""
    return 0 if self._core.running is None else self._core.running.replaced()

  def __enter__(self) -> Self:
    return self.start()


def _in_another(key: str, count: int, initializer: Any, env: Mapping[str, str]) -> Workers:
  """Makes such workers in a process that got one of their gates; a call there starts them."""
  with _placing:
    return _live.get(key) or Workers(WorkerPlace(count, initializer, env, key))


def name_of(held: Workers) -> str:
  """Returns the name by which programs refer to workers with objects.

  The name is unique in this process. The next process gives it to the workers that it makes in the
  same order.
  """
  with _placing:
    identity = core(held)
    if identity.as_held is None:
      identity.as_held = "processes" if held is _shared else f"workers #{next(_numbers)}"
      _places[identity.as_held] = held
    return identity.as_held


def at_place(place: str) -> Workers | None:
  """Returns the live workers of a name in programs, or None."""
  return _places.get(place)


def workers(
  count: int | None = None,
  *,
  initializer: Callable[[], Any] | None = None,
  env: Mapping[str, str] | None = None,
) -> Workers:
  """Makes a pool of Python processes for gates: `cg.gate(f, run_on=workers)`.

  ```python
  import callgate as cg, jax, jax.numpy as jnp, numpy as np

  with cg.workers(2) as processes:
    norm = cg.gate(lambda x: np.linalg.norm(x), out=jax.ShapeDtypeStruct((), "float32"),
                   run_on=processes)
    assert jax.jit(jax.vmap(norm))(jnp.eye(4)).tolist() == [1.0] * 4
  ```

  The processes are spawned, never forked, and stay for all later calls. Several gates may share
  them. Arrays go through shared memory, without this process's GIL.

  Args:
    count: the number of processes. Default: the number of CPUs that this process may use.
    initializer: a function that each process calls before anything else. It is sent like the
      functions of gates.
    env: environment variables of the processes, in addition to this process's. JAX in the processes
      uses the CPU only, unless `env` says otherwise.

  Returns:
    `Workers`, also a context manager.

  Raises:
    GateDefinitionError: an option is wrong.
  """
  what = "workers"
  known = options.or_none(options.count, what, "count", count, least=1, most=1024)
  options.or_none(options.function, what, "initializer", initializer)
  given = options.named(what, "env", env)
  for name, value in given.items():
    if not isinstance(value, str) or "\0" in value or "\0" in name or "=" in name or not name:
      raise GateDefinitionError(
        f"workers: env: expected a mapping of names to strings, got {name!r}: {value!r}"
      )
    options.text(what, "env", name)
    options.text(what, "env", value)
  return Workers(WorkerPlace(known or usable_cpus(), initializer, given))


def usable_cpus() -> int:
  """Returns the number of CPUs that this process may use."""
  return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


_shared: Workers | None = None  # guarded by _placing


def shared() -> Workers:
  """Returns the workers of `run_on="processes"`."""
  global _shared
  with _placing:
    if _shared is None:
      _shared = Workers(WorkerPlace(usable_cpus(), None, {}))
    return _shared


@joins("workers")
class Pools(Part):
  """Ends the worker processes."""

  def end(self, phase: Phase, wait: Wait) -> None:
    for each in _live.valuerefs() if phase == "join" else ():
      if (one := each()) is not None:
        core(one).end(wait.left)
