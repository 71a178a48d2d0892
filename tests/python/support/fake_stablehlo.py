# SPDX-License-Identifier: Apache-2.0
"""Single StableHLO operations, computed by the reference interpreter that comes with jaxlib.

An operation becomes a module of its own, once; its operands and results are NumPy's arrays. Dtypes
that MLIR's attributes can't hold in Python travel as integers of their size.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import jax.numpy as jnp
import ml_dtypes
import numpy as np
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import func, stablehlo

Array = np.ndarray[Any, Any]

# MLIR's name of an element type, NumPy's dtype, XLA's number of it.
_DTYPES: dict[str, tuple[np.dtype[Any], int]] = {
  "i1": (np.dtype(bool), 1),
  "i8": (np.dtype(np.int8), 2),
  "i16": (np.dtype(np.int16), 3),
  "i32": (np.dtype(np.int32), 4),
  "i64": (np.dtype(np.int64), 5),
  "ui8": (np.dtype(np.uint8), 6),
  "ui16": (np.dtype(np.uint16), 7),
  "ui32": (np.dtype(np.uint32), 8),
  "ui64": (np.dtype(np.uint64), 9),
  "f16": (np.dtype(np.float16), 10),
  "f32": (np.dtype(np.float32), 11),
  "f64": (np.dtype(np.float64), 12),
  "bf16": (np.dtype(jnp.bfloat16), 16),
  "complex<f32>": (np.dtype(np.complex64), 15),
  "complex<f64>": (np.dtype(np.complex128), 18),
  "f8E5M2": (np.dtype(ml_dtypes.float8_e5m2), 19),
  "f8E4M3FN": (np.dtype(ml_dtypes.float8_e4m3fn), 20),
}
_CODES = dict(_DTYPES.values())


def dtype_code(dtype: Any) -> int:
  """XLA_FFI_DataType of a NumPy dtype."""
  dtype = np.dtype(dtype)
  if dtype not in _CODES:
    raise NotImplementedError(f"dtype {dtype}")
  return _CODES[dtype]


def array_type(value: Any) -> tuple[tuple[int, ...], np.dtype[Any]] | None:
  """Shape and dtype of an MLIR type; None for a token."""
  if "token" in str(value):
    return None
  ranked = ir.RankedTensorType(value)
  element = str(ranked.element_type)
  if element not in _DTYPES:
    raise NotImplementedError(f"an array of {element}")
  return tuple(ranked.shape), _DTYPES[element][0]


def _travel(ranked: Any) -> list[Any]:
  """The types that an array travels as: of its own, or of what Python can read and write."""
  element = str(ranked.element_type)
  make = lambda inner: ir.RankedTensorType.get(ranked.shape, inner)
  if element.startswith("complex"):
    return [make(ir.ComplexType(ranked.element_type).element_type)] * 2
  if element == "i1":
    return [make(ir.IntegerType.get_unsigned(8))]
  if element.startswith(("bf", "f8")):
    return [make(ir.IntegerType.get_unsigned(8 * _DTYPES[element][0].itemsize))]
  return [ranked]


def _unpack(values: Sequence[Any], ranked: Any) -> Any:
  """The operand, of what came for it. A bool is a number that is not 0."""
  element = str(ranked.element_type)
  if element.startswith("complex"):
    return stablehlo.complex(*values)
  if values[0].type == ranked:
    return values[0]
  change = stablehlo.convert if element == "i1" else stablehlo.bitcast_convert
  return change(ranked, values[0])


def _pack(value: Any) -> list[Any]:
  """The reverse of `_unpack`."""
  ranked = ir.RankedTensorType(value.type)
  element, types = str(ranked.element_type), _travel(ranked)
  if element.startswith("complex"):
    return [stablehlo.real(value), stablehlo.imag(value)]
  if types[0] == ranked:
    return [value]
  change = stablehlo.convert if element == "i1" else stablehlo.bitcast_convert
  return [change(types[0], value)]


def _flat(lists: Iterable[list[Any]]) -> list[Any]:
  return list(itertools.chain.from_iterable(lists))


class Evaluator:
  """One operation, ready to compute.

  Args:
    op: the operation; it may have regions, if they use nothing from outside.
  """

  def __init__(self, op: Any) -> None:
    self.name: str = op.operation.name
    with op.operation.context, ir.Location.unknown():
      inputs = [ir.RankedTensorType(operand.type) for operand in op.operation.operands]
      outputs = [ir.RankedTensorType(result.type) for result in op.operation.results]
      self._inputs = [_travel(ranked) for ranked in inputs]
      self._outputs = [array_type(ranked) for ranked in outputs]
      self._module = ir.Module.create()
      with ir.InsertionPoint(self._module.body):
        taken, given = _flat(self._inputs), _flat(map(_travel, outputs))
        block = func.FuncOp("main", ir.FunctionType.get(taken, given)).add_entry_block()
        with ir.InsertionPoint(block):
          came = iter(block.arguments)
          operands = [
            _unpack([next(came) for _ in types], ranked)
            for types, ranked in zip(self._inputs, inputs, strict=True)
          ]
          clone = op.operation.clone()
          for index, operand in enumerate(operands):
            clone.operands[index] = operand
          func.ReturnOp(_flat(map(_pack, clone.results)))

  def __call__(self, operands: Sequence[Array]) -> list[Array]:
    with self._module.context:
      values = [
        _attribute(part, ranked)
        for array, types in zip(operands, self._inputs, strict=True)
        for part, ranked in zip(_parts(array), types, strict=True)
      ]
      try:
        results = iter(stablehlo.eval_module(self._module, values))
      except Exception as error:
        raise NotImplementedError(f"{self.name}: {error}") from error
      return [_array(results, *expected) for expected in self._outputs if expected is not None]


def _parts(array: Array) -> list[Array]:
  return [array.real, array.imag] if array.dtype.kind == "c" else [array]


def _attribute(array: Array, ranked: Any) -> Any:
  if array.size == 0:
    return ir.Attribute.parse(f"dense<> : {ranked}")
  dtype = _DTYPES[str(ranked.element_type)][0]
  array = np.ascontiguousarray(array).reshape(array.shape)
  array = array.astype(np.uint8) if array.dtype.kind == "b" else array.view(dtype)
  return ir.DenseElementsAttr.get(array, type=ranked.element_type, shape=ranked.shape)


def _array(results: Iterator[Any], shape: tuple[int, ...], dtype: np.dtype[Any]) -> Array:
  part = lambda: np.array(next(results)).reshape(shape)
  if 0 in shape:
    for _ in range(1 + (dtype.kind == "c")):
      next(results)
    return np.zeros(shape, dtype)
  if dtype.kind == "c":
    real = part()
    return (real + 1j * part()).astype(dtype)
  array = part()
  return array.astype(bool) if dtype.kind == "b" else array.view(dtype)
