# SPDX-License-Identifier: Apache-2.0
"""The project's files, and the words in them: comments, docstrings, pages."""

import ast
import functools
import re
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[3]
FENCE = re.compile(r"^[ ]*(```|~~~).*?^[ ]*\1[ ]*$", re.MULTILINE | re.DOTALL)
# Python's strings, which may hold a `#`, and comments, the group. tokenize takes ten times as long.
COMMENTS = re.compile(
  r'''"""(?:[^\\]|\\.)*?"""|\'{3}(?:[^\\]|\\.)*?\'{3}'''
  r"""|"(?:[^"\\\n]|\\.)*"|'(?:[^'\\\n]|\\.)*'|(\#[^\n]*)""",
  re.DOTALL,
)
CODE = ("python", "src", "include", "tests", "benchmarks", "examples", "tools", "cmake")


def files(*suffixes: str) -> list[Path]:
  folders = [ROOT / name for name in (*CODE, "docs")]
  below = [path for folder in folders for path in folder.rglob("*") if path.suffix in suffixes]
  here = [path for path in ROOT.iterdir() if path.suffix in suffixes]
  return sorted(path for path in below + here if "__pycache__" not in path.parts)


def prose(page: Path) -> str:
  """A page without its blocks of code."""
  return FENCE.sub("", page.read_text(encoding="utf-8"))


@functools.cache
def words(file: Path) -> str:
  """The comments and docstrings of a Python file, the `//` comments of C++, the prose of a page."""
  if file.suffix == ".md":
    return prose(file)
  text = file.read_text(encoding="utf-8")
  if file.suffix in (".h", ".cc"):
    return "\n".join(re.findall(r"//(.*)", text))
  comments = [comment for comment in COMMENTS.findall(text) if comment]
  docstrings = (ast.get_docstring(node) or "" for node in documented(ast.parse(text)))
  return FENCE.sub("", "\n".join([*comments, *docstrings]))


def documented(node: ast.AST) -> Iterator[ast.Module | ast.ClassDef | ast.FunctionDef]:
  """The module, classes and functions in a statement; expressions hold none."""
  if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef)):
    yield node
  for part in ("body", "orelse", "finalbody", "handlers", "cases"):
    inside = getattr(node, part, ())
    for inner in inside if isinstance(inside, list) else ():
      yield from documented(inner)


def cells_of_jax() -> list[str]:
  """The messages of JAX and XLA in docs/messages.md; test_jax_messages.py raises each."""
  text = (ROOT / "docs" / "messages.md").read_text(encoding="utf-8")
  (rows,) = re.findall(r"^\| JAX's message .*\n\|-.*\n((?:\|.*\n)+)", text, re.MULTILINE)
  return [row.split("|")[1].strip() for row in rows.splitlines()]
