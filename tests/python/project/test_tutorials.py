# SPDX-License-Identifier: Apache-2.0
"""tools/tutorial_notebooks.py: pages of the documentation as executed notebooks."""

from __future__ import annotations

from typing import Any

import project_tools
import pytest

pytest.importorskip("jupytext", reason="jupytext is not installed")
nbclient = pytest.importorskip("nbclient", reason="nbclient is not installed")
pytest.importorskip("ipykernel", reason="ipykernel is not installed")

PAGE = """# A title

Read [gates](../gates.md#effects) first.

```python
print(1 + 1)
```

<!-- output -->
```text
2
```

<!-- gpu -->
```python
raise SystemError("there is no GPU")
```

```python
import matplotlib.pyplot as plt

_ = plt.plot([1, 2])
```

The end.
"""


@pytest.fixture(scope="module")
def tool() -> Any:
  return project_tools.load("tutorial_notebooks")


def test_blocks_become_cells_and_links_lead_to_the_site(tool: Any) -> None:
  cells = tool.notebook(PAGE).cells
  assert [cell.cell_type for cell in cells] == ["markdown", "code", "markdown", "code", "markdown"]
  assert cells[1].source == "print(1 + 1)"
  assert "(https://callgate.github.io/callgate/gates/#effects)" in cells[0].source
  assert "there is no GPU" in cells[2].source
  assert "```text" not in cells[2].source


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of the kernel's own libraries
def test_outputs_and_pictures_of_cells_are_in_the_notebook_and_the_page(tool: Any) -> None:
  book = tool.executed(PAGE)
  printed, drawn = (cell.outputs for cell in book.cells if cell.cell_type == "code")
  assert printed[0].text == "2\n"
  images = tool.pictures(book)
  assert [len(each) for each in images] == [0, 1]
  assert images[1][0].startswith(b"\x89PNG")
  assert drawn
  page = tool.with_pictures(PAGE, "name", images)
  assert page.startswith("# A title\n\n[This page as a notebook](name.ipynb)\n")
  assert "[1, 2])\n```\n\n![What the code above draws](name_1_0.png)\n\nThe end." in page


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_a_cell_that_fails_is_an_error(tool: Any) -> None:
  with pytest.raises(nbclient.exceptions.CellExecutionError, match="ZeroDivisionError"):
    tool.executed("# A title\n\n```python\n1 / 0\n```\n")


def test_every_tutorial_is_a_notebook(tool: Any) -> None:
  pages = sorted(tool.TUTORIALS.glob("*.md"))
  assert len(pages) == 6
  for page in pages:
    cells = tool.notebook(page.read_text(encoding="utf-8")).cells
    assert sum(cell.cell_type == "code" for cell in cells) >= 3, page.name
