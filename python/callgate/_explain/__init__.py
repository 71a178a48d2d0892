# SPDX-License-Identifier: Apache-2.0
"""What a program's calls cost, told without running it."""
