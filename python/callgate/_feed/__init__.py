# SPDX-License-Identifier: Apache-2.0
"""Host iterators that programs read."""
