# SPDX-License-Identifier: Apache-2.0
"""`callgate.install()`: JAX's callbacks and debug callbacks on callgate's engine.

One option of the process selects the lowering of programs (`compat.callbacks`). It is part of the
key of JAX's caches, so compiled programs are kept. Any thread may call these functions.
"""

from __future__ import annotations

from callgate._runtime import config


def install() -> None:
  """Runs JAX's own callbacks on callgate's engine from now on.

  It affects `jax.pure_callback`, `jax.experimental.io_callback`, `jax.debug.callback` and
  `jax.debug.print` in the whole process, on the CPU and on CUDA GPUs. Arguments, results and
  exceptions stay as in JAX. Programs no longer wait for the two debug callbacks;
  `jax.effects_barrier()` waits for them and raises their errors.

  Functions that you have called before are compiled again at their next call. Compiled objects that
  you hold (`jit(f).lower(x).compile()`), and programs that another thread is compiling, keep their
  engine. Calling it again has no effect.

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
  """Restores JAX's own engine for its callbacks.

  JAX uses the programs from before `install` again. Without `install` it has no effect.

  Example:
    >>> import callgate as cg
    >>> cg.install()
    >>> cg.uninstall()
  """
  config.switch_installed(False)
