# SPDX-License-Identifier: Apache-2.0
"""JAX's control flow with gates, taps and progress bars in it."""
