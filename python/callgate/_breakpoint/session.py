# SPDX-License-Identifier: Apache-2.0
"""One stop of a program: a debugger in frames that stand for those of the code that traced it."""

from __future__ import annotations

import contextlib
import os
import pdb
import stat
import sys
import threading
from collections.abc import Generator, Mapping
from types import CodeType, FrameType
from typing import IO, Any, Literal

import numpy as np

from callgate._breakpoint import attach
from callgate._breakpoint.stack import Stack
from callgate._core import dtypes
from callgate._sharding import tiles

# What `_callgate.current_place` gives: extents of batch levels, lane, device, shard, layout.
Place = tuple[list[int], int, int, int, str] | None
_one_at_a_time = threading.RLock()


def stop(stack: Stack, values: Mapping[str, Any], place: Place, out: tuple[str, ...]) -> Any:
  """Opens the debugger, and waits for its end.

  Args:
    stack: of the code that traced the call, outermost first.
    values: pytrees of arrays, which the user may change, by their names.
    place: the lane and device of the call.
    out: the names of those that the program goes on with.

  Returns:
    What the names are then.

  Raises:
    KeyboardInterrupt: the user has left the debugger.
  """
  debugger = os.environ.get("PYTHONBREAKPOINT", "")
  if debugger == "0":
    return values
  names: dict[str, Any] = {**_where(place), **values}
  with _one_at_a_time:
    print(f"callgate: {_heading(stack, place)}", file=sys.stderr, flush=True)
    problem = ""
    while True:
      if problem:
        print(f"callgate: breakpoint: {problem}", file=sys.stderr, flush=True)
      if debugger or sys.breakpointhook is not sys.__breakpointhook__:
        _run(stack, names, "__import__('sys').breakpointhook()", {})
      else:
        _stop_in_pdb(stack, names)
      problem = next(filter(None, (_mismatch(name, values[name], names) for name in out)), "")
      if not problem:
        return names


def _where(place: Place) -> dict[str, Any]:
  if place is None:
    return {"lane": None, "shard": None}
  extents, lane, _, shard, _ = place
  index = tuple(int(i) for i in np.unravel_index(lane, extents)) if extents else None
  return {
    "lane": index[0] if index is not None and len(index) == 1 else index,
    "shard": shard if shard >= 0 else None,
  }


def _heading(stack: Stack, place: Place) -> str:
  file, line, _ = stack[-1] if stack else ("?", 0, "")
  text = f"breakpoint at {file}:{line}"
  where = _where(place)
  if place is None:
    return text
  extents, _, device, shard, layout = place
  if extents:
    text += f", lane {where['lane']} of {extents[0] if len(extents) == 1 else tuple(extents)}"
  part = tiles.describe(layout, shard) if layout and shard >= 0 else ""
  return text + (f", on {part}" if part else f", on device {device}" if device >= 0 else "")


def _mismatch(name: str, given: Any, names: Mapping[str, Any]) -> str:
  """What is wrong with the value that the program is to go on with, or ""."""
  import jax

  if name not in names:
    return f"{name}: expected a value to go on with, got none: it was deleted"
  value = names[name]
  if jax.tree.structure(value) != jax.tree.structure(given):
    expected, came = jax.tree.structure(given), jax.tree.structure(value)
    return f"{name}: expected {expected}, got {came}; give it such a value, and go on"
  for leaf, own in zip(jax.tree.leaves(value), jax.tree.leaves(given), strict=True):
    array = np.asarray(leaf)
    is_number = isinstance(leaf, (bool, int, float, complex))
    fits = is_number or np.can_cast(array.dtype, own.dtype, "same_kind")
    if array.shape != own.shape or not fits:
      expected, came = (dtypes.type_text(x.dtype, x.shape) for x in (own, array))
      return f"{name}: expected {expected}, got {came}; give it such a value, and go on"
  return ""


# -- frames ------------------------------------------------------------------------------------
def _run(stack: Stack, names: dict[str, Any], code: str, given: dict[str, Any]) -> None:
  """Runs `code` as if the innermost line of the stack said it, with `names` as its variables.

  Each outer line of the stack calls the next one.
  """
  frames = stack or (("<unknown>", 1, "<module>"),)

  def at(index: int) -> None:
    file, line, function = frames[index]
    last = index == len(frames) - 1
    local = names if last else {}
    local.update(given if last else {"__callgate__": lambda: at(index + 1)})
    text = code if last else "__callgate__()"
    exec(_code(text, file, line, function), _globals_of(file), local)

  at(0)


def _code(text: str, file: str, line: int, function: str) -> CodeType:
  code = compile(text, file, "exec")
  return code.replace(co_firstlineno=line, co_name=function, co_qualname=function)


def _globals_of(file: str) -> dict[str, Any]:
  """The names of the module that a file is."""
  for module in list(sys.modules.values()):
    if getattr(module, "__file__", None) == file:
      return vars(module)
  return vars(sys.modules["__main__"])  # of a notebook's cell, say


# -- pdb ---------------------------------------------------------------------------------------
class _Pdb(pdb.Pdb):
  """pdb in the frames of a stop, which end with it: it neither steps nor traces."""

  def __init__(self, stdin: IO[str] | None = None, stdout: IO[str] | None = None) -> None:
    super().__init__(stdin=stdin, stdout=stdout, nosigint=True, readrc=stdin is None)
    self.prompt = "(callgate) "
    self.reset()

  def get_stack(self, f: FrameType | None, t: Any) -> tuple[list[tuple[FrameType, int]], int]:
    """The frames that `_run` made."""
    stack: list[tuple[FrameType, int]] = []
    while f is not None:
      if f.f_code.co_filename != __file__ and (f.f_locals.get("__callgate__") or not stack):
        stack.append((f, f.f_lineno))
      elif f.f_code.co_filename != __file__:
        break
      f = f.f_back
    stack.reverse()
    return stack, len(stack) - 1

  def set_continue(self) -> None:
    """Leaves other tracers of this thread alone."""
    self._set_stopinfo(self.botframe, None, -1)  # pyright: ignore


def _stop_in_pdb(stack: Stack, names: dict[str, Any]) -> None:
  with _terminal() as (stdin, stdout):
    debugger = _Pdb(stdin, stdout)

    def interact() -> None:
      names.pop("__callgate__", None)
      debugger.interaction(sys._getframe(1), None)  # pyright: ignore[reportPrivateUsage]

    _run(stack, names, "__callgate__()", {"__callgate__": interact})
  names.pop("__builtins__", None)
  if debugger.quitting:
    raise KeyboardInterrupt("callgate: a breakpoint's debugger was left")


@contextlib.contextmanager
def _terminal() -> Generator[tuple[IO[str] | None, IO[str] | None]]:
  """The files that a debugger talks through; (None, None) for the process's own."""
  who = _stdin()
  if who == "user":
    yield None, None
    return
  with attach.waiting(sys.stdin.fileno() if who == "pipe" else None) as connection:
    yield connection, connection


def _stdin() -> Literal["user", "pipe", "nobody"]:
  """Who is at the process's stdin; a pipe may be somebody's."""
  stdin = sys.stdin
  if stdin is None or stdin.closed:  # pyright: ignore[reportUnnecessaryComparison]
    return "nobody"
  try:
    number = stdin.fileno()
  except (OSError, ValueError):  # a file of Python's alone
    return "user"
  if stdin.isatty() or _in_notebook() or number in attach.taken:
    return "user"
  about = os.fstat(number)
  if stat.S_ISREG(about.st_mode):
    return "user" if os.lseek(number, 0, os.SEEK_CUR) < about.st_size else "nobody"
  return "nobody" if stat.S_ISCHR(about.st_mode) else "pipe"  # /dev/null


def _in_notebook() -> bool:
  kernel: Any = sys.modules.get("ipykernel.kernelapp")
  return kernel is not None and kernel.IPKernelApp.initialized()
