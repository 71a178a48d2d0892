# SPDX-License-Identifier: Apache-2.0
"""Fixtures of the contract's tests: skips, and a folder for files."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from contract import ROWS


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
  """Rows of CUDA's kernels run where the other tests of a GPU do."""
  for item in items:
    row = getattr(item, "callspec", None) and item.callspec.params.get("row")
    if row in ROWS and ROWS[row].gpu:
      item.add_marker(pytest.mark.gpu)


@pytest.fixture(autouse=True)
def needed(request: pytest.FixtureRequest) -> None:
  row = getattr(request.node, "callspec", None) and request.node.callspec.params.get("row")
  if row and (package := ROWS[row].needs):
    pytest.importorskip(package, reason=f"{package} is not installed")


@pytest.fixture(autouse=True, scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
  """Made here, since processes would remove theirs before their last programs end."""
  with pytest.MonkeyPatch.context() as patch:
    patch.setenv("CONTRACT_FOLDER", str(tmp_path_factory.mktemp("contract")))
    yield
