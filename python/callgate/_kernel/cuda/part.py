# SPDX-License-Identifier: Apache-2.0
"""CUDA source as the CUDA part of a kernel, for `callgate.cuda` and `callgate.cpp`."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import os
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from callgate._build import nvrtc
from callgate._build.nvrtc import CompiledImage
from callgate._core import options as check
from callgate._core import static_values
from callgate._core.dtypes import dtype_named
from callgate._core.errors import GateDefinitionError
from callgate._kernel.cuda import source as _source
from callgate._kernel.cuda.kernel import evaluated
from callgate._kernel.launch import CudaCall, CudaPart, Launch, LaunchPlan, checked
from callgate._kernel.launch import LaunchParameter as Argument
from callgate._kernel.options import LaunchOptions
from callgate._kernel.parameters import OPERANDS, RESULTS, Kind, Parameter, Signature
from callgate._kernel.source import SourceFunction, TemplateParameter


class BuildOptions(NamedTuple):
  options: tuple[str, ...]  # options of NVRTC
  include_dirs: tuple[str, ...]  # folders of headers
  arch: tuple[int, ...]  # compute capabilities if the process has no device


class SourcePart(CudaPart):
  """A kernel in CUDA C++; tracing and lowering threads use it concurrently."""

  def __init__(
    self, label: str, source: str, kernel: str | None, launching: LaunchOptions,
    building: BuildOptions, aliases: Mapping[int, int],
  ) -> None:  # fmt: skip
    self.label, self.source, self.kernel = label, source, kernel
    self.aliases, self.launching = dict(aliases), launching
    self.arch = building.arch
    folders = tuple(os.path.abspath(folder) for folder in building.include_dirs)
    self.building = building._replace(include_dirs=folders)
    function = _source.find(label, source, kernel)
    self.function = _with_roles(label, function, aliases, launching.scratch or {})
    # The image of one variant, by its expression and capability, compiled at its first use.
    self.built = functools.cache(functools.partial(
      nvrtc.build, label, function.name, source, options=building.options, include_dirs=folders
    ))  # fmt: skip
    self._configuration = (launching.grid, launching.block, launching.shared, launching.cluster)
    if not any(map(callable, self._configuration)):  # check it at once
      checked(label, *self._configuration)

  def signature(self) -> Signature:
    """The parameters of a call: its operands, values and results."""
    templates = [t.name for t in self.function.template]
    for p in self.function.parameters.of((Kind.NUMBER,)):
      if p.dtype is None and p.element not in templates:
        kinds = "a pointer, a view (cg::In<float, 1>) or a number by value"
        fault = f"parameter '{p.name}': expected {kinds}, got the type '{p.element}'"
        raise GateDefinitionError(f"{self.label}: {fault}")
    return Signature(p for p in self.function.parameters if p.kind is not Kind.CONTEXT)

  # -- variants ----------------------------------------------------------------------------------
  def expression(self, call: CudaCall) -> str:
    """Returns the function for a call, as C++ names it: "scale<float, 4>"."""
    f = self.function
    values = (f.bound.get(p.name) or self._template_argument(p, call) for p in f.template)
    arguments = ", ".join(itertools.takewhile(bool, values))  # the rest have defaults
    return f.qualified + (f"<{arguments}>" if f.template else "")

  def _template_argument(self, parameter: TemplateParameter, call: CudaCall) -> str:
    """Returns the template argument of a call's static values or arrays; "" if unknown."""
    otherwise = f" or in the kernel's name ({self.function.name}<...>)"
    found = parameter.argument(self.label, call.static, self._arrays(call), otherwise)
    if found is None or isinstance(found, int):
      return "" if found is None else str(found)
    if (name := str(found)) not in _source.TYPES:
      what = f"template parameter '{parameter.name}'"
      raise GateDefinitionError(f"{self.label}: {what}: CUDA has no type for {name}")
    return _source.TYPES[name]

  def _arrays(self, call: CudaCall) -> list[tuple[Parameter, Any]]:
    """Returns array parameters with their arrays; an operand in a result's memory counts twice."""
    found: list[tuple[Parameter, Any]] = []
    sides = (("operands", OPERANDS, call.operands), ("results", RESULTS, call.results))
    for what, kinds, arrays in sides:
      side = self.function.parameters.of(kinds)
      if len(side) != len(arrays):
        names = f"({', '.join(p.name for p in side)}) as in the CUDA source"
        expected = f"expected {len(side)} {what} {names}"
        raise GateDefinitionError(f"{self.label}: {expected}, got {len(arrays)}")
      found += zip(side, arrays, strict=True)
    return found

  def images(self, key: str, capabilities: tuple[int, ...]) -> tuple[CompiledImage, ...] | None:
    return tuple(self.built(key, each).image for each in capabilities or (0,))

  # -- launches ----------------------------------------------------------------------------------
  def plan(self, call: CudaCall) -> LaunchPlan:
    self._arrays(call)  # raises for another number of arrays
    expression, label = self.expression(call), self.label
    named = zip(("grid", "block", "shared", "cluster"), self._configuration, strict=True)
    options = (evaluated(label, option, given, call) for option, given in named)
    (x, y, z), block, shared, cluster = checked(label, *options)
    if call.batch is not None:
      if z != 1:
        check.refuse(
          label, "vmap='grid'", "a grid with z = 1, since vmap uses z for the lanes", (x, y, z)
        )
      z = call.batch
    if call.results and all(0 in r.shape for r in call.results):  # nothing to write
      x = 0
    builds = [self.built(expression, each) for each in call.capabilities or (0,)]
    scratch: dict[str, int] = {}
    for name, value in (self.launching.scratch or {}).items():
      size = evaluated(label, option := f"scratch: '{name}'", value, call)
      size = check.count(label, option, size, what="a number of bytes")
      scratch[name] = size * (call.batch or 1)
    parameters = tuple(self._parameters(call, list(scratch)))
    launch = Launch(builds[0].entry, (x, y, z), block, parameters, shared, cluster)
    images, zeroed = tuple(b.image for b in builds), tuple(self.launching.zeroed)
    return LaunchPlan(expression, images, (launch,), tuple(scratch.values()), zeroed)

  def _parameters(self, call: CudaCall, scratch: Sequence[str]) -> Iterator[Argument]:
    memory = self.function.parameters.memory
    for p in self.function.parameters:
      if p.kind is Kind.NUMBER:
        yield self._number(p, call)
      elif p.kind is Kind.CONTEXT:
        yield Argument.pointer("scratch", scratch.index(p.name))
      else:
        side, index = memory[p.name]
        shape = call.array(side, index).shape
        yield Argument.pointer(
          side, index, shape if p.rank_text else ()
        )  # without rank text it is no view

  def _number(self, parameter: Parameter, call: CudaCall) -> Argument:
    name, element, what = parameter.name, parameter.element, f"{self.label}: parameter"
    if name not in call.static:
      got = f"got {', '.join(call.static) or 'none'}; declare it as a pointer to pass an array"
      number = f"'{name}', a number by value: expected a static value of that name"
      raise GateDefinitionError(f"{what} {number}, {got}")
    dtype = parameter.dtype
    if dtype is None:  # a template's: the dtype of an array with this element type
      dtype = next((a.dtype for p, a in self._arrays(call) if p.element == element), None)
    if dtype is None and element in call.static:
      dtype = dtype_named(call.static[element])
    if dtype is None:
      fault = (
        f"the type '{element}' is unknown; pass {element}= by keyword, or an array of that type"
      )
      raise GateDefinitionError(f"{what} '{name}': {fault}")
    frozen = static_values.number(self.label, name, call.static[name], dtype, what="argument")
    return Argument.scalar(frozen.value, dtype)


def _with_roles(
  label: str, function: SourceFunction, aliases: Mapping[int, int], scratch: Mapping[str, Any]
) -> SourceFunction:
  """Assigns roles to pointers to non-const elements: results, operands in place, scratch memory."""
  parameters: list[Parameter] = []
  operands = results = 0
  for p in function.parameters:
    pointer = p.kind is Kind.OUT and not p.rank_text
    if p.name in scratch:
      if not pointer:
        raise GateDefinitionError(f"{label}: scratch: expected '{p.name}' to be a pointer `T*`")
      p = dataclasses.replace(p, kind=Kind.CONTEXT)  # neither operand nor result
    elif pointer and aliases.get(operands) == results:
      p = dataclasses.replace(p, kind=Kind.INOUT)
    operands += p.kind in OPERANDS
    results += p.kind in RESULTS
    parameters.append(p)
  if unknown := scratch.keys() - {p.name for p in parameters}:
    expected = "expected names of the kernel's parameters"
    raise GateDefinitionError(f"{label}: scratch: {expected}, got '{min(unknown)}'")
  return function._replace(parameters=Signature(parameters))


def saved(part: SourcePart) -> dict[str, Any]:
  """Returns a part for a file, without launches, which the programs have."""
  form = {"source": part.source, "function": part.kernel, "aliases": sorted(part.aliases.items())}
  return form | part.building._asdict()


def restored(label: str, form: Mapping[str, Any]) -> SourcePart:
  """Returns the part of `saved`, without its launches."""
  building = BuildOptions(*(tuple(form[name]) for name in BuildOptions._fields))
  aliases = {int(operand): int(result) for operand, result in form["aliases"]}
  launching = LaunchOptions(grid=1, block=1)
  return SourcePart(label, form["source"], form["function"], launching, building, aliases)
