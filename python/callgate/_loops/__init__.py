# SPDX-License-Identifier: Apache-2.0
"""JAX's control flow around gates, taps and progress bars."""
