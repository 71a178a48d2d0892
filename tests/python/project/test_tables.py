# SPDX-License-Identifier: Apache-2.0
"""The documentation's tables of environment variables and of messages are those of the code."""

from __future__ import annotations

import ast
import functools
import re
from pathlib import Path

from texts import cells_of_jax

ROOT = Path(__file__).resolve().parents[3]
PACKAGE = sorted((ROOT / "python" / "callgate").rglob("*.py"))
NATIVE = sorted(path for path in (ROOT / "src").rglob("*") if path.suffix in (".cc", ".h"))


def cells(page: str, column: int) -> list[str]:
  """A column of all tables of a page, without their headings."""
  text = (ROOT / "docs" / page).read_text(encoding="utf-8")
  rows = re.findall(r"^\|(?! ?(?:-|message|variable))(.*)\|$", text, re.MULTILINE)
  return [row.split("|")[column].strip() for row in rows]


# --- environment variables ---------------------------------------------------------------------
def names_in(node: ast.AST) -> list[str]:
  strings = [n.value for n in ast.walk(node) if isinstance(n, ast.Constant)]
  return [s for s in strings if isinstance(s, str) and re.fullmatch(r"[A-Z][A-Z_]+", s)]


def variables_read(tree: ast.AST) -> set[str]:
  found: set[str] = set()
  for node in ast.walk(tree):
    if isinstance(node, ast.Call):
      function = ast.unparse(node.func)
      if function in ("os.environ.get", "environment.seconds") and node.args:
        found |= {*names_in(node.args[0])}
      elif function == "map" and ast.unparse(node.args[0]) == "os.environ.get":
        found |= {*names_in(node.args[1])}
      elif function in ("tracing.define_bool", "tracing.define_enum"):
        found.add(ast.literal_eval(node.args[0]).upper())  # JAX reads its options from these
    elif isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "_ENVIRONMENT":
      found |= {*names_in(node.value)}
  return found


def test_environment_variables_that_the_code_reads_are_those_of_the_page() -> None:
  read = {name for path in PACKAGE for name in variables_read(ast.parse(path.read_text("utf-8")))}
  code = "\n".join(path.read_text(encoding="utf-8") for path in NATIVE)
  read |= set(re.findall(r'getenv\("(\w+)"\)', code))
  read -= {"MLFLOW_ALLOW_FILE_STORE", "CLEARML_CACHE_DIR"}  # put back to what they were
  said = {name for cell in cells("environment.md", 0) for name in re.findall(r"`(\w+)`", cell)}
  assert said == read


# --- messages ----------------------------------------------------------------------------------
@functools.cache
def messages() -> list[str]:
  """Texts of the code, each whole, with f-strings' values and C++'s insertions left out."""
  texts: list[str] = []
  for path in PACKAGE:
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
      if isinstance(node, ast.JoinedStr):
        texts.append("".join(v.value if isinstance(v, ast.Constant) else "\0" for v in node.values))
      elif isinstance(node, ast.Constant) and isinstance(node.value, str):
        texts.append(node.value)
  for path in NATIVE:
    joined = re.sub(r'"\s*\n\s*"', "", path.read_text(encoding="utf-8"))
    texts += re.findall(r'"((?:[^"\\\n]|\\.)*)"', joined)
  return texts


def test_messages_of_the_page_are_messages_of_the_code() -> None:
  wrong = []
  for cell in cells("messages.md", 0):
    if cell == "JAX's message" or cell in cells_of_jax():
      continue
    (text,) = re.findall(r"`([^`]+)`", cell)[:1]
    pieces = [piece for piece in text.split("…") if piece.strip(" :,")]
    if not any(_in_order(pieces, message) for message in messages()):
      wrong.append(text)
  assert not wrong


def _in_order(pieces: list[str], message: str) -> bool:
  at = 0
  for piece in pieces:
    at = message.find(piece, at)
    if at < 0:
      return False
    at += len(piece)
  return True
