# SPDX-License-Identifier: Apache-2.0
"""Describes a compilation, without Numba."""

from __future__ import annotations

import types as pytypes
from typing import Any, NamedTuple

import numpy as np

from callgate._kernel.parameters import Signature
from callgate._kernel.variants import Static

Type = tuple[np.dtype[Any], int]  # dtype and rank of an array


class CallTypes(NamedTuple):
  """The types of a call's arrays and its static values, for which a variant is compiled."""

  operands: tuple[Type, ...]
  results: tuple[Type, ...]
  static: Static


class Slot(NamedTuple):
  """Describes what one parameter of the user's function takes."""

  # "out" (the result, or the tuple of them), "result" (a pointer to one), "operand", "rest" (a
  # tuple of operands) or "static".
  kind: str
  indices: tuple[int, ...] = ()  # of results or operands
  value: Any = None  # the static one


class Request(NamedTuple):
  """A variant to compile."""

  label: str  # the kernel, for messages
  function: pytypes.FunctionType  # the user's
  options: dict[str, Any]  # Numba's, of its compilation
  slots: tuple[Slot, ...]  # of the function's parameters, in their order
  cast: bool  # results that it returns may be cast
  # The types of its parameters where it takes pointers (a cfunc), else None.
  pointers: tuple[Any, ...] | None
  types: CallTypes  # of the call
  parameters: Signature  # of the native function, for the runtime
