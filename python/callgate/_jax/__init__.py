# SPDX-License-Identifier: Apache-2.0
"""Takes what callgate needs from JAX's private modules; nothing else imports `jax._src`."""
