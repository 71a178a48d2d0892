# SPDX-License-Identifier: Apache-2.0
"""`callgate.install()`: JAX's own callbacks and debug callbacks on callgate's engine.

One option of the process decides how programs are lowered (`compat.callbacks`). It is part of the
key of JAX's caches, so nothing compiled is lost. Any thread may call these.
"""

from __future__ import annotations

from callgate._runtime import config


def install() -> None:
  """Runs JAX's own callbacks on callgate's engine from now on.

  They are `jax.pure_callback`, `jax.experimental.io_callback`, `jax.debug.callback` and
  `jax.debug.print`. Their arguments, results and exceptions stay JAX's. For the two debug callbacks
  the program no longer waits: `jax.effects_barrier()` waits for them and raises what they raised.

  It counts for the whole process, on the CPU and on CUDA GPUs (there through pinned memory).
  Functions that were jitted before are compiled again when next called; compiled objects that you
  hold (`jit(f).lower(x).compile()`) and programs that another thread is compiling keep their
  engine. Installing twice does nothing more.

  Example:
    >>> import callgate as cg, jax, numpy as np
    >>> cg.install()
    >>> float(jax.jit(lambda x: jax.pure_callback(np.square, x, x))(np.float32(3)))
    9.0
    >>> cg.uninstall()
  """
  from callgate.compat import callbacks

  callbacks.register()
  config.switch_installed(True)


def uninstall() -> None:
  """Puts JAX's own engine back for its callbacks.

  Programs from before `install` serve again. Without a preceding `install`, does nothing.

  Example:
    >>> import callgate as cg
    >>> cg.install()
    >>> cg.uninstall()
  """
  config.switch_installed(False)
