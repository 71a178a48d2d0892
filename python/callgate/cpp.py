"""`callgate.cpp`: kernels from C++ source, compiled by the system's compiler when they are made."""

from __future__ import annotations

import contextlib
import ctypes
import itertools
import os
import sys
import threading
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np

from callgate import (
  _callgate,
  _cpp_source,
  _cuda_part,
  _cuda_program,
  _names,
  _options,
  _toolchain,
)
from callgate._attributes import dtype_named
from callgate._cpp_source import SourceFunction, SourceParameter, TemplateParameter
from callgate._operation import Effect, Vmap
from callgate._parameters import Kind, Parameter, from_codes
from callgate.errors import GateDefinitionError
from callgate.kernel import CallTypes, Function, Kernel, Static, Type
from callgate.kernel_files import compiled_form, installed, no_new_calls

_TYPES = {
  "bool": "bool",
  **{f"{sign}int{bits}": f"{sign}int{bits}_t" for sign in ("", "u") for bits in (8, 16, 32, 64)},
  "float32": "float",
  "float64": "double",
  "complex64": "std::complex<float>",
  "complex128": "std::complex<double>",
  **{
    name: f"cg::{name}"
    for name in (
      *("float16", "bfloat16", "float8_e5m2", "float8_e4m3", "float8_e3m4", "float8_e4m3fn"),
      *("float8_e4m3b11fnuz", "float8_e4m3fnuz", "float8_e5m2fnuz", "float8_e8m0fnu"),
    )
  },
}
_DTYPES = {
  **{text: name for name, text in _TYPES.items()},
  **{f"std::{text}": name for name, text in _TYPES.items() if text.endswith("_t")},
  "int": "int32",
  "unsigned": "uint32",
  "unsigned int": "uint32",
  "short": "int16",
  "long": "int64",
  "long long": "int64",
  "unsigned long": "uint64",
  "size_t": "uint64",
}


# What kernels of one source, which is one library, take turns by; and those that link libraries,
# which may be the same ones.
_turns: weakref.WeakValueDictionary[str, _callgate.KernelTurn] = weakref.WeakValueDictionary()
_turns_lock = threading.Lock()


def cpp_type(dtype: np.dtype[Any]) -> str:
  """The C++ type of a dtype's elements; "" for one that kernel.h doesn't have."""
  return _TYPES.get(np.dtype(dtype).name, "")


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
    self._plain: Function | None = None
    if not self.cpp_function.template:
      self._plain = self._build(label, "")
    signature = self._plain.parameters if self._plain else _signature(self.cpp_function)
    super().__init__(name, signature, **options)
    if self._turn is not None:
      with _turns_lock:
        key = "" if build_options["libraries"] else source
        self._turn = _turns.setdefault(key, self._turn)

  # -- calls -------------------------------------------------------------------------------------
  def _arguments(
    self, args: tuple[Any, ...], kwargs: dict[str, Any]
  ) -> tuple[tuple[Any, ...], Static]:
    template = {p.name: p for p in self.cpp_function.template}
    given = {name: kwargs.pop(name) for name in template if name in kwargs}
    operands, static = super()._arguments(args, kwargs)
    if not given:
      return operands, static
    bound = {
      name: _template_value(self.label, template[name], value) for name, value in given.items()
    }
    return operands, tuple(sorted({**dict(static), **bound}.items()))

  # -- variants ----------------------------------------------------------------------------------
  def variant_key(self, types: CallTypes) -> str:
    given, parts = dict(types.static), list[str]()
    for parameter in self.cpp_function.template:
      if parameter.name in given:
        parts.append(f"{parameter.name}={given[parameter.name]}")
      elif (found := self._deduced(parameter, types)) is not None:
        parts.append(f"{parameter.name}={found}")
      elif not parameter.default:
        kind = "typename" if parameter.is_type else "int"
        raise GateDefinitionError(
          f"{self.label}: expected the template parameter '{kind} {parameter.name}' by keyword "
          f"({parameter.name}=...), since it is no array's element type or rank"
        )
    return ",".join(parts)

  def types_of_key(self, key: str) -> CallTypes:
    return CallTypes((), (), tuple(sorted(_bound(key).items())))

  def _deduced(self, wanted: TemplateParameter, types: CallTypes) -> str | None:
    """A template parameter from the call's arrays: an element type, or a rank."""
    for parameter, (dtype, rank) in self._arrays(types):
      element = parameter.element.replace(" ", "")
      if wanted.is_type and element == wanted.name:
        return dtype.name
      if wanted.is_type and element == f"std::complex<{wanted.name}>" and dtype.kind == "c":
        return f"float{dtype.itemsize * 4}"
      if not wanted.is_type and parameter.rank == wanted.name:
        return str(rank)
    return None

  def _arrays(self, types: CallTypes) -> Iterator[tuple[SourceParameter, Type]]:
    """Parameters with the type of an array that they take, operands first."""
    parameters = self.cpp_function.parameters or ()
    for kinds, arrays in (
      ((Kind.IN, Kind.INOUT, Kind.SCALAR, Kind.INS), types.operands),
      ((Kind.OUT, Kind.INOUT, Kind.OUTS), types.results),
    ):
      side = [p for p in parameters if p.kind in kinds]
      rest = iter(arrays)
      for parameter in side:
        variadic = parameter.kind in (Kind.INS, Kind.OUTS)
        for array in itertools.islice(rest, len(arrays) - len(side) + 1 if variadic else 1):
          yield parameter, array

  def compile(self, types: CallTypes) -> tuple[str, Function]:
    key = self.variant_key(types)
    if self._plain is not None:
      return key, self._plain
    bound, arguments = _bound(key), list[str]()
    for parameter in self.cpp_function.template:
      value = bound.get(parameter.name, parameter.default)
      if parameter.is_type and parameter.name in bound:
        value = cpp_type(dtype_named(value))
        if not value:
          raise GateDefinitionError(
            f"{self.label}: {parameter.name}: C++ kernels have no type for "
            f"{bound[parameter.name]}; expected one of {', '.join(_TYPES)}"
          )
      arguments.append(value)
    function = self._build(self.label, f"<{', '.join(arguments)}>")
    assert self.signature is not None
    for read, real in zip(self.signature, function.parameters, strict=True):
      if read.kind is not real.kind:
        raise GateDefinitionError(
          f"{self.label}: parameter '{read.name}': expected its type written as cg::{real.kind.cpp}"
          "<...>: callgate reads the kinds of a template's parameters before it is compiled, and "
          "does not know other names of them"
        )
    return key, function

  def _build(self, label: str, instance: str) -> Function:
    library, loaded = self._open(label, instance)
    self._libraries[instance] = library
    table = _address(loaded, "callgate_kernels")
    # The source may have kernels of its own, of CALLGATE_KERNEL; ours is the last.
    *_, (_, address, codes, names) = _callgate.read_library(str(library), table)
    return Function(address, tuple(from_codes(codes, names)), keep=loaded)

  def _open(self, label: str, instance: str) -> tuple[Path, ctypes.CDLL]:
    """The library of one instance: as it came in a file, or compiled here."""
    came = self._from_files.get(instance)
    if came is not None:
      with contextlib.suppress(
        _toolchain.CompileError
      ):  # an older C library here, say: compiling may do
        return came, _toolchain.load(came, label)
    what = f"{label}, for {self.cpp_function.name}{instance}" if instance else label
    library = _toolchain.build(what, self._unit(instance), **self.build_options)
    return library, _toolchain.load(library, label)

  # -- files -------------------------------------------------------------------------------------
  def saved_form(self) -> dict[str, Any] | None:
    native = any("native" in flag for flag in self.build_options["flags"])
    libraries = {**self._from_files, **self._libraries}
    cuda = self.cuda if isinstance(self.cuda, _cuda_part.SourcePart) else None
    return {
      "kind": "cpp",
      "name": self.name,
      "source": self.source,
      "function": self._given_function,
      "build_options": self.build_options,
      "thread_safe": self.thread_safe,
      "cuda": None if cuda is None else _cuda_part.saved(cuda),
      "compiled": compiled_form(libraries, native=native),
    }

  def take_compiled(self, compiled: Any) -> None:
    self._from_files.update(installed(compiled))

  def _unit(self, instance: str) -> str:
    """The source with what makes a library of it; no part of it is the kernel's own name."""
    function = self.cpp_function
    parameters = function.parameters or ()
    names = ", ".join(p.name or str(i) for i, p in enumerate(parameters))
    complexes = "#include <complex>\n" if "complex" in instance + self.source else ""
    return (
      f'#include <algorithm>\n#include <cmath>\n{complexes}#include "callgate/kernel.h"\n'
      f'#line 1 "{function.name}"\n{self.source}\n#line 1 "callgate"\n'
      "namespace { callgate_kernel callgate_made = "
      f"::callgate::detail::describe<&::{function.qualified}{instance}>"
      f'("{function.name}{", " if names else ""}{names}");\n'
      "const ::callgate::detail::Registration callgate_registration(callgate_made); }\n"
    )


def _bound(key: str) -> dict[str, str]:
  """The template arguments that a variant's key holds."""
  pairs = (part.partition("=") for part in key.split(",") if part)
  return {name: value for name, _, value in pairs}


def _signature(function: SourceFunction) -> list[Parameter]:
  """A template's parameters before it is compiled for a call: kinds and names."""
  parameters: list[Parameter] = []
  for i, p in enumerate(function.parameters or ()):
    rank = 0 if p.kind is Kind.SCALAR else int(p.rank) if p.rank.isdigit() else -1
    known = _DTYPES.get(p.element)
    dtype = dtype_named(known) if known else None
    parameters.append(Parameter(p.name or str(i), p.kind, dtype, rank))
  return parameters


def _template_value(label: str, parameter: TemplateParameter, value: Any) -> str:
  if not parameter.is_type:
    if isinstance(value, (bool, int, np.integer)):
      return str(int(value))
    what = "an integer"
  else:
    what = "a dtype"
    if not isinstance(value, (bool, int, float)) and value is not None:
      with contextlib.suppress(TypeError, AttributeError):
        return (dtype_named(value) if isinstance(value, str) else np.dtype(value)).name
  raise GateDefinitionError(
    f"{label}: template parameter '{parameter.name}': expected {what}, got {value!r}"
  )


def _address(library: Any, symbol: str) -> int:
  address = ctypes.cast(getattr(library, symbol), ctypes.c_void_p).value
  assert address is not None
  return address


def restore(form: dict[str, Any]) -> CppKernel:
  """A kernel from its saved form: for programs, which hold all else that a call needs."""
  kernel = CppKernel(
    form["name"],
    form["source"],
    form["function"],
    {k: tuple(v) if isinstance(v, list) else v for k, v in form["build_options"].items()},
    form["compiled"],
    out=no_new_calls(form["name"]),
    thread_safe=form["thread_safe"],
  )
  if form.get("cuda") is not None:
    kernel.cuda = _cuda_part.restored(kernel.label, form["cuda"])
  return kernel


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
  cuda_source: str | None = None,
  cuda_kernel: str | None = None,
  grid: Any = None,
  block: Any = None,
  shared: Any = 0,
  cluster: Any = None,
  zeroed: Sequence[int] = (),
  scratch: Mapping[str, Any] | None = None,
  cuda_options: Sequence[str] = (),
  arch: str | int | Sequence[str | int] | None = None,
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
      "broadcast" (all have) or a rule, as for `callgate.gate`; "grid" as for `callgate.cuda`, and
      on the CPU as "each".
    sharding: which dimensions may stay split over devices: None or "gather" (none), "shard", a rule
      such as "i [j] -> i" or a function, as for `callgate.gate`.
    linear: True, a position or positions of arguments in which the kernel is linear.
    gradient: "finite-difference": derivatives by central differences.
    thread_safe: calls may run at once, on several devices and in several programs, and so may the
      lanes of `vmap="each"`. By default they take turns, with those of all such kernels of the same
      source, or, with `libraries`, of all that link some.
    flags: for the compiler, after "-O3 -march=native -DNDEBUG".
    include_dirs: folders of headers.
    libraries: names for `-l`, or paths of libraries.
    library_dirs: folders where they are, now and at run time.
    debug: "-O0 -g" and bounds checks of every index instead of the flags above.
    cuda_source: CUDA C++ with the same kernel, which runs in programs for CUDA. Its arrays are
      those of the C++ function, in the same order: pointers or views, `const T*` also where that
      takes a number by value; its numbers by value are the C++ function's `cg::Attr` of the same
      names.
    cuda_kernel: which kernel of it, where it has several.
    grid: with cuda_source, blocks of its launch, as for `callgate.cuda`; also all that follow.
    block: threads of a block.
    shared: bytes of dynamic shared memory.
    cluster: blocks of a cluster.
    zeroed: flat positions of results that are set to zero before a launch.
    scratch: bytes of the memory behind parameters, by their names.
    cuda_options: for NVRTC.
    arch: what to compile for where the process has no CUDA device.

  Returns:
    A `Kernel`.

  Raises:
    CompileError: the compiler refuses the source, with its message and your line numbers; or there
      is no compiler.
    GateDefinitionError: an option is wrong.
  """
  name = _options.name("cpp", name)
  _options.text("cpp", "source", source)
  _options.optional_texts(
    "cpp", function=function, cuda_source=cuda_source, cuda_kernel=cuda_kernel
  )
  _options.boolean("cpp", "debug", debug)
  defaults = _toolchain.DEBUG_FLAGS if debug else _toolchain.DEFAULT_FLAGS
  known = _cpp_source.find("cpp" if name is None else f"kernel '{name}'", source, function)
  label = f"kernel '{name or known.name}'"
  build_options = {
    "flags": (*defaults, *_options.strings(label, "flags", flags)),
    "include_dirs": _options.strings(label, "include_dirs", include_dirs),
    "libraries": _options.strings(label, "libraries", libraries),
    "library_dirs": _options.strings(label, "library_dirs", library_dirs),
  }
  if cuda_source is None and any(x is not None for x in (grid, block, cuda_kernel)):
    raise GateDefinitionError(
      f"{label}: grid, block, cuda_kernel: expected with cuda_source= alone, got one without it"
    )
  if name is None:
    name = _names.free_name(f"{caller_module()}.{known.name}")
  made = CppKernel(
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
  launching = _cuda_part.launch_options(label, grid, block, shared, cluster, zeroed, scratch)
  building = _cuda_part.build_options(
    _options.strings(label, "cuda_options", cuda_options),
    build_options["include_dirs"],
    _cuda_program.parse_arch(label, arch),
  )
  if cuda_source is not None:
    made.cuda = _cuda_part.SourcePart(
      made.label, cuda_source, cuda_kernel, launching, building, made.aliases
    )
  return made
