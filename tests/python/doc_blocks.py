"""Runs the Python blocks of a documentation page, in order, in one namespace.

    python doc_blocks.py PAGE FOLDER [--gpu]

A block that needs a CUDA device has `<!-- gpu -->` on the line before it, or
`<!-- gpu: NAME, ... -->` where it needs modules too. Without --gpu such blocks are compiled only;
with it they alone run, with `cg`, `jax`, `jnp` and `np` there, and those whose modules are missing
are named. The page's code is written to FOLDER as one file with the page's line numbers, since
compilers such as Triton's read a function's source.
"""

from __future__ import annotations

import argparse
import dataclasses
import importlib.util
import pathlib
import re
import textwrap
from typing import Any

_BLOCK = re.compile(
  r"^(?P<indent>[ ]*)(?:<!-- gpu(?P<modules>:[^\n]*)? -->\n\s*)?```python\n(?P<code>.*?)^[ ]*```",
  re.MULTILINE | re.DOTALL,
)
_IMPORTS = "import callgate as cg, jax, jax.numpy as jnp, numpy as np"
_GPU = re.compile(r"^[ ]*<!-- gpu")


@dataclasses.dataclass(frozen=True)
class Block:
  """A Python block of a page.

  Attributes:
    line: of its first statement, from 1.
    code: without the block's indentation.
    gpu: whether it needs a CUDA device.
    modules: what it imports that may be missing.
  """

  line: int
  code: str
  gpu: bool
  modules: tuple[str, ...]


def blocks(text: str) -> list[Block]:
  """The Python blocks of a page, in order."""
  found: list[Block] = []
  for match in _BLOCK.finditer(text):
    named = (match["modules"] or "").removeprefix(":").split(",")
    found.append(
      Block(
        line=text.count("\n", 0, match.start("code")) + 1,
        code=textwrap.dedent(match["code"]),
        gpu=_GPU.match(match[0]) is not None,
        modules=tuple(name.strip() for name in named if name.strip()),
      )
    )
  return found


def run(page: pathlib.Path, folder: pathlib.Path, *, gpu: bool) -> None:
  """Runs a page's blocks.

  Args:
    page: the Markdown file.
    folder: where its code is written as a file.
    gpu: whether those for CUDA devices run, in place of the others.
  """
  found = blocks(page.read_text(encoding="utf-8"))
  path = folder / f"{page.stem}_blocks.py"
  path.write_text(_as_file(found), encoding="utf-8")
  namespace: dict[str, Any] = {"__name__": "__main__"}
  if gpu:
    exec(_IMPORTS, namespace)
  for block in found:
    code = compile("\n" * (block.line - 1) + block.code, str(path), "exec")
    if block.gpu != gpu:
      continue
    if missing := [name for name in block.modules if not _has(name)]:
      print(f"{page.name}:{block.line}: skipped, since there is no {', '.join(missing)}")
      continue
    exec(code, namespace)


def _as_file(found: list[Block]) -> str:
  lines: list[str] = []
  for block in found:
    lines += [""] * (block.line - 1 - len(lines)) + block.code.splitlines()
  return "\n".join(lines) + "\n"


def _has(module: str) -> bool:
  try:
    return importlib.util.find_spec(module) is not None
  except ModuleNotFoundError:  # a parent of it
    return False


if __name__ == "__main__":
  parser = argparse.ArgumentParser()
  parser.add_argument("page", type=pathlib.Path)
  parser.add_argument("folder", type=pathlib.Path)
  parser.add_argument("--gpu", action="store_true")
  arguments = parser.parse_args()
  run(arguments.page, arguments.folder, gpu=arguments.gpu)
