"""Which parameters a user's function has."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any

_POSITIONAL = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)


def parameters_of(function: Callable[..., Any], skip: int) -> tuple[str, ...]:
  """Names of a callable's positional parameters after the first `skip`; () when unknown."""
  signature = signature_of(function, skip)
  if signature is None:
    return ()
  return tuple(p.name for p in signature.parameters.values() if p.kind in _POSITIONAL)


def signature_of(function: Callable[..., Any], skip: int) -> inspect.Signature | None:
  """The callable's signature without its first `skip` parameters; None when unknown."""
  try:
    signature = inspect.signature(function)
  except (TypeError, ValueError):
    return None
  parameters = list(signature.parameters.values())
  leading = parameters[:skip]
  # `*args` stands for any number of parameters, the first ones included.
  dropped = [p for p in leading if p.kind in _POSITIONAL]
  return signature.replace(parameters=parameters[len(dropped) :])


def accepted_static(
  function: Callable[..., Any], operands: int, static: Mapping[str, Any]
) -> dict[str, Any]:
  """The static values that a function has parameters for, beside those that the operands fill."""
  try:
    parameters = list(inspect.signature(function).parameters.values())
  except (TypeError, ValueError):
    return {}
  if any(p.kind is p.VAR_KEYWORD for p in parameters):
    return dict(static)
  filled = [p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD) for p in parameters]
  taken = {p.name for p, fills in list(zip(parameters, filled, strict=True))[:operands] if fills}
  return {p.name: static[p.name] for p in parameters if p.name in static and p.name not in taken}


def wants_info(function: Callable[..., Any]) -> bool:
  """Whether a consumer takes (value, info): by a second positional parameter without a default."""
  try:
    parameters = inspect.signature(function).parameters.values()
  except (TypeError, ValueError):
    return False
  positional = [p for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
  return len(positional) >= 2 and (
    positional[1].default is inspect.Parameter.empty or positional[1].name == "info"
  )


def accepted(function: Callable[..., Any], keywords: dict[str, Any]) -> dict[str, Any]:
  """Those keywords that the function has parameters for."""
  if not keywords:
    return {}
  try:
    parameters = inspect.signature(function).parameters
  except (TypeError, ValueError):
    return {}
  if any(p.kind is inspect.Parameter.VAR_KEYWORD for p in parameters.values()):
    return keywords
  return {key: value for key, value in keywords.items() if key in parameters}


def places(
  function: Callable[..., Any], skip: int, values: Mapping[str, Any]
) -> tuple[list[str], dict[str, Any]]:
  """Names of a function's positional parameters, and those of the values that it has a name for."""
  try:
    parameters = list(inspect.signature(function).parameters.values())
  except (TypeError, ValueError):
    return [], {}
  named = {p.name for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)}
  anything = any(p.kind is p.VAR_KEYWORD for p in parameters)
  positional = [
    p.name for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)
  ]
  known = {name: value for name, value in values.items() if anything or name in named}
  return positional[skip:], known


def takes_two(function: Callable[..., Any]) -> bool:
  kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
  try:
    parameters = inspect.signature(function).parameters.values()
  except (TypeError, ValueError):
    return False
  return sum(p.kind in kinds and p.default is p.empty for p in parameters) == 2
