# SPDX-License-Identifier: Apache-2.0
"""The documentation's tables of environment variables and of messages are those of the code."""

from __future__ import annotations

import ast
import functools
import re
from collections.abc import Iterator
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
MESSAGES = ("messages.md", "messages_running.md")


@functools.cache
def messages() -> list[str]:
  """Texts of the code, each whole, with f-strings' values and C++'s insertions left out."""
  texts: list[str] = []
  for path in PACKAGE:
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
      if isinstance(node, ast.JoinedStr):
        texts.append(_text(node))
      elif isinstance(node, ast.Constant) and isinstance(node.value, str):
        texts.append(node.value)
  for path in NATIVE:
    joined = re.sub(r'"\s*\n\s*"', "", path.read_text(encoding="utf-8"))
    texts += re.findall(r'"((?:[^"\\\n]|\\.)*)"', joined)
  return texts


def rows(page: str) -> Iterator[tuple[str, list[str]]]:
  """Each message of a page that is callgate's, and its pieces between the parts that vary."""
  for cell in cells(page, 0):
    if cell != "JAX's message" and cell not in cells_of_jax():
      (text,) = re.findall(r"`([^`]+)`", cell)[:1]
      yield text, [piece for piece in text.split("…") if piece.strip(" :,")]


def test_messages_of_the_pages_are_messages_of_the_code() -> None:
  wrong = [
    text
    for page in MESSAGES
    for text, pieces in rows(page)
    if not any(_in_order(pieces, message) for message in messages())
  ]
  assert not wrong


def test_a_message_is_on_the_page_to_which_its_exception_links() -> None:
  raised, pages_of = [*raised_texts()], linked_pages()
  found = 0
  for page in MESSAGES:
    for text, pieces in rows(page):
      kinds = {kind for kind, message in raised if _in_order(pieces, message)}
      links = {f"{pages_of[kind]}.md" for kind in kinds if pages_of.get(kind)}
      assert not links or page in links, f"{text!r} is on {page}, but {kinds} link to {links}"
      found += bool(links)
  assert found > 30


def linked_pages() -> dict[str, str]:
  """The page of each of callgate's exceptions: its own, or that of its base class."""
  found: dict[str, str] = {}
  file = ROOT / "python" / "callgate" / "_core" / "errors.py"
  for node in ast.parse(file.read_text(encoding="utf-8")).body:
    if isinstance(node, ast.ClassDef):
      own = re.findall(
        r"^  _page(?:: .*)? = '(.*)'$", ast.unparse(node).replace("    ", "  "), re.M
      )
      bases = (found[name] for base in node.bases if (name := ast.unparse(base)) in found)
      if pages := [*own, *bases]:
        found[node.name] = pages[0]
  return found


def raised_texts() -> Iterator[tuple[str, str]]:
  """The exception's name and the text of each `raise` with a text, as in `messages`."""
  for path in PACKAGE:
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
      if isinstance(node, ast.Raise) and isinstance(node.exc, ast.Call) and node.exc.args:
        yield ast.unparse(node.exc.func).rpartition(".")[2], _text(node.exc.args[0])


def _text(node: ast.AST) -> str:
  if isinstance(node, ast.JoinedStr):
    return "".join(_text(value) for value in node.values)
  return str(node.value) if isinstance(node, ast.Constant) else "\0"


def _in_order(pieces: list[str], message: str) -> bool:
  at = 0
  for piece in pieces:
    at = message.find(piece, at)
    if at < 0:
      return False
    at += len(piece)
  return True
