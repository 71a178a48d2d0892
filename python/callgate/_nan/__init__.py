# SPDX-License-Identifier: Apache-2.0
"""Where a program makes its first NaN or infinity."""
