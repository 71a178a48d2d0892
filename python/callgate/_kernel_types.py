"""Whether a kernel's function takes a call's arrays, checked while the call is traced."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from callgate import _compat, _names
from callgate._lowering import is_packed
from callgate._parameters import Kind, Parameter, expected_text, fits, type_text
from callgate._primitive import CallSite
from callgate.errors import GateDefinitionError


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
  kernel: Any,
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
        f"{kernel.label}: argument {_names.argument(kernel.name, site.spec, index)}: expected "
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


def check_argument(kernel: Any, parameter: Parameter, value: Any) -> None:
  """Raises where it is known before the results' types are that an array doesn't fit."""
  if isinstance(value, (str, bytes)):
    raise GateDefinitionError(
      f"{kernel.label}: argument '{parameter.name}': expected an array, got {value!r}"
    )
  dtype, shape = getattr(value, "dtype", None), getattr(value, "shape", None)
  if not isinstance(dtype, np.dtype) or shape is None:
    return  # becomes an array first
  dtype = _compat.canonical_dtype(dtype)
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
  wide = parameter.dtype is not None and _compat.canonical_dtype(parameter.dtype) != parameter.dtype
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
