# SPDX-License-Identifier: Apache-2.0
"""Everything that the reference names has a docstring, with the public members of classes."""

import inspect
import pkgutil
import re
from pathlib import Path

import pytest

REFERENCE = Path(__file__).resolve().parents[3] / "docs" / "reference"
ENTRIES = [
  entry
  for page in sorted(REFERENCE.glob("*.md"))
  for entry in re.findall(r"^::: ([\w.]+)$", page.read_text(encoding="utf-8"), re.MULTILINE)
]


def bare(value: object) -> bool:
  """True for a function, a method or a property without a docstring."""
  doc = inspect.getdoc(value) or ""
  if type(value).__module__ == "nanobind" or isinstance(value, property):
    doc = re.sub(r"\A(\w+)?\(self.*(\n|\Z)", "", doc)  # the signature that nanobind puts first
  return (inspect.isroutine(value) or isinstance(value, property)) and not doc.strip()


@pytest.mark.parametrize("entry", ENTRIES)
def test_an_entry_of_the_reference_and_its_public_members_have_docstrings(entry: str) -> None:
  value = pkgutil.resolve_name(entry)
  assert inspect.getdoc(value)
  if inspect.isclass(value):
    public = [name for name in dir(value) if not name.startswith("_")]
    assert [name for name in public if bare(inspect.getattr_static(value, name))] == []
