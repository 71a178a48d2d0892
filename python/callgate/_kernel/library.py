# SPDX-License-Identifier: Apache-2.0
"""`callgate.library`: kernels from a user's own shared library, built with callgate/kernel.h.

A library stays loaded until the process ends; one that was built again meanwhile is loaded anew.
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
# By path, each version by its stamp. Guarded by _lock; never emptied: libraries stay loaded.
_loaded: dict[str, dict[tuple[int, ...], ctypes.CDLL]] = {}
# Guarded by _lock.
_libraries: weakref.WeakValueDictionary[str, Library] = weakref.WeakValueDictionary()


def _inferred(label: str, function: str, parameters: Signature, *args: Any) -> Any:
  """The results as far as the parameters tell them; see `library`."""
  operands = parameters.of(OPERANDS)
  given = list(zip(operands, map(jax.tree.leaves, args), strict=False))
  fit = all(p.fits(x.dtype, len(x.shape)) for p, values in given for x in values)

  def result(wanted: Parameter) -> Any:
    if not fit or wanted.rank == 0:
      # The call is refused for an argument in a moment; any result of the right type will do.
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
    raise GateDefinitionError(f"{label}: {fault}; expected out=, as in {example}")

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
  """The kernels of a shared library; made by `callgate.library`.

  `library.saxpy`, or `library["saxpy"]`, is a `Kernel`: the same object each time. `kernel()` makes
  one with options. Iterating gives the kernels' names.

  Attributes:
    name: what the names of its kernels begin with in compiled programs.
    path: of the file.
    cdll: the file as ctypes has loaded it.
  """

  def __init__(self, path: str, name: str, loaded: ctypes.CDLL) -> None:
    self.name, self.path, self.cdll = name, path, loaded
    self._kernels: dict[str, Kernel] = {}
    if not hasattr(loaded, "callgate_kernels"):
      made = "which callgate/kernel.h and CALLGATE_KERNEL(function) in a source make, found none"
      fault = f"no library of kernels: expected the symbol callgate_kernels, {made}"
      raise GateDefinitionError(f"callgate.library: '{path}' is {fault}")
    try:
      table = exported(path, loaded)
    except ValueError as error:
      raise GateDefinitionError(f"callgate.library: {error}") from error
    self._functions = dict(table)
    if twice := [n for n, count in collections.Counter(n for n, _ in table).items() if count > 1]:
      expected = "one CALLGATE_KERNEL of a name (CALLGATE_KERNEL_AS gives another)"
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
      function: its name in the library.
      out: the results. Default: what the parameters tell; see `callgate.library`.
      name: what programs call it by. Default: the library's name, a dot and the function's, with a
        number from the second one on.
      thread_safe: calls may run at once, on several devices and in several programs, and so may the
        lanes of `vmap="each"`. By default they take turns, with those of all other kernels of the
        library that are not thread-safe.

    Raises:
      AttributeError: the library has no such kernel.
      GateDefinitionError: an option is wrong.
      ValueError: the name is taken.
    """
    if function not in self:
      text = f"library '{self.path}' has no kernel '{function}'; it has {', '.join(self) or 'none'}"
      raise AttributeError(text, name=function, obj=self)
    name = options.name
    while name is None or (options.name is None and _is_live(name)):
      name = registry.free_name(f"{self.name}.{function}")  # the next run gives the same ones
    return Kernel(LibraryKernel(name, self, function, self._functions[function], options))

  def __getitem__(self, function: str) -> Kernel:
    if function not in self._kernels:
      name = f"{self.name}.{function}"
      self._kernels[function] = self.kernel(function, name=None if _is_live(name) else name)
    return self._kernels[function]

  def __getattr__(self, function: str) -> Kernel:
    if function.startswith("__"):  # what copy, pickle and IPython look for
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
  """Opens a shared library of kernels that was built with callgate/kernel.h.

  ```python
  import callgate as cg, jax, jax.numpy as jnp

  mine = cg.library("build/libmine.so")
  z = jax.jit(mine.saxpy)(2.0, jnp.ones(3), jnp.arange(3.0))
  histogram = mine.kernel("histogram", out=lambda x: jax.ShapeDtypeStruct((16,), "int32"))
  ```

  Each call is checked against the kernel's C++ types while it is traced. Results are inferred where
  these tell them: an `InOut` is as its argument; a result of rank 0 has no extents; an `Out` has
  the shape of the arguments whose parameters have its element type and rank, if they all have one
  shape. For any other result, and where this is not what the kernel means, give `out`: see
  `Library.kernel`. Opening a library again gives the same object while it is in use; one that was
  built again meanwhile is loaded anew, and kernels made before go on with the code that they had.

  Args:
    path: the file. Its constructors run, as when any library is loaded.
    name: what its kernels' names begin with in compiled programs. Default: the file's name without
      "lib" and extensions, with a number where another library in use has it.

  Returns:
    A `Library`, whose attributes are the kernels.

  Raises:
    FileNotFoundError: there is no such file.
    OSError: the system's loader refuses it, with its message.
    GateDefinitionError: it is no library of kernels, or of another binary interface than this.
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
  """The file as it is now: loading the same path twice would give what it was at first."""
  status = os.stat(file)
  stamp = (status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns)
  versions = _loaded.setdefault(os.path.realpath(file), {})
  if stamp not in versions:
    # The loader compares paths before files, so each version gets a spelling of its own. A folder's
    # name must not change: libraries look for others beside themselves.
    folder, base = os.path.split(file)
    try:
      versions[stamp] = open_library(os.path.join(folder, *["."] * len(versions), base))
    except OSError as error:
      raise OSError(f"callgate.library: '{file}' could not be loaded: {error}") from error
  return versions[stamp]


@_part.joins("libraries")
class _Libraries(Part):
  """Defines the kernels of open libraries in programs of other processes."""

  def define(self, name: str) -> Any:
    base, _, function = name.rpartition(".")
    with _lock:
      opened = _libraries.get(base)
    kernel = opened[function] if opened is not None and function in opened else None
    return kernel if kernel is None or kernel.name == name else registry.get(name)
