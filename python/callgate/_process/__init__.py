# SPDX-License-Identifier: Apache-2.0
"""The other processes of `jax.distributed`: who lives, who ended and why, where all meet."""
