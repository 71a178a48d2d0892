# SPDX-License-Identifier: Apache-2.0
"""Things that callgate makes of a user's function, once, for as long as the function lives.

JAX's caches know a function by its identity and hold it weakly. So what stands for a function there
must be one for all calls, and must not keep the function, whose closure may hold arrays, or tracers
of a trace that has ended. It is an attribute of the function: the two die together.
"""

from __future__ import annotations

import functools
import threading
import types
import weakref
from collections.abc import Callable
from typing import Any

from callgate._core import exact
from callgate._jax import tracing

_ATTRIBUTE = "__callgate__"
_lock = threading.RLock()  # held where a function gets its store; a collection may need one, too


class _Store:
  """Keeps the things of one function. `functools.wraps` hands it on to other functions."""

  def __init__(self, owner: Callable[..., Any]) -> None:
    self.owner, self.made = weakref.ref(owner), dict[Any, Any]()
    _stores.add(self)

  def __reduce__(self) -> Any:
    return dict, ()  # pickled with its function: another process makes its own


_stores = weakref.WeakSet[_Store]()  # guarded by _lock; the functions keep them


class _Clearing:
  def cache_clear(self) -> None:
    """Called by `jax.clear_caches()`."""
    with _lock:
      stores = list(_stores)
    for store in stores:
      store.made.clear()


_clearing = _Clearing()  # constant: JAX holds it weakly
tracing.clear_with_caches(_clearing, "what callgate made of functions")


def _store_of(function: Any) -> _Store | None:
  """The store of a function; None for other callables, whose attributes are their own affair."""
  if not isinstance(function, (types.FunctionType, functools.partial)):
    return None
  with _lock:
    store = vars(function).get(_ATTRIBUTE)
    if not isinstance(store, _Store) or store.owner() is not function:
      store = vars(function)[_ATTRIBUTE] = _Store(function)
  return store


def cached(most: int) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
  """Has a maker called once for each function, given as an `Exact`, and further keys.

  Args:
    most: of callables that are no functions as many are remembered, the latest ones.
  """

  def decorate(make: Callable[..., Any]) -> Callable[..., Any]:
    of_others = tracing.clearable_cache(most)(make)

    @functools.wraps(make)
    def find(function: exact.Exact, *keys: Any) -> Any:
      if (store := _store_of(function.value)) is None:
        return of_others(function, *keys)
      key = make, keys
      if (made := store.made.get(key)) is None:
        made = store.made.setdefault(key, make(function, *keys))
      return made

    return find

  return decorate
