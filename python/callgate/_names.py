"""Names of a call's arguments and results, for messages.

A call site knows flat positions; users know `x` or `params['w']`. Gates register what is needed to
translate one into the other.
"""

from __future__ import annotations

import inspect
import weakref
from collections.abc import Callable
from typing import Any

import jax

from callgate import _spec

_POSITIONAL = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)

_gates: weakref.WeakValueDictionary[str, Any] = weakref.WeakValueDictionary()


def register(name: str, gate: Any) -> None:
  """Makes a gate's parameter names known; the gate has `parameters`."""
  _gates[name] = gate


def get(name: str) -> Any:
  """The live gate or kernel of a name, or None."""
  return _gates.get(name)


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


def of(gate: str, spec: str, kind: str, index: int) -> str:
  """ "argument 'x'", "result 0" or "result ['w']" for a flat position of a call."""
  if kind == "argument":
    return f"argument {argument(gate, spec, index)}"
  path = _spec.result_path(spec, index)
  return f"result {index}" + (f" ({path})" if path else "")


def argument(gate: str, spec: str, index: int) -> str:
  """The quoted name of a flat argument: its parameter and, inside a pytree, its path."""
  parameters: tuple[str, ...] = getattr(_gates.get(gate), "parameters", ())
  position, path, keyword = _spec.argument_path(spec, index)
  if keyword is not None:
    return f"'{keyword}{path}'"
  if position < len(parameters):
    return f"'{parameters[position]}{path}'"
  return f"{position}{path}"


def keystr(path: tuple[Any, ...]) -> str:
  """JAX's text for a path into a pytree."""
  return jax.tree_util.keystr(path)


def operations() -> list[tuple[str, Any]]:
  """The live gates and kernels by name."""
  return list(_gates.items())
