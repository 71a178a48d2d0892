# SPDX-License-Identifier: Apache-2.0
"""JAX's own callbacks on callgate's engine."""
