# SPDX-License-Identifier: Apache-2.0
"""The tutorials as notebooks, run when the site is built: a hook of MkDocs (mkdocs.yml).

Each page of docs/tutorials becomes a notebook of the same name, which runs in a kernel of its own.
The page gets a link to it and, below the code that draws, its pictures. A cell that fails ends
the build.

    python tools/tutorial_notebooks.py FOLDER   # the notebooks alone
"""

from __future__ import annotations

import base64
import functools
import re
import sys
import tempfile
import tomllib
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path, PurePosixPath
from typing import Any

import jupytext
import nbclient
import nbformat

ROOT = Path(__file__).resolve().parent.parent
TUTORIALS = ROOT / "docs" / "tutorials"
PROJECT: dict[str, Any] = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
SITE: str = PROJECT["urls"]["Documentation"]
_SHOWN = r"\n<!-- output -->\n```text\n.*?^```\n"
_OUTPUT = re.compile(_SHOWN, re.MULTILINE | re.DOTALL)
_LINK = re.compile(r"\]\((\.\./[^)\s]*?)(?:\.md)?(#[^)\s]*)?\)")
_CODE = re.compile(rf"^```python\n.*?^```\n(?:{_SHOWN})?", re.MULTILINE | re.DOTALL)


def notebook(page: str) -> nbformat.NotebookNode:
  """The notebook of a page: its Python blocks are cells, and what they printed is left out."""
  text = _OUTPUT.sub("", page)
  text = text.replace("<!-- gpu -->\n```python\n", "```python .noeval\n")  # shown, never run
  text = _LINK.sub(lambda link: _absolute(link[1], link[2] or ""), text)
  book = jupytext.reads(text, fmt="md")
  book.metadata = {"kernelspec": {"name": "python3", "display_name": "Python 3"}}
  return book


def _absolute(target: str, anchor: str) -> str:
  """A link of a page, as the site has it."""
  path = target.removeprefix("../")
  return f"]({SITE}{path}{'' if PurePosixPath(path).suffix else '/'}{anchor})"


@functools.cache  # `mkdocs serve` builds again and again
def executed(page: str) -> nbformat.NotebookNode:
  """The notebook of a page, with what its cells print and draw. Raises CellExecutionError."""
  book = notebook(page)
  with tempfile.TemporaryDirectory() as folder:
    resources = {"metadata": {"path": folder}}
    nbclient.NotebookClient(book, timeout=300, resources=resources).execute()
  return book


def pictures(book: nbformat.NotebookNode) -> list[list[bytes]]:
  """The pictures that each code cell of an executed notebook has drawn, as PNG."""
  cells = [cell for cell in book.cells if cell.cell_type == "code"]
  shown = [[output.get("data", {}) for output in cell.outputs] for cell in cells]
  return [[base64.b64decode(d["image/png"]) for d in data if "image/png" in d] for data in shown]


def with_pictures(page: str, name: str, drawn: list[list[bytes]]) -> str:
  """The page, with a picture below each block that draws one, and a link to the notebook."""
  cells = iter(enumerate(drawn))

  def block(match: re.Match[str]) -> str:
    if page[: match.start()].endswith("<!-- gpu -->\n"):
      return match[0]
    cell, images = next(cells)
    shown = [f"\n![What the code above draws]({name}_{cell}_{i}.png)\n" for i in range(len(images))]
    return "".join([match[0], *shown])

  title, _, rest = _CODE.sub(block, page).partition("\n")
  return f"{title}\n\n[This page as a notebook]({name}.ipynb)\n{rest}"


def _all() -> dict[str, nbformat.NotebookNode]:
  """Every tutorial's executed notebook, by its page's name."""
  pages = {path.stem: path.read_text(encoding="utf-8") for path in sorted(TUTORIALS.glob("*.md"))}
  with ThreadPoolExecutor(2) as pool:
    return dict(zip(pages, pool.map(executed, pages.values()), strict=True))


# --- MkDocs' events ----------------------------------------------------------------------------
def on_files(files: Any, config: Any) -> Any:
  from mkdocs.structure.files import File

  for name, book in _all().items():
    made = {f"{name}.ipynb": nbformat.writes(book)}
    for cell, images in enumerate(pictures(book)):
      made |= {f"{name}_{cell}_{i}.png": image for i, image in enumerate(images)}
    for file, content in made.items():
      files.append(File.generated(config, f"tutorials/{file}", content=content))
  return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Any) -> str:
  path = PurePosixPath(page.file.src_uri)
  if path.parent.name != "tutorials":
    return markdown
  text = (TUTORIALS / path.name).read_text(encoding="utf-8")
  return with_pictures(markdown, path.stem, pictures(executed(text)))


def main(arguments: list[str]) -> int:
  if len(arguments) != 1:
    print(f"expected one folder, got {len(arguments)} arguments", file=sys.stderr)
    return 2
  folder = Path(arguments[0])
  folder.mkdir(parents=True, exist_ok=True)
  for name, book in _all().items():
    nbformat.write(book, folder / f"{name}.ipynb")
  return 0


if __name__ == "__main__":
  sys.exit(main(sys.argv[1:]))
