# SPDX-License-Identifier: Apache-2.0
"""Native functions in compiled programs: what all kinds of kernels share."""
