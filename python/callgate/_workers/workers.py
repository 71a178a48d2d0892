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
from callgate._part import Part, Phase, Wait, join
from callgate._workers import travel

# By their keys. Under the GIL: single steps, but for those of another process, by _placing.
_live: weakref.WeakValueDictionary[str, Workers] = weakref.WeakValueDictionary()
# By what programs call them. Guarded by _placing.
_places: weakref.WeakValueDictionary[str, Workers] = weakref.WeakValueDictionary()
_numbers = itertools.count()
_placing = threading.Lock()
_SECONDS = 5.0  # that a worker may take to end what it runs


class Workers:
  """Python processes that gates run in; made by `callgate.workers`.

  They start with the first call that is traced, or by `start()`, and end with `close()`, at the end
  of a `with` block, or with this process, in whatever way that ends.

  Attributes:
    count: how many there are.
    key: what tells them from all others, in any process.
    place: what programs call them, if they hold objects that live there: no others of this process,
      earlier or later, and in the next process those that come there as these do here.
  """

  def __init__(
    self,
    count: int,
    initializer: Callable[[], Any] | None,
    env: Mapping[str, str],
    key: str | None = None,
  ) -> None:
    self.count = count
    self._initializer, self._env = initializer, dict(env)
    self._lock = threading.Lock()
    self._pool: Any = None
    self._closed = False
    self._place: str | None = None
    self._process = os.getpid()
    self.key = key or uuid.uuid4().hex
    _live[self.key] = self

  def __reduce__(self) -> Any:
    return _in_another, (self.key, self.count, self._initializer, self._env)

  def start(self) -> Self:
    """Starts the processes, where they don't run yet, without waiting for them."""
    self.pool()
    return self

  def pool(self) -> Any:
    with self._lock:
      if self._closed:
        raise WorkerError(f"{self!r}: the workers have been closed")
      if self._pool is None:
        self._pool = _callgate.WorkerPool(*self._command(), self._start_text(), self.count)
      return self._pool

  def close(self) -> None:
    """Ends the processes; what they run has 5 seconds to end by itself. Calls fail from then on."""
    self.end(_SECONDS)

  def end(self, seconds: float) -> None:
    if os.getpid() != self._process:  # a fork's child: they are its parent's
      return
    with self._lock:
      self._closed, pool = True, self._pool
    if pool is not None:
      pool.close(seconds)

  @property
  def place(self) -> str:
    with _placing:
      if self._place is None:
        self._place = "processes" if self is _shared else f"workers #{next(_numbers)}"
        _places[self._place] = self
      return self._place

  @property
  def pids(self) -> list[int]:
    """The process ids, by worker; of those that run."""
    return [] if self._pool is None else self._pool.pids()

  @property
  def replaced(self) -> int:
    """How many workers have ended and been replaced by others."""
    return 0 if self._pool is None else self._pool.replaced()

  def __enter__(self) -> Self:
    return self.start()

  def __exit__(self, *_: object) -> None:
    self.close()

  def __repr__(self) -> str:
    return f"<callgate.workers({self.count})>"

  def _command(self) -> tuple[list[str], list[str]]:
    flags: list[str] = subprocess._args_from_interpreter_flags()  # pyright: ignore
    path = json.dumps([os.getcwd() if one == "" else one for one in sys.path])
    code = (
      "import json, sys; sys.path[:] = json.loads(sys.argv.pop(1)); "
      "from callgate._workers.worker import main; main(*map(int, sys.argv[1:]))"
    )
    environment = {**os.environ, **self._env}
    if "JAX_PLATFORMS" not in self._env:  # a GPU is the parent's
      environment["JAX_PLATFORMS"] = "cpu"
    texts = [f"{name}={value}" for name, value in environment.items()]
    return [sys.executable, *flags, "-c", code, path], texts

  def _start_text(self) -> bytes:
    initializer = self._initializer
    by = f"{self!r}: initializer"
    return pickle.dumps(
      {
        "jax": {"jax_enable_x64": bool(jax.config.read("jax_enable_x64"))},
        "initializer": None if initializer is None else travel.dumps(by, initializer),
      }
    )


def _in_another(key: str, count: int, initializer: Any, env: Mapping[str, str]) -> Workers:
  """Such workers in a process to which a gate of theirs came: they start if it is called there."""
  with _placing:
    return _live.get(key) or Workers(count, initializer, env, key)


def at_place(place: str) -> Workers | None:
  """Workers of this process by what programs call them, as long as somebody has them."""
  return _places.get(place)


def workers(
  count: int | None = None,
  *,
  initializer: Callable[[], Any] | None = None,
  env: Mapping[str, str] | None = None,
) -> Workers:
  """Python processes for gates to run in: `cg.gate(f, run_on=workers)`.

  ```python
  import callgate as cg, jax, jax.numpy as jnp, numpy as np

  with cg.workers(2) as processes:
    norm = cg.gate(lambda x: np.linalg.norm(x), out=jax.ShapeDtypeStruct((), "float32"),
                   run_on=processes)
    assert jax.jit(jax.vmap(norm))(jnp.eye(4)).tolist() == [1.0] * 4
  ```

  They are started anew, never forked from this process, and then stay: several gates may share
  them. Arrays go there and back through shared memory, and this process's GIL is not taken.

  Args:
    count: how many processes; default: as many as this process may use CPUs.
    initializer: called in each before anything else; travels as functions of gates do.
    env: environment variables for them, beside this process's. Unless told otherwise, their JAX
      uses the CPU alone.

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
  return Workers(known or usable_cpus(), initializer, given)


def usable_cpus() -> int:
  """How many CPUs this process may use."""
  return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


_shared: Workers | None = None  # guarded by _placing


def shared() -> Workers:
  """The workers of `run_on="processes"`."""
  global _shared
  with _placing:
    if _shared is None:
      _shared = Workers(usable_cpus(), None, {})
    return _shared


def close_all(seconds: float) -> None:
  """At the end of the process."""
  for each in _live.valuerefs():
    if (one := each()) is not None:
      one.end(seconds)


class Pools(Part):
  """Ends the worker processes."""

  name = "workers"

  def end(self, phase: Phase, wait: Wait) -> None:
    if phase == "join":
      close_all(wait.left)


join(Pools())
