# SPDX-License-Identifier: Apache-2.0
"""Reads a user's function: its parameters (none without a signature), and if it is async."""

from __future__ import annotations

import contextlib
import functools
import inspect
import sys
from collections.abc import Callable, Container, Mapping
from typing import Any, cast

from callgate._core import foreign
from callgate._core.errors import GateDefinitionError

_POSITIONAL = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)


def read(function: Callable[..., Any]) -> inspect.Signature:
  """Returns `inspect.signature(function)`; with annotations as text if evaluating them raises.

  Since Python 3.14 their first reader evaluates them, and may find names that aren't defined.

  Raises:
    TypeError, ValueError: the function has no signature.
  """
  try:
    return inspect.signature(function)
  except Exception:
    if sys.version_info < (3, 14):
      raise
    import annotationlib

    return inspect.signature(function, annotation_format=annotationlib.Format.STRING)


def signature_of(function: Callable[..., Any], skip: int = 0) -> inspect.Signature | None:
  """Returns the callable's signature without its first `skip` parameters; None if unknown."""
  try:
    signature = read(function)
  except Exception:  # noqa: BLE001 - from the object's own attributes
    return None
  parameters = list(signature.parameters.values())
  # `*args` accepts any number of arguments, including the first ones.
  dropped = [p for p in parameters[:skip] if p.kind in _POSITIONAL]
  return signature.replace(parameters=parameters[len(dropped) :])


def parameters_text(signature: inspect.Signature) -> str:
  """Returns a signature without annotations, and with "..." for defaults."""
  shown = [
    p.replace(annotation=p.empty, default=p.empty if p.default is p.empty else _DEFAULT)
    for p in signature.parameters.values()
  ]
  return str(inspect.Signature(shown))


class _Default:
  def __repr__(self) -> str:
    return "..."


_DEFAULT = _Default()


def _parameters(function: Callable[..., Any], skip: int = 0) -> list[inspect.Parameter]:
  signature = signature_of(function, skip)
  return [] if signature is None else list(signature.parameters.values())


def positional(function: Callable[..., Any], skip: int = 0) -> list[inspect.Parameter]:
  """Returns a callable's positional parameters after the first `skip`."""
  return [p for p in _parameters(function, skip) if p.kind in _POSITIONAL]


def accepted(
  function: Callable[..., Any], values: Mapping[str, Any], *, filled: int = 0
) -> dict[str, Any]:
  """Returns the values for which the function has parameters after its first `filled` ones."""
  parameters = _parameters(function) if values else []
  if any(p.kind is p.VAR_KEYWORD for p in parameters):
    return dict(values)
  taken = {p.name for p in parameters[:filled] if p.kind in _POSITIONAL}
  return {p.name: values[p.name] for p in parameters if p.name in values and p.name not in taken}


def defaults(function: Callable[..., Any], skip: int = 0) -> dict[str, Any]:
  """Returns the defaults of a callable's parameters after the first `skip`."""
  return {p.name: p.default for p in _parameters(function, skip) if p.default is not p.empty}


def open_parameters(function: Callable[..., Any], filled: int, given: Container[str]) -> list[str]:
  """Returns parameters after the first `filled` that a call doesn't fill by `given` names."""
  positional_first = [p for p in _parameters(function) if p.kind in _POSITIONAL][filled:]
  keyword_only = [p for p in _parameters(function) if p.kind is p.KEYWORD_ONLY]
  named = (p for p in (*positional_first, *keyword_only) if p.kind is not p.POSITIONAL_ONLY)
  return [p.name for p in named if p.name not in given]


def places(
  function: Callable[..., Any], skip: int, values: Mapping[str, Any]
) -> tuple[list[str], dict[str, Any]]:
  """Returns the names of a function's positional parameters, and the values for these names."""
  parameters = _parameters(function)
  anything = any(p.kind is p.VAR_KEYWORD for p in parameters)
  named = {p.name for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)}
  known = {name: value for name, value in values.items() if anything or name in named}
  return [p.name for p in parameters if p.kind in _POSITIONAL][skip:], known


def wants_info(function: Callable[..., Any]) -> bool:
  """Returns True if a consumer takes (value, info): its second parameter has no default."""
  second = positional(function)[1:2]
  return any(p.default is p.empty or p.name == "info" for p in second)


def takes_two(function: Callable[..., Any]) -> bool:
  """Returns True if two positional parameters have no default."""
  return sum(p.default is p.empty for p in positional(function)) == 2


def is_coroutine_function(function: Any) -> bool:
  """Returns True if a call returns a coroutine, also by an object's `__call__`."""
  return _is(inspect.iscoroutinefunction, function)


def is_generator_function(function: Any) -> bool:
  """Returns True if a call returns a generator, also an async one or by an object's `__call__`."""
  return _is(inspect.isgeneratorfunction, function) or _is(inspect.isasyncgenfunction, function)


def _is(kind: Callable[[Any], bool], function: Any) -> bool:
  while isinstance(function, functools.partial):
    function = cast("Any", function).func
  for one in (function, getattr(type(function), "__call__", None)):  # noqa: B004
    with contextlib.suppress(Exception):  # from attributes that the object computes
      if kind(one):
        return True
  return False


def refuse_unrun(expected: str, function: Any) -> None:
  """Raises for a function whose call runs nothing and returns a coroutine or a generator."""
  if is_coroutine_function(function):
    kind = "an async function"
    way = "use a def, which may call asyncio.run_coroutine_threadsafe(f(...), loop)"
  elif is_generator_function(function):
    kind, way = "a generator function", "use a def without yield"
  else:
    return
  got = f"{kind}, {foreign.repr_of(function)}"
  raise GateDefinitionError(f"{expected} that runs when called, got {got}; {way}")
