# SPDX-License-Identifier: Apache-2.0
"""Skips rows that need a package which is not installed."""

from __future__ import annotations

import pytest
from contract import ROWS


@pytest.fixture(autouse=True)
def needed(request: pytest.FixtureRequest) -> None:
  row = getattr(request.node, "callspec", None) and request.node.callspec.params.get("row")
  if row and (package := ROWS[row].needs):
    pytest.importorskip(package, reason=f"{package} is not installed")
