# SPDX-License-Identifier: Apache-2.0
"""Kernels that are C functions of other libraries."""
