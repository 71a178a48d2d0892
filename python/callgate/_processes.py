"""This process among those of `jax.distributed`: its index, its group, what it says when it ends.

Does nothing in a program of one process. `start` hooks into `jax.distributed.initialize`; the main
thread leaves the group at the end.
"""

from __future__ import annotations

import os
import sys
from types import TracebackType

import jax

from callgate import _compat
from callgate._process_group import Group

_group: Group | None = None
_hooked = False
_process = 0  # of the operating system, whose group this is: a fork's child has none


def group() -> Group | None:
  """The group of this process; None where it is alone.

  Raises:
    RuntimeError: there are several processes, but `jax.distributed` does not run.
  """
  if _compat.distributed_client() is not None:
    return _group
  if _compat.has_backend() and jax.process_count() > 1:
    raise RuntimeError(
      f"callgate.barrier: all_processes=True: expected jax.distributed to be initialized, got "
      f"{jax.process_count()} processes without it (see jax.distributed.initialize)"
    )
  return None


def known_index() -> int | None:
  """This process's index, if that can be told without starting JAX's devices."""
  if _compat.distributed_client() is not None:
    return _compat.distributed_place()[0]
  return jax.process_index() if _compat.has_backend() else None


def index() -> int:
  """This process's index. Starts JAX's devices where `jax.distributed` does not tell it."""
  known = known_index()
  return jax.process_index() if known is None else known


PLACEHOLDER = "{process}"


def fill_index(path: str) -> str:
  """A path with this process's index in the place of each "{process}"."""
  return path.replace(PLACEHOLDER, str(index())) if PLACEHOLDER in path else path


def _join() -> None:
  """After `jax.distributed.initialize`."""
  global _group, _hooked, _process
  if _group is not None:
    _group.leave()
  if not _hooked:
    _hooked = True
    _tell_of_uncaught()
  _process = os.getpid()
  place, count = _compat.distributed_place()
  _group = Group(_compat.CommonStore(_compat.distributed_client()), place, count)


def _end(error: BaseException | None) -> None:
  if _group is not None and os.getpid() == _process and _compat.distributed_client() is not None:
    _group.say_ended(error)


def leave(seconds: float) -> None:
  """At the end of the process, while the service still runs."""
  del seconds
  global _group
  uncaught: BaseException | None = getattr(sys, "last_value", None)
  _end(None if _is_interactive() else uncaught)
  if _group is not None and os.getpid() == _process:
    _group.leave()
    _group = None


def _tell_of_uncaught() -> None:
  """Tells the others of an uncaught exception at once: threads may keep the process for long."""
  before = sys.excepthook

  def hook(
    kind: type[BaseException], error: BaseException, traceback: TracebackType | None
  ) -> None:
    if not _is_interactive():
      _end(error)
    before(kind, error, traceback)

  sys.excepthook = hook


def _is_interactive() -> bool:
  """Whether an uncaught exception leaves the process at its prompt."""
  return bool(sys.flags.interactive) or hasattr(sys, "ps1")


def start() -> None:
  """Called once by `import callgate`; does nothing more unless there are several processes."""
  _compat.after_distributed_start(_join)
