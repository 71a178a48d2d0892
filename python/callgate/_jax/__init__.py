# SPDX-License-Identifier: Apache-2.0
"""All uses of JAX's private modules; nothing else imports `jax._src`."""
