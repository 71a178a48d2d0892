# SPDX-License-Identifier: Apache-2.0
"""`find_nan`: the first NaN or infinity of a program."""
