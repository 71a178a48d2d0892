# SPDX-License-Identifier: Apache-2.0
"""One stop of a program: a debugger in frames that imitate those of the code that traced it."""

from __future__ import annotations

import contextlib
import os
import pdb
import re
import socket
import stat
import sys
import threading
from collections.abc import Generator, Mapping
from types import CodeType, FrameType
from typing import IO, Any, Literal

import numpy as np

from callgate._breakpoint import attach
from callgate._core import dtypes
from callgate._core.errors import ResultError
from callgate._core.where import Stack
from callgate._sharding import tiles

# The form of `_callgate.current_place`: extents of batch levels, lane, device, shard, layout.
Place = tuple[list[int], int, int, int, str] | None
_one_at_a_time = threading.RLock()
_MOST_REFUSED = 10  # wrong values in a row; the debugger may be a function


def stop(stack: Stack, values: Mapping[str, Any], place: Place, out: tuple[str, ...]) -> Any:
  """Opens the debugger, and waits for its end.

  Args:
    stack: the stack of the code that traced the call, outermost first.
    values: pytrees of arrays by name, which the user may change.
    place: the lane and device of the call.
    out: the names of the values to return.

  Returns:
    The values of these names after the stop, in their original dtypes.

  Raises:
    KeyboardInterrupt: the user quit the debugger.
    ResultError: a debugger in pdb's place left a wrong value ten times in a row.
  """
  debugger = os.environ.get("PYTHONBREAKPOINT", "")
  if debugger == "0":
    return {name: values[name] for name in out}
  names: dict[str, Any] = {**_where(place), **values}
  with _one_at_a_time:
    print(f"callgate: {_heading(stack, place)}", file=sys.stderr, flush=True)
    refused = 0
    while True:
      hooked = bool(debugger) or sys.breakpointhook is not sys.__breakpointhook__
      if hooked:
        _run(stack, names, "__import__('sys').breakpointhook()", {})
      else:
        _stop_in_pdb(stack, names, frozenset(values))
      try:
        return {name: _checked(name, values[name], names) for name in out}
      except ResultError as error:
        refused += 1
        if hooked and refused == _MOST_REFUSED:  # no user may be there
          said = f"breakpoint: {error} (the debugger has left an invalid value {refused} times)"
          raise ResultError(said) from None
        said = f"callgate: breakpoint: {error}; assign a valid value and continue"
        print(said, file=sys.stderr, flush=True)


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


def _checked(name: str, given: Any, names: Mapping[str, Any]) -> Any:
  """Returns the value to continue with, in the dtypes of the program's value.

  Raises:
    ResultError: these dtypes can't hold it.
  """
  import jax

  if name not in names:
    raise ResultError(
      f"{name}: expected a value, got none: it was deleted in the debugger; assign one"
    )
  own, structure = jax.tree.flatten(given)
  leaves, came = jax.tree.flatten(names[name])
  if came != structure:
    raise ResultError(f"{name}: expected {structure}, got {came}")
  taken = [_converted(name, leaf, one) for leaf, one in zip(leaves, own, strict=True)]
  return jax.tree.unflatten(structure, taken)


def _converted(name: str, leaf: Any, own: np.ndarray[Any, Any]) -> Any:
  """Returns the array in the other's dtype, if it is of the same kind or a lower one and fits."""
  array = np.asarray(leaf)
  expected, came = (dtypes.type_text(x.dtype, x.shape) for x in (own, array))
  if array.shape != own.shape or not 0 <= _kind(array.dtype) <= _kind(own.dtype):
    raise ResultError(f"{name}: expected {expected}, got {came}")
  with np.errstate(all="ignore"):
    made = array.astype(own.dtype)
  if _kind(own.dtype) == _INTEGER and (made != array).any():
    number = array[made != array].ravel()[0]
    raise ResultError(f"{name}: expected values that fit {expected}, got {number}")
  return made


_KINDS = np.bool_, np.integer, np.floating, np.complexfloating
_INTEGER = 1


def _kind(dtype: np.dtype[Any]) -> int:
  """Returns a rank: a kind of higher rank can hold the lower ones; -1 for no number."""
  import jax.numpy as jnp

  return next((i for i, kind in enumerate(_KINDS) if jnp.issubdtype(dtype, kind)), -1)


# -- frames ------------------------------------------------------------------------------------
def _run(stack: Stack, names: dict[str, Any], code: str, given: dict[str, Any]) -> None:
  """Runs `code` as if it were the innermost line of the stack, with `names` as variables.

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
  """Returns the globals of the module with this file."""
  for module in list(sys.modules.values()):
    if getattr(module, "__file__", None) == file:
      return vars(module)
  return vars(sys.modules["__main__"])  # such as a notebook's cell


# -- pdb ---------------------------------------------------------------------------------------
# `x = 1`, `x[0] += 1`, `x.flat[0] = 1`, `x, y = 1, 2`, but not `p [1] == x`.
_ASSIGNMENT = re.compile(
  r"\s*(\w+)(?:\s*\[.*\]|\s*\.\s*\w+|\s*,\s*\w+)*\s*(?:\*\*|//|<<|>>|[-+*/%@&|^])?=(?!=)"
)


class _Pdb(pdb.Pdb):
  """pdb in the frames of a stop, which end with it: it neither steps nor traces."""

  def __init__(self, own: frozenset[str], stdin: IO[str] | None, stdout: IO[str] | None) -> None:
    super().__init__(stdin=stdin, stdout=stdout, nosigint=True, readrc=stdin is None)
    self.own = own  # the names of the breakpoint's values
    self.prompt = "(callgate) "
    self.reset()

  def get_stack(self, f: FrameType | None, t: Any) -> tuple[list[tuple[FrameType, int]], int]:
    """Returns the frames that `_run` made."""
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

  def onecmd(self, line: str) -> bool:
    """Runs an assignment to a value as Python, even if pdb has a command of the value's name."""
    assigned = _ASSIGNMENT.match(line)
    return super().onecmd(f"!{line}" if assigned and assigned[1] in self.own else line)

  def do_EOF(self, arg: str) -> bool | None:
    self.lost = True
    return super().do_EOF(arg)

  lost = False  # end of input: Ctrl-D, or a closed terminal


def _stop_in_pdb(stack: Stack, names: dict[str, Any], own: frozenset[str]) -> None:
  """Waits for a debugger to end; opens another one if its terminal disconnected."""
  while _hung_up(stack, names, own):
    print("callgate: breakpoint: the debugger disconnected", file=sys.stderr, flush=True)


def _hung_up(stack: Stack, names: dict[str, Any], own: frozenset[str]) -> bool:
  with _terminal() as attached:
    stdin, stdout, connection = attached or (None, None, None)
    debugger, gone = _Pdb(own, stdin, stdout), False

    def interact() -> None:
      names.pop("__callgate__", None)
      debugger.interaction(sys._getframe(1), None)  # pyright: ignore[reportPrivateUsage]

    try:
      _run(stack, names, "__callgate__()", {"__callgate__": interact})
      gone = debugger.lost and connection is not None and attach.has_hung_up(connection)
    except (BrokenPipeError, ConnectionResetError):  # the socket is closed
      if connection is None:
        raise
      gone = True
  names.pop("__builtins__", None)
  if debugger.quitting and not gone:
    raise KeyboardInterrupt("callgate: the user quit a breakpoint's debugger")
  return gone


@contextlib.contextmanager
def _terminal() -> Generator[tuple[IO[str], IO[str], socket.socket] | None]:
  """Yields a debugger's input, output and socket; None for the process's own."""
  who = _stdin()
  if who == "user":
    yield None
    return
  with attach.waiting(sys.stdin.fileno() if who == "pipe" else None) as attached:
    yield attached


def _stdin() -> Literal["user", "pipe", "nobody"]:
  """Returns the kind of the process's stdin; a pipe may have a user at its other end."""
  stdin = sys.stdin
  if stdin is None or stdin.closed:  # pyright: ignore[reportUnnecessaryComparison]
    return "nobody"
  try:
    number = stdin.fileno()
  except (OSError, ValueError):  # a Python object without a file descriptor
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
