# SPDX-License-Identifier: Apache-2.0
"""Objects that live where a gate runs: one for each worker, or one for each lane."""

from __future__ import annotations

import functools
import inspect
import math
import threading
import uuid
import weakref
from collections.abc import Callable
from typing import Any

from callgate import _callgate
from callgate._core import signatures

# Guarded by _lock, but for a key that nobody knows yet.
_tables: weakref.WeakValueDictionary[str, Instances] = weakref.WeakValueDictionary()
_lock = threading.RLock()
_local = threading.local()


class Instances:
  """The objects of a class in this process; each process has its own.

  Attributes:
    make: the class, or a `functools.partial` of it.
    by_lane: True for one object for each lane, made at the lane's first call; else one for all.
  """

  def __init__(self, make: Callable[[], Any], by_lane: bool, key: str | None = None) -> None:
    self.make, self.by_lane = make, by_lane
    self.key = key or uuid.uuid4().hex
    self._made: dict[int, Any] = {}
    self._making = threading.RLock()
    _tables[self.key] = self

  def __reduce__(self) -> Any:
    return _instances, (self.make, self.by_lane, self.key)

  def get(self) -> Any:
    """Returns the object of the current lane."""
    lane = current_lane() if self.by_lane else 0
    with self._making:
      if lane not in self._made:
        self._made[lane] = self.make()
      return self._made[lane]


def _instances(make: Callable[[], Any], by_lane: bool, key: str) -> Instances:
  with _lock:
    return _tables.get(key) or Instances(make, by_lane, key)


class MethodOf:
  """A method of the objects of `Instances`, as a function."""

  def __init__(self, instances: Instances, name: str) -> None:
    self.instances, self.name = instances, name
    kind = class_of(instances.make)
    if name == "__call__" and not any(name in vars(base) for base in kind.__mro__):
      method: Any = _no_call
    else:
      method = getattr(kind, name)
    functools.update_wrapper(self, method, updated=())
    self.__module__, self.__qualname__ = kind.__module__, f"{kind.__qualname__}.{name}"
    parameters = list(signatures.read(method).parameters.values())
    if not isinstance(inspect.getattr_static(kind, name), (staticmethod, classmethod)):
      parameters = parameters[1:]
    self.__signature__ = inspect.Signature(parameters)

    if method is _no_call:  # the class may have other methods that can be called
      self.__signature__ = inspect.Signature()

  def __reduce__(self) -> Any:
    return MethodOf, (self.instances, self.name)

  def __call__(self, *args: Any, **kwargs: Any) -> Any:
    return getattr(self.instances.get(), self.name)(*args, **kwargs)

  @property
  def make(self) -> Any:
    """The class, for checks that it can be imported."""
    return class_of(self.instances.make)


def _no_call(_: Any) -> None:
  """Replaces the `__call__` of a class that has none."""


def class_of(made: Any) -> Any:
  """Returns the class of which a gate was made, directly or by a partial; else None."""
  while isinstance(made, functools.partial):
    made = made.func
  return made if isinstance(made, type) else None


def current_lane() -> int:
  """Returns the number of the lane that runs on this thread; devices' lanes are consecutive."""
  lane: int | None = getattr(_local, "lane", None)
  if lane is not None:
    return lane
  if (place := _callgate.current_place()) is None:
    return _callgate.worker_lane()
  extents, lane, _, shard, _ = place
  return max(shard, 0) * math.prod(extents) + lane


def on_lane(lane: int, function: Callable[[], Any]) -> Any:
  """Calls a function in this process as a worker would for a lane."""
  before, _local.lane = getattr(_local, "lane", None), lane
  try:
    return function()
  finally:
    _local.lane = before
