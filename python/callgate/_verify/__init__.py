# SPDX-License-Identifier: Apache-2.0
"""Questions about one gate or kernel, all asked by one call, with a report of the answers."""
