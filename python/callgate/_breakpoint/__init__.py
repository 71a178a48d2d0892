# SPDX-License-Identifier: Apache-2.0
"""Breakpoints in compiled programs: a debugger at the user's line while the program waits."""
