# SPDX-License-Identifier: Apache-2.0
"""Native functions in compiled programs: the basics of all kinds of kernels."""
