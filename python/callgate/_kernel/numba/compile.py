# SPDX-License-Identifier: Apache-2.0
"""Numba's side of `callgate.numba`: compiles a Python function to a native one of kernel_abi.h.

The native function, `entry`, is generated: it calls Numba's code for the user's function, with
arrays over the call's buffers, and takes the GIL only after an exception. Addresses that differ
between processes come through the call's user data, so that the code can be kept on disk.
"""

# The inside of Numba's compiler has no types.
# pyright: reportMissingTypeStubs=false, reportPrivateUsage=false, reportArgumentType=false
# pyright: reportAttributeAccessIssue=false, reportPrivateImportUsage=false

from __future__ import annotations

import ctypes
import functools
import itertools
import types as pytypes
from collections.abc import Sequence
from typing import Any

import numba
import numpy as np
from llvmlite import ir
from numba.core import cgutils, types
from numba.core import errors as numba_errors
from numba.core.ccallback import CFunc
from numba.core.compiler_lock import global_compiler_lock
from numba.core.datamodel import models
from numba.core.dispatcher import Dispatcher
from numba.core.extending import intrinsic
from numba.np import numpy_support
from numba.np.arrayobj import populate_array

from callgate import _callgate
from callgate._core.errors import GateDefinitionError, ResultShapeError
from callgate._kernel.numba.cache import CFuncCache, digest_of
from callgate._kernel.numba.parallel import kernel_loops
from callgate._kernel.numba.request import Request, Slot, Type
from callgate._kernel.variants import Function


@global_compiler_lock  # Numba does not take its lock everywhere
def compile_function(request: Request) -> Function:
  """Returns the native function for a request, from disk if it is there."""
  argument_types = _argument_types(request)
  digest = digest_of(request, argument_types)
  name = f"callgate_{digest[:24] if digest else f'unkept{next(_unkept)}'}"

  def entry(call: Any) -> Any:  # compiled only if it is not on disk
    return run(call)  # noqa: F821  # pyright: ignore

  placeholder = pytypes.FunctionType(entry.__code__, {"__name__": __name__}, name)
  compiled = CFunc(placeholder, (_ENTRY.args, _ENTRY.return_type), locals={}, options={})
  compiled._cache = kept = CFuncCache(digest)
  if kept.content is None:
    placeholder.__globals__["run"] = _build(request, argument_types, name)
  _compile(request, argument_types, compiled.compile)
  # The mutex is for Numba's threading layer that only one thread at a time may use.
  try:
    alone = numba.threading_layer() == "workqueue"
  except ValueError:
    alone = False  # no parallel loop yet
  mutex = ctypes.addressof(_mutex()) if alone else 0
  shared = (ctypes.c_void_p * 2)(_callgate.take_python_error_address(), mutex)
  keep, user_data = (compiled, shared), ctypes.addressof(shared)
  return Function(compiled.address, request.parameters, keep, user_data)


_ENTRY = types.int32(types.voidptr)
_unkept = itertools.count()


@functools.cache  # called under Numba's lock
def _mutex() -> ctypes.Array[ctypes.c_char]:
  mutex = ctypes.create_string_buffer(128)  # larger than any platform's pthread_mutex_t
  ctypes.CDLL(None).pthread_mutex_init(mutex, None)
  return mutex


def _build(request: Request, argument_types: tuple[Any, ...], name: str) -> Any:
  """Returns an intrinsic of Numba that runs one call: `run(call) -> 0`, or 1 after an exception."""
  source = request.function
  # Under a unique name, because code from disk may contain functions of the user's names.
  function = pytypes.FunctionType(
    source.__code__, source.__globals__, source.__name__, source.__defaults__, source.__closure__
  )
  function.__kwdefaults__ = source.__kwdefaults__
  function.__module__ = source.__module__
  function.__qualname__ = f"{source.__qualname__}_{name}"
  dispatcher: Any = numba.njit(**request.options)(function)
  if not isinstance(dispatcher, Dispatcher):
    fault = "Numba's compiler is off; unset NUMBA_DISABLE_JIT"
    raise GateDefinitionError(f"{request.label}: {fault}")
  _compile(request, argument_types, lambda: dispatcher.compile(argument_types))
  compiled = dispatcher.overloads[argument_types]
  stores = _stores(request, compiled.signature.return_type)

  @intrinsic
  def run(typing: Any, call: Any) -> Any:
    del typing

    def emit(context: Any, builder: Any, signature: Any, args: Any) -> Any:
      del signature
      return _Emitter(context, builder, args[0]).emit(request, compiled, stores)

    emit.keep = dispatcher  # type: ignore[attr-defined]
    return types.int32(call), emit

  return run


def _compile(request: Request, argument_types: tuple[Any, ...], compile: Any) -> None:
  try:
    with kernel_loops():
      compile()
  except (numba_errors.NumbaError, NotImplementedError) as error:
    shown = ", ".join(map(str, argument_types))
    what = f"'{request.function.__name__}' for ({shown})"
    raise GateDefinitionError(f"{request.label}: Numba can't compile {what}:\n{error}") from error


# -- types ---------------------------------------------------------------------------------------
def _argument_types(request: Request) -> tuple[Any, ...]:
  if request.pointers is not None:
    return request.pointers
  operands = [  # read-only arrays, numbers for rank 0
    types.Array(element_type(dtype), rank, "C", readonly=True) if rank else element_type(dtype)
    for dtype, rank in request.types.operands
  ]
  results = [result_type(type) for type in request.types.results]
  found: list[Any] = []
  for kind, indices, value in request.slots:
    if kind == "out":
      found.append(results[0] if len(results) == 1 else types.BaseTuple.from_types(results))
    elif kind == "operand":
      found.append(operands[indices[0]])
    elif kind == "rest":
      found.append(types.BaseTuple.from_types([operands[i] for i in indices]))
    else:
      found.append(_Static(value))
  return tuple(found)


class _Static(types.Omitted):
  """A static value's type. Numba's own is the same for 0.0 and -0.0, (1, 2) and (True, 2)."""

  @property
  def key(self) -> tuple[type, str]:
    return type(self.value), repr(self.value)


@models.register_default(_Static)
class _StaticModel(models.OmittedArgDataModel):
  """The data of such a type: none."""


def _stores(request: Request, returned: Any) -> list[Any]:
  """Makes the code that copies each returned value into its result; raises if one doesn't fit."""
  if any(slot.kind in ("out", "result") for slot in request.slots):
    return []
  what, wanted = f"'{request.function.__name__}' returns", request.types.results
  nothing = isinstance(returned, types.NoneType)
  got = list(returned) if isinstance(returned, types.BaseTuple) else [] if nothing else [returned]
  if len(got) != len(wanted):
    raise GateDefinitionError(f"{request.label}: {what} {len(got)} values, expected {len(wanted)}")
  stores: list[Any] = []
  for index, (type, (dtype, rank)) in enumerate(zip(got, wanted, strict=True)):
    type = types.unliteral(type)
    is_array = isinstance(type, types.Array)
    have = None
    if is_array or isinstance(type, (types.Number, types.Boolean)):
      have = numpy_support.as_dtype(type.dtype if is_array else type), type.ndim if is_array else 0
    ranks_fit = have is not None and have[1] == rank
    castable = have is not None and np.can_cast(have[0], dtype, "same_kind")
    if not ranks_fit or not (have == (dtype, rank) or (castable and request.cast)):
      shown = type if have is None else f"{have[0].name} of rank {have[1]}"
      hint = "; pass cast=True to cast results" if ranks_fit and castable else ""
      expected = f"expected {dtype.name} of rank {rank}"
      fault = f"result {index}: {expected}, but {what} {shown}{hint}"
      raise GateDefinitionError(f"{request.label}: {fault}")
    store = _store(index if is_array else None)
    signature = (result_type((dtype, rank)), type)
    store.compile(signature)
    stores.append(store.overloads[signature])
  return stores


@functools.cache  # at most one entry for each result's index
def _store(index: int | None) -> Any:
  """Makes the code that stores an array, or a number, as the result of an index."""

  def array(out: Any, value: Any) -> None:
    if out.shape != value.shape:
      raise ResultShapeError(index, out.shape, value.shape)
    out[...] = value

  def number(out: Any, value: Any) -> None:
    out[()] = value

  return numba.njit(number if index is None else array)


# -- questions before a compilation --------------------------------------------------------------
def made_with(function: Any) -> tuple[dict[str, Any], tuple[Any, ...] | None] | None:
  """Returns the options of an `@njit` function or a `@cfunc`, and a cfunc's parameter types."""
  if isinstance(function, CFunc):
    return dict(function._compiler.targetoptions), tuple(function._sig.args)
  if isinstance(function, Dispatcher):
    return {k: v for k, v in function.targetoptions.items() if k != "nopython"}, None
  return None


def pointer_text(declared: Any, have: Type) -> str | None:
  """Returns a cfunc parameter's type for a message; None if it accepts this array."""
  if isinstance(declared, types.RawPointer):
    return None
  if isinstance(declared, types.CPointer):
    element = numpy_support.as_dtype(declared.dtype)
    return None if element == have[0] else f"{element.name} of any rank"
  number = numpy_support.as_dtype(declared)
  return None if (number, 0) == have else f"{number.name} of rank 0"


def element_type(dtype: np.dtype[Any]) -> Any:
  """Returns Numba's type for elements of a dtype; None if it has none on the CPU."""
  if dtype.name == "float16":
    return None  # a type for CUDA only
  try:
    return numpy_support.from_dtype(dtype)
  except numba_errors.NumbaNotImplementedError:
    return None


def result_type(result: Type) -> Any:
  return types.Array(element_type(result[0]), result[1], "C")


# -- the code around the user's function ---------------------------------------------------------
_I8P = ir.IntType(8).as_pointer()
_I32, _I64 = ir.IntType(32), ir.IntType(64)
# kernel_abi.h's callgate_array, and the positions in callgate_call.
_ARRAY = ir.LiteralStructType([_I8P, _I64.as_pointer(), _I32, ir.IntType(8)])
_OPERANDS, _RESULTS, _USER_DATA = 0, 1, 6
_TAKE_ERROR, _MUTEX = 0, 1  # positions in the user data


class _Emitter:
  """Writes LLVM IR for one call of kernel_abi.h."""

  def __init__(self, context: Any, builder: Any, call: Any) -> None:
    self.context, self.builder = context, builder
    self.call = builder.bitcast(call, _I8P.as_pointer())
    self.failed = cgutils.alloca_once_value(builder, _I32(0))

  def emit(self, request: Request, compiled: Any, stores: Sequence[Any]) -> Any:
    """Emits the call; `compiled` is the user's function in Numba, `stores` copy its results."""
    context, builder = self.context, self.builder
    result_types = map(result_type, request.types.results)
    results = [self._array(_RESULTS, i, type) for i, type in enumerate(result_types)]
    values = [
      self._argument(slot, type, results)
      for slot, type in zip(request.slots, compiled.signature.args, strict=True)
    ]
    in_parallel = "numba_parallel_for" in str(compiled.library.get_llvm_str())
    mutex = self._shared(_MUTEX) if in_parallel else None  # for a threading layer of one thread
    self._mutex_call("pthread_mutex_lock", mutex)
    status, returned = self._invoke(compiled, values)
    type = compiled.signature.return_type
    is_tuple = isinstance(type, types.BaseTuple)
    with builder.if_then(builder.not_(status.is_error)):
      for index, store in enumerate(stores):  # copies the function's results
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
    """Returns the address and the extents of one of the call's arrays."""
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
    strides = list(itertools.accumulate(shape[:0:-1], builder.mul, initial=_I64(size)))[::-1]
    array = context.make_array(type)(context, builder)
    place = builder.bitcast(data, element.as_pointer())
    populate_array(array, place, shape, strides[: type.ndim], size, meminfo=None)
    return array._getvalue()

  # -- the call ----------------------------------------------------------------------------------
  def _invoke(self, compiled: Any, values: Sequence[Any]) -> tuple[Any, Any]:
    """Calls a function; takes the GIL to raise its exception and pass it to the runtime."""
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
