# SPDX-License-Identifier: Apache-2.0
"""The live page that a program serves, its controls, and the commands for them."""
