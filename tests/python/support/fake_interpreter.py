# SPDX-License-Identifier: Apache-2.0
"""Walks a StableHLO program and gives its operations to a stream of the fake driver.

One interpreter a run. Values of the program are DeviceArrays; who made them knows whether they are
arguments, constants or temporaries, which are overwritten in the end.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from fake_cuda import DeviceArray
from fake_programs import TOKEN, Pending, Program, Site
from fake_stablehlo import array_type
from jaxlib.mlir import ir

# Custom calls of the compiler's own, which leave their operands as they are.
_MARKS = ("Sharding", "SPMDFullToShardShape", "SPMDShardToFullShape", "annotate_device_placement")
_SAME = ("stablehlo.optimization_barrier", "sdy.sharding_constraint")

Path = tuple[Any, ...]


class Interpreter:
  """One run of a program.

  Args:
    program: what to run.
    pending: the run, whose stream gets the work.
    capturing: the stream is being captured, so nothing may wait for it.
  """

  def __init__(self, program: Program, pending: Pending, *, capturing: bool = False) -> None:
    self.program, self.pending, self.capturing = program, pending, capturing
    self.stream, self.fake = pending.stream, program.fake
    self.device = self.stream.device
    self.donated: set[int] = set()  # pointers that the program may write to

  def run(self, flat: Sequence[Any]) -> None:
    main = self.program.functions["main"]
    block = main.regions[0].blocks[0]
    values = iter(enumerate(flat))
    arguments: list[Any] = []
    for parameter in block.arguments:
      expected = array_type(parameter.type)
      if expected is None:
        arguments.append(TOKEN)
        continue
      index, value = next(values)
      arguments.append(self._argument(value, *expected))
      if index in self.program.donate:
        self.donated.add(arguments[-1].pointer)
    self.pending.results = list(self._block(block, arguments, {}, ()))
    self._overwrite()

  def _argument(self, value: Any, shape: tuple[int, ...], dtype: Any) -> DeviceArray:
    if not isinstance(value, DeviceArray):
      value = self.fake.put(np.asarray(value, dtype), self.device)
      self.pending.constants.append(value)
    assert (value.shape, value.dtype) == (shape, dtype), (
      f"expected an array of {shape} and {dtype}, got {value.shape} and {value.dtype}"
    )
    return value

  def _overwrite(self) -> None:
    """Gives memory that no one needs any more to others, on the same stream, as XLA does."""
    kept = {value.pointer for value in self.pending.results if value is not TOKEN}
    unused = [value for value in self.pending.temporaries if value.pointer not in kept]
    if not unused:
      return

    def overwrite() -> None:
      for value in unused:
        value.view().reshape(-1).view(np.uint8)[...] = 0xEE

    self.stream.enqueue(overwrite, writes=[value for value in unused if value.nbytes])

  def _empty(self, result: Any) -> Any:
    expected = array_type(result.type)
    if expected is None:
      return TOKEN
    value = self.fake.empty(*expected, self.device)
    self.pending.temporaries.append(value)
    return value

  # -- control flow
  def _block(self, block: Any, arguments: Sequence[Any], outer: Any, path: Path) -> list[Any]:
    values = {**outer, **dict(zip(block.arguments, arguments, strict=True))}
    for index, op in enumerate(block.operations):
      operation = op.operation
      operands = [values[operand] for operand in operation.operands]
      if operation.name in ("func.return", "stablehlo.return", "sdy.return"):
        return operands
      results = self._operation(operation, operands, values, (*path, index))
      values.update(zip(operation.results, results, strict=True))
    return []

  def _operation(self, op: Any, operands: list[Any], values: Any, path: Path) -> Sequence[Any]:
    match op.name:
      case "func.call":
        name = ir.FlatSymbolRefAttr(op.attributes["callee"]).value
        called = self.program.functions[name]
        return self._block(called.regions[0].blocks[0], operands, {}, (*path, name))
      case "stablehlo.while":
        return self._loop(op, operands, values, path)
      case "stablehlo.case" | "stablehlo.if":
        return self._branch(op, operands[0], values, path)
      case "stablehlo.custom_call":
        return self._custom_call(op, operands, path)
      case "stablehlo.create_token" | "stablehlo.after_all":
        return [TOKEN]
      case "stablehlo.partition_id" | "stablehlo.replica_id":
        return [self._constant(np.zeros((), np.uint32))]
      case name if name in _SAME:
        return operands
      case "stablehlo.constant":
        return [self._constant(self.program.evaluator(path, op)([])[0])]
      case _:
        return self._evaluate(op, operands, path)

  def _number(self, value: DeviceArray, op: Any) -> int:
    if self.capturing:
      raise NotImplementedError(f"{op.name} in a capture: the host would wait for its stream")
    assert self.stream.finish() == 0
    if self.pending.failures:
      raise self.pending.failures[0]
    return int(value.get())

  def _loop(self, op: Any, operands: list[Any], values: Any, path: Path) -> list[Any]:
    condition, body = (region.blocks[0] for region in op.regions)
    while self._number(self._block(condition, operands, values, (*path, "condition"))[0], op):
      operands = self._block(body, operands, values, (*path, "body"))
    return operands

  def _branch(self, op: Any, index: DeviceArray, values: Any, path: Path) -> list[Any]:
    number = self._number(index, op)
    if op.name == "stablehlo.if":
      chosen = 0 if number else 1
    else:
      chosen = number if 0 <= number < len(op.regions) else len(op.regions) - 1
    return self._block(op.regions[chosen].blocks[0], [], values, (*path, chosen))

  # -- operations
  def _constant(self, array: Any) -> DeviceArray:
    value = self.fake.put(array, self.device)
    self.pending.constants.append(value)
    return value

  def _evaluate(self, op: Any, operands: list[Any], path: Path) -> list[Any]:
    evaluator = self.program.evaluator(path, op)
    results = [self._empty(result) for result in op.results]
    failures = self.pending.failures  # not the run itself: a graph of it lives no longer than it

    def compute() -> None:
      try:
        arrays = evaluator([operand.view() for operand in operands])
        for result, array in zip(results, arrays, strict=True):
          result.view()[...] = array
      except BaseException as error:  # noqa: BLE001 - a stream's thread has no one to tell
        failures.append(error)

    self.stream.enqueue(
      compute,
      reads=[x for x in operands if x.nbytes],
      writes=[x for x in results if x.nbytes],
    )
    return results

  def _custom_call(self, op: Any, operands: list[Any], path: Path) -> list[Any]:
    target = ir.StringAttr(op.attributes["call_target_name"]).value
    if target in _MARKS:
      return operands
    site = self.program.site(path, lambda: Site(self.fake, target, _attributes(op)))
    results = [self._empty(result) for result in op.results]
    operands = list(operands)
    for result, operand in _aliases(op):
      results[result] = operands[operand] = self._shared(operands[operand], results[result])
    site.execute(operands, results, self.stream)
    return results

  def _shared(self, operand: DeviceArray, fresh: DeviceArray) -> DeviceArray:
    """The operand's own memory if the program may write to it, else a copy."""
    if operand.pointer in self.donated:
      return operand

    def copy() -> None:
      fresh.view()[...] = operand.view()

    if operand.nbytes:
      self.stream.enqueue(copy, reads=[operand], writes=[fresh])
    return fresh


def _aliases(op: Any) -> list[tuple[int, int]]:
  """Which result is which operand's memory."""
  if "output_operand_aliases" not in op.attributes:
    return []
  pairs: list[tuple[int, int]] = []
  for alias in ir.ArrayAttr(op.attributes["output_operand_aliases"]):
    text = str(alias)
    outputs = text.split("output_tuple_indices = [")[1].split("]")[0]
    operand = text.split("operand_index = ")[1].split(",")[0]
    pairs.append((int(outputs) if outputs else 0, int(operand)))
  return pairs


def _attributes(op: Any) -> dict[str, Any]:
  for name in ("mhlo.backend_config", "backend_config"):
    if name in op.attributes and str(op.attributes[name]).startswith("{"):
      with op.context, ir.Location.unknown():
        return _value(op.attributes[name])
  return {}


def _value(attribute: Any) -> Any:
  """An attribute as `Site` takes it."""
  if isinstance(attribute, ir.DictAttr):
    return {named.name: _value(named.attr) for named in attribute}
  if isinstance(attribute, ir.StringAttr):
    return attribute.value_bytes
  if isinstance(attribute, ir.BoolAttr):
    return np.bool_(attribute.value)
  if isinstance(attribute, ir.IntegerAttr | ir.FloatAttr):
    _, dtype = array_type(ir.RankedTensorType.get([], attribute.type)) or ((), None)
    return np.asarray(attribute.value, dtype)
  if isinstance(attribute, ir.DenseElementsAttr):
    return np.array(attribute)
  return np.array(list(attribute))  # a dense array
