# SPDX-License-Identifier: Apache-2.0
"""The contestants: one adapter per way of calling host code from a compiled JAX program."""
