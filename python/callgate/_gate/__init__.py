# SPDX-License-Identifier: Apache-2.0
"""Python callables in compiled programs: gates, checks, their statistics."""
