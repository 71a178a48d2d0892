"""Numba's side of `callgate.numba`: compiles a Python function to a native one of kernel_abi.h.

The native function, `entry`, is generated: it makes Numba's arrays from the call's buffers, calls
what Numba made of the user's function and, only where that has raised, takes the GIL to hand the
exception on. Addresses that change from process to process reach it through the call's user data,
so that its machine code can be kept on disk. This module alone imports Numba.
"""

# The inside of Numba's compiler has no types.
# pyright: reportMissingTypeStubs=false, reportPrivateUsage=false, reportArgumentType=false
# pyright: reportAttributeAccessIssue=false, reportPrivateImportUsage=false

from __future__ import annotations

import ctypes
import functools
import itertools
import types as pytypes
from typing import Any

import numba
import numpy as np
from numba.core import errors as numba_errors
from numba.core import types
from numba.core.ccallback import CFunc
from numba.core.compiler_lock import global_compiler_lock
from numba.core.dispatcher import Dispatcher
from numba.np import numpy_support

from callgate import _callgate
from callgate._core.errors import GateDefinitionError, ResultShapeError
from callgate._kernel.numba.cache import Kept, digest_of
from callgate._kernel.numba.entry import make_entry, operand_type, result_type
from callgate._kernel.numba.parallel import kernel_loops
from callgate._kernel.numba.request import Request
from callgate._kernel.variants import Function, Type


# -- one variant ---------------------------------------------------------------------------------
@global_compiler_lock  # not all that Numba does on the way takes its lock
def compile_function(request: Request) -> Function:
  """The native function for a request, from the disk where it is there.

  Raises:
    GateDefinitionError: Numba refuses the function, with its message; or its results are not what
      the call declares.
  """
  argument_types = _argument_types(request)
  digest = digest_of(request, argument_types)
  name = f"callgate_{digest[:24] if digest else f'unkept{next(_unkept)}'}"

  def entry(call: Any) -> Any:  # compiled only where the disk hasn't got it
    return run(call)  # noqa: F821  # pyright: ignore

  placeholder = pytypes.FunctionType(entry.__code__, {"__name__": __name__}, name)
  compiled = CFunc(placeholder, (_ENTRY.args, _ENTRY.return_type), locals={}, options={})
  compiled._cache = kept = Kept(digest)
  if kept.content is None:
    placeholder.__globals__["run"] = _build(request, argument_types, name)
  _compile(request, argument_types, compiled.compile)
  # The mutex is for a threading layer of Numba's that one thread at a time may use.
  try:
    alone = numba.threading_layer() == "workqueue"
  except ValueError:
    alone = False  # no parallel loop so far
  mutex = ctypes.addressof(_mutex()) if alone else 0
  shared = (ctypes.c_void_p * 2)(_callgate.take_python_error_address(), mutex)
  return Function(
    compiled.address, request.parameters, (compiled, shared), user_data=ctypes.addressof(shared)
  )


_ENTRY = types.int32(types.voidptr)
_unkept = itertools.count()


@functools.cache  # called under Numba's lock
def _mutex() -> ctypes.Array[ctypes.c_char]:
  mutex = ctypes.create_string_buffer(128)  # larger than any platform's pthread_mutex_t
  ctypes.CDLL(None).pthread_mutex_init(mutex, None)
  return mutex


def _build(request: Request, argument_types: tuple[Any, ...], name: str) -> Any:
  """What runs one call: an intrinsic of Numba's."""
  source = request.function
  # Under a name of its own: what comes from the disk may hold functions of the user's names.
  function = pytypes.FunctionType(
    source.__code__, source.__globals__, source.__name__, source.__defaults__, source.__closure__
  )
  function.__kwdefaults__ = source.__kwdefaults__
  function.__module__ = source.__module__
  function.__qualname__ = f"{source.__qualname__}_{name}"
  dispatcher: Any = numba.njit(**request.options)(function)
  if not isinstance(dispatcher, Dispatcher):
    raise GateDefinitionError(
      f"{request.label}: expected Numba's compiler, which NUMBA_DISABLE_JIT switches off; got none"
    )
  _compile(request, argument_types, lambda: dispatcher.compile(argument_types))
  compiled = dispatcher.overloads[argument_types]
  stores = _stores(request, compiled.signature.return_type)
  return make_entry(request, compiled, stores, keep=dispatcher)


def _compile(request: Request, argument_types: tuple[Any, ...], compile: Any) -> None:
  try:
    with kernel_loops():
      compile()
  except (numba_errors.NumbaError, NotImplementedError) as error:
    shown = ", ".join(map(str, argument_types))
    raise GateDefinitionError(
      f"{request.label}: Numba can't compile '{request.function.__name__}' for ({shown}):\n{error}"
    ) from error


# -- types ---------------------------------------------------------------------------------------
def _argument_types(request: Request) -> tuple[Any, ...]:
  """The types that the user's function is compiled for."""
  if request.pointers is not None:
    return request.pointers
  operands = [operand_type(type) for type in request.types.operands]
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
      found.append(types.Omitted(value))
  return tuple(found)


def _stores(request: Request, returned: Any) -> list[Any]:
  """What copies each returned value into its result; raises where they don't fit."""
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
    castable = request.cast and have is not None and np.can_cast(have[0], dtype, "same_kind")
    if not ranks_fit or not (have == (dtype, rank) or castable):
      shown = type if have is None else f"{have[0].name} of rank {have[1]}"
      hint = "; results are never cast silently: see cast=True" if ranks_fit else ""
      expected = f"expected {dtype.name} of rank {rank}"
      raise GateDefinitionError(
        f"{request.label}: result {index}: {expected}, but {what} {shown}{hint}"
      )
    store = _store(index if is_array else None)
    signature = (result_type((dtype, rank)), type)
    store.compile(signature)
    stores.append(store.overloads[signature])
  return stores


@functools.cache
def _store(index: int | None) -> Any:
  """What stores an array as the result of an index, or a number."""

  def array(out: Any, value: Any) -> None:
    if out.shape != value.shape:
      raise ResultShapeError(index, out.shape, value.shape)
    out[...] = value

  def number(out: Any, value: Any) -> None:
    out[()] = value

  return numba.njit(number if index is None else array)


# -- what it is asked before ---------------------------------------------------------------------
def made_with(function: Any) -> tuple[dict[str, Any], tuple[Any, ...] | None] | None:
  """The options of an `@njit` function or a `@cfunc`, and the types of the latter's parameters."""
  if isinstance(function, CFunc):
    return dict(function._compiler.targetoptions), tuple(function._sig.args)
  if isinstance(function, Dispatcher):
    return {k: v for k, v in function.targetoptions.items() if k != "nopython"}, None
  return None


def pointer_text(declared: Any, have: Type) -> str | None:
  """What a cfunc's parameter of a type takes, for a message; None if it takes this array."""
  if isinstance(declared, types.RawPointer):
    return None
  if isinstance(declared, types.CPointer):
    element = numpy_support.as_dtype(declared.dtype)
    return None if element == have[0] else f"{element.name} of any rank"
  number = numpy_support.as_dtype(declared)
  return None if (number, 0) == have else f"{number.name} of rank 0"
