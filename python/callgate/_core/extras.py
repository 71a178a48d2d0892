"""Optional libraries: imported where they are needed, with one message where one is missing."""

from __future__ import annotations

import importlib
from typing import Any

from callgate._core.errors import GateDefinitionError


def library(
  module: str, title: str, extra: str, *, by: str, error: type[Exception] = GateDefinitionError
) -> Any:
  """Imports a library that callgate does without elsewhere.

  Args:
    module: the module's name, with dots.
    title: the library's, for the message.
    extra: the extra of callgate that brings it.
    by: what needs it, for the message: "kernel 'saxpy'".
    error: what is raised where it can't be imported.
  """
  try:
    return importlib.import_module(module)
  except ImportError as missing:
    absent = isinstance(missing, ModuleNotFoundError)
    why = "is not installed" if absent else f"can't be imported ({missing})"
    raise error(f"{by} needs {title}, which {why}: pip install 'callgate[{extra}]'") from missing
