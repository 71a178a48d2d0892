"""The parameters of kernels: what a native function takes, and whether a call's arrays fit.

The kinds are those of include/callgate/kernel_abi.h. Calls are checked while they are traced.
"""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from callgate._call.site import Callee, CallSite
from callgate._core import registry, static_values
from callgate._core.dtypes import dtype_code, dtype_of, is_packed, type_text
from callgate._core.errors import GateDefinitionError
from callgate._jax import tracing


class Kind(enum.IntEnum):
  """What a parameter takes."""

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
    """Its name in callgate/kernel.h, without its namespace."""
    return {
      Kind.INOUT: "InOut",
      Kind.NUMBER: "Attr",
    }.get(self, self.name.capitalize())


_OPERANDS = (Kind.IN, Kind.INOUT, Kind.SCALAR, Kind.INS)
_RESULTS = (Kind.OUT, Kind.INOUT, Kind.OUTS)
_STATIC = (Kind.NUMBER, Kind.STRING, Kind.NUMBERS, Kind.DICT)


@dataclasses.dataclass(frozen=True)
class Parameter:
  """One parameter of a kernel.

  Attributes:
    name: as in the source; its position where the source gives none.
    kind: what it takes.
    dtype: of its elements; None where any will do.
    rank: of its arrays; -1 where any will do.
  """

  name: str
  kind: Kind
  dtype: np.dtype[Any] | None = None
  rank: int = -1

  @property
  def is_operand(self) -> bool:
    return self.kind in _OPERANDS

  @property
  def is_result(self) -> bool:
    return self.kind in _RESULTS

  @property
  def is_static(self) -> bool:
    return self.kind in _STATIC

  @property
  def is_given(self) -> bool:
    """True for what a caller passes."""
    return self.is_operand or self.is_static

  @property
  def code(self) -> tuple[int, int, int]:
    """(kind, dtype code, rank), as the runtime takes it."""
    return int(self.kind), 0 if self.dtype is None else dtype_code(self.dtype), self.rank

  def freeze(self, label: str, value: Any) -> Any:
    """The hashable form of a static value; raises for one that doesn't fit."""
    if self.kind is Kind.STRING:
      return static_values.string(label, self.name, value)
    if self.kind is Kind.DICT:
      return static_values.dictionary(label, self.name, value)
    freeze = static_values.numbers if self.kind is Kind.NUMBERS else static_values.number
    return freeze(label, self.name, value, self.dtype)


def from_codes(codes: Sequence[tuple[int, int, int]], names: Sequence[str]) -> list[Parameter]:
  """Parameters as the runtime describes them."""
  return [
    Parameter(names[i] if names else str(i), Kind(kind), dtype_of(dtype) if dtype else None, rank)
    for i, (kind, dtype, rank) in enumerate(codes)
  ]


def expected_text(parameter: Parameter) -> str:
  """What a parameter takes, for messages."""
  dtype = parameter.dtype.name if parameter.dtype is not None else "any dtype"
  if parameter.dtype is not None and tracing.canonical_dtype(parameter.dtype) != parameter.dtype:
    dtype += " (which needs jax_enable_x64)"
  return f"{dtype} of rank {parameter.rank}" if parameter.rank >= 0 else f"{dtype} of any rank"


def fits(parameter: Parameter, dtype: Any, rank: int) -> bool:
  """Whether an array of this type fits."""
  return (parameter.dtype is None or parameter.dtype == dtype) and parameter.rank in (-1, rank)


def as_operand(label: str, parameter: Parameter, value: Any) -> Any:
  """Python's scalars get the parameter's dtype where it holds them, as literals do in C++."""
  dtype = parameter.dtype
  if dtype is None or not isinstance(value, (bool, int, float, complex)):
    return value
  if tracing.canonical_dtype(dtype) != dtype:
    raise GateDefinitionError(
      f"{label}: argument '{parameter.name}': {dtype.name} needs jax_enable_x64; a "
      "static value does not (cg::Attr in C++)"
    )
  frozen = static_values.number(label, parameter.name, value, dtype, what="argument")
  return jnp.asarray(frozen.value)


def leaves_of(label: str, parameter: Parameter, value: Any) -> list[Any]:
  """The arrays that one argument brings: one, or any number for a variadic parameter."""
  leaves = jax.tree.leaves(value)
  if parameter.kind is not Kind.INS and len(leaves) != 1:
    raise GateDefinitionError(
      f"{label}: argument '{parameter.name}': expected one array, got {len(leaves)}"
    )
  return leaves


# -- a call's arguments ------------------------------------------------------------------------
def named_arguments(
  label: str, given: Sequence[Parameter], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> dict[str, Any]:
  """The values of a call by the names of the parameters that it gives.

  Raises:
    GateDefinitionError: there are more or fewer, or one is given twice.
  """
  expected = ", ".join(p.name for p in given)
  if len(args) > len(given):
    raise GateDefinitionError(
      f"{label}: expected {len(given)} arguments ({expected}), got {len(args)}"
    )
  values = dict(zip((p.name for p in given), args, strict=False))
  for name, value in kwargs.items():
    if name in values or name not in {p.name for p in given}:
      what = "twice" if name in values else "which it doesn't have"
      raise GateDefinitionError(f"{label}: got argument '{name}' {what}; expected {expected}")
    values[name] = value
  missing = [p.name for p in given if p.name not in values]
  if missing:
    raise GateDefinitionError(f"{label}: expected argument '{missing[0]}', got none")
  return values


def inout_aliases(label: str, signature: Sequence[Parameter]) -> dict[int, int]:
  """An InOut is an operand and a result in one memory: the positions of the one and the other."""
  inouts = [p for p in signature if p.kind is Kind.INOUT]
  if inouts and any(p.kind in (Kind.INS, Kind.OUTS) for p in signature):
    raise GateDefinitionError(f"{label}: expected no InOut beside Ins or Outs, got both")
  operands = [p for p in signature if p.is_operand]
  results = [p for p in signature if p.is_result]
  return {operands.index(p): results.index(p) for p in inouts}


def linear_operands(
  label: str, linear: bool | tuple[int, ...], signature: Sequence[Parameter]
) -> bool | tuple[int, ...]:
  """Users' `linear` counts a call's arguments; rules count those that are arrays."""
  if isinstance(linear, bool):
    return linear
  given = [p for p in signature if p.is_given]
  operands = [p for p in given if p.is_operand]
  for position in linear:
    if not 0 <= position < len(given) or not given[position].is_operand:
      arrays = ", ".join(f"{i} ('{p.name}')" for i, p in enumerate(given) if p.is_operand)
      raise GateDefinitionError(
        f"{label}: linear: expected positions of arguments that are arrays, {arrays}; got "
        f"{position}"
      )
  return tuple(operands.index(given[position]) for position in linear)


def refuse_packed(label: str, operands: Sequence[Any], results: Sequence[Any]) -> None:
  """Raises where an array has elements smaller than a byte."""
  for index, value in enumerate((*operands, *results)):
    if is_packed(value.dtype):
      what = f"argument {index}" if index < len(operands) else f"result {index - len(operands)}"
      raise GateDefinitionError(
        f"{label}: {what}: {np.dtype(value.dtype).name} has several elements in a byte, which "
        "kernels don't take; convert to int8 before the call"
      )


def check_types(
  kernel: Callee,
  parameters: Sequence[Parameter],
  site: CallSite,
  operands: Sequence[Any],
  results: Sequence[Any],
  *,
  whole: bool = False,
) -> None:
  """Raises unless each array fits its parameter, and each parameter has one.

  Args:
    kernel: the Kernel, for messages.
    parameters: of the function that is to be called.
    site: the call.
    operands: types of what goes in.
    results: types of what comes out.
    whole: batched arrays have their leading axis here.
  """
  ins = _expand([p for p in parameters if p.is_operand], len(operands))
  outs = _expand([p for p in parameters if p.is_result], len(results))
  source = "out" if kernel.out is not None else "like"
  if ins is None or outs is None:
    side, have = ("arguments", len(operands)) if ins is None else ("results", len(results))
    want = [p.name for p in parameters if (p.is_operand if ins is None else p.is_result)]
    hint = "" if ins is None else f" from {source}"
    raise GateDefinitionError(
      f"{kernel.label}: expected {len(want)} {side} ({', '.join(want)}), got {have}{hint}"
    )
  for index, (parameter, value) in enumerate(zip(ins, operands, strict=True)):
    if not fits(parameter, value.dtype, len(value.shape)):
      raise GateDefinitionError(
        f"{kernel.label}: argument {registry.argument(kernel.name, site.spec, index)}: expected "
        f"{expected_text(parameter)}, got {type_text(value.dtype, value.shape)}"
        f"{_hint(parameter, value, whole)}"
      )
  for index, (parameter, value) in enumerate(zip(outs, results, strict=True)):
    if not fits(parameter, value.dtype, len(value.shape)):
      raise GateDefinitionError(
        f"{kernel.label}: result {index} ('{parameter.name}'): expected "
        f"{expected_text(parameter)}, got {type_text(value.dtype, value.shape)} from "
        f"{source}{_hint(parameter, value, whole)}"
      )


def check_argument(kernel: Callee, parameter: Parameter, value: Any) -> None:
  """Raises where it is known before the results' types are that an array doesn't fit."""
  if isinstance(value, (str, bytes)):
    raise GateDefinitionError(
      f"{kernel.label}: argument '{parameter.name}': expected an array, got {value!r}"
    )
  dtype, shape = getattr(value, "dtype", None), getattr(value, "shape", None)
  if not isinstance(dtype, np.dtype) or shape is None:
    return  # becomes an array first
  dtype = tracing.canonical_dtype(dtype)
  if not fits(parameter, dtype, len(shape)):
    raise GateDefinitionError(
      f"{kernel.label}: argument '{parameter.name}': expected {expected_text(parameter)}, got "
      f"{type_text(dtype, shape)}{_hint(parameter, value, whole=False)}"
    )


def _hint(parameter: Parameter, value: Any, whole: bool) -> str:
  """What may have gone wrong with an array that doesn't fit."""
  if whole and len(value.shape) == parameter.rank + 1:
    return (
      "; under vmap='whole' and 'broadcast' batched arrays have a leading axis more, so the rank "
      "is cg::dynamic or a template parameter"
    )
  wide = parameter.dtype is not None and tracing.canonical_dtype(parameter.dtype) != parameter.dtype
  return f" ({parameter.dtype} needs jax_enable_x64)" if wide else ""


def _expand(parameters: Sequence[Parameter], count: int) -> list[Parameter] | None:
  """One parameter for each of `count` arrays; None where they don't fit."""
  variadic = sum(p.kind in (Kind.INS, Kind.OUTS) for p in parameters)
  extra = count - len(parameters)
  if variadic > 1 or (variadic == 0 and extra != 0) or (variadic == 1 and extra < -1):
    return None
  expanded: list[Parameter] = []
  for parameter in parameters:
    times = extra + 1 if parameter.kind in (Kind.INS, Kind.OUTS) else 1
    expanded.extend([parameter] * times)
  return expanded
