# SPDX-License-Identifier: Apache-2.0
"""Optional libraries: imported when needed, with one message if a library is missing."""

from __future__ import annotations

import importlib
from typing import Any

from callgate._core.errors import GateDefinitionError


def library(
  module: str, title: str, extra: str, *, by: str, error: type[Exception] = GateDefinitionError
) -> Any:
  """Imports a module of the optional library `title`.

  `extra` is callgate's extra that installs it. `by` is what needs it: "kernel 'saxpy'". Raises
  `error` if the library is missing.
  """
  try:
    return importlib.import_module(module)
  except ImportError as missing:
    absent = isinstance(missing, ModuleNotFoundError)
    why = "is not installed" if absent else f"can't be imported ({missing})"
    raise error(f"{by} needs {title}, which {why}: pip install 'callgate[{extra}]'") from missing
