# SPDX-License-Identifier: Apache-2.0
"""callgate: compiled JAX programs call anything, in microseconds, under every transformation."""

from __future__ import annotations

import importlib
from typing import Any

from callgate._jax import versions

with versions.needs_its_versions():
  from callgate import _attach, _names

  _attach.start()

# Each name is imported on first use, from the module in `_names`; `__init__.pyi` has the types.
__all__ = [*_names.MODULES, "executors", "sinks"]  # noqa: F822  # pyright: ignore[reportUnsupportedDunderAll]


def __getattr__(name: str) -> Any:
  if name in _names.MODULES:
    _attach.load()
    _names.get(name)
    found = _names.publish()
    globals().update(found)
    return found[name]
  if name in ("compat", "executors", "sinks"):
    return importlib.import_module(f"callgate.{name}")
  if name == "__version__":  # the installed version of pyproject.toml
    return importlib.import_module("importlib.metadata").version("callgate")
  raise AttributeError(f"module 'callgate' has no attribute {name!r}")


def __dir__() -> list[str]:
  return sorted({*globals(), *__all__})
