# SPDX-License-Identifier: Apache-2.0
"""Types of operations for type checkers: the wrapped function's parameters and arrays."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Never, Protocol, TypeAlias, overload

import jax

if TYPE_CHECKING:  # with defaults, which `typing` has from Python 3.13 on
  from typing_extensions import ParamSpec, TypeVar

  P = ParamSpec("P", default=...)
  R = TypeVar("R", covariant=True, default=Any)
else:
  from typing import ParamSpec, TypeVar

  P = ParamSpec("P")
  R = TypeVar("R", covariant=True)


class AnyArray(Protocol):
  """An array of any library."""

  @property
  def shape(self) -> Any: ...
  @property
  def dtype(self) -> Any: ...


# A call returns these types as a jax.Array.
OneArray: TypeAlias = AnyArray | complex


class Method(Protocol[P, R]):
  """An operation as a method of an object.

  It lacks `check`, for example: the operation has that, and takes the object first.
  """

  @property
  def __self__(self) -> object: ...
  @property
  def __func__(self) -> Any: ...
  def start(self, *args: P.args, **kwargs: P.kwargs) -> Any: ...
  @overload
  def __call__(self: Method[P, Never], *args: P.args, **kwargs: P.kwargs) -> Any: ...
  @overload
  def __call__(self: Method[P, None], *args: P.args, **kwargs: P.kwargs) -> tuple[()]: ...
  @overload
  def __call__(self: Method[P, OneArray], *args: P.args, **kwargs: P.kwargs) -> jax.Array: ...
  @overload
  def __call__(
    self: Method[P, tuple[OneArray, ...]], *args: P.args, **kwargs: P.kwargs
  ) -> tuple[jax.Array, ...]: ...
  @overload
  def __call__(
    self: Method[P, Mapping[str, OneArray]], *args: P.args, **kwargs: P.kwargs
  ) -> dict[str, jax.Array]: ...
  @overload
  def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R: ...
  def __call__(self, *args: Any, **kwargs: Any) -> Any: ...
