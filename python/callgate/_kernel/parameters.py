# SPDX-License-Identifier: Apache-2.0
"""The parameters of kernels, and checks of a call's arrays.

The kinds are those of include/callgate/kernel_abi.h. Calls are checked during tracing.
"""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Collection, Mapping, Sequence
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np

from callgate._call.site import Callee, CallSite
from callgate._core import registry, static_values
from callgate._core.dtypes import is_packed, type_text
from callgate._core.errors import GateDefinitionError
from callgate._jax import tracing


class Kind(enum.IntEnum):
  """The kind of value that a parameter takes."""

  IN = 0
  OUT = 1
  INOUT = 2
  SCALAR = 3
  INS = 4
  OUTS = 5
  NUMBER = 6
  STRING = 7
  NUMBERS = 8
  DICT = 9
  CONTEXT = 10

  @property
  def cpp(self) -> str:
    """Its name in callgate/kernel.h, without the namespace."""
    return {Kind.INOUT: "InOut", Kind.NUMBER: "Attr"}.get(self, self.name.capitalize())


OPERANDS = (Kind.IN, Kind.INOUT, Kind.SCALAR, Kind.INS)
RESULTS = (Kind.OUT, Kind.INOUT, Kind.OUTS)
STATIC = (Kind.NUMBER, Kind.STRING, Kind.NUMBERS, Kind.DICT)
GIVEN = OPERANDS + STATIC  # passed by the caller
_VARIADIC = (Kind.INS, Kind.OUTS)
Side = Literal["operand", "result"]


@dataclasses.dataclass(frozen=True)
class Parameter:
  """One parameter of a kernel."""

  name: str  # its name in the source, or its position
  kind: Kind
  dtype: np.dtype[Any] | None = None  # of its elements; None for any
  rank: int = -1  # of its arrays; -1 for any
  way: str = dataclasses.field(default="", compare=False)  # a remedy for a dtype that JAX lacks
  element: str = ""  # the text of its element type in the source
  rank_text: str = ""  # the text of its rank there; "" without one

  def freeze(self, label: str, value: Any) -> Any:
    """Returns the hashable form of a static value; raises for a value that doesn't fit."""
    if self.kind is Kind.STRING:
      return static_values.string(label, self.name, value)
    if self.kind is Kind.DICT:
      return static_values.dictionary(label, self.name, value)
    freeze = static_values.numbers if self.kind is Kind.NUMBERS else static_values.number
    return freeze(label, self.name, value, self.dtype)

  def fits(self, dtype: Any, rank: int) -> bool:
    """Returns True if an array of this type fits."""
    return (self.dtype is None or self.dtype == dtype) and self.rank in (-1, rank)

  @property
  def text(self) -> str:
    """The arrays that it takes, for messages."""
    dtype = "any dtype" if self.dtype is None else self.dtype.name
    wide = " (which needs jax_enable_x64)" if is_wide(self.dtype) else ""
    return f"{dtype}{wide} of {f'rank {self.rank}' if self.rank >= 0 else 'any rank'}"


def is_wide(dtype: np.dtype[Any] | None) -> bool:
  """Returns True if JAX needs jax_enable_x64, which is off, for arrays of the dtype."""
  return dtype is not None and tracing.canonical_dtype(dtype) != dtype


class Signature(tuple[Parameter, ...]):
  """A kernel's parameters, in order, and their arrays in a call."""

  __slots__ = ()

  def of(self, kinds: Collection[Kind]) -> list[Parameter]:
    return [p for p in self if p.kind in kinds]

  def takers(self, kinds: Collection[Kind], count: int) -> list[Parameter]:
    """Returns the parameter of each of `count` operands or results; a variadic one takes the rest.

    The list has another length than `count` if that many don't fit.
    """
    side = self.of(kinds)
    if sum(p.kind in _VARIADIC for p in side) > 1:
      return []
    left = count - len(side) + 1
    return [p for p in side for _ in range(left if p.kind in _VARIADIC else 1)]

  def groups(self, operands: int, results: int) -> list[int]:
    """Returns the number of arrays of each variadic parameter."""
    each = [*self.takers(OPERANDS, operands), *self.takers(RESULTS, results)]
    return [each.count(p) for p in self if p.kind in _VARIADIC]

  @property
  def memory(self) -> dict[str, tuple[Side, int]]:
    """The operand or result whose memory each parameter gets, by name; a result for an InOut."""
    sides: tuple[tuple[Side, Collection[Kind]], ...] = (("operand", OPERANDS), ("result", RESULTS))
    return {p.name: (side, i) for side, kinds in sides for i, p in enumerate(self.of(kinds))}


def by_name(
  label: str, names: Sequence[str], args: Sequence[Any], kwargs: Mapping[str, Any], *,
  some_left_open: bool = False,
) -> dict[str, Any]:  # fmt: skip
  """Returns the value of each of a call's parameters; raises for duplicates and unknown names."""
  known = ", ".join(names)
  most, other = ("at most ", "take") if some_left_open else ("", "have")
  if len(args) > len(names):
    expected = f"expected {most}{len(names)} arguments ({known})"
    raise GateDefinitionError(f"{label}: {expected}, got {len(args)}")
  given = dict(zip(names, args, strict=False))
  for name, value in kwargs.items():
    if name in given or name not in names:
      what = "twice" if name in given else f"which it doesn't {other}"
      raise GateDefinitionError(f"{label}: got argument '{name}' {what}; expected {known}")
    given[name] = value
  missing = [name for name in names if name not in given]
  if missing and not some_left_open:
    raise GateDefinitionError(f"{label}: expected argument '{missing[0]}', got none")
  return given


def arguments(
  label: str, signature: Signature, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> tuple[tuple[Any, ...], tuple[tuple[str, Any], ...]]:
  """Returns a call's operands, in the order of the parameters, and its frozen static values."""
  given = signature.of(GIVEN)
  names = [p.name for p in given]
  values = by_name(label, names, args, kwargs)
  operands = [(p, _scalar(label, p, values[p.name])) for p in given if p.kind in OPERANDS]
  for parameter, value in operands:
    where = f"{label}: argument '{parameter.name}'"
    for leaf in leaves_of(label, parameter, value):
      if isinstance(leaf, (str, bytes)):
        raise GateDefinitionError(f"{where}: expected an array, got {leaf!r}")
      dtype, shape = getattr(leaf, "dtype", None), getattr(leaf, "shape", None)
      if isinstance(dtype, np.dtype) and shape is not None:  # otherwise it becomes an array first
        dtype = tracing.canonical_dtype(dtype)
        if not parameter.fits(dtype, len(shape)):
          raise GateDefinitionError(f"{where}: {_misfit(parameter, dtype, shape)}")
  static = [(p.name, p.freeze(label, values[p.name])) for p in given if p.kind in STATIC]
  return tuple(value for _, value in operands), tuple(sorted(static))


def _scalar(label: str, parameter: Parameter, value: Any) -> Any:
  """Converts a Python scalar to the parameter's dtype if that can hold it, like a C++ literal."""
  name, dtype = parameter.name, parameter.dtype
  if dtype is None or not isinstance(value, (bool, int, float, complex)):
    return value
  if is_wide(dtype):
    fault = (
      f"{dtype.name} needs jax_enable_x64; set it, or use cast=True of a C function or a static "
      "parameter of C++ (cg::Attr)"
    )
    raise GateDefinitionError(f"{label}: argument '{name}': {fault}")
  return jnp.asarray(static_values.number(label, name, value, dtype, what="argument").value)


def leaves_of(label: str, parameter: Parameter, value: Any) -> list[Any]:
  """Returns the arrays of one argument: one, or any number for a variadic parameter."""
  leaves = jax.tree.leaves(value)
  if parameter.kind is not Kind.INS and len(leaves) != 1:
    where = f"{label}: argument '{parameter.name}'"
    raise GateDefinitionError(f"{where}: expected one array, got {len(leaves)}")
  return leaves


def refuse_packed(label: str, operands: Sequence[Any], results: Sequence[Any]) -> None:
  """Raises if an array has elements smaller than a byte."""
  for index, value in enumerate((*operands, *results)):
    if is_packed(value.dtype):
      what = f"argument {index}" if index < len(operands) else f"result {index - len(operands)}"
      fault = (
        f"{np.dtype(value.dtype).name} has several elements in a byte, which kernels don't support"
      )
      raise GateDefinitionError(f"{label}: {what}: {fault}; convert to int8 before the call")


def check_types(
  kernel: Callee,
  signature: Signature,
  site: CallSite,
  operands: Sequence[Any],
  results: Sequence[Any],
) -> None:
  """Raises unless each array, or its type, fits its parameter, and each parameter has one."""
  for side, given in (("argument", operands), ("result", results)):
    is_result = side == "result"
    source = f" from {'like' if kernel.out is None else 'out'}" if is_result else ""
    kinds = RESULTS if is_result else OPERANDS
    have, each = signature.of(kinds), signature.takers(kinds, len(given))
    if len(each) != len(given):
      expected = f"{len(have)} {side}s ({', '.join(p.name for p in have)})"
      raise GateDefinitionError(f"{kernel.label}: expected {expected}, got {len(given)}{source}")
    for index, (parameter, value) in enumerate(zip(each, given, strict=True)):
      if parameter.fits(value.dtype, len(value.shape)):
        continue
      argument = None if is_result else registry.argument(kernel.name, site.spec, index)
      named = argument or f"{index} ('{parameter.name}')"
      problem = _misfit(parameter, value.dtype, value.shape, source)
      # With vmap='whole' batched arrays have their leading axis here.
      ranks = zip(results, site.results, strict=True)
      whole = any(len(r.shape) != len(shape) for r, (shape, _) in ranks)
      if whole and len(value.shape) == parameter.rank + 1:
        problem += (
          "; vmap='whole' and 'broadcast' add a leading axis, so declare the rank as "
          "cg::dynamic or a template parameter"
        )
      raise GateDefinitionError(f"{kernel.label}: {side} {named}: {problem}")


def _misfit(parameter: Parameter, dtype: Any, shape: Sequence[int], source: str = "") -> str:
  way = f" ({parameter.dtype} needs jax_enable_x64{parameter.way})"
  hint = way if is_wide(parameter.dtype) else ""
  return f"expected {parameter.text}, got {type_text(dtype, shape)}{source}{hint}"
