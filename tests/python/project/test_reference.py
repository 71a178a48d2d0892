"""The reference of the documentation names what the package exports."""

import inspect
import pickle
import pkgutil
import re
from pathlib import Path

import pytest

import callgate as cg

REFERENCE = Path(__file__).resolve().parents[3] / "docs" / "reference.md"


def test_every_public_name_has_an_entry_in_the_reference():
  entries = re.findall(r"^::: [\w.]*\.(\w+)$", REFERENCE.read_text(), re.MULTILINE)
  assert set(cg.__all__) <= set(entries)


@pytest.mark.parametrize(
  "entry", re.findall(r"^::: ([\w.]+)$", REFERENCE.read_text(), re.MULTILINE)
)
def test_an_entry_of_the_reference_exists_where_it_says(entry: str) -> None:
  assert pkgutil.resolve_name(entry) is not None


@pytest.mark.parametrize("name", cg.__all__)
def test_a_public_name_is_callgates_own_wherever_it_is_defined(name: str) -> None:
  value = getattr(cg, name)
  if not inspect.ismodule(value):
    assert value.__module__ == "callgate"
    assert pickle.loads(pickle.dumps(value)) is value
