# SPDX-License-Identifier: Apache-2.0
"""`bars`: a progress bar for each of JAX's loops that is traced in a block, also in libraries.

The first block wraps JAX's three loop functions in a layer that checks the thread's option. The
option is part of the keys of JAX's caches, so a function traced in a block isn't reused outside.
Loops inside JAX's own functions, and loops inside callgate's loops, have no bar.
"""

from __future__ import annotations

import functools
import inspect
import threading
from collections.abc import Callable
from contextlib import AbstractContextManager, ContextDecorator
from typing import Any

from callgate import _part
from callgate._core import options
from callgate._jax import loops as _jax_loops
from callgate._loops import automatic, loops
from callgate._loops.progress import has_bar
from callgate._runtime import config

_LOOPS: dict[str, Callable[..., Any]] = {
  "scan": loops.scan, "fori_loop": loops.fori_loop, "while_loop": loops.while_loop,
}  # fmt: skip
_MOST = 2**31 - 1


class bars(ContextDecorator):
  """Gives each JAX loop that is traced in the block a progress bar, named by its source line.

  Use it for loops of libraries, such as NumPyro, BlackJAX or Diffrax:

  ```python
  with cg.bars(min_steps=100):
    mcmc.run(key)  # fori_collect (util.py:369):  41%
  ```

  - Each call of `jax.lax.scan`, `fori_loop` and `while_loop` gets a bar, except in JAX's own
    functions. A `while_loop` shows a count. If only the running program knows the number of steps,
    the bar appears after `min_steps` steps.
  - A loop with its own options (`progress=`, or a body under `cg.progress`) keeps them;
    `progress=False` means no bar.
  - The loops run the same steps in the same order, with the same results and gradients. XLA may
    round `a * b + c` differently, as it does beside any call in a loop.
  - Programs that can't have a bar run without one, such as a `jax.shard_map` over some axes of its
    mesh.
  - JAX compiles a function again inside the block, and doesn't use that program outside. The block
    applies to the thread that enters it. `bars()` also works as a decorator.

  Args:
    min_steps: loops with fewer steps have no bar.

  Raises:
    GateDefinitionError: `min_steps` is not an integer of at least 0.
  """

  def __init__(self, min_steps: int = 100) -> None:
    self._min_steps = options.count("bars", "min_steps", min_steps, most=_MOST)
    self._local = threading.local()  # .blocks: this object's blocks that the thread is in

  def __enter__(self) -> bars:
    _wrap()
    block = config.least_steps_of_bars(self._min_steps)
    block.__enter__()
    self._local.__dict__.setdefault("blocks", []).append(block)
    return self

  def __exit__(self, *error: Any) -> None:
    blocks: list[AbstractContextManager[Any]] = self._local.__dict__.get("blocks", [])
    if not blocks:
      raise RuntimeError("bars: the block must end in the thread that began it; exit it there")
    blocks.pop().__exit__(*error)


@_part.once
def _wrap() -> None:
  for name, own in _LOOPS.items():
    _jax_loops.wrap_function(name, functools.partial(_layer, name, own))


def _layer(
  name: str, own: Callable[..., Any], original: Callable[..., Any], args: Any, kwargs: Any
) -> Any:
  """Runs a loop that a user or a library calls: as callgate's own loop if it has a bar."""
  if config.least_steps_of_bars.value == config.NO_BARS:
    return original(*args, **kwargs)
  try:
    given = inspect.signature(original).bind(*args, **kwargs).arguments
  except TypeError:  # JAX raises the right error
    return original(*args, **kwargs)
  bodies = [given.get(argument, own) for argument in ("f", "body_fun", "cond_fun")]
  is_plain = all(map(callable, bodies)) and not any(map(has_bar, bodies))
  bar = automatic.bar_of(name, given) if is_plain else None
  if bar is None:
    return original(*args, **kwargs)
  return own(*args, **kwargs, progress=bar)
