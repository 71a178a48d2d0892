# SPDX-License-Identifier: Apache-2.0
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
    """Its name in callgate/kernel.h, without its namespace."""
    return {Kind.INOUT: "InOut", Kind.NUMBER: "Attr"}.get(self, self.name.capitalize())


OPERANDS = (Kind.IN, Kind.INOUT, Kind.SCALAR, Kind.INS)
RESULTS = (Kind.OUT, Kind.INOUT, Kind.OUTS)
STATIC = (Kind.NUMBER, Kind.STRING, Kind.NUMBERS, Kind.DICT)
GIVEN = OPERANDS + STATIC  # by the caller


@dataclasses.dataclass(frozen=True)
class Parameter:
  """One parameter of a kernel."""

  name: str  # as in the source; its position where the source gives none
  kind: Kind
  dtype: np.dtype[Any] | None = None  # of its elements; None where any will do
  rank: int = -1  # of its arrays; -1 where any will do
  way: str = dataclasses.field(default="", compare=False)  # out of a dtype that JAX lacks

  def freeze(self, label: str, value: Any) -> Any:
    """The hashable form of a static value; raises for one that doesn't fit."""
    if self.kind is Kind.STRING:
      return static_values.string(label, self.name, value)
    if self.kind is Kind.DICT:
      return static_values.dictionary(label, self.name, value)
    freeze = static_values.numbers if self.kind is Kind.NUMBERS else static_values.number
    return freeze(label, self.name, value, self.dtype)


Signature = Sequence[Parameter] | None


def expected_text(parameter: Parameter) -> str:
  """Returns what a parameter takes, for messages."""
  dtype = "any dtype" if parameter.dtype is None else parameter.dtype.name
  wide = " (which needs jax_enable_x64)" if _is_wide(parameter.dtype) else ""
  return f"{dtype}{wide} of {f'rank {parameter.rank}' if parameter.rank >= 0 else 'any rank'}"


def _is_wide(dtype: np.dtype[Any] | None) -> bool:
  """True if JAX has arrays of it with jax_enable_x64 alone, which is off."""
  return dtype is not None and tracing.canonical_dtype(dtype) != dtype


def fits(parameter: Parameter, dtype: Any, rank: int) -> bool:
  """True if an array of this type fits."""
  return (parameter.dtype is None or parameter.dtype == dtype) and parameter.rank in (-1, rank)


def by_name(
  label: str, names: Sequence[str], args: Sequence[Any], kwargs: Mapping[str, Any], *,
  some_left_open: bool = False,
) -> dict[str, Any]:  # fmt: skip
  """Returns what is given for each of a call's parameters: each once, and no other."""
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
  return given


def arguments(
  label: str, signature: Sequence[Parameter], args: Sequence[Any], kwargs: Mapping[str, Any]
) -> tuple[tuple[Any, ...], tuple[tuple[str, Any], ...]]:
  """A call's operands, in the order of the parameters, and its static values, frozen."""
  given = [p for p in signature if p.kind in GIVEN]
  names = [p.name for p in given]
  values = by_name(label, names, args, kwargs)
  if missing := [name for name in names if name not in values]:
    raise GateDefinitionError(f"{label}: expected argument '{missing[0]}', got none")
  operands = [(p, _scalar(label, p, values[p.name])) for p in given if p.kind in OPERANDS]
  for parameter, value in operands:
    where = f"{label}: argument '{parameter.name}'"
    for leaf in leaves_of(label, parameter, value):
      if isinstance(leaf, (str, bytes)):
        raise GateDefinitionError(f"{where}: expected an array, got {leaf!r}")
      dtype, shape = getattr(leaf, "dtype", None), getattr(leaf, "shape", None)
      if isinstance(dtype, np.dtype) and shape is not None:  # else becomes an array first
        dtype = tracing.canonical_dtype(dtype)
        if not fits(parameter, dtype, len(shape)):
          raise GateDefinitionError(f"{where}: {_misfit(parameter, dtype, shape)}")
  static = [(p.name, p.freeze(label, values[p.name])) for p in given if p.kind in STATIC]
  return tuple(value for _, value in operands), tuple(sorted(static))


def _scalar(label: str, parameter: Parameter, value: Any) -> Any:
  """Python's scalars get the parameter's dtype where it holds them, as literals do in C++."""
  name, dtype = parameter.name, parameter.dtype
  if dtype is None or not isinstance(value, (bool, int, float, complex)):
    return value
  if _is_wide(dtype):
    fault = f"{dtype.name} needs jax_enable_x64; a static value does not (cg::Attr in C++)"
    raise GateDefinitionError(f"{label}: argument '{name}': {fault}")
  return jnp.asarray(static_values.number(label, name, value, dtype, what="argument").value)


def leaves_of(label: str, parameter: Parameter, value: Any) -> list[Any]:
  """The arrays that one argument brings: one, or any number for a variadic parameter."""
  leaves = jax.tree.leaves(value)
  if parameter.kind is not Kind.INS and len(leaves) != 1:
    where = f"{label}: argument '{parameter.name}'"
    raise GateDefinitionError(f"{where}: expected one array, got {len(leaves)}")
  return leaves


def refuse_packed(label: str, operands: Sequence[Any], results: Sequence[Any]) -> None:
  """Raises where an array has elements smaller than a byte."""
  for index, value in enumerate((*operands, *results)):
    if is_packed(value.dtype):
      what = f"argument {index}" if index < len(operands) else f"result {index - len(operands)}"
      fault = (
        f"{np.dtype(value.dtype).name} has several elements in a byte, which kernels don't take"
      )
      raise GateDefinitionError(f"{label}: {what}: {fault}; convert to int8 before the call")


def check_types(
  kernel: Callee,
  parameters: Sequence[Parameter],
  site: CallSite,
  operands: Sequence[Any],
  results: Sequence[Any],
) -> None:
  """Raises unless each array, or type of one, fits its parameter, and each parameter has one."""
  for side, given in (("argument", operands), ("result", results)):
    is_result = side == "result"
    source = f" from {'like' if kernel.out is None else 'out'}" if is_result else ""
    have = [p for p in parameters if p.kind in (RESULTS if is_result else OPERANDS)]
    variadic = [p.kind in (Kind.INS, Kind.OUTS) for p in have]
    extra = len(given) - len(have)
    if sum(variadic) > 1 or (extra < -1 if any(variadic) else extra):
      expected = f"{len(have)} {side}s ({', '.join(p.name for p in have)})"
      raise GateDefinitionError(f"{kernel.label}: expected {expected}, got {len(given)}{source}")
    each = [p for p, many in zip(have, variadic, strict=True) for _ in range(extra * many + 1)]
    for index, (parameter, value) in enumerate(zip(each, given, strict=True)):
      if fits(parameter, value.dtype, len(value.shape)):
        continue
      argument = None if is_result else registry.argument(kernel.name, site.spec, index)
      named = argument or f"{index} ('{parameter.name}')"
      problem = _misfit(parameter, value.dtype, value.shape, source)
      # Under vmap='whole' batched arrays have their leading axis here.
      ranks = zip(results, site.results, strict=True)
      whole = any(len(r.shape) != len(shape) for r, (shape, _) in ranks)
      if whole and len(value.shape) == parameter.rank + 1:
        problem += (
          "; under vmap='whole' and 'broadcast' batched arrays have a leading axis more, so the "
          "rank is cg::dynamic or a template parameter"
        )
      raise GateDefinitionError(f"{kernel.label}: {side} {named}: {problem}")


def _misfit(parameter: Parameter, dtype: Any, shape: Sequence[int], source: str = "") -> str:
  way = f" ({parameter.dtype} needs jax_enable_x64{parameter.way})"
  hint = way if _is_wide(parameter.dtype) else ""
  return f"expected {expected_text(parameter)}, got {type_text(dtype, shape)}{source}{hint}"
