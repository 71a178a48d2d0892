# SPDX-License-Identifier: Apache-2.0
"""Basics that every part uses: errors, dtypes, names, encodings; no tracing, no lowering."""
