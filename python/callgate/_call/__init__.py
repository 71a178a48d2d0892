# SPDX-License-Identifier: Apache-2.0
"""The primitive that gates and kernels share: tracing, its rules, its lowering."""
