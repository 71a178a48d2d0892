# SPDX-License-Identifier: Apache-2.0
"""PyTorch functions and modules in compiled programs."""
