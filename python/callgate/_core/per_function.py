# SPDX-License-Identifier: Apache-2.0
"""Objects that callgate makes once for each user's function and that live as long as the function.

JAX's caches know a function by its identity and hold it weakly. So callgate's replacement of a
function must be the same in all calls. It must not keep the function, whose closure may hold
arrays, or tracers of a trace that has ended. Therefore it is an attribute of the function, and both
die together.
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
_lock = threading.RLock()  # held while a function gets its store; a collection may need it, too


class _Store:
  """Keeps the objects of one function. `functools.wraps` passes it on to other functions."""

  def __init__(self, owner: Callable[..., Any]) -> None:
    self.owner, self.made = weakref.ref(owner), dict[Any, Any]()
    _stores.add(self)

  def __reduce__(self) -> Any:
    return dict, ()  # a pickle of the function gets an empty store


_stores = weakref.WeakSet[_Store]()  # guarded by _lock; the functions keep them


class _Clearing:
  def cache_clear(self) -> None:
    """Clears the stores; called by `jax.clear_caches()`."""
    with _lock:
      stores = list(_stores)
    for store in stores:
      store.made.clear()


_clearing = _Clearing()  # constant: JAX holds it weakly
tracing.clear_with_caches(_clearing, "what callgate made of functions")


def _store_of(function: Any) -> _Store | None:
  """Returns the store of a function; None for other callables."""
  if not isinstance(function, (types.FunctionType, functools.partial)):
    return None
  with _lock:
    store = vars(function).get(_ATTRIBUTE)
    if not isinstance(store, _Store) or store.owner() is not function:
      store = vars(function)[_ATTRIBUTE] = _Store(function)
  return store


def cached(most: int) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
  """Makes a function run once for each callable, given as an `Exact`, and further keys.

  Args:
    most: the number of callables other than functions to remember, the latest ones.
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
