# SPDX-License-Identifier: Apache-2.0
"""Signatures as `help()`, editors and notebooks print them."""

import importlib
import inspect
import re
import typing

import pytest

import callgate as cg

COMPAT = ("buffer_callback", "callbacks", "host_callback", "host_callback_2023", "sharded_jit")
MODULES = ["callgate", "callgate.sinks", "callgate.executors",
           *(f"callgate.compat.{name}" for name in COMPAT)]  # fmt: skip


def functions(module):
  """The public functions and methods of a module, and its classes."""
  found = importlib.import_module(module)
  for name in found.__all__:
    value = getattr(found, name)
    yield name, value
    for member in dir(value) if isinstance(value, type) else []:
      function = getattr(value, member)
      if not member.startswith("_") and inspect.isfunction(function):
        yield f"{name}.{member}", function


@pytest.mark.parametrize("module", MODULES)
def test_a_signature_has_no_quotes_around_annotations_and_no_paths_of_modules(module):
  for name, value in functions(module):
    if getattr(value, "__module__", "").startswith("callgate"):
      try:
        text = str(inspect.signature(value))
      except (TypeError, ValueError):  # a module, or compiled
        continue
      wrong = re.search(r"(: |-> )['\"]|typing\.|collections\.abc|callgate\.|Unpack|Union\[", text)
      assert not wrong, f"{module}.{name}{text}"


@pytest.mark.parametrize("module", MODULES)
def test_hints_of_public_names_are_types(module):
  for name, value in functions(module):
    if inspect.isfunction(value) and value.__module__.startswith("callgate"):
      for hint in typing.get_type_hints(value).values():
        assert not isinstance(hint, str), name


def test_the_keywords_of_every_sink_are_in_its_signature():
  parameters = inspect.signature(cg.sinks.JSONL).parameters
  assert list(parameters) == ["path", "append", "every", "rate", "where"]
  assert str(parameters["every"]) == "every: int | None = None"


def test_a_public_dataclass_has_hints():
  assert typing.get_type_hints(cg.Progress)["style"] == typing.Literal["tqdm", "rich"]
  assert typing.get_type_hints(cg.TapInfo)["lane"] == tuple[int, ...]
