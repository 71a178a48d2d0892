# SPDX-License-Identifier: Apache-2.0
"""The words of Python files."""

from __future__ import annotations

import io
import tokenize
from pathlib import Path

import texts

TEXT = '''"""The module."""  # first
a = "# no comment" + '\\'# nor "this' + f"{a!r} # {a}"  # "second"
b = """
# no comment \\""" # either
"""
if a:  # third
  try:
    f = lambda: 0
  except ValueError:
    class Inner:
      """A class."""
      def method(self):
        r"""A method."""
        return {"x": \'\'\' # no "comment"
        \'\'\'}  # fourth's
'''


def test_words_are_the_comments_and_docstrings(tmp_path: Path) -> None:
  file = tmp_path / "a.py"
  file.write_text(TEXT)
  tokens = tokenize.generate_tokens(io.StringIO(TEXT).readline)
  comments = [token.string for token in tokens if token.type == tokenize.COMMENT]
  assert comments == ["# first", '# "second"', "# third", "# fourth's"]
  documented = ["The module.", "A class.", "A method."]
  assert texts.words(file).splitlines() == [*comments, *documented]


def test_the_package_s_comments_are_those_of_the_tokenizer() -> None:
  files = sorted((texts.ROOT / "python" / "callgate" / "_core").glob("*.py"))
  for file in files:
    tokens = tokenize.generate_tokens(io.StringIO(file.read_text("utf-8")).readline)
    comments = [token.string for token in tokens if token.type == tokenize.COMMENT]
    assert [found for found in texts.COMMENTS.findall(file.read_text("utf-8")) if found] == comments
