"""The module that a call on shards is: what the partitioner answers XLA with.

Made with the MLIR bindings that come with jaxlib, through `jax.interpreters.mlir` where that has
what is needed.
"""

from __future__ import annotations

import contextlib
import importlib
from collections.abc import Generator, Mapping, Sequence
from typing import Any

import numpy as np
from jax.interpreters import mlir as _mlir

# These have no type stubs.
func: Any = importlib.import_module("jaxlib.mlir.dialects.func")
hlo: Any = importlib.import_module("jaxlib.mlir.dialects.stablehlo")
ir: Any = importlib.import_module("jaxlib.mlir.ir")
mlir: Any = _mlir


@contextlib.contextmanager
def ir_context() -> Generator[None]:
  """A context for `read_attributes` and `local_module`."""
  with mlir.make_ir_context() as context, ir.Location.unknown(context):
    yield


def read_attributes(text: bytes) -> dict[str, Any]:
  """A call's attributes from the text that XLA has: strings as str, others as they are."""
  held: Any = ir.Attribute.parse(text.decode())
  return {
    entry.name: entry.attr.value if isinstance(entry.attr, ir.StringAttr) else entry.attr
    for entry in ir.DictAttr(held)
  }


def local_module(
  target: str,
  operands: Sequence[tuple[Sequence[int], Any]],
  results: Sequence[tuple[Sequence[int], Any]],
  attributes: Mapping[str, Any],
  *,
  has_side_effect: bool,
  aliases: Mapping[int, int],
  partition_id: bool,
  broadcast: Sequence[Sequence[int]] | None,
) -> bytes:
  """A module whose `main` makes one FFI call, as bytecode.

  Args:
    target: the FFI target.
    operands: (shape, dtype) of each; a dtype None is a token.
    results: likewise.
    attributes: as from `read_attributes`.
    has_side_effect: of the call.
    aliases: operand to result: one memory.
    partition_id: the device's number is one more operand, the last.
    broadcast: groups of devices; the results of each group are added up, bit by bit.
  """

  def ir_type(shape: Sequence[int], dtype: Any) -> Any:
    if dtype is None:
      return hlo.TokenType.get()
    return ir.RankedTensorType.get(shape, mlir.dtype_to_ir_type(np.dtype(dtype)))

  inputs = [ir_type(*operand) for operand in operands]
  outputs = [ir_type(*result) for result in results]
  module: Any = ir.Module.create()
  with ir.InsertionPoint(module.body):
    function = func.FuncOp("main", ir.FunctionType.get(inputs, outputs))
    function.attributes["sym_visibility"] = ir.StringAttr.get("public")
    with ir.InsertionPoint(function.add_entry_block()):
      values = list(function.arguments)
      ranks = [len(shape) for shape, _ in operands]
      if partition_id:
        values.append(hlo.partition_id())
        ranks.append(0)
      call = hlo.CustomCallOp(
        outputs,
        values,
        call_target_name=ir.StringAttr.get(target),
        has_side_effect=ir.BoolAttr.get(has_side_effect),
        api_version=mlir.i32_attr(4),
        backend_config=ir.DictAttr.get(
          {
            name: ir.StringAttr.get(value) if isinstance(value, str) else value
            for name, value in attributes.items()
          }
        ),
        operand_layouts=_layouts(ranks),
        result_layouts=_layouts([len(shape) for shape, _ in results]),
        output_operand_aliases=ir.ArrayAttr.get(
          [
            hlo.OutputOperandAlias.get([o] if len(outputs) > 1 else [], i, [])
            for i, o in aliases.items()
          ]
        ),
      )
      returned = list(call.results)
      if broadcast is not None:
        returned = [
          value if dtype is None else _added_up(value, np.dtype(dtype), broadcast)
          for value, (_, dtype) in zip(returned, results, strict=True)
        ]
      func.ReturnOp(returned)
  return mlir.module_to_bytecode(module)


def _layouts(ranks: Sequence[int]) -> Any:
  index = ir.IndexType.get()
  return ir.ArrayAttr.get(
    [
      ir.DenseIntElementsAttr.get(np.arange(rank - 1, -1, -1, dtype=np.int64), type=index)
      for rank in ranks
    ]
  )


def _added_up(value: Any, dtype: np.dtype[Any], groups: Sequence[Sequence[int]]) -> Any:
  """The sum over groups of devices, of which all but one have zeros, of a value's bits."""
  own = ir.RankedTensorType(value.type)

  def of(element: Any) -> Any:
    return ir.RankedTensorType.get(own.shape, element)

  if dtype.kind == "c":
    part = np.dtype(np.float32 if dtype.itemsize == 8 else np.float64)
    halves = [_added_up(half, part, groups) for half in (hlo.real(value), hlo.imag(value))]
    return hlo.complex(*halves)
  packed = (
    dtype.itemsize == 1
    and dtype.name not in ("bool", "int8", "uint8")
    and "float8" not in (dtype.name)
  )
  if dtype.name == "bool" or packed:
    word = of(mlir.dtype_to_ir_type(np.dtype(np.int32)))
    return hlo.convert(own, _all_reduce(hlo.convert(word, value), groups))
  word = of(mlir.dtype_to_ir_type(np.dtype(f"uint{8 * dtype.itemsize}")))
  return hlo.bitcast_convert(own, _all_reduce(hlo.bitcast_convert(word, value), groups))


def _all_reduce(value: Any, groups: Sequence[Sequence[int]]) -> Any:
  element = ir.RankedTensorType.get([], ir.RankedTensorType(value.type).element_type)
  reduce = hlo.AllReduceOp(
    [value.type],
    [value],
    ir.DenseIntElementsAttr.get(np.array(groups, dtype=np.int64)),
    channel_handle=hlo.ChannelHandle.get(1, 1),
    use_global_device_ids=ir.UnitAttr.get(),
  )
  block = reduce.regions[0].blocks.append(element, element)
  with ir.InsertionPoint(block):
    hlo.return_([hlo.add(*block.arguments)])
  return reduce.results[0]
