"""The parameters of kernels: what a native function takes, and whether a call's arrays fit.

The kinds are those of include/callgate/kernel_abi.h. Calls are checked while they are traced.
"""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Mapping, Sequence
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
    return {Kind.INOUT: "InOut", Kind.NUMBER: "Attr"}.get(self, self.name.capitalize())


_OPERANDS = (Kind.IN, Kind.INOUT, Kind.SCALAR, Kind.INS)
_RESULTS = (Kind.OUT, Kind.INOUT, Kind.OUTS)
_STATIC = (Kind.NUMBER, Kind.STRING, Kind.NUMBERS, Kind.DICT)


@dataclasses.dataclass(frozen=True)
class Parameter:
  """One parameter of a kernel."""

  name: str  # as in the source; its position where the source gives none
  kind: Kind
  dtype: np.dtype[Any] | None = None  # of its elements; None where any will do
  rank: int = -1  # of its arrays; -1 where any will do

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


Signature = Sequence[Parameter] | None


def from_codes(codes: Sequence[tuple[int, int, int]], names: Sequence[str]) -> list[Parameter]:
  """Parameters as the runtime describes them."""
  return [
    Parameter(names[i] if names else str(i), Kind(kind), dtype_of(dtype) if dtype else None, rank)
    for i, (kind, dtype, rank) in enumerate(codes)
  ]


def expected_text(parameter: Parameter) -> str:
  """What a parameter takes, for messages."""
  dtype = "any dtype" if parameter.dtype is None else parameter.dtype.name
  wide = " (which needs jax_enable_x64)" if _is_wide(parameter.dtype) else ""
  return f"{dtype}{wide} of {f'rank {parameter.rank}' if parameter.rank >= 0 else 'any rank'}"


def _is_wide(dtype: np.dtype[Any] | None) -> bool:
  """Whether JAX has arrays of it with jax_enable_x64 alone, which is off."""
  return dtype is not None and tracing.canonical_dtype(dtype) != dtype


def fits(parameter: Parameter, dtype: Any, rank: int) -> bool:
  """Whether an array of this type fits."""
  return (parameter.dtype is None or parameter.dtype == dtype) and parameter.rank in (-1, rank)


def as_operands(label: str, given: Sequence[Parameter], values: Mapping[str, Any]) -> list[Any]:
  """The arrays of a call; raises where it is known before the results' types that one doesn't fit.

  Python's scalars get the parameter's dtype where it holds them, as literals do in C++.
  """
  operands: list[Any] = []
  parameters = [p for p in given if p.is_operand]
  for name, dtype in ((p.name, p.dtype) for p in parameters):
    operands.append(values[name])
    if dtype is None or not isinstance(operands[-1], (bool, int, float, complex)):
      continue
    if _is_wide(dtype):
      raise GateDefinitionError(
        f"{label}: argument '{name}': {dtype.name} needs jax_enable_x64; a static value does not "
        "(cg::Attr in C++)"
      )
    number = static_values.number(label, name, operands[-1], dtype, what="argument")
    operands[-1] = jnp.asarray(number.value)
  for parameter, value in zip(parameters, operands, strict=True):
    where = f"{label}: argument '{parameter.name}'"
    for leaf in leaves_of(label, parameter, value):
      if isinstance(leaf, (str, bytes)):
        raise GateDefinitionError(f"{where}: expected an array, got {leaf!r}")
      dtype, shape = getattr(leaf, "dtype", None), getattr(leaf, "shape", None)
      if isinstance(dtype, np.dtype) and shape is not None:  # else becomes an array first
        dtype = tracing.canonical_dtype(dtype)
        if not fits(parameter, dtype, len(shape)):
          raise GateDefinitionError(f"{where}: {_misfit(parameter, dtype, shape)}")
  return operands


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
  """The values of a call by the names of the parameters that it gives, each once."""
  names = [p.name for p in given]
  expected = ", ".join(names)
  if len(args) > len(given):
    raise GateDefinitionError(
      f"{label}: expected {len(given)} arguments ({expected}), got {len(args)}"
    )
  values = dict(zip(names, args, strict=False))
  for name, value in kwargs.items():
    if name in values or name not in names:
      what = "twice" if name in values else "which it doesn't have"
      raise GateDefinitionError(f"{label}: got argument '{name}' {what}; expected {expected}")
    values[name] = value
  for name in names:
    if name not in values:
      raise GateDefinitionError(f"{label}: expected argument '{name}', got none")
  return values


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
      expected = f"expected positions of arguments that are arrays, {arrays}"
      raise GateDefinitionError(f"{label}: linear: {expected}; got {position}")
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
) -> None:
  """Raises unless each array, or type of one, fits its parameter, and each parameter has one."""
  source = f" from {'out' if kernel.out is not None else 'like'}"
  for side, given in (("argument", operands), ("result", results)):
    is_result = side == "result"
    have = [p for p in parameters if (p.is_result if is_result else p.is_operand)]
    variadic = [p.kind in (Kind.INS, Kind.OUTS) for p in have]
    extra = len(given) - len(have)
    if sum(variadic) > 1 or (extra < -1 if any(variadic) else extra):
      names = ", ".join(p.name for p in have)
      got = f"{len(given)}{source if is_result else ''}"
      raise GateDefinitionError(
        f"{kernel.label}: expected {len(have)} {side}s ({names}), got {got}"
      )
    each = [p for p, many in zip(have, variadic, strict=True) for _ in range(extra * many + 1)]
    for index, (parameter, value) in enumerate(zip(each, given, strict=True)):
      if fits(parameter, value.dtype, len(value.shape)):
        continue
      named = f"{index} ('{parameter.name}')"
      if not is_result:
        named = registry.argument(kernel.name, site.spec, index)
      # Under vmap='whole' batched arrays have their leading axis here.
      ranks = zip(results, site.results, strict=True)
      whole = any(len(r.shape) != len(shape) for r, (shape, _) in ranks)
      problem = _misfit(parameter, value.dtype, value.shape, source if is_result else "", whole)
      raise GateDefinitionError(f"{kernel.label}: {side} {named}: {problem}")


def _misfit(
  parameter: Parameter, dtype: Any, shape: Sequence[int], source: str = "", whole: bool = False
) -> str:
  """What is said of an array that doesn't fit, with what may have gone wrong."""
  hint = f" ({parameter.dtype} needs jax_enable_x64)" if _is_wide(parameter.dtype) else ""
  if whole and len(shape) == parameter.rank + 1:
    hint = (
      "; under vmap='whole' and 'broadcast' batched arrays have a leading axis more, so the rank "
      "is cg::dynamic or a template parameter"
    )
  return f"expected {expected_text(parameter)}, got {type_text(dtype, shape)}{source}{hint}"
