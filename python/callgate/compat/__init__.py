# SPDX-License-Identifier: Apache-2.0
"""Other interfaces on callgate's engine, each a module of its own.

- `callgate.compat.callbacks`: `pure_callback` and `io_callback` with JAX's signatures.
- `callgate.compat.buffer_callback`: `jax.experimental.buffer_callback`, the interface of 2025.
- `callgate.compat.host_callback`: `jax.experimental.host_callback` as it was in 2020.
- `callgate.compat.host_callback_2023`: the same in its last form, of 2021 to 2024.
- `callgate.compat.sharded_jit`: `jax.experimental.sharded_jit` as it was in 2020 and 2021.

Nothing is imported here: each module registers its rules with JAX when it is first imported.
"""

from __future__ import annotations
