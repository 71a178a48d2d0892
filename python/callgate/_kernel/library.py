# SPDX-License-Identifier: Apache-2.0
"""`callgate.library`: kernels of a user's shared library, built with callgate/kernel.h.

A library stays loaded until the process ends. After a rebuild the new version is loaded beside the
old one.
"""

from __future__ import annotations

import collections
import ctypes
import dataclasses
import functools
import itertools
import os
import threading
import weakref
from collections.abc import Iterator
from typing import Any

import jax

from callgate import _callgate, _part
from callgate._build.toolchain import open_library
from callgate._core import factories, registry
from callgate._core import options as _options
from callgate._core.dtypes import type_text
from callgate._core.errors import GateDefinitionError
from callgate._kernel.cpu import CpuKernel
from callgate._kernel.kernel import Kernel
from callgate._kernel.options import KernelOptions
from callgate._kernel.parameters import OPERANDS, RESULTS, STATIC, Kind, Parameter, Signature
from callgate._kernel.variants import Function, exported
from callgate._part import Part

_lock = threading.Lock()
# The versions of each path, by stamp. Guarded by _lock; never emptied: libraries stay loaded.
_loaded: dict[str, dict[tuple[int, ...], ctypes.CDLL]] = {}
# Guarded by _lock.
_libraries: weakref.WeakValueDictionary[str, Library] = weakref.WeakValueDictionary()


def _inferred(label: str, function: str, parameters: Signature, *args: Any) -> Any:
  """Returns the result types that follow from the parameters; see `library`."""
  operands = parameters.of(OPERANDS)
  given = list(zip(operands, map(jax.tree.leaves, args), strict=False))
  fit = all(p.fits(x.dtype, len(x.shape)) for p, values in given for x in values)

  def result(wanted: Parameter) -> Any:
    if not fit or wanted.rank == 0:
      # The call raises for this argument later, so any result of the right type will do.
      return jax.ShapeDtypeStruct((0,) * max(wanted.rank, 0), wanted.dtype)
    if wanted.kind is Kind.INOUT:
      return dict(given)[wanted][0]
    alike = {
      f"'{p.name}[{i}]'" if p.kind is Kind.INS else f"'{p.name}'": x
      for p, values in given
      for i, x in enumerate(values)
      if p.kind is not Kind.SCALAR and (p.dtype, p.rank) == (wanted.dtype, wanted.rank)
    }
    shapes = {tuple(x.shape) for x in alike.values()}
    if wanted.kind is not Kind.OUTS and len(shapes) == 1:
      return jax.ShapeDtypeStruct(shapes.pop(), wanted.dtype)
    shown = ", ".join(f"{name} is {type_text(x.dtype, x.shape)}" for name, x in alike.items())
    why = f"the arguments of that type differ: {shown}" if alike else "no argument has that type"
    if wanted.kind is Kind.OUTS:
      why = "it stands for any number of results"
    identifiers = all(p.name.isidentifier() for p in operands)
    names = ", ".join(p.name for p in operands) if identifiers else "*args"
    what = f"the shape of result '{wanted.name}' ({wanted.text})"
    fault = f"{what} does not follow from the arguments, since {why}"
    example = f"library.kernel('{function}', out=lambda {names}: ...)"
    raise GateDefinitionError(f"{label}: {fault}; pass out=, as in {example}")

  results = list(map(result, parameters.of(RESULTS)))
  return results[0] if len(results) == 1 else tuple(results)


class LibraryKernel(CpuKernel):
  """A kernel of a shared library; see `callgate.library`."""

  def __init__(
    self, name: str, library: Library, function: str, native: Function, options: KernelOptions
  ) -> None:
    self.library, self.function, self._native = library, function, native
    if options.out is None and options.like is None:
      out = functools.partial(_inferred, f"kernel '{name}'", function, native.parameters)
      options = dataclasses.replace(options, out=out)
    super().__init__(name, native.parameters, options)

  def compile(self, key: str) -> Function:
    return self._native

  def turn(self, function: Function) -> _callgate.KernelTurn | None:
    return _callgate.KernelTurn.of_library(function.address) or super().turn(function)


class Library:
  """The kernels of a shared library; `callgate.library` opens one.

  `library.saxpy` or `library["saxpy"]` is a `Kernel`, the same object each time. `kernel()` makes a
  kernel with options. Iterating gives the kernels' names.

  Attributes:
    name: the prefix of its kernels' names in compiled programs.
    path: the path of the file.
    cdll: the library as a `ctypes.CDLL`.
  """

  def __init__(self, path: str, name: str, loaded: ctypes.CDLL) -> None:
    self.name, self.path, self.cdll = name, path, loaded
    self._kernels: dict[str, Kernel] = {}
    if not hasattr(loaded, "callgate_kernels"):
      made = "which callgate/kernel.h and CALLGATE_KERNEL(function) define, found none"
      fault = f"not a library of kernels: expected the symbol callgate_kernels, {made}"
      raise GateDefinitionError(f"callgate.library: '{path}' is {fault}")
    try:
      table = exported(path, loaded)
    except ValueError as error:
      raise GateDefinitionError(f"callgate.library: {error}") from error
    self._functions = dict(table)
    if twice := [n for n, count in collections.Counter(n for n, _ in table).items() if count > 1]:
      expected = "one CALLGATE_KERNEL for each name; use CALLGATE_KERNEL_AS for another name"
      fault = f"'{path}' exports two kernels '{twice[0]}'"
      raise GateDefinitionError(f"callgate.library: {fault}; expected {expected}")

  def __reduce__(self) -> Any:
    return _reopened, (self.path, self.name)

  @factories.method(KernelOptions)
  def kernel(self, function: str, /, *, options: KernelOptions) -> Kernel:
    """Makes a kernel with options.

    ```python
    histogram = library.kernel(
      "histogram", out=lambda x: jax.ShapeDtypeStruct((16,), "int32"), thread_safe=True
    )
    ```

    Args:
      function: the function's name in the library.
      out: the results, as for `callgate.gate`. Default: inferred from the C++ types; see
        `callgate.library`.
      name: the name in compiled programs. Default: the library's name, a dot and the function's
        name, with a number if that name is taken.
      thread_safe: True lets several calls run at the same time, from several devices and programs,
        and runs the lanes of vmap="each" in parallel. By default calls take turns with all other
        kernels of the library that are not thread-safe.

    Returns:
      A `Kernel`.

    Raises:
      AttributeError: the library has no such kernel.
      GateDefinitionError: an option is wrong.
      ValueError: another live kernel or gate has the name.
    """
    if function not in self:
      text = f"library '{self.path}' has no kernel '{function}'; it has {', '.join(self) or 'none'}"
      raise AttributeError(text, name=function, obj=self)
    name = options.name
    while name is None or (options.name is None and _is_live(name)):
      name = registry.free_name(f"{self.name}.{function}")  # the same names in the next run
    return Kernel(LibraryKernel(name, self, function, self._functions[function], options))

  def __getitem__(self, function: str) -> Kernel:
    if function not in self._kernels:
      name = f"{self.name}.{function}"
      self._kernels[function] = self.kernel(function, name=None if _is_live(name) else name)
    return self._kernels[function]

  def __getattr__(self, function: str) -> Kernel:
    if function.startswith("__"):  # copy, pickle and IPython look for these
      raise AttributeError(function)
    return self[function]

  def __dir__(self) -> list[str]:
    return sorted({*super().__dir__(), *self._functions})

  def __iter__(self) -> Iterator[str]:
    return iter(self._functions)

  def __contains__(self, function: object) -> bool:
    return function in self._functions

  def __len__(self) -> int:
    return len(self._functions)

  def __repr__(self) -> str:
    def declared(p: Parameter) -> str:  # "float32 a", "In<float32,1> x"
      types = [] if p.dtype is None else [p.dtype.name]
      if p.kind not in STATIC and p.kind not in (Kind.SCALAR, Kind.CONTEXT):
        types.append("*" if p.rank < 0 else str(p.rank))
      word, inside = "" if p.kind is Kind.SCALAR else p.kind.cpp, ",".join(types)
      return f"{word}<{inside}> {p.name}" if word and inside else f"{word}{inside} {p.name}"

    known = {name: ", ".join(map(declared, f.parameters)) for name, f in self._functions.items()}
    shown = ", ".join(f"{name}({parameters})" for name, parameters in known.items())
    return f"<library '{self.name}' of {self.path}: {shown or 'no kernels'}>"


def library(path: str | os.PathLike[str], *, name: str | None = None) -> Library:
  """Opens a shared library of C++ kernels that was built with callgate/kernel.h.

  ```python
  import callgate as cg, jax, jax.numpy as jnp

  mine = cg.library("build/libmine.so")
  z = jax.jit(mine.saxpy)(2.0, jnp.ones(3), jnp.arange(3.0))
  histogram = mine.kernel("histogram", out=lambda x: jax.ShapeDtypeStruct((16,), "int32"))
  ```

  callgate checks each call against the kernel's C++ types while it traces the call. It infers the
  results from these types:

  - An `InOut` has its argument's shape.
  - An `Out` of rank 0 has shape ().
  - Any other `Out` has the common shape of the array arguments with the same element type and rank.

  If a result can't be inferred, or the inferred shape is wrong, pass `out` to `Library.kernel`.

  Opening a library that is in use returns the same object. After a rebuild, opening it loads the
  new version, and existing kernels keep the old code.

  Args:
    path: the path of the file. Loading runs the library's constructors, as for any library.
    name: the prefix of its kernels' names in compiled programs. Default: the file's name without
      "lib" and extensions, with a number if another library in use has that name.

  Returns:
    A `Library`, whose attributes are the kernels.

  Raises:
    FileNotFoundError: there is no such file.
    OSError: the system's loader rejects the file; the error has its message.
    GateDefinitionError: the library exports no kernels, or was built for another version of the
      binary interface.
  """
  file = os.path.abspath(_options.path("callgate.library", "path", path))
  name = _options.name("callgate.library", name)
  if not os.path.exists(file):
    raise FileNotFoundError(f"callgate.library: expected a shared library, found no file '{file}'")
  with _lock:
    loaded, others = _load(file), dict(_libraries)
    for known in others.values():
      if known.cdll is loaded and name in (None, known.name):
        return known
    if name is None:
      stem = os.path.basename(file).split(".")[0].removeprefix("lib")
      names = (f"{stem}#{number}" if number else stem for number in itertools.count())
      name = next(name for name in names if name not in others)
    elif name in others:
      taken = f"callgate.library: the name '{name}' is taken by the library"
      raise ValueError(f"{taken} '{others[name].path}'; choose another name=")
    _libraries[name] = opened = Library(file, name, loaded)
    return opened


def _reopened(path: str, name: str) -> Library:
  return library(path, name=name)


def _is_live(name: str) -> bool:
  return registry.get(name) is not None or _callgate.is_registered(name)


def _load(file: str) -> ctypes.CDLL:
  """Loads the file as it is now; the loader itself would return the first version of a path."""
  status = os.stat(file)
  stamp = (status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns)
  versions = _loaded.setdefault(os.path.realpath(file), {})
  if stamp not in versions:
    # The loader compares paths before files, so each version is loaded by a path of a different
    # spelling. The folder's name must not change, because libraries look for others next to them.
    folder, base = os.path.split(file)
    try:
      versions[stamp] = open_library(os.path.join(folder, *["."] * len(versions), base))
    except OSError as error:
      raise OSError(f"callgate.library: '{file}' could not be loaded: {error}") from error
  return versions[stamp]


@_part.joins("libraries")
class _Libraries(Part):
  """Defines the kernels of open libraries for programs from other processes."""

  def define(self, name: str) -> Any:
    base, _, function = name.rpartition(".")
    with _lock:
      opened = _libraries.get(base)
    kernel = opened[function] if opened is not None and function in opened else None
    return kernel if kernel is None or kernel.name == name else registry.get(name)
