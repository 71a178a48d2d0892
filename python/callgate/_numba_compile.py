"""Numba's side of `callgate.numba`: compiles a Python function to a native one of kernel_abi.h.

The native function, `entry`, is generated: it makes Numba's arrays from the call's buffers, calls
what Numba made of the user's function and, only where that has raised, takes the GIL to hand the
exception on. Addresses that change from process to process reach it through the call's user data,
so that its machine code can be kept on disk. This module alone imports Numba.
"""

# The inside of Numba's compiler has no types.
# pyright: reportMissingTypeStubs=false, reportAttributeAccessIssue=false, reportArgumentType=false
# pyright: reportPrivateImportUsage=false, reportPrivateUsage=false
from __future__ import annotations

import ctypes
import dataclasses
import functools
import hashlib
import itertools
import json
import pickle
import platform
import sys
import types as pytypes
from typing import Any

import llvmlite
import numba
import numpy as np
from numba.core import entrypoints, types
from numba.core import errors as numba_errors
from numba.core.caching import CompileResultCacheImpl
from numba.core.ccallback import CFunc
from numba.core.compiler_lock import global_compiler_lock
from numba.core.registry import cpu_target
from numba.core.serialize import dumps
from numba.np import numpy_support

from callgate import _cache_files, _callgate, _numba_identity
from callgate._numba_entry import make_entry
from callgate._numba_parallel import kernel_loops
from callgate._parameters import Parameter, type_text
from callgate.errors import GateDefinitionError
from callgate.kernel import CallTypes, Function, Type

_FORMAT = 1  # of what is kept on disk, and of the code that is generated


@dataclasses.dataclass(frozen=True)
class Slot:
  """What one parameter of the user's function takes.

  Attributes:
    kind: "out" (the result, or the tuple of them), "result" (a pointer to one), "operand", "rest"
      (a tuple of operands) or "static".
    indices: of results or operands.
    value: the static one.
  """

  kind: str
  indices: tuple[int, ...] = ()
  value: Any = None


@dataclasses.dataclass(frozen=True)
class Request:
  """A variant to compile.

  Attributes:
    label: the kernel, for messages.
    function: the user's.
    options: Numba's, of its compilation.
    slots: of the function's parameters, in their order.
    returns: its results are what it returns.
    cast: they may be cast.
    pointers: the types of its parameters where it takes pointers (a cfunc), else None.
    types: of the call.
    parameters: of the native function, for the runtime.
  """

  label: str
  function: pytypes.FunctionType
  options: dict[str, Any]
  slots: tuple[Slot, ...]
  returns: bool
  cast: bool
  pointers: tuple[Any, ...] | None
  types: CallTypes
  parameters: tuple[Parameter, ...]

  @property
  def name(self) -> str:
    return self.function.__name__


def element_type(dtype: np.dtype[Any]) -> Any:
  """Numba's type for elements of a dtype; None where it has none on the CPU."""
  if dtype.name == "float16":
    return None  # a type of CUDA's alone
  try:
    return numpy_support.from_dtype(dtype)
  except numba_errors.NumbaNotImplementedError:
    return None


def is_dispatcher(value: Any) -> bool:
  return isinstance(value, numba.core.dispatcher.Dispatcher)


def is_cfunc(value: Any) -> bool:
  return isinstance(value, CFunc)


def signature_of(function: CFunc) -> tuple[Any, ...]:
  """The types of a cfunc's parameters."""
  return tuple(function._sig.args)


def options_of(function: Any) -> dict[str, Any]:
  """The options that an `@njit` function or a `@cfunc` was made with."""
  if is_cfunc(function):
    return dict(function._compiler.targetoptions)
  return {k: v for k, v in function.targetoptions.items() if k != "nopython"}


# -- one variant ---------------------------------------------------------------------------------
@global_compiler_lock  # not all that Numba does on the way takes its lock
def compile_function(request: Request) -> Function:
  """The native function for a request, from the disk where it is there.

  Raises:
    GateDefinitionError: Numba refuses the function, with its message; or its results are not what
      the call declares.
  """
  argument_types = _argument_types(request)
  digest = _digest(request, argument_types)
  name = f"callgate_{(digest or _unique())[:24]}"

  def entry(call: Any) -> Any:  # compiled only where the disk hasn't got it
    return run(call)  # noqa: F821  # pyright: ignore

  placeholder = pytypes.FunctionType(entry.__code__, {"__name__": __name__}, name)
  compiled = CFunc(placeholder, (_ENTRY.args, _ENTRY.return_type), locals={}, options={})
  compiled._cache = kept = _Kept(digest)
  if not kept.load():
    placeholder.__globals__["run"] = _build(request, argument_types, name)
  _compile(request, argument_types, compiled.compile)
  shared = _shared()
  return Function(
    compiled.address, request.parameters, (compiled, shared), user_data=ctypes.addressof(shared)
  )


_ENTRY = types.int32(types.voidptr)


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
  if not is_dispatcher(dispatcher):
    raise GateDefinitionError(
      f"{request.label}: expected Numba's compiler, got none: it is switched off "
      "(NUMBA_DISABLE_JIT)"
    )
  _compile(request, argument_types, lambda: dispatcher.compile(argument_types))
  compiled = dispatcher.overloads[argument_types]
  stores = _stores(request, compiled.signature.return_type)
  return make_entry(request, compiled, stores, (dispatcher, stores))


def _compile(request: Request, argument_types: tuple[Any, ...], compile: Any) -> None:
  try:
    with kernel_loops():
      compile()
  except (numba_errors.NumbaError, NotImplementedError) as error:
    shown = ", ".join(map(str, argument_types))
    raise GateDefinitionError(
      f"{request.label}: Numba can't compile '{request.name}' for ({shown}):\n{error}"
    ) from error


# -- types ---------------------------------------------------------------------------------------
def _argument_types(request: Request) -> tuple[Any, ...]:
  """The types that the user's function is compiled for."""
  operands = [operand_type(type) for type in request.types.operands]
  results = [_result_type(type) for type in request.types.results]
  found: list[Any] = []
  for position, slot in enumerate(request.slots):
    if request.pointers is not None:
      found.append(request.pointers[position])
    elif slot.kind == "out":
      found.append(results[0] if len(results) == 1 else types.BaseTuple.from_types(results))
    elif slot.kind == "operand":
      found.append(operands[slot.indices[0]])
    elif slot.kind == "rest":
      found.append(types.BaseTuple.from_types([operands[i] for i in slot.indices]))
    else:
      found.append(types.Omitted(slot.value))
  return tuple(found)


def operand_type(operand: Type) -> Any:
  """An argument: a read-only array, or a number for rank 0."""
  dtype, rank = operand
  element = element_type(dtype)
  return types.Array(element, rank, "C", readonly=True) if rank else element


def pointer_text(declared: Any, have: Type) -> str | None:
  """What a cfunc's parameter of a type takes, for a message; None if it takes this array."""
  if isinstance(declared, types.RawPointer):
    return None
  if isinstance(declared, types.CPointer):
    element = numpy_support.as_dtype(declared.dtype)
    return None if element == have[0] else f"{element.name} of any rank"
  number = numpy_support.as_dtype(declared)
  return None if (number, 0) == have else f"{number.name} of rank 0"


def _result_type(result: Type) -> Any:
  return types.Array(element_type(result[0]), result[1], "C")


def _stores(request: Request, returned: Any) -> list[Any]:
  """What copies each returned value into its result; raises where they don't fit."""
  wanted = request.types.results
  if not request.returns:
    return []
  got = list(returned) if isinstance(returned, types.BaseTuple) else [returned]
  if isinstance(returned, types.NoneType):
    got = []
  if len(got) != len(wanted):
    raise GateDefinitionError(
      f"{request.label}: '{request.name}' returns {len(got)} values, expected {len(wanted)}"
    )
  stores: list[Any] = []
  for index, (type, (dtype, rank)) in enumerate(zip(got, wanted, strict=True)):
    type = types.unliteral(type)
    have = _returned(type)
    fits = have is not None and have[1] == rank
    if have is None or not (fits and (have[0] == dtype or _castable(request, have[0], dtype))):
      shown = type if have is None else f"{have[0].name} of rank {have[1]}"
      hint = ""
      if have is not None and fits:
        hint = "; results are never cast silently: see cast=True"
      raise GateDefinitionError(
        f"{request.label}: result {index}: expected {dtype.name} of rank {rank}, but "
        f"'{request.name}' returns {shown}{hint}"
      )
    store = _store_array(index) if isinstance(type, types.Array) else _store_number()
    store.compile((_result_type((dtype, rank)), type))
    stores.append(store.overloads[(_result_type((dtype, rank)), type)])
  return stores


def _returned(type: Any) -> Type | None:
  if isinstance(type, types.Array):
    return numpy_support.as_dtype(type.dtype), type.ndim
  if isinstance(type, (types.Number, types.Boolean)):
    return numpy_support.as_dtype(type), 0
  return None


def _castable(request: Request, have: np.dtype[Any], want: np.dtype[Any]) -> bool:
  return request.cast and np.can_cast(have, want, "same_kind")


@functools.cache
def _store_array(index: int) -> Any:
  from callgate.numba import ResultShapeError

  @numba.njit
  def store(out: Any, value: Any) -> None:
    if out.shape != value.shape:
      raise ResultShapeError(index, out.shape, value.shape)
    out[...] = value

  return store


@functools.cache
def _store_number() -> Any:
  @numba.njit
  def store(out: Any, value: Any) -> None:
    out[()] = value

  return store


# -- what it is in this process ------------------------------------------------------------------
class _Shared(ctypes.Structure):
  """What a call's user data points to; `make_entry` reads it by position."""

  _fields_ = (("take_error", ctypes.c_void_p), ("mutex", ctypes.c_void_p))


_pthreads = ctypes.CDLL(None)


def _made_mutex() -> ctypes.Array[ctypes.c_char]:
  mutex = ctypes.create_string_buffer(128)
  _pthreads.pthread_mutex_init(mutex, None)
  return mutex


_mutex = _made_mutex()


def _shared() -> _Shared:
  """With the mutex where Numba's threading layer may be used by one thread at a time only."""
  try:
    alone = numba.threading_layer() == "workqueue"
  except ValueError:
    alone = False  # no parallel loop so far
  mutex = ctypes.addressof(_mutex) if alone else None
  return _Shared(_callgate.take_python_error_address(), mutex)


_counter = itertools.count()


def _unique() -> str:
  return f"unkept{next(_counter)}"


# -- the disk ------------------------------------------------------------------------------------
def _digest(request: Request, argument_types: tuple[Any, ...]) -> str | None:
  source = _numba_identity.identity(request.function)
  if source is None:
    return None
  settings = numba.config
  parts = [
    _FORMAT,
    _callgate.KERNEL_ABI,
    source,
    sorted((key, repr(value)) for key, value in request.options.items()),
    [(slot.kind, slot.indices) for slot in request.slots],
    [request.returns, request.cast],
    [str(type) for type in argument_types],
    [type_text(dtype, (rank,)) for dtype, rank in request.types.operands],
    [type_text(dtype, (rank,)) for dtype, rank in request.types.results],
    [repr(slot.value) for slot in request.slots],
    [repr(getattr(settings, name, None)) for name in ("OPT", "BOUNDSCHECK")],
    [numba.__version__, llvmlite.__version__, np.__version__, sys.version, platform.machine()],
    cpu_target.target_context.codegen().magic_tuple(),
  ]
  return hashlib.sha256(json.dumps(parts).encode()).hexdigest()


class _Kept:
  """The cache that a CFunc asks: one file an entry, with a checksum; a damaged one is made again.

  Any number of processes may read and write: a file is replaced in one step.
  """

  def __init__(self, digest: str | None) -> None:
    self._digest = digest
    self._content: Any = None

  def load(self) -> bool:
    """Whether the entry is there and whole."""
    digest = self._digest
    if digest is None:
      return False
    try:
      content = _cache_files.read(_cache_files.kept_folder("numba", digest[:2]) / f"{digest}.bin")
    except OSError:
      return False
    if hashlib.sha256(content[32:]).digest() != content[:32]:
      return False
    try:
      entrypoints.init_all()  # extensions of Numba, whose symbols the entry may need
      cpu_target.target_context.refresh()
      self._content = CompileResultCacheImpl.rebuild(
        None, cpu_target.target_context, pickle.loads(content[32:])
      )
    except Exception:  # noqa: BLE001 - a module that it names is gone: it is compiled again
      return False
    return True

  def load_overload(self, signature: Any, context: Any) -> Any:
    """Numba's question: the compiled function, or None."""
    del signature, context
    return self._content

  def save_overload(self, signature: Any, compiled: Any) -> None:
    """Numba's offer of what it has compiled."""
    del signature
    digest = self._digest
    if digest is None or compiled.library.has_dynamic_globals:
      return  # it holds addresses of this process
    # What starts the threads of parallel loops: Numba leaves it out for cfuncs.
    compiled = compiled._replace(reload_init=list(compiled.library._reload_init))
    try:
      content = dumps(compiled._reduce())
      path = _cache_files.made_folder("numba", digest[:2], quiet=True) / f"{digest}.bin"
      _cache_files.write(path, hashlib.sha256(content).digest() + content)
    except (OSError, pickle.PicklingError, TypeError):
      return  # it works as well without
