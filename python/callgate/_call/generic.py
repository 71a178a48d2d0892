# SPDX-License-Identifier: Apache-2.0
"""Operations as type checkers see them: of which function they are, and what becomes an array."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol, TypeAlias

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


# What a call returns as a jax.Array.
OneArray: TypeAlias = AnyArray | complex
