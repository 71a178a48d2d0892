# SPDX-License-Identifier: Apache-2.0
"""The live page that a program serves of itself, its controls, and commands for these."""
