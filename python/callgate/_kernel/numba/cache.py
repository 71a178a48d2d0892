# SPDX-License-Identifier: Apache-2.0
"""Keeps Numba's compiled code on disk, by the text of everything that it depends on.

Numba compiles the values that a function reads from its module and closure, and the functions that
it calls, into the code. Numba's own cache key has none of these, and does not support functions of
notebook cells.
"""

# The inside of Numba's compiler has no types.
# pyright: reportMissingTypeStubs=false, reportPrivateUsage=false, reportArgumentType=false
# pyright: reportAttributeAccessIssue=false, reportPrivateImportUsage=false

from __future__ import annotations

import builtins
import contextlib
import hashlib
import pickle
import platform
import sys
import types
from collections.abc import Iterator
from typing import Any, cast

import llvmlite
import numba
import numpy as np
from numba.core import entrypoints
from numba.core.caching import CompileResultCacheImpl
from numba.core.registry import cpu_target
from numba.core.serialize import dumps

from callgate import _callgate
from callgate._build import files
from callgate._build.cache import digest
from callgate._kernel.numba.request import Request

_PLAIN = (bool, int, float, complex, str, bytes, type(None), type(Ellipsis), slice, range)


class UnknownIdentityError(Exception):
  """A function depends on a value without a stable text."""


def _function(function: types.FunctionType, seen: set[int]) -> Iterator[str]:
  if id(function) in seen:
    return
  seen.add(id(function))
  codes = [function.__code__]  # and the code of inner functions
  for code in codes:
    # The lines, which exceptions show, but not the file, which differs between processes for a
    # cell.
    yield repr((
      code.co_name, code.co_argcount, code.co_posonlyargcount, code.co_kwonlyargcount,
      code.co_flags, code.co_firstlineno, code.co_names, code.co_varnames, code.co_freevars,
      code.co_cellvars, code.co_code, code.co_linetable,
    ))  # fmt: skip
    for constant in code.co_consts:
      if isinstance(constant, frozenset):
        yield repr(sorted(map(repr, cast("frozenset[Any]", constant))))
      elif isinstance(constant, types.CodeType):
        codes.append(constant)
      else:
        yield repr(constant)
  names = sorted({name for code in codes for name in code.co_names})
  yield from _value(function.__defaults__, names, seen)
  yield from _value(sorted((function.__kwdefaults__ or {}).items()), names, seen)
  for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
    yield name
    try:
      value = cell.cell_contents
    except ValueError:
      continue  # not set yet; Numba rejects it
    yield from _value(value, names, seen)
  for name in names:
    if name in function.__globals__:
      yield name
      yield from _value(function.__globals__[name], names, seen)
    elif hasattr(builtins, name):
      yield f"builtin {name}"


def _value(value: Any, names: list[str], seen: set[int]) -> Iterator[str]:
  """Yields the text of a value that a function reads; `names` are attributes read of modules."""
  if isinstance(value, (*_PLAIN, np.generic, np.dtype)):
    yield f"{type(value).__name__} {value!r}"
  elif isinstance(value, (tuple, list)):
    items = cast("tuple[Any, ...] | list[Any]", value)
    yield f"{type(items).__name__} {len(items)}"
    for item in items:
      yield from _value(item, names, seen)
  elif isinstance(value, np.ndarray):
    if value.dtype.hasobject:
      raise UnknownIdentityError
    yield f"{value.dtype!r} {value.shape} {value.strides}"
    yield hashlib.sha256(np.ascontiguousarray(value).tobytes()).hexdigest()
  elif isinstance(value, types.ModuleType):
    version = _version(value.__name__)
    yield f"module {value.__name__} {version}"
    if id(value) not in seen and not version:
      seen.add(id(value))
      for name in (name for name in names if hasattr(value, name)):
        yield name
        yield from _value(getattr(value, name), names, seen)
  elif hasattr(value, "py_func") and hasattr(value, "targetoptions"):  # a dispatcher
    yield repr(sorted((k, repr(v)) for k, v in value.targetoptions.items()))
    yield from _function(value.py_func, seen)
  elif isinstance(value, types.FunctionType) and not _version(value.__module__):
    yield from _function(value, seen)
  elif isinstance(value, type) and not issubclass(value, (BaseException, np.generic)):
    if value.__module__ != "builtins":
      raise UnknownIdentityError
    yield value.__qualname__
  elif isinstance(value, (type, types.FunctionType, types.BuiltinFunctionType, np.ufunc)):
    module = str(getattr(value, "__module__", None))
    yield f"{module} {_version(module)} {getattr(value, '__qualname__', value.__name__)}"
  elif type(value).__module__.startswith("numba.core.types"):
    yield str(value)
  elif callable(value) and _version(str(getattr(value, "__module__", ""))):
    yield f"{value.__module__} {_version(value.__module__)} {getattr(value, '__name__', value)!r}"
  else:
    raise UnknownIdentityError


def _version(module: str) -> str:
  """Returns the version of a module's package; "" for code without one."""
  top = module.partition(".")[0]
  if top in sys.stdlib_module_names and top != "__main__":
    return sys.version
  return str(getattr(sys.modules.get(top), "__version__", ""))


# -- the disk ------------------------------------------------------------------------------------
_FORMAT = 2  # of the files on disk, and of the generated code


def digest_of(request: Request, argument_types: tuple[Any, ...]) -> str | None:
  """Returns a digest of everything that machine code depends on; None if it is unknown."""
  try:
    source = digest(list(_function(request.function, set())))
  except UnknownIdentityError:
    return None
  return digest([
    _FORMAT, _callgate.KERNEL_ABI, source,
    sorted((key, repr(value)) for key, value in request.options.items()),
    repr((request.slots, request.types)), request.cast, list(map(str, argument_types)),
    [repr(getattr(numba.config, name, None)) for name in ("OPT", "BOUNDSCHECK")],
    [numba.__version__, llvmlite.__version__, np.__version__, sys.version, platform.machine()],
    cpu_target.target_context.codegen().magic_tuple(),
  ])  # fmt: skip


class CFuncCache:
  """The cache of a CFunc: one file for each entry, replaced atomically, made again if damaged."""

  def __init__(self, key: str | None) -> None:
    self._key, self.content = key, None  # the entry, if it exists and is intact
    if key is not None:
      with contextlib.suppress(Exception):  # a module in it may be gone: compile again
        kept = files.read(files.kept_folder("numba", key[:2]) / f"{key}.bin")
        if hashlib.sha256(kept[32:]).digest() == kept[:32]:
          entrypoints.init_all()  # the entry may need symbols of Numba's extensions
          context = cpu_target.target_context
          context.refresh()
          self.content = CompileResultCacheImpl.rebuild(None, context, pickle.loads(kept[32:]))

  def load_overload(self, signature: Any, context: Any) -> Any:
    del signature, context
    return self.content

  def save_overload(self, signature: Any, compiled: Any) -> None:
    del signature
    key = self._key
    if key is None or compiled.library.has_dynamic_globals:
      return  # contains addresses of this process
    # Starts the threads of parallel loops, which Numba omits for cfuncs.
    compiled = compiled._replace(reload_init=list(compiled.library._reload_init))
    with contextlib.suppress(OSError, pickle.PicklingError, TypeError):  # the cache is optional
      content = dumps(compiled._reduce())
      path = files.made_folder("numba", key[:2], quiet=True) / f"{key}.bin"
      files.write(path, hashlib.sha256(content).digest() + content)
