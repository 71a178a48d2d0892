# SPDX-License-Identifier: Apache-2.0
"""The coordination service of `jax.distributed`."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
from jax._src import distributed as _distributed


# -- many processes --------------------------------------------------------------------------------
# The client of the coordination service that `jax.distributed.initialize` connects to: a store of
# texts by key, common to all processes. `jax.experimental.multihost_utils` is public, but needs
# collectives, which hang when another process has failed (0.10 to 0.12).
def distributed_client() -> Any:
  """Returns the client, or None without `jax.distributed.initialize`."""
  return _distributed.global_state.client


def distributed_place() -> tuple[int, int]:
  """Returns (index of this process, number of processes), once there is a client."""
  state = _distributed.global_state
  return int(state.process_id), int(state.num_processes or 1)


def after_distributed_start(function: Callable[[], None]) -> None:
  """Calls a function now if there is a client, and after each `jax.distributed.initialize`."""
  original = _distributed.State.initialize

  @functools.wraps(original)
  def initialize(self: Any, *args: Any, **kwargs: Any) -> None:
    original(self, *args, **kwargs)
    if self is _distributed.global_state:
      function()

  _distributed.State.initialize = initialize
  if distributed_client() is not None:
    function()


class CommonStore:
  """Texts by key that all processes share (`distributed_client`). Its calls release the GIL.

  They raise ConnectionError if the coordinator does not answer.
  """

  def __init__(self, client: Any) -> None:
    self._client = client

  def put(self, key: str, text: str, *, overwrite: bool = False) -> bool:
    """Writes a text; returns False if the key exists and must not be overwritten."""
    return self._answer("ALREADY_EXISTS", self._client.key_value_set, key, text, overwrite) != ()

  def get(self, key: str, seconds: float = 0.0) -> str | None:
    """Waits for a text and returns it; None if it did not arrive in time."""
    if seconds <= 0:
      found = self._answer("NOT_FOUND", self._client.key_value_try_get, key)
    else:
      milliseconds = max(1, round(1000 * seconds))
      blocking = self._client.blocking_key_value_get
      found = self._answer("DEADLINE_EXCEEDED", blocking, key, milliseconds)
    return None if found == () else found

  def under(self, folder: str) -> dict[str, str]:
    """Returns the texts in `folder`, which ends with "/", by the rest of their keys."""
    found = self._answer("NOT_FOUND", self._client.key_value_dir_get, folder)
    return {key.removeprefix(folder): text for key, text in found}

  def remove(self, folder: str) -> None:
    """Removes all keys that begin with `folder`."""
    self._answer("NOT_FOUND", self._client.key_value_delete, folder)

  @staticmethod
  def _answer(expected: str, call: Callable[..., Any], *arguments: Any) -> Any:
    """Returns the result of the call; () for an error whose text begins with `expected`."""
    try:
      return call(*arguments)
    except jax.errors.JaxRuntimeError as error:
      if str(error).startswith(expected):
        return ()
      raise ConnectionError(f"the coordinator of jax.distributed: {error}") from error
