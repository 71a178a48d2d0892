# SPDX-License-Identifier: Apache-2.0
"""Gates as bound methods of objects, in place of Python's `types.MethodType`.

Python's own type would look up `start` at the function, which does not know the object.
"""

from __future__ import annotations

import copy
import inspect
from typing import Any, Self

from callgate._core import signatures


class BoundMethod:
  """A gate bound to an object: calls and starts pass the object as the first argument."""

  def __init__(self, function: Any, instance: Any) -> None:
    self.__func__, self.__self__ = function, instance
    self.__module__ = function.__module__

  def __call__(self, /, *args: Any, **kwargs: Any) -> Any:
    return self.__func__(self.__self__, *args, **kwargs)

  def start(self, /, *args: Any, **kwargs: Any) -> Any:
    """Starts a call of the method; see `Gate.start`."""
    return self.__func__.start(self.__self__, *args, **kwargs)

  def __getattr__(self, name: str) -> Any:
    if name in ("__func__", "__self__"):  # a copy under construction
      raise AttributeError(name)
    return getattr(self.__func__, name)

  @property
  def __doc__(self) -> str | None:  # pyright: ignore[reportIncompatibleVariableOverride]
    return self.__func__.__doc__

  @property
  def __signature__(self) -> inspect.Signature:
    signature = signatures.read(self.__func__)
    return signature.replace(parameters=list(signature.parameters.values())[1:])

  def __eq__(self, other: object) -> bool:
    if not isinstance(other, BoundMethod):
      return NotImplemented
    return self.__self__ is other.__self__ and self.__func__ == other.__func__

  def __hash__(self) -> int:
    return hash((id(self.__self__), self.__func__))

  def __repr__(self) -> str:
    return f"<bound method {self.__func__!r} of {self.__self__!r}>"

  def __deepcopy__(self, memo: Any) -> Self:
    return type(self)(self.__func__, copy.deepcopy(self.__self__, memo))

  def __reduce__(self) -> Any:
    return getattr, (self.__self__, self.__func__.__name__)
