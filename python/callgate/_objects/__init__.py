# SPDX-License-Identifier: Apache-2.0
"""Objects of the host that compiled programs hold, and solvers with derivatives built on them."""
