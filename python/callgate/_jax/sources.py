# SPDX-License-Identifier: Apache-2.0
"""Finds the user's code that traced an operation.

JAX keeps a traceback with each equation, which ends at the function being traced. JAX traces a
function with rules of its own separately, so its operations have no frames of the user.
`traced_here` gives them the caller's frames.
"""

from __future__ import annotations

import contextlib
import sys
import types
from collections.abc import Callable, Generator
from typing import Any, TypeVar

from jax._src import source_info_util as _source_info
from jax._src.lib import xla_client as _xla_client  # pyright: ignore[reportPrivateImportUsage]


def call_site(context: Any) -> tuple[str, int, str] | None:
  """Returns (file, line, function) of the user's code that traced the operation being lowered.

  `jax.extend.source_info_util` is public but does not read a lowering's traceback (0.10 to 0.12).
  """
  return _line(getattr(context, "traceback", None))


def source_of(eqn: Any) -> str:
  """Returns the user's code that traced an equation: "file:line (function)"; "" if unknown."""
  line = _line(eqn.source_info.traceback)
  return "" if line is None else f"{line[0]}:{line[1]} ({line[2]})"


_F = TypeVar("_F", bound=Callable[..., Any])
# Atomic: single steps; at most one entry for each function that is marked.
_shared: set[types.CodeType] = set()


def shared(function: _F) -> _F:
  """Marks a function whose program also serves later calls, which may be on other lines."""
  _shared.add(function.__code__)
  return function


_FIRST = " (the first such call)"


def _line(traceback: Any) -> tuple[str, int, str] | None:
  """Returns the innermost of the user's frames (0.10 to 0.12), a kept line only if alone."""
  said, kept = "", None
  for code, last in zip(*traceback.raw_frames(), strict=True) if traceback is not None else ():
    if code in _shared:
      said = " (the first such call outside of jax.jit)"
    if _source_info.is_user_filename(code.co_filename):
      frame = _source_info.raw_frame_to_frame(code, last)
      line = frame.file_name, frame.start_line, frame.function_name + said
      if not code.co_qualname.endswith(_FIRST):
        return line
      kept = line
  return kept


def users_line() -> tuple[str, int, str] | None:
  """Returns (file, line, function) of the user's code that is tracing now; None if unknown."""
  return _line(_source_info.current().traceback)


@contextlib.contextmanager
def _traced_at(source: Any) -> Generator[None]:
  """Gives operations that the block traces this source (0.10 to 0.12; not public)."""
  local = _source_info._source_info_context  # pyright: ignore[reportPrivateUsage]
  before = local.context
  local.context = source
  try:
    yield
  finally:
    local.context = before


def traced_here() -> contextlib.AbstractContextManager[None]:
  """Gives operations that the block traces this place's traceback."""
  return _traced_at(_source_info.current())


def users_line_kept() -> contextlib.AbstractContextManager[None]:
  """Gives operations that the block traces the user's line if JAX's traceback has none.

  It has none if JAX traces a function of callgate itself, as in `jax.lax.map(gate, xs)`. Later
  calls may get the same program, so such a line counts as that of the first call.
  """
  source, frame = _source_info.current(), sys._getframe(1)  # pyright: ignore[reportPrivateUsage]
  if _line(source.traceback) is not None:
    return contextlib.nullcontext()
  while not _source_info.is_user_filename(frame.f_code.co_filename):
    if frame.f_back is None:
      return contextlib.nullcontext()
    frame = frame.f_back
  name = frame.f_code.co_qualname + _FIRST
  traced = _traceback.__code__.replace(
    co_filename=frame.f_code.co_filename, co_firstlineno=frame.f_lineno, co_qualname=name
  )
  return _traced_at(source.replace(traceback=types.FunctionType(traced, globals())()))


# Its frame, the only one that a traceback can have from outside of the traced function, gets the
# user's file, line and name.
_traceback = lambda: _xla_client.Traceback.get_traceback()  # noqa: E731


def traced_as(eqn: Any) -> contextlib.AbstractContextManager[None]:
  """Gives operations that the block traces an equation's source, as `jax.core.eval_jaxpr` does."""
  info = eqn.source_info
  stack = _source_info.current_name_stack() + info.name_stack
  return _source_info.user_context(info.traceback, name_stack=stack)
