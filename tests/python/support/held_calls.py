# SPDX-License-Identifier: Apache-2.0
"""The attributes of calls in programs, read back from the program."""

from __future__ import annotations

from typing import Any

import jax
import jaxlib.mlir.ir as ir


def calls(function: Any, *args: Any, platform: str = "cpu") -> list[dict[str, Any]]:
  """The attributes of callgate's calls in a function's program, in the program's order."""
  lowered = jax.jit(function).trace(*args).lower(lowering_platforms=(platform,))
  found: list[dict[str, Any]] = []

  def visit(operation: Any) -> ir.WalkResult:
    names = operation.attributes
    if operation.name == "stablehlo.custom_call" and "callgate." in str(names["call_target_name"]):
      found.append(value(names["mhlo.backend_config"]))
    return ir.WalkResult.ADVANCE

  lowered.compiler_ir("stablehlo").operation.walk(visit)
  return found


def value(attribute: Any) -> Any:
  """An attribute as Python's; lists are what they stand for."""
  if isinstance(attribute, ir.DictAttr):
    entries = {entry.name: value(entry.attr) for entry in attribute}
    places = [str(place) for place in range(len(entries))]
    return (
      [entries[place] for place in places] if entries and set(entries) == set(places) else entries
    )
  if isinstance(attribute, ir.DenseElementsAttr):
    return list(attribute)
  return attribute.value
