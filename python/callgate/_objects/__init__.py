# SPDX-License-Identifier: Apache-2.0
"""Host objects that compiled programs refer to, and differentiable solvers built on them."""
