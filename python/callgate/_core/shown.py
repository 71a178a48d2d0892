# SPDX-License-Identifier: Apache-2.0
"""Annotations in signatures, for `help()`, editors and notebooks."""

from __future__ import annotations

import inspect
import re
import threading
import types
import typing
from typing import Any

_MODULES = re.compile(
  r"\b(?:typing|collections\.abc|concurrent\.futures\._base|jaxlib\._jax|callgate(?:\.\w+)*)\."
)


class Annotation(str):
  """The text of an annotation, which `inspect` shows without quotes.

  `typing.get_type_hints` evaluates it like any other str.
  """

  __slots__ = ()

  def __repr__(self) -> str:
    return str(self)


def annotation(given: Any) -> Any:
  """Returns the text of an annotation, evaluated or not."""
  if given is inspect.Signature.empty or isinstance(given, Annotation):
    return given
  return Annotation(given if isinstance(given, str) else _text(given))


def _text(given: Any) -> str:
  if typing.get_origin(given) in (typing.Union, types.UnionType):
    return " | ".join(_text(argument) for argument in typing.get_args(given))
  text = "None" if given is types.NoneType else inspect.formatannotation(given)
  return _MODULES.sub("", text)


# Held while public objects change: threads may ask for their first names at once.
changing = threading.RLock()


def show(*values: Any) -> None:
  """Makes public functions, and functions of public classes, show annotations without quotes."""
  with changing:
    for value in values:
      if isinstance(value, type):
        if inspect.get_annotations(value):  # `get_type_hints` would use the public module
          value.__annotations__ = inspect.get_annotations(value, eval_str=True)
        for base in value.__mro__:
          if base.__module__.partition(".")[0] == "callgate":
            for member in tuple(vars(base).values()):
              _show(getattr(member, "__func__", member))
      else:
        _show(value)


def _show(function: Any) -> None:
  if not isinstance(function, types.FunctionType) or "__signature__" in vars(function):
    return
  annotations = function.__annotations__
  if not all(isinstance(given, str) for given in annotations.values()):
    # `typing.get_type_hints` still uses these.
    function.__signature__ = signature(inspect.signature(function))  # type: ignore[attr-defined]
    return
  function.__annotations__ = {name: annotation(text) for name, text in annotations.items()}
  if any(text.startswith("Unpack[") for text in annotations.values()):
    function.__signature__ = _unpacked(function)  # type: ignore[attr-defined]
  _show(getattr(function, "__wrapped__", None))


def signature(given: inspect.Signature) -> inspect.Signature:
  """Returns a signature whose annotations are texts."""
  parameters = [p.replace(annotation=annotation(p.annotation)) for p in given.parameters.values()]
  return inspect.Signature(parameters, return_annotation=annotation(given.return_annotation))


def _unpacked(function: types.FunctionType) -> inspect.Signature:
  """Returns the signature with the keywords of `**options: Unpack[Options]`, None by default."""
  given = inspect.signature(function)
  *own, last = given.parameters.values()
  options = function.__globals__[last.annotation.removeprefix("Unpack[").removesuffix("]")]
  keywords = [
    inspect.Parameter(
      name, last.KEYWORD_ONLY, default=None, annotation=annotation(text.__forward_arg__)
    )
    for name, text in options.__annotations__.items()
  ]
  return given.replace(parameters=[*own, *keywords])
