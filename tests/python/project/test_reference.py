"""The reference of the documentation names what the package exports."""

import re
from pathlib import Path

import callgate

REFERENCE = Path(__file__).resolve().parents[3] / "docs" / "reference.md"


def test_every_public_name_has_an_entry_in_the_reference():
  entries = re.findall(r"^::: [\w.]*\.(\w+)$", REFERENCE.read_text(), re.MULTILINE)
  assert set(callgate.__all__) <= set(entries)
