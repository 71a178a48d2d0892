# SPDX-License-Identifier: Apache-2.0
"""Steers compiled programs from outside: requests to stop, and knobs."""
