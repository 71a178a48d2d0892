# SPDX-License-Identifier: Apache-2.0
"""Calls that a program starts now and waits for later."""
