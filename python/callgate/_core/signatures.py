"""Which parameters a user's function has. What has no signature to look at has none."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any

_POSITIONAL = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)


def signature_of(function: Callable[..., Any], skip: int = 0) -> inspect.Signature | None:
  """The callable's signature without its first `skip` parameters; None when unknown."""
  try:
    signature = inspect.signature(function)
  except (TypeError, ValueError):
    return None
  parameters = list(signature.parameters.values())
  # `*args` stands for any number of parameters, the first ones included.
  dropped = [p for p in parameters[:skip] if p.kind in _POSITIONAL]
  return signature.replace(parameters=parameters[len(dropped) :])


def _parameters(function: Callable[..., Any], skip: int = 0) -> list[inspect.Parameter]:
  signature = signature_of(function, skip)
  return [] if signature is None else list(signature.parameters.values())


def positional(function: Callable[..., Any], skip: int = 0) -> list[inspect.Parameter]:
  """A callable's positional parameters after the first `skip`."""
  return [p for p in _parameters(function, skip) if p.kind in _POSITIONAL]


def accepted(
  function: Callable[..., Any], values: Mapping[str, Any], *, filled: int = 0
) -> dict[str, Any]:
  """Those values that the function has parameters for, beside the first `filled` of these."""
  parameters = _parameters(function) if values else []
  if any(p.kind is p.VAR_KEYWORD for p in parameters):
    return dict(values)
  taken = {p.name for p in parameters[:filled] if p.kind in _POSITIONAL}
  return {p.name: values[p.name] for p in parameters if p.name in values and p.name not in taken}


def places(
  function: Callable[..., Any], skip: int, values: Mapping[str, Any]
) -> tuple[list[str], dict[str, Any]]:
  """Names of a function's positional parameters, and those of the values that it has a name for."""
  parameters = _parameters(function)
  anything = any(p.kind is p.VAR_KEYWORD for p in parameters)
  named = {p.name for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)}
  known = {name: value for name, value in values.items() if anything or name in named}
  return [p.name for p in parameters if p.kind in _POSITIONAL][skip:], known


def wants_info(function: Callable[..., Any]) -> bool:
  """Whether a consumer takes (value, info): by a second positional parameter without a default."""
  second = positional(function)[1:2]
  return any(p.default is p.empty or p.name == "info" for p in second)


def takes_two(function: Callable[..., Any]) -> bool:
  """Whether two positional parameters have no default."""
  return sum(p.default is p.empty for p in positional(function)) == 2
