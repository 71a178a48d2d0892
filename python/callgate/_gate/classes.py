# SPDX-License-Identifier: Apache-2.0
"""Gates of classes whose objects live in workers."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, NoReturn, cast

from callgate._core import registry
from callgate._core.errors import GateDefinitionError
from callgate._gate.callee import STARTED, GateCallee
from callgate._gate.options import GateOptions
from callgate._places import objects
from callgate._places.workers import Workers


class ClassGateCallee(GateCallee):
  """The core of a class's gate: calls an object's `__call__`, and makes gates of the methods."""

  def __init__(self, made: Callable[..., Any], options: GateOptions) -> None:
    self._objects = objects.Instances(made, options.affinity == "lane")
    self._class: type = objects.class_of(made)
    self._given = options
    self._outs = outs_by_method(self._class, options.out)
    name = options.name if options.name is not None else registry.unique_name(made)
    super().__init__(
      objects.MethodOf(self._objects, "__call__"),
      dataclasses.replace(options, name=name, out=self._out_of("__call__")),
    )

  def _out_of(self, method: str) -> Any:
    if self._outs is None:
      return self._given.out
    return self._outs.get(method, functools.partial(no_results, self._class, method))

  def _maker_of(self, suffix: str) -> Callable[[str], GateCallee] | None:
    if suffix in STARTED or not callable(getattr(self._class, suffix, None)):
      return super()._maker_of(suffix)
    return functools.partial(self._method, suffix)

  def _method(self, method: str, name: str) -> GateCallee:
    options = dataclasses.replace(self._given, name=name, out=self._out_of(method))
    return GateCallee(objects.MethodOf(self._objects, method), options)


def has_objects(function: Any, run_on: Any) -> bool:
  """Returns True for a class whose objects live in workers."""
  on_workers = isinstance(run_on, Workers) or (isinstance(run_on, str) and run_on == "processes")
  return on_workers and objects.class_of(function) is not None


def outs_by_method(kind: type, out: Any) -> dict[str, Any] | None:
  """Returns each method's results if `out` is a dictionary of them; else None."""
  if type(out) is not dict or not out:
    return None
  given = cast("dict[Any, Any]", out)
  methods = all(isinstance(name, str) and callable(getattr(kind, name, None)) for name in given)
  return given if methods else None


def refuse_hidden(made: Any, out: Any, own: set[str]) -> None:
  """Raises if `out` names a method that an attribute of gates hides."""
  kind: Any = objects.class_of(made)
  if hidden := sorted(own & (outs_by_method(kind, out) or {}).keys()):
    raise GateDefinitionError(
      f"gate of {kind.__qualname__}: out: the method '{hidden[0]}' has the name of a gate's own "
      f"method ({', '.join(sorted(own))}); rename it in a subclass"
    )


def no_results(kind: type, method: str, *_: Any, **__: Any) -> NoReturn:
  """Raises; the `out` of a method that is missing in the user's `out`."""
  raise GateDefinitionError(
    f"gate of {kind.__qualname__}: the results of '{method}' are not known; pass out={{..., "
    f"{method!r}: ...}}"
  )
