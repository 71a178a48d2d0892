# SPDX-License-Identifier: Apache-2.0
"""Functions whose annotations can't be evaluated, as they may be since Python 3.14 (PEP 649)."""

from __future__ import annotations

import enum
import functools
import inspect
import sys
import types
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
import pytest

import callgate as cg
from callgate._core import signatures

SCALAR = jax.ShapeDtypeStruct((), np.float32)
# Only type checkers would know the name. Before Python 3.14 `def` itself raises.
SOURCE = """
def scaled(x: Unknown, factor: Unknown = 2.0) -> Unknown:
  return x * factor

class Sink(base):
  def __init__(self, seen: Unknown, **choice: Unknown) -> None:
    super().__init__(**choice)
    self.seen = seen

  def write(self, records: Unknown) -> Unknown:
    self.seen += [float(record.value) for record in records]

class Scale:
  def __init__(self) -> Unknown:
    self.factor = 2.0

  def __call__(self, x: Unknown, more: Unknown = 1.0) -> Unknown:
    return x * self.factor * more
"""


class Marker:
  """Stands for the undefined name."""


@pytest.fixture
def unknown(monkeypatch: pytest.MonkeyPatch) -> types.SimpleNamespace:
  """Functions and classes whose annotations name `Unknown`; before Python 3.14 simulated."""
  names: dict[str, Any] = {"base": cg.sinks.Sink, "__name__": __name__}
  if sys.version_info < (3, 14):
    names["Unknown"] = Marker  # for `def`
    _defer(monkeypatch)
  exec(compile(SOURCE, __file__, "exec", dont_inherit=True), names)
  return types.SimpleNamespace(**names)


def _defer(monkeypatch: pytest.MonkeyPatch) -> None:
  """Lets `inspect` evaluate these annotations when they are read."""
  signature, annotations = inspect.signature, inspect.get_annotations
  formats = enum.IntEnum("Format", "VALUE VALUE_WITH_FAKE_GLOBALS FORWARDREF STRING")

  as_text = False

  def read(function: Any, **given: Any) -> Any:
    found = annotations(function, **given)
    if Marker in found.values() and not as_text:
      raise NameError("name 'Unknown' is not defined")
    return found

  def taken(function: Any, *, annotation_format: int = formats.VALUE, **given: Any) -> Any:
    nonlocal as_text
    as_text = annotation_format == formats.STRING
    try:
      return signature(function, **given)
    finally:
      as_text = False

  monkeypatch.setattr(inspect, "signature", taken)
  monkeypatch.setattr(inspect, "get_annotations", read)
  monkeypatch.setitem(
    sys.modules,
    "annotationlib",
    types.SimpleNamespace(Format=formats),  # type: ignore[arg-type]
  )
  monkeypatch.setattr(signatures, "sys", types.SimpleNamespace(version_info=(3, 14)))


def test_evaluating_the_annotations_raises(unknown: Any) -> None:
  for function in (unknown.scaled, unknown.Scale.__call__, unknown.Sink.__init__):
    with pytest.raises(NameError):
      inspect.signature(function)
    assert "self" in (found := signatures.read(function).parameters) or "factor" in found


@pytest.mark.parametrize("run_on", ["here", "objects"])
def test_a_gate_has_the_parameters_and_defaults_of_its_function(unknown: Any, run_on: str) -> None:
  if run_on == "objects":
    gate = cg.gate(unknown.Scale(), out=SCALAR)
    assert jax.jit(gate)(3.0) == 6
    assert jax.jit(lambda x: gate(x, more=2.0))(3.0) == 12
    return
  gate = cg.gate(unknown.scaled, out=SCALAR)
  assert jax.jit(gate)(3.0) == 6
  assert jax.jit(lambda x: gate(x, factor=5.0))(3.0) == 15
  with pytest.raises(TypeError, match="facto"):
    jax.jit(lambda x: gate(x, facto=5.0))(3.0)


@pytest.mark.parametrize(
  "wrap", [lambda f: f, lambda f: functools.partial(f, factor=2.0), functools.wraps]
)
def test_annotations_that_cannot_be_evaluated_declare_no_results(
  unknown: Any, wrap: Callable[..., Any]
) -> None:
  function: Any = wrap(unknown.scaled)
  if wrap is functools.wraps:
    function = function(lambda *args, **options: unknown.scaled(*args, **options))
  with pytest.raises(cg.GateDefinitionError, match="out"):
    jax.jit(cg.gate(function))(3.0)


def test_consumers_and_sinks_need_no_annotations(unknown: Any) -> None:
  seen: list[float] = []
  channel = cg.channel("unknown annotations", to=[unknown.Sink(seen, every=1), unknown.scaled])
  jax.block_until_ready(jax.jit(lambda x: cg.tap(x, to=channel))(3.0))
  cg.barrier()
  channel.close()
  assert seen == [3.0]
  with pytest.raises(TypeError, match=r"'evry'.*every"):
    unknown.Sink(seen, evry=1)


class Odd:
  """A callable whose signature, and a proxy whose annotations, raise in every form."""

  def __init__(self, error: Exception) -> None:
    self._error = error

  @property
  def __signature__(self) -> Any:
    raise self._error

  def __call__(self, x: Any) -> Any:
    return x + np.float32(1)


class Proxy:
  """Takes its attributes from a function, as wrapt's objects do."""

  @property
  def __annotations__(self) -> Any:  # type: ignore[override]
    raise NameError("name 'Unknown' is not defined")

  async def __call__(self, x: Any) -> Any:
    return x


@pytest.mark.parametrize("error", [NameError("Unknown"), ZeroDivisionError(), TypeError()])
def test_a_signature_that_raises_in_every_form_leaves_a_gate_its_positions(
  error: Exception,
) -> None:
  gate = cg.gate(Odd(error), out=SCALAR)
  assert jax.jit(lambda x: gate(x))(3.0) == 4  # JAX reads the signature of what it gets itself


def test_a_proxy_whose_annotations_raise_is_what_its_call_is() -> None:
  assert signatures.is_coroutine_function(Proxy())
  assert not signatures.is_generator_function(Proxy())
