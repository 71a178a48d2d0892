# SPDX-License-Identifier: Apache-2.0
"""An executor over actors of Ray (https://docs.ray.io).

A function is stored once in Ray's object store, from which each actor loads it. Large arguments and
results use the store, too, and their arrays are views of the store's memory.
"""

from __future__ import annotations

import collections
import concurrent.futures
import threading
from collections.abc import Callable, Mapping
from typing import Any

from callgate._core import extras, options

_MOST_FUNCTIONS = 64  # the most functions kept in the store


class RayExecutor(concurrent.futures.Executor):
  """An executor that runs functions in actors of Ray; made by `callgate.executors.ray`.

  Attributes:
    actors: the number of actors.
  """

  def __init__(self, library: Any, actors: int, started: bool, each: Mapping[str, Any]) -> None:
    self.actors = self._max_workers = actors
    self._ray, self._started = library, started
    # Calls of Ray are made under the first lock. Ray's own thread takes only the second one.
    self._submitting, self._lock = threading.Lock(), threading.Lock()
    self._closed = False
    self._functions: collections.OrderedDict[Callable[..., Any], Any] = collections.OrderedDict()
    self._kind = library.remote(**each)(_Runner)
    self._all = [self._kind.remote() for _ in range(actors)]
    self._running = [0] * actors
    self._ended: set[int] = set()  # indices of ended actors, until the next call there
    self._open: set[concurrent.futures.Future[Any]] = set()

  def submit(
    self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any
  ) -> concurrent.futures.Future[Any]:
    """Calls the function in the actor with the fewest pending calls.

    Raises:
      ray.exceptions.RayActorError: (by the future) the actor or its machine has ended; a new actor
        replaces it.
    """
    future = concurrent.futures.Future[Any]()
    with self._submitting:
      if self._closed:
        raise RuntimeError(f"{self!r}: cannot schedule new futures after shutdown")
      with self._lock:
        index = min(range(self.actors), key=self._running.__getitem__)
        self._running[index] += 1
        ended = index in self._ended
        self._ended.discard(index)
      try:
        if ended:  # a call to an actor that starts waits for it
          self._all[index] = self._kind.remote()
        actor = self._all[index]
        running = actor.run.remote(self._in_store(fn), args, kwargs).future()
      except BaseException:
        with self._lock:
          self._running[index] -= 1
          if ended:
            self._ended.add(index)
        raise
      with self._lock:
        self._open.add(running)
    running.add_done_callback(lambda done: self._answered(index, actor, done, future))
    return future

  def _in_store(self, function: Callable[..., Any]) -> Any:
    if (known := self._functions.pop(function, None)) is None:
      known = self._ray.put(function)
    self._functions[function] = known
    if len(self._functions) > _MOST_FUNCTIONS:
      self._functions.popitem(last=False)
    return known

  def _answered(
    self, index: int, actor: Any, done: concurrent.futures.Future[Any],
    future: concurrent.futures.Future[Any],
  ) -> None:  # fmt: skip
    """Completes the future, on a thread of Ray, which must not wait for Ray."""
    error = done.exception()
    with self._lock:
      self._running[index] -= 1
      self._open.discard(done)
      if isinstance(error, self._ray.exceptions.RayActorError) and actor is self._all[index]:
        self._ended.add(index)
    if not future.set_running_or_notify_cancel():
      return
    if error is None:
      future.set_result(done.result())
    else:
      future.set_exception(error)

  def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
    """Ends the actors, and Ray itself if this executor has initialized it.

    Args:
      wait: waits for running calls first. With False, the actors end after the last call.
      cancel_futures: does not wait for running calls, which fail.
    """
    with self._submitting, self._lock:
      if self._closed:
        return
      self._closed, left = True, list(self._open)
    if cancel_futures:
      left = []
    if wait or not left:
      return self._end(left)
    threading.Thread(target=self._end, args=(left,), name="callgate ray", daemon=True).start()

  def _end(self, left: list[concurrent.futures.Future[Any]]) -> None:
    concurrent.futures.wait(left)
    for actor in self._all:
      self._ray.kill(actor)
    self._functions.clear()
    if self._started:
      self._ray.shutdown()

  def __repr__(self) -> str:
    return f"<callgate.executors.ray({self.actors})>"


class _Runner:
  """The actor."""

  def run(self, function: Callable[..., Any], args: Any, kwargs: Any) -> Any:
    return function(*args, **kwargs)


def ray(
  actors: int | None = None,
  *,
  address: str | None = None,
  each: Mapping[str, Any] | None = None,
) -> RayExecutor:
  """Makes an executor of Ray actors for gates: `cg.gate(f, run_on=cg.executors.ray(8))`.

  ```python
  import callgate as cg, jax, jax.numpy as jnp

  with cg.executors.ray(2) as actors:
    square = cg.gate(lambda x: x * x, out=lambda x: x, run_on=actors)
    assert jax.jit(jax.vmap(square))(jnp.arange(4.0)).tolist() == [0, 1, 4, 9]
  ```

  A new actor replaces one that ends. The calls of the ended actor run again, as often as the gate's
  `retries=` allows, and then fail with Ray's error. If Ray isn't initialized, this function
  initializes it, and the executor shuts it down.

  Args:
    actors: the number of actors. Default: the number of CPUs of the cluster.
    address: the cluster's address, if Ray isn't initialized: see `ray.init`. Default: a new cluster
      on this machine.
    each: the options of each actor: `{"num_cpus": 1, "num_gpus": 0.5, "runtime_env": ...}`; see
      `ray.remote`.

  Returns:
    A `concurrent.futures.Executor`, also a context manager.

  Raises:
    GateDefinitionError: an option is wrong, or Ray is not installed.
  """
  what = "executors.ray"
  count = options.or_none(options.count, what, "actors", actors, least=1, most=100_000)
  options.or_none(options.text, what, "address", address)
  given = options.named(what, "each", each)
  library = extras.library("ray", "Ray", "ray", by=what)
  extras.library("cloudpickle", "cloudpickle", "ray", by=what)
  started = not library.is_initialized()
  if started:
    library.init(address=address, log_to_driver=False, include_dashboard=False)
  if count is None:
    count = max(int(library.cluster_resources().get("CPU", 1)), 1)
  return RayExecutor(library, count, started, given)
