# SPDX-License-Identifier: Apache-2.0
"""Plain words: sentences whose subject is a noun, and class names that stand for one thing."""

from __future__ import annotations

import ast
import collections
import re

from texts import ROOT, files, prose

# A sentence that begins so has no noun as its subject. Comments, docstrings and messages count.
BEGINNINGS = re.compile(
  r"""(?:\A|\n\s*\n|[.!?]["']?\s+(?:(?:\#|//)\ )?|\"\"\"|\n\s*(?:\#|//|[-*])\ )\s*
  (?:What|Whether|Of|Who|Those)\b""",
  re.VERBOSE,
)
# How many there are in each folder: the tests' are a page's title and the examples below. Lower a
# number with each sentence that is mended; none may grow.
MOST = {"tests": 4}


def sentences(text: str) -> int:
  return sum(1 for _ in BEGINNINGS.finditer(text))


def test_a_sentence_without_a_noun_is_counted() -> None:
  text = """A gate calls. What is called runs. It is called once,
  of all shards. "What works" is a page.

  Of these: none. Whether it is so.
  """
  assert sentences(text) == 3
  assert sentences("Who waits for those?") == 1


def test_no_folder_gains_sentences_whose_subject_is_no_noun() -> None:
  found: collections.Counter[str] = collections.Counter()
  for path in files(".py", ".h", ".cc", ".md"):
    text = prose(path) if path.suffix == ".md" else path.read_text(encoding="utf-8")
    found[path.relative_to(ROOT).parts[0]] += sentences(text)
  assert dict(found) == {name: MOST.get(name, 0) for name in found}, "mend them, or lower MOST"


# Tools make these from the code, or include the changelog.
MADE = {"changelog.md", "state.md", "what_works.md"}


def test_a_page_answers_one_question_in_at_most_2000_words() -> None:
  found = {path: len(path.read_text(encoding="utf-8").split()) for path in files(".md")}
  pages = {path.name: count for path, count in found.items() if path.is_relative_to(ROOT / "docs")}
  assert {name for name, count in pages.items() if count > 2000} <= MADE
  assert pages["performance.md"] < 800


def test_the_pages_use_one_spelling_of_the_place_of_a_call() -> None:
  """`thread="own"` is another spelling of `run_on="own"`; `cg.torch` has no other."""
  pages = {path.name for path in files(".md") if 'thread="own"' in path.read_text("utf-8")}
  assert pages <= {"gates_threads.md", "kernels_torch.md"}


def test_no_two_classes_of_the_package_have_one_name() -> None:
  found: collections.Counter[str] = collections.Counter()
  for path in files(".py"):
    if path.is_relative_to(ROOT / "python"):
      nodes = ast.walk(ast.parse(path.read_text(encoding="utf-8")))
      found.update(node.name for node in nodes if isinstance(node, ast.ClassDef))
  assert not [name for name, count in found.items() if count > 1]


ENTRY = re.compile(r"- \*\*(?:\[(.+?)\]\(\S+\)|(.+?))\*\*: (.+)")
# A meaning that begins so has no noun as its first word.
NO_NOUN = re.compile(r"(?:what|which|who|whether|how|where|when|of|to|see|\w+ing)\b", re.IGNORECASE)


def test_the_glossary_gives_each_word_one_meaning_in_one_sentence() -> None:
  """In the order of the alphabet; test_statements.py follows the links."""
  head, _, entries = (ROOT / "docs" / "glossary.md").read_text("utf-8").partition("\n- ")
  assert head.startswith("# Glossary\n")
  found = [ENTRY.fullmatch(line) for line in f"- {entries}".splitlines()]
  words = [match and (match[1] or match[2]) for match in found]
  assert words == sorted(set(words), key=str.casefold)
  for match in found:
    meaning = match[3]
    assert not NO_NOUN.match(meaning), meaning
    assert re.fullmatch(r"[^.!?]+(?:\.\w[^.!?]*)*\.", meaning), meaning
