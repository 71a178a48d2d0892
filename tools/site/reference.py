# SPDX-License-Identifier: Apache-2.0
"""Completes the reference of the package: an extension of griffe (mkdocs.yml).

griffe reads sources and runs none, so it does not see a signature that the package makes when it
runs: the options of a dataclass (callgate/_core/factories.py). The extension asks the package for
these. It also leaves out overloads, which only type checkers read, and parameters and members with
an underscore.
"""

from __future__ import annotations

import functools
import importlib
import inspect
import re
from typing import Any

import griffe

# Functions that are attributes of a public function: griffe finds none below a function.
_BELOW = {
  "callgate.envs": (
    "callgate._envs.wrappers.normalize_observation",
    "callgate._envs.wrappers.normalize_reward",
    "callgate._envs.wrappers.episode_statistics",
  ),
}


# A hidden parameter in a docstring's "Args:", and the deeper lines after it.
_HIDDEN = re.compile(r"^  _\w+: .*\n(?:    .*\n)*", re.MULTILINE)


class ReferenceOfPackage(griffe.Extension):
  """Puts in what the running functions say of themselves, and leaves out what users don't call."""

  def on_package(self, *, pkg: griffe.Module, **_: Any) -> None:
    _walk(pkg)
    for owner, targets in _BELOW.items():
      function = pkg[owner.removeprefix(f"{pkg.name}.")].final_target
      for target in targets:
        name = target.rpartition(".")[2]
        function.members[name] = griffe.Alias(
          name, pkg[target.removeprefix(f"{pkg.name}.")], parent=function
        )


def _walk(owner: griffe.Module | griffe.Class) -> None:
  for name, member in [*owner.members.items()]:
    if member.is_alias:
      continue
    if isinstance(member, griffe.Module | griffe.Class):
      member.overloads.clear()
      _walk(member)
    elif isinstance(member, griffe.Function):
      member.overloads = None
      owner.overloads.pop(name, None)
      if name == "__init__" and "core" in [p.name for p in member.parameters]:
        del owner.members[name]  # functions make these objects
      else:
        _complete(member)


def _complete(function: griffe.Function) -> None:
  made = function.decorators or any("Unpack" in str(p.annotation) for p in function.parameters)
  if made and function.module.path != "callgate._callgate":
    within = function.path.removeprefix(f"{function.module.path}.").split(".")
    found: Any = functools.reduce(getattr, within, importlib.import_module(function.module.path))
    if "__signature__" in getattr(found, "__dict__", {}):
      if doc := inspect.getdoc(found):
        function.docstring = griffe.Docstring(doc, parent=function, parser=griffe.Parser.google)
      signature = inspect.signature(found)
      function.parameters = griffe.Parameters(*map(_parameter, signature.parameters.values()))
  shown = [p for p in function.parameters if not p.name.startswith("_")]
  function.parameters = griffe.Parameters(*shown)
  if function.docstring:
    function.docstring.value = _HIDDEN.sub("", function.docstring.value)


def _parameter(parameter: inspect.Parameter) -> griffe.Parameter:
  annotation, default = parameter.annotation, parameter.default
  return griffe.Parameter(
    parameter.name,
    annotation=str(annotation),
    kind=griffe.ParameterKind(parameter.kind.description),
    default=None if default is inspect.Parameter.empty else repr(default),
  )
