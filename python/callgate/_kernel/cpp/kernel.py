"""Kernels from C++ source: their variants, what they are compiled to, and how they are saved."""

from __future__ import annotations

import contextlib
import itertools
import threading
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from callgate import _callgate
from callgate._build import toolchain
from callgate._core.dtypes import dtype_named
from callgate._core.errors import CompileError, GateDefinitionError
from callgate._kernel import source as _source
from callgate._kernel.cpu import CpuKernel
from callgate._kernel.cuda import part as _part
from callgate._kernel.files import compiled_form, installed, no_new_calls
from callgate._kernel.options import KernelOptions
from callgate._kernel.parameters import Kind, Parameter
from callgate._kernel.source import SourceParameter, TemplateParameter
from callgate._kernel.variants import CallTypes, Function, Given

# What kernels of one source, which is one library, take turns by; and those that link libraries,
# which may be the same ones.
_turns: weakref.WeakValueDictionary[str, _callgate.KernelTurn] = weakref.WeakValueDictionary()
_turns_lock = threading.Lock()


class CppKernel(CpuKernel):
  """A kernel from C++ source; see `callgate.cpp`."""

  def __init__(
    self,
    name: str,
    source: str,
    function: str | None,
    build_options: dict[str, Any],
    options: KernelOptions,
    compiled: Any = None,
  ) -> None:
    self.source = source
    self.build_options = build_options
    self._given_function = function
    self._libraries: dict[str, Path] = {}  # of the variants here
    self._from_files: dict[str, Path] = {}  # that `load_kernels` has brought
    if compiled is not None:
      self.take_compiled(compiled)
    label = f"kernel '{name}'"
    self.cpp_function = _source.find(label, source, function)
    self._plain: Function | None = None
    if not self.cpp_function.template:
      self._plain = self._build(label, "")
      signature = list(self._plain.parameters)
    else:  # kinds and names, before it is compiled for a call
      signature = list[Parameter]()
      for i, p in enumerate(self.cpp_function.parameters):
        rank = 0 if p.kind is Kind.SCALAR else int(p.rank) if p.rank.isdigit() else -1
        known = _source.DTYPES.get(p.element)
        dtype = dtype_named(known) if known else None
        signature.append(Parameter(p.name or str(i), p.kind, dtype, rank))
    super().__init__(name, signature, options)
    if self._turn is not None:
      with _turns_lock:
        self._turn = _turns.setdefault("" if build_options["libraries"] else source, self._turn)

  # -- calls -------------------------------------------------------------------------------------
  def _arguments(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Given:
    given = [(p, kwargs.pop(p.name)) for p in self.cpp_function.template if p.name in kwargs]
    operands, static = super()._arguments(args, kwargs)
    bound = {p.name: _template_value(self.label, p, value) for p, value in given}
    return operands, tuple(sorted({**dict(static), **bound}.items())) if bound else static

  # -- variants ----------------------------------------------------------------------------------
  def variant_key(self, types: CallTypes) -> str:
    given, parts = dict(types.static), list[str]()
    for parameter in self.cpp_function.template:
      value = given.get(parameter.name)
      if value is None:
        value = _source.deduced(parameter, self._arrays(types))
      if value is not None:
        parts.append(f"{parameter.name}={value}")
      elif not parameter.default:
        kind = "typename" if parameter.is_type else "int"
        raise GateDefinitionError(
          f"{self.label}: expected the template parameter '{kind} {parameter.name}' by keyword "
          f"({parameter.name}=...), since it is no array's element type or rank"
        )
    return ",".join(parts)

  def types_of_key(self, key: str) -> CallTypes:
    return CallTypes((), (), tuple(sorted(_bound(key).items())))

  def _arrays(self, types: CallTypes) -> Iterator[tuple[SourceParameter, np.dtype[Any], int]]:
    """Parameters with the dtype and rank of an array that they take, operands first."""
    parameters = self.cpp_function.parameters
    for kinds, arrays in (
      ((Kind.IN, Kind.INOUT, Kind.SCALAR, Kind.INS), types.operands),
      ((Kind.OUT, Kind.INOUT, Kind.OUTS), types.results),
    ):
      side = [p for p in parameters if p.kind in kinds]
      rest = iter(arrays)
      for parameter in side:
        variadic = parameter.kind in (Kind.INS, Kind.OUTS)
        for array in itertools.islice(rest, len(arrays) - len(side) + 1 if variadic else 1):
          yield parameter, *array

  def compile(self, types: CallTypes) -> Function:
    key = self.variant_key(types)
    if self._plain is not None:
      return self._plain
    bound, arguments = _bound(key), list[str]()
    for parameter in self.cpp_function.template:
      value = bound.get(parameter.name, parameter.default)
      if parameter.is_type and parameter.name in bound:
        value = _source.cpp_type(dtype_named(value))
        if not value:
          raise GateDefinitionError(
            f"{self.label}: {parameter.name}: C++ kernels have no type for "
            f"{bound[parameter.name]}; expected one of {', '.join(_source.TYPES)}"
          )
      arguments.append(value)
    function = self._build(self.label, f"<{', '.join(arguments)}>")
    assert self.signature is not None
    for read, real in zip(self.signature, function.parameters, strict=True):
      if read.kind is not real.kind:
        raise GateDefinitionError(
          f"{self.label}: parameter '{read.name}': expected its type written as cg::{real.kind.cpp}"
          "<...>, which in a template callgate has to know before it is compiled"
        )
    return function

  def _build(self, label: str, instance: str) -> Function:
    """The function of one instance: as it came in a file, or compiled here."""
    library, loaded = self._from_files.get(instance), None
    if library is not None:
      with contextlib.suppress(CompileError):  # an older C library here, say: compiling may do
        loaded = toolchain.load(library, label)
    if library is None or loaded is None:
      what = f"{label}, for {self.cpp_function.name}{instance}" if instance else label
      library = toolchain.build(what, self._unit(instance), **self.build_options)
      loaded = toolchain.load(library, label)
    self._libraries[instance] = library
    return Function.built(library, loaded)

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
      "cuda": _part.saved(self.cuda) if isinstance(self.cuda, _part.SourcePart) else None,
      "compiled": compiled_form(libraries, native=native),
    }

  def take_compiled(self, compiled: Any) -> None:
    self._from_files.update(installed(compiled))

  def _unit(self, instance: str) -> str:
    """The source with what makes a library of it; no part of it is the kernel's own name."""
    function = self.cpp_function
    names = [p.name or str(i) for i, p in enumerate(function.parameters)]
    complexes = "#include <complex>\n" if "complex" in instance + self.source else ""
    return (
      f'#include <algorithm>\n#include <cmath>\n{complexes}#include "callgate/kernel.h"\n'
      f'#line 1 "{function.name}"\n{self.source}\n#line 1 "callgate"\n'
      "namespace { callgate_kernel callgate_made = "
      f"::callgate::detail::describe<&::{function.qualified}{instance}>"
      f'("{", ".join([function.name, *names])}");\n'
      "const ::callgate::detail::Registration callgate_registration(callgate_made); }\n"
    )


def _bound(key: str) -> dict[str, str]:
  """The template arguments that a variant's key holds."""
  return dict(part.split("=", 1) for part in key.split(",") if "=" in part)


def _template_value(label: str, parameter: TemplateParameter, value: Any) -> str:
  if not parameter.is_type and isinstance(value, (bool, int, np.integer)):
    return str(int(value))
  if parameter.is_type and not isinstance(value, (bool, int, float)) and value is not None:
    with contextlib.suppress(TypeError, AttributeError):
      return (dtype_named(value) if isinstance(value, str) else np.dtype(value)).name
  what = "a dtype" if parameter.is_type else "an integer"
  raise GateDefinitionError(
    f"{label}: template parameter '{parameter.name}': expected {what}, got {value!r}"
  )


def restore(form: dict[str, Any]) -> CppKernel:
  """A kernel from its saved form: for programs, which hold all else that a call needs."""
  kernel = CppKernel(
    form["name"],
    form["source"],
    form["function"],
    {k: tuple(v) if isinstance(v, list) else v for k, v in form["build_options"].items()},
    KernelOptions(out=no_new_calls(form["name"]), thread_safe=form["thread_safe"]),
    form["compiled"],
  )
  if form.get("cuda") is not None:
    kernel.cuda = _part.restored(kernel.label, form["cuda"])
  return kernel
