# SPDX-License-Identifier: Apache-2.0
"""`explain`: the costs of a program's calls, without running the program."""
