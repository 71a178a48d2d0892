# SPDX-License-Identifier: Apache-2.0
"""Signatures and docstrings of functions whose options a dataclass declares, for the reference.

griffe reads sources without running them; of these functions (callgate/_core/factories.py) it asks
the package itself.
"""

from __future__ import annotations

import functools
import importlib
import inspect
from typing import Any

import griffe

_FACTORIES = "callgate._core.factories"


class DocumentedOptions(griffe.Extension):
  """Puts in what the running function says of itself."""

  def on_function(self, *, func: griffe.Function, **_: Any) -> None:
    if not any(d.callable_path.startswith(_FACTORIES) for d in func.decorators):
      return
    within = func.path.removeprefix(f"{func.module.path}.").split(".")
    found: Any = functools.reduce(getattr, within, importlib.import_module(func.module.path))
    func.docstring = griffe.Docstring(
      inspect.getdoc(found) or "", parent=func, parser=griffe.Parser.google
    )
    signature = inspect.signature(found)
    func.parameters = griffe.Parameters(*map(_parameter, signature.parameters.values()))


def _parameter(parameter: inspect.Parameter) -> griffe.Parameter:
  annotation, default = parameter.annotation, parameter.default
  text = annotation if isinstance(annotation, str) else inspect.formatannotation(annotation)
  return griffe.Parameter(
    parameter.name,
    annotation=text.replace("typing.", "").replace("collections.abc.", ""),
    kind=griffe.ParameterKind(parameter.kind.description),
    default=None if default is inspect.Parameter.empty else repr(default),
  )
