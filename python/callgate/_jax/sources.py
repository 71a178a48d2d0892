# SPDX-License-Identifier: Apache-2.0
"""Finds the user's code that traced an operation.

JAX keeps a traceback with each equation, which ends at the function being traced. JAX traces a
function with rules of its own separately, so its operations have no frames of the user.
`traced_here` gives them the caller's frames.
"""

from __future__ import annotations

import contextlib
import types
from collections.abc import Callable, Generator
from typing import Any, TypeVar

from jax._src import source_info_util as _source_info


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


def _line(traceback: Any) -> tuple[str, int, str] | None:
  """Returns the innermost of the user's frames (0.10 to 0.12)."""
  said = ""
  for code, last in zip(*traceback.raw_frames(), strict=True) if traceback is not None else ():
    if code in _shared:
      said = " (the first such call outside of jax.jit)"
    if _source_info.is_user_filename(code.co_filename):
      frame = _source_info.raw_frame_to_frame(code, last)
      return frame.file_name, frame.start_line, frame.function_name + said
  return None


def users_line() -> tuple[str, int, str] | None:
  """Returns (file, line, function) of the user's code that is tracing now; None if unknown."""
  return _line(_source_info.current().traceback)


@contextlib.contextmanager
def traced_here() -> Generator[None]:
  """Gives operations that the block traces this place's traceback (0.10 to 0.12; not public)."""
  local = _source_info._source_info_context  # pyright: ignore[reportPrivateUsage]
  before = local.context
  local.context = _source_info.current()
  try:
    yield
  finally:
    local.context = before


def traced_as(eqn: Any) -> contextlib.AbstractContextManager[None]:
  """Gives operations that the block traces an equation's source, as `jax.core.eval_jaxpr` does."""
  info = eqn.source_info
  stack = _source_info.current_name_stack() + info.name_stack
  return _source_info.user_context(info.traceback, name_stack=stack)
