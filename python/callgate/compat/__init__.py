# SPDX-License-Identifier: Apache-2.0
"""Other libraries' interfaces on callgate's engine, each in its own module.

- `callgate.compat.callbacks`: `pure_callback` and `io_callback` with JAX's signatures.
- `callgate.compat.buffer_callback`: `jax.experimental.buffer_callback`, as of 2025.
- `callgate.compat.host_callback`: `jax.experimental.host_callback`, as of 2020.
- `callgate.compat.host_callback_2023`: its last form, of 2021 to 2024.
- `callgate.compat.sharded_jit`: `jax.experimental.sharded_jit`, as of 2020 and 2021.

This package imports none of them, because each registers its rules with JAX on import.
"""

from __future__ import annotations
