"""The code that Numba is given around a user's function: from a call's buffers to its arrays.

`make_entry` writes LLVM IR for one call of kernel_abi.h. No thread holds the GIL there; it is taken
after an exception only.
"""

# The inside of Numba's compiler has no types.
# pyright: reportMissingTypeStubs=false, reportPrivateUsage=false, reportArgumentType=false

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from llvmlite import ir
from numba.core import cgutils, types
from numba.core import errors as numba_errors
from numba.core.extending import intrinsic
from numba.np import numpy_support
from numba.np.arrayobj import populate_array

from callgate._kernel.numba.request import Request, Slot
from callgate._kernel.variants import Type

_I8P = ir.IntType(8).as_pointer()
_I32, _I64 = ir.IntType(32), ir.IntType(64)
# kernel_abi.h's callgate_array, and the positions in callgate_call.
_ARRAY = ir.LiteralStructType([_I8P, _I64.as_pointer(), _I32, ir.IntType(8)])
_OPERANDS, _RESULTS, _USER_DATA = 0, 1, 6
_TAKE_ERROR, _MUTEX = 0, 1  # in the user data


def make_entry(request: Request, compiled: Any, stores: Sequence[Any], keep: Any) -> Any:
  """An intrinsic that runs one call: `run(call) -> 0`, or 1 after an exception.

  `compiled` is Numba's result for the user's function, `stores` are those for what copies each
  returned value, none where it works in place. `keep` lives as long as the intrinsic.
  """

  @intrinsic
  def run(typing: Any, call: Any) -> Any:
    del typing

    def emit(context: Any, builder: Any, signature: Any, args: Any) -> Any:
      del signature
      emitter = _Emitter(context, builder, args[0])
      return emitter.emit(request, compiled, stores)

    emit.keep = keep  # type: ignore[attr-defined]
    return types.int32(call), emit

  return run


class _Emitter:
  def __init__(self, context: Any, builder: Any, call: Any) -> None:
    self.context, self.builder = context, builder
    self.call = builder.bitcast(call, _I8P.as_pointer())
    self.failed = cgutils.alloca_once_value(builder, _I32(0))

  def emit(self, request: Request, compiled: Any, stores: Sequence[Any]) -> Any:
    """The whole call."""
    context, builder = self.context, self.builder
    result_types = map(result_type, request.types.results)
    results = [self._array(_RESULTS, i, type) for i, type in enumerate(result_types)]
    values = [
      self._argument(slot, type, results)
      for slot, type in zip(request.slots, compiled.signature.args, strict=True)
    ]
    in_parallel = "numba_parallel_for" in str(compiled.library.get_llvm_str())
    mutex = self._shared(_MUTEX) if in_parallel else None  # of a layer that takes one thread
    self._mutex_call("pthread_mutex_lock", mutex)
    status, returned = self._invoke(compiled, values)
    type = compiled.signature.return_type
    is_tuple = isinstance(type, types.BaseTuple)
    with builder.if_then(builder.not_(status.is_error)):
      for index, store in enumerate(stores):  # copies what the function has returned
        value = builder.extract_value(returned, index) if is_tuple else returned
        declared = type[index] if is_tuple else type
        value = context.cast(builder, value, declared, store.signature.args[1])
        with builder.if_then(builder.icmp_unsigned("==", builder.load(self.failed), _I32(0))):
          self._invoke(store, [results[index], value])
      if context.enable_nrt:
        context.nrt.decref(builder, type, returned)
    self._mutex_call("pthread_mutex_unlock", mutex)
    return builder.load(self.failed)

  # -- arguments ---------------------------------------------------------------------------------
  def _argument(self, slot: Slot, type: Any, results: list[Any]) -> Any:
    """What a parameter of the user's function is passed."""
    context, builder = self.context, self.builder
    if slot.kind == "out":
      return results[0] if len(results) == 1 else context.make_tuple(builder, type, results)
    if slot.kind == "rest":
      rest = [self._operand(i, part) for i, part in zip(slot.indices, type, strict=True)]
      return context.make_tuple(builder, type, rest)
    if slot.kind == "operand":
      return self._operand(slot.indices[0], type)
    if slot.kind == "result":
      data, _ = self._data(_RESULTS, slot.indices[0])
      return builder.bitcast(data, context.get_value_type(type))
    if isinstance(type, types.Omitted):
      return None
    return context.get_constant_generic(builder, type, slot.value)

  def _operand(self, index: int, type: Any) -> Any:
    if isinstance(type, types.Array):
      return self._array(_OPERANDS, index, type)
    data, _ = self._data(_OPERANDS, index)
    if isinstance(type, types.RawPointer | types.CPointer):
      return self.builder.bitcast(data, self.context.get_value_type(type))
    place = self.builder.bitcast(data, self.context.get_data_type(type).as_pointer())
    return self.context.unpack_value(self.builder, type, place)

  def _data(self, side: int, index: int) -> tuple[Any, Any]:
    """The address and the extents of one of the call's arrays."""
    builder = self.builder
    arrays = builder.load(builder.gep(self.call, [_I32(side)]))
    one = builder.gep(builder.bitcast(arrays, _ARRAY.as_pointer()), [_I64(index)])
    data, dims = (builder.load(builder.gep(one, [_I32(0), _I32(field)])) for field in (0, 1))
    return data, dims

  def _array(self, side: int, index: int, type: Any) -> Any:
    context, builder = self.context, self.builder
    data, dims = self._data(side, index)
    element = context.get_data_type(type.dtype)
    size = context.get_abi_sizeof(element)
    shape = [builder.load(builder.gep(dims, [_I64(axis)])) for axis in range(type.ndim)]
    strides: list[Any] = []
    stride = _I64(size)
    for extent in reversed(shape):
      strides.insert(0, stride)
      stride = builder.mul(stride, extent)
    array = context.make_array(type)(context, builder)
    place = builder.bitcast(data, element.as_pointer())
    populate_array(array, place, shape, strides, size, meminfo=None)
    return array._getvalue()

  # -- the call ----------------------------------------------------------------------------------
  def _invoke(self, compiled: Any, values: Sequence[Any]) -> tuple[Any, Any]:
    """Calls a function; sets its exception and has the runtime take it, under the GIL."""
    context, builder = self.context, self.builder
    context.active_code_library.add_linking_library(compiled.library)
    status, returned = context.call_internal_no_propagate(
      builder, compiled.fndesc, compiled.signature, values
    )
    with builder.if_then(status.is_error, likely=False):
      python = context.get_python_api(builder)
      gil = python.gil_ensure()
      context.call_conv.raise_error(builder, python, status)
      function = ir.FunctionType(ir.VoidType(), [_I8P]).as_pointer()
      take = builder.bitcast(self._shared(_TAKE_ERROR), function)
      builder.call(take, [builder.bitcast(self.call, _I8P)])
      python.gil_release(gil)
      builder.store(_I32(1), self.failed)
    return status, returned

  def _shared(self, field: int) -> Any:
    builder = self.builder
    data = builder.load(builder.gep(self.call, [_I32(_USER_DATA)]))
    return builder.load(builder.gep(builder.bitcast(data, _I8P.as_pointer()), [_I32(field)]))

  def _mutex_call(self, name: str, mutex: Any) -> None:
    builder = self.builder
    if mutex is not None:
      callee = ir.FunctionType(_I32, [_I8P])
      function = cgutils.get_or_insert_function(builder.module, callee, name)
      with builder.if_then(cgutils.is_not_null(builder, mutex)):
        builder.call(function, [mutex])


# -- types ---------------------------------------------------------------------------------------
def element_type(dtype: np.dtype[Any]) -> Any:
  """Numba's type for elements of a dtype; None where it has none on the CPU."""
  if dtype.name == "float16":
    return None  # a type of CUDA's alone
  try:
    return numpy_support.from_dtype(dtype)
  except numba_errors.NumbaNotImplementedError:
    return None


def operand_type(operand: Type) -> Any:
  """An argument: a read-only array, or a number for rank 0."""
  dtype, rank = operand
  element = element_type(dtype)
  return types.Array(element, rank, "C", readonly=True) if rank else element


def result_type(result: Type) -> Any:
  return types.Array(element_type(result[0]), result[1], "C")
