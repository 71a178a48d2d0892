# SPDX-License-Identifier: Apache-2.0
"""`bars`: a progress bar for each of JAX's loops that is traced in a block, whoever's loop it is.

JAX's three functions for loops get a layer at the first block, which asks the thread's option: it
is a part of the keys of JAX's caches, so what is traced in a block is not used outside of it. Loops
of JAX's own functions, and those that callgate's loops are made of, are left alone.
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
  """Gives each loop of JAX's that is traced in the block a progress bar, named by its place.

  For loops that somebody else has written, as those of NumPyro, BlackJAX or Diffrax:

  ```python
  with cg.bars(min_steps=100):
    mcmc.run(key)  # fori_collect (util.py:369):  41%
  ```

  Each call of `jax.lax.scan`, `fori_loop` and `while_loop` has one, but for those of JAX's own
  functions. The same steps run in the same order, and results and gradients are those without bars;
  XLA may round `a * b + c` in another way, as it does beside any call in a loop. A loop whose
  number of steps the program alone knows has its bar from step `min_steps` on. A `while_loop`
  counts. A loop with options of its own (`progress=`, or a body under `cg.progress`) has those;
  `progress=False` is none. Where a program can have no bar, in a `jax.shard_map` over some axes of
  its mesh, say, it has none.

  A function that was compiled before the block has no bars, and one that was compiled in it is not
  used outside. The block is the thread's that enters it. It may be a decorator, too.

  Args:
    min_steps: loops with fewer steps have none.

  Raises:
    GateDefinitionError: `min_steps` is no integer from 0 on.
  """

  def __init__(self, min_steps: int = 100) -> None:
    self._min_steps = options.count("bars", "min_steps", min_steps, most=_MOST)
    self._local = threading.local()  # .blocks: those that a thread is in, of this object

  def __enter__(self) -> bars:
    _wrap()
    block = config.least_steps_of_bars(self._min_steps)
    block.__enter__()
    self._local.__dict__.setdefault("blocks", []).append(block)
    return self

  def __exit__(self, *error: Any) -> None:
    blocks: list[AbstractContextManager[Any]] = self._local.__dict__.get("blocks", [])
    if not blocks:
      raise RuntimeError("bars: expected the end of the block in the thread that began it")
    blocks.pop().__exit__(*error)


@_part.once
def _wrap() -> None:
  for name, own in _LOOPS.items():
    _jax_loops.wrap_function(name, functools.partial(_layer, name, own))


def _layer(
  name: str, own: Callable[..., Any], original: Callable[..., Any], args: Any, kwargs: Any
) -> Any:
  """A call of a function of JAX's by a user, or a library: by callgate's own where it has a bar."""
  if config.least_steps_of_bars.value == config.NO_BARS:
    return original(*args, **kwargs)
  try:
    given = inspect.signature(original).bind(*args, **kwargs).arguments
  except TypeError:  # JAX says what is wrong
    return original(*args, **kwargs)
  bodies = [given.get(argument, own) for argument in ("f", "body_fun", "cond_fun")]
  is_plain = all(map(callable, bodies)) and not any(map(has_bar, bodies))
  bar = automatic.bar_of(name, given) if is_plain else None
  if bar is None:
    return original(*args, **kwargs)
  return own(*args, **kwargs, progress=bar)
