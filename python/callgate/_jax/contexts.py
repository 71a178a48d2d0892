# SPDX-License-Identifier: Apache-2.0
"""Contexts of the keys of JAX's caches that callgate defines.

`import callgate` defines them: a new context changes all keys, so JAX would trace and compile again
each program that it compiled before.
"""

from __future__ import annotations

import jax

# True while vmap marks what it batches (`batching.marking`).
marked = jax.make_user_context(default_value=False)
