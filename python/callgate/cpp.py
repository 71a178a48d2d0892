"""`callgate.cpp`: kernels from C++ source, compiled by the system's compiler when they are made."""

from __future__ import annotations

import contextlib
import ctypes
import os
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np

from callgate import _callgate, _cpp_source, _runtime, _toolchain
from callgate._cpp_source import SourceFunction
from callgate._operation import Effect, Vmap
from callgate._parameters import Kind, Parameter, from_codes
from callgate.errors import GateDefinitionError
from callgate.kernel import CallTypes, Function, Kernel, Static
from callgate.kernel_files import compiled_form, installed, no_new_calls, register_kind

_TYPES = {
  "bool": "bool",
  "float16": "cg::float16",
  "float32": "float",
  "float64": "double",
  "complex64": "std::complex<float>",
  "complex128": "std::complex<double>",
}


def cpp_type(dtype: np.dtype[Any]) -> str:
  """The C++ type of a dtype's elements."""
  if dtype.kind in "iu":
    return f"{dtype.name}_t"
  return _TYPES.get(dtype.name, f"cg::{dtype.name}")


class CppKernel(Kernel):
  """A kernel from C++ source; see `callgate.cpp`.

  Attributes:
    source: as given.
    build_options: flags, include_dirs, libraries and library_dirs of its compilation.
  """

  def __init__(
    self,
    name: str,
    source: str,
    function: str | None,
    build_options: dict[str, Any],
    compiled: Any = None,
    **options: Any,
  ) -> None:
    self.source = source
    self.build_options = build_options
    self._given_function = function
    self._libraries: dict[str, Path] = {}  # of the variants here
    self._from_files: dict[str, Path] = {}  # that `load_kernels` has brought
    if compiled is not None:
      self.take_compiled(compiled)
    label = f"kernel '{name}'"
    self.cpp_function = _cpp_source.find(label, source, function)
    self._qualified = function or self.cpp_function.name
    self._plain: Function | None = None
    template = self.cpp_function.template
    if not template:
      self._plain = self._build(label, "")
    signature = self._plain.parameters if self._plain else _signature(self.cpp_function)
    super().__init__(name, signature, **options)

  # -- calls -------------------------------------------------------------------------------------
  def _arguments(
    self, args: tuple[Any, ...], kwargs: dict[str, Any]
  ) -> tuple[tuple[Any, ...], Static]:
    given = {name: kwargs.pop(name) for _, name in self.cpp_function.template if name in kwargs}
    operands, static = super()._arguments(args, kwargs)
    if not given:
      return operands, static
    bound = {name: _template_value(self.label, name, value) for name, value in given.items()}
    return operands, tuple(sorted({**dict(static), **bound}.items()))

  # -- variants ----------------------------------------------------------------------------------
  def variant_key(self, types: CallTypes) -> str:
    bound = dict[str, str]()
    given = dict(types.static)
    for kind, name in self.cpp_function.template:
      if name in given:
        bound[name] = str(given[name])
      else:
        bound[name] = self._deduce(kind, name, types)
    return ",".join(f"{name}={bound[name]}" for _, name in self.cpp_function.template)

  def types_of_key(self, key: str) -> CallTypes:
    static = tuple(tuple(part.split("=", 1)) for part in key.split(",") if part)
    return CallTypes((), (), static)  # pyright: ignore[reportArgumentType]

  def _deduce(self, kind: str, name: str, types: CallTypes) -> str:
    """A template parameter from the call's arrays: an element type, or a rank."""
    operands, results = iter(types.operands), iter(types.results)
    for parameter in self.cpp_function.parameters:
      found = None
      if parameter.kind in (Kind.IN, Kind.INOUT, Kind.SCALAR, Kind.INS):
        found = next(operands, None)
      if parameter.kind in (Kind.OUT, Kind.INOUT, Kind.OUTS):
        found = next(results, found)
      if found is None:
        continue
      if parameter.element == name:
        return found[0].name
      if parameter.rank == name:
        return str(found[1])
    raise GateDefinitionError(
      f"{self.label}: expected the template parameter '{kind} {name}' by keyword ({name}=...), "
      "since it is no array's element type or rank"
    )

  def compile(self, types: CallTypes) -> tuple[str, Function]:
    key = self.variant_key(types)
    if self._plain is not None:
      return key, self._plain
    arguments: list[str] = []
    for kind, name in self.cpp_function.template:
      value = dict(part.split("=", 1) for part in key.split(","))[name]
      is_type = kind in ("typename", "class")
      arguments.append(cpp_type(_dtype(value)) if is_type else value)
    return key, self._build(self.label, f"<{', '.join(arguments)}>")

  def _build(self, label: str, instance: str) -> Function:
    library, loaded = self._open(label, instance)
    self._libraries[instance] = library
    table = _address(loaded, "callgate_kernels")
    ((_, address, codes, names),) = _callgate.read_library(str(library), table)
    return Function(address, tuple(from_codes(codes, names)), keep=loaded)

  def _open(self, label: str, instance: str) -> tuple[Path, ctypes.CDLL]:
    """The library of one instance: as it came in a file, or compiled here."""
    came = self._from_files.get(instance)
    if came is not None:
      with contextlib.suppress(OSError):  # an older C library here, say: compiling may do
        return came, _toolchain.load(came)
    library = _toolchain.build(label, self._unit(label, instance), **self.build_options)
    return library, _toolchain.load(library)

  # -- files -------------------------------------------------------------------------------------
  def saved_form(self) -> dict[str, Any] | None:
    native = any("native" in flag for flag in self.build_options["flags"])
    libraries = {**self._from_files, **self._libraries}
    return {
      "kind": "cpp",
      "name": self.name,
      "source": self.source,
      "function": self._given_function,
      "build_options": self.build_options,
      "thread_safe": self.thread_safe,
      "compiled": compiled_form(libraries, native=native),
    }

  def take_compiled(self, compiled: Any) -> None:
    self._from_files.update(installed(compiled))

  def _unit(self, label: str, instance: str) -> str:
    """The source with what makes a library of it."""
    file = re.sub(r'["\\]', "_", label)
    function = self.cpp_function
    names = ", ".join(p.name or str(i) for i, p in enumerate(function.parameters))
    complexes = "#include <complex>\n" if "complex" in instance + self.source else ""
    return (
      f'#include <algorithm>\n#include <cmath>\n{complexes}#include "callgate/kernel.h"\n'
      f'#line 1 "{file}"\n{self.source}\n#line 1 "callgate"\n'
      "namespace { callgate_kernel callgate_made = "
      f"::callgate::detail::describe<&{self._qualified}{instance}>"
      f'("{function.name}, {names}");\n'
      "const ::callgate::detail::Registration callgate_registration(callgate_made); }\n"
    )


def _signature(function: SourceFunction) -> list[Parameter]:
  """A template's parameters before it is compiled for a call: kinds and names."""
  parameters: list[Parameter] = []
  for i, p in enumerate(function.parameters):
    rank = 0 if p.kind is Kind.SCALAR else int(p.rank) if p.rank.isdigit() else -1
    dtype = (
      _element_dtype(p.element) if p.kind in (Kind.NUMBER, Kind.NUMBERS, Kind.SCALAR) else None
    )
    parameters.append(Parameter(p.name or str(i), p.kind, dtype, rank))
  return parameters


def _element_dtype(text: str) -> np.dtype[Any] | None:
  names = {"float": "float32", "double": "float64", "int": "int32", "long": "int64", "bool": "bool"}
  text = text.removeprefix("std::").removesuffix("_t")
  try:
    return np.dtype(names.get(text, text))
  except TypeError:
    return None


def _dtype(name: str) -> np.dtype[Any]:
  import ml_dtypes

  return np.dtype(getattr(ml_dtypes, name, name))


def _template_value(label: str, name: str, value: Any) -> str:
  if isinstance(value, (bool, int, np.integer)):
    return str(int(value))
  try:
    return np.dtype(value).name
  except TypeError:
    raise GateDefinitionError(
      f"{label}: template parameter '{name}': expected a dtype or an integer, got {value!r}"
    ) from None


def _address(library: Any, symbol: str) -> int:
  address = ctypes.cast(getattr(library, symbol), ctypes.c_void_p).value
  assert address is not None
  return address


def _restore(form: dict[str, Any]) -> CppKernel:
  """A kernel from its saved form: for programs, which hold all else that a call needs."""
  return CppKernel(
    form["name"],
    form["source"],
    form["function"],
    {k: tuple(v) if isinstance(v, list) else v for k, v in form["build_options"].items()},
    form["compiled"],
    out=no_new_calls(form["name"]),
    thread_safe=form["thread_safe"],
  )


register_kind("cpp", _restore)


def caller_module(depth: int = 2) -> str:
  """The module whose code makes a kernel, for its name."""
  return str(sys._getframe(depth).f_globals.get("__name__", "__main__"))  # pyright: ignore[reportPrivateUsage]


def cpp(
  source: str,
  function: str | None = None,
  /,
  *,
  out: Any = None,
  like: Callable[..., Any] | None = None,
  name: str | None = None,
  effect: Effect = "pure",
  aliases: Mapping[int, int] | None = None,
  vmap: Vmap | Callable[..., Any] = "each",
  sharding: Any = None,
  linear: bool | int | Sequence[int] = False,
  gradient: Literal["finite-difference"] | None = None,
  thread_safe: bool = False,
  flags: Sequence[str] = (),
  include_dirs: Sequence[str | os.PathLike[str]] = (),
  libraries: Sequence[str] = (),
  library_dirs: Sequence[str | os.PathLike[str]] = (),
  debug: bool = False,
) -> Kernel:
  """Makes a C++ function a JAX function: compiled once, cached on disk, no Python at run time.

  ```python
  import callgate as cg, jax.numpy as jnp

  saxpy = cg.cpp(\"\"\"
    void saxpy(float a, cg::In<float, 1> x, cg::In<float, 1> y, cg::Out<float, 1> z) {
      for (int64_t i = 0; i < x.size(); ++i) z[i] = a * x[i] + y[i];
    }\"\"\", out=lambda a, x, y: x)

  assert saxpy(2.0, jnp.ones(3), jnp.arange(3.0)).tolist() == [2.0, 3.0, 4.0]
  ```

  Args:
    source: C++20 with a function `void name(...)` of callgate's views (see callgate/kernel.h, which
      is included, as are <algorithm> and <cmath>). A template is compiled for the dtypes and ranks
      of each call; what these don't tell is given by keyword.
    function: which function, where the source has several.
    out: the results: a pytree of anything with `.shape` and `.dtype`, or a function from the
      arguments' ShapeDtypeStructs to one.
    like: a JAX-traceable reference of the same signature: gives the results' shapes when `out` is
      not given, derivatives when the kernel has no rule of its own, and `check`'s truth.
    name: what programs call the kernel by. Default: the calling module and the function's name.
    effect: "pure", "io" or "ordered", as for `callgate.gate`.
    aliases: flat input position to flat output position: both are one memory. An `InOut` is aliased
      without being named here.
    vmap: "each" (a loop over the lanes in C++), "whole" (batched arguments have a leading axis),
      "broadcast" (all have) or a rule, as for `callgate.gate`.
    sharding: None or "gather".
    linear: True, a position or positions of arguments in which the kernel is linear.
    gradient: "finite-difference": derivatives by central differences.
    thread_safe: the lanes of `vmap="each"` may run on several threads at once.
    flags: for the compiler, after "-O3 -march=native -DNDEBUG".
    include_dirs: folders of headers.
    libraries: names for `-l`, or paths of libraries.
    library_dirs: folders where they are, now and at run time.
    debug: "-O0 -g" and bounds checks of every index instead of the flags above.

  Returns:
    A `Kernel`.

  Raises:
    CompileError: the compiler refuses the source, with its message and your line numbers; or there
      is no compiler.
    GateDefinitionError: an option is wrong.
  """
  defaults = _toolchain.DEBUG_FLAGS if debug else _toolchain.DEFAULT_FLAGS
  build_options = {
    "flags": (*defaults, *flags),
    "include_dirs": tuple(os.fspath(d) for d in include_dirs),
    "libraries": tuple(libraries),
    "library_dirs": tuple(os.fspath(d) for d in library_dirs),
  }
  if name is None:
    known = _cpp_source.find("cpp", source, function)
    name = _runtime.free_name(f"{caller_module()}.{known.name}")
  return CppKernel(
    name,
    source,
    function,
    build_options,
    out=out,
    like=like,
    effect=effect,
    aliases=aliases,
    vmap=vmap,
    sharding=sharding,
    linear=linear,
    gradient=gradient,
    thread_safe=thread_safe,
  )
