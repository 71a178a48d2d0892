# SPDX-License-Identifier: Apache-2.0
"""The other processes of `jax.distributed`: which live, which ended and why, and barriers."""
