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
  """The types of a call's arrays and its static values, which determine a variant."""

  operands: tuple[Type, ...]
  results: tuple[Type, ...]
  static: Static


class Slot(NamedTuple):
  """The values of one parameter of the user's function."""

  # "out" (the result, or the tuple of them), "result" (a pointer to one), "operand", "rest" (a
  # tuple of operands) or "static".
  kind: str
  indices: tuple[int, ...] = ()  # the indices of results or operands
  value: Any = None  # the static value


class Request(NamedTuple):
  """A variant to compile."""

  label: str  # the kernel, for messages
  function: pytypes.FunctionType  # the user's function
  options: dict[str, Any]  # options of Numba's compiler
  slots: tuple[Slot, ...]  # one for each parameter of the function, in order
  cast: bool  # True if returned results may be cast
  # The parameter types of a function that takes pointers (a cfunc); else None.
  pointers: tuple[Any, ...] | None
  types: CallTypes  # the types of the call
  parameters: Signature  # the parameters of the native function, for the runtime
