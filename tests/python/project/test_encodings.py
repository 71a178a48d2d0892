# SPDX-License-Identifier: Apache-2.0
"""Text files have the same encoding everywhere: UTF-8 is Python's default only since 3.15."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

PACKAGE = Path(__file__).resolve().parents[3] / "python" / "callgate"


def calls_without_encoding(file: Path) -> Iterator[str]:
  """The calls that read or write text in the default encoding; ruff needs to know the type."""
  for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
    if not isinstance(node, ast.Call) or any(k.arg in ("encoding", None) for k in node.keywords):
      continue
    name = node.func.attr if isinstance(node.func, ast.Attribute) else ast.unparse(node.func)
    options = {k.arg: ast.unparse(k.value) for k in node.keywords}
    is_text = options.get("text", options.get("universal_newlines")) == "True"
    opens = name == "open" and isinstance(node.func, ast.Name)
    modes = [*map(ast.unparse, node.args[1:2]), options.get("mode", "")] if opens else []
    reads = name == "write_text" or (name == "read_text" and not node.args)
    if reads or is_text or (opens and not any("b" in mode for mode in modes)):
      yield f"{file.name}:{node.lineno}: {ast.unparse(node)}"


def test_every_text_file_has_an_encoding() -> None:
  assert [call for file in PACKAGE.rglob("*.py") for call in calls_without_encoding(file)] == []


def test_the_check_finds_calls_without_one(tmp_path: Path) -> None:
  lines = (
    "path.read_text()", "path.write_text(x)", "open(path)", "open(path, 'w')", "run(c, text=True)",
    "path.read_text(encoding='utf-8')", "open(path, 'rb')", "os.open(path, 0)", "f.read_text('a')",
  )  # fmt: skip
  file = tmp_path / "module.py"
  file.write_text("\n".join(lines), encoding="utf-8")
  assert [found.split(": ", 1)[1] for found in calls_without_encoding(file)] == list(lines[:5])
