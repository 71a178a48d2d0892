# SPDX-License-Identifier: Apache-2.0
"""All modules with operations: each registers what draws them."""

# ruff: noqa: F401
from __future__ import annotations

import arithmetic
import asked
import bodies
import calls
import checks
import collectives
import control_flow
import counted
import derivatives
import forms
import in_order
import lanes
import loops
import old_interfaces
import parts
import references
import simulators
import solved

import kernels
