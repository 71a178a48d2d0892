# SPDX-License-Identifier: Apache-2.0
"""Of JAX's vmap: where the lanes of what it makes are."""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Callable, Generator
from typing import Any

import jax
from jax._src import core as _core
from jax._src.interpreters import batching as _batching

Mark = Callable[[Any, int], Any]
_local = threading.local()
# Part of the keys of JAX's caches: what is traced with marks is used by nobody else.
_marked = jax.make_user_context(default_value=False)


@contextlib.contextmanager
def marking(mark: Mark) -> Generator[None]:
  """In the block each result of a batched operation is `mark(result, axis of the lanes)`.

  Wraps the method of JAX by which vmap batches an operation (0.10 to 0.12). JAX has no public way
  to see where an axis of vmap's is.
  """
  _wrap_once()
  before, _local.mark = getattr(_local, "mark", None), mark
  try:
    with _marked(True):
      yield
  finally:
    _local.mark = before


@functools.cache
def _wrap_once() -> None:
  process: Callable[..., Any] = _batching.BatchTrace.process_primitive

  def with_marks(self: Any, primitive: Any, *args: Any, **params: Any) -> Any:
    made = process(self, primitive, *args, **params)
    mark: Mark | None = getattr(_local, "mark", None)
    if mark is None:
      return made

    def marked(result: Any) -> Any:
      if not isinstance(result, _batching.BatchTracer) or not isinstance(result.batch_dim, int):
        return result
      if result._trace.tag is not self.tag:  # pyright: ignore[reportPrivateUsage]
        return result
      with _core.set_current_trace(self.parent_trace):
        value = mark(result.val, result.batch_dim)
      return _batching.BatchTracer(self, value, result.batch_dim, result.source_info)

    return [marked(one) for one in made] if primitive.multiple_results else marked(made)

  _batching.BatchTrace.process_primitive = with_marks
