"""CUDA source as the CUDA part of a kernel: its signature, its variants and its launches.

`callgate.cuda` makes kernels of nothing else; `callgate.cpp(..., cuda_source=)` gives one to a
kernel in C++.
"""

from __future__ import annotations

import dataclasses
import os
import struct
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from callgate._build import nvrtc
from callgate._build.nvrtc import Image
from callgate._core import static_values
from callgate._core.errors import GateDefinitionError
from callgate._kernel import launch as _launch
from callgate._kernel.cuda import source as _source
from callgate._kernel.cuda.kernel import evaluated
from callgate._kernel.cuda.source import CudaFunction, CudaParameter
from callgate._kernel.launch import Address, Launch, Plan
from callgate._kernel.launch import Parameter as Argument
from callgate._kernel.options import LaunchOptions
from callgate._kernel.parameters import Kind, Parameter
from callgate._kernel.program import CudaCall, CudaPart
from callgate._kernel.source import TemplateParameter, deduced

_KINDS = {"in": Kind.IN, "out": Kind.OUT, "inout": Kind.INOUT, "number": Kind.NUMBER}


class BuildOptions(NamedTuple):
  """How a source is compiled."""

  options: tuple[str, ...]  # for NVRTC
  include_dirs: tuple[str, ...]  # folders of headers
  arch: tuple[int, ...]  # compute capabilities, where the process has no device


class SourcePart(CudaPart):
  """A kernel in CUDA C++; tracing and lowering threads use it at once.

  Attributes:
    label: for messages.
    source, kernel, aliases: as given.
    function: what was read of it.
    launching, building: the options; folders are kept by their absolute paths.
  """

  def __init__(
    self, label: str, source: str, kernel: str | None, launching: LaunchOptions,
    building: BuildOptions, aliases: Mapping[int, int],
  ) -> None:  # fmt: skip
    self.label = label
    self.source = source
    self.kernel = kernel
    self.aliases = dict(aliases)
    self.launching = launching
    folders = tuple(os.path.abspath(folder) for folder in building.include_dirs)
    self.building = building._replace(include_dirs=folders)
    function = _source.find(label, source, kernel)
    self.function = _with_roles(label, function, aliases, launching.scratch or {})
    self._built: dict[tuple[str, int], nvrtc.Built] = {}
    self._configuration = (launching.grid, launching.block, launching.shared, launching.cluster)
    if not any(map(callable, self._configuration)):  # it can be checked at once
      _launch.checked(label, *self._configuration)

  def arch(self) -> tuple[int, ...]:
    return self.building.arch

  def signature(self) -> list[Parameter]:
    """What a call gives and gets, in the order of the source."""
    parameters: list[Parameter] = []
    for p in self.function.parameters:
      if p.role == "scratch":
        continue
      dtype = self._dtype(p.element)
      is_template = any(t.name == p.element for t in self.function.template)
      if p.role == "number" and dtype is None and not is_template:
        raise GateDefinitionError(
          f"{self.label}: parameter '{p.name}': expected a pointer, a view (cg::In<float, 1>) or a "
          f"number by value, got the type '{p.element}'"
        )
      rank = 0 if p.role == "number" else int(p.rank) if p.rank.isdigit() else -1
      parameters.append(Parameter(p.name, _KINDS[p.role], dtype, rank))
    return parameters

  def _dtype(self, element: str) -> np.dtype[Any] | None:
    return _source.element_dtype(self.function.bound.get(element, element))

  # -- variants ----------------------------------------------------------------------------------
  def expression(self, call: CudaCall) -> str:
    """The function for a call, as C++ names it: "scale<float, 4>"."""
    function = self.function
    if not function.template:
      return function.qualified
    arguments: list[str] = []
    for parameter in function.template:
      value = function.bound.get(parameter.name) or self._template_argument(parameter, call)
      if value:
        arguments.append(value)
      elif parameter.default:
        break  # and so have those that follow
      else:
        kind = "typename" if parameter.is_type else "int"
        raise GateDefinitionError(
          f"{self.label}: expected the template parameter '{kind} {parameter.name}' by keyword "
          f"({parameter.name}=...) or in the kernel's name ({function.name}<...>), since it is no "
          "array's element type or rank"
        )
    return f"{function.qualified}<{', '.join(arguments)}>"

  def _template_argument(self, parameter: TemplateParameter, call: CudaCall) -> str:
    """What a call's static values or arrays say of it; "" where they don't."""
    name, what = parameter.name, f"{self.label}: template parameter '{parameter.name}'"
    if name in call.static:
      value = call.static[name]
      if isinstance(value, (bool, int, np.integer)) or str(value).lstrip("-").isdigit():
        return str(int(value))
      try:
        found = _source.dtype_by_name(value)
      except TypeError:
        raise GateDefinitionError(
          f"{what}: expected a dtype or an integer, got {value!r}"
        ) from None
    else:
      arrays = self._arrays(call)
      found = deduced(parameter, ((p.element, p.rank, a.dtype, len(a.shape)) for p, a in arrays))
    if found is None or isinstance(found, int):
      return "" if found is None else str(found)
    if found.name not in _source.TYPES:
      raise GateDefinitionError(f"{what}: CUDA has no type for {found}")
    return _source.TYPES[found.name]

  def _arrays(self, call: CudaCall) -> list[tuple[CudaParameter, Any]]:
    """Parameters that are arrays, with theirs; an operand and a result in one count as both."""
    found: list[tuple[CudaParameter, Any]] = []
    for what, role, arrays in (("operands", "in", call.operands), ("results", "out", call.results)):
      side = [p for p in self.function.parameters if p.role in (role, "inout")]
      if len(side) != len(arrays):
        names = f"({', '.join(p.name for p in side)}), as the CUDA source has them"
        raise GateDefinitionError(
          f"{self.label}: expected {len(side)} {what} {names}, got {len(arrays)}"
        )
      found += zip(side, arrays, strict=True)
    return found

  def built(self, expression: str, capability: int) -> nvrtc.Built:
    """The image of one variant, compiled at its first use."""
    if (expression, capability) not in self._built:
      options, folders, _ = self.building
      self._built[expression, capability] = nvrtc.build(
        self.label, self.function.name, self.source, expression, capability,
        options=options, include_dirs=folders,
      )  # fmt: skip
    return self._built[expression, capability]

  def images(self, key: str, capabilities: tuple[int, ...]) -> tuple[Image, ...] | None:
    return tuple(self.built(key, each).image for each in capabilities or (0,))

  # -- launches ----------------------------------------------------------------------------------
  def plan(self, call: CudaCall) -> Plan:
    self._arrays(call)  # raises where there are more or fewer
    expression = self.expression(call)
    grid, block, shared, cluster = _launch.checked(
      self.label, *(evaluated(option, call) for option in self._configuration)
    )
    if call.batch is not None:
      if grid[2] != 1:
        raise GateDefinitionError(
          f"{self.label}: vmap='grid': expected a grid whose z is 1, for the lanes; got {grid}"
        )
      grid = (grid[0], grid[1], call.batch)
    if call.results and all(0 in r.shape for r in call.results):  # nothing to write
      grid = (0, grid[1], grid[2])
    builds = [self.built(expression, each) for each in call.capabilities or (0,)]
    scratch: dict[str, int] = {}
    for name, value in (self.launching.scratch or {}).items():
      size = evaluated(value, call)
      if not isinstance(size, (int, np.integer)) or isinstance(size, bool) or size < 0:
        raise GateDefinitionError(
          f"{self.label}: scratch: '{name}': expected a number of bytes, got {size!r}"
        )
      scratch[name] = int(size) * (call.batch or 1)
    parameters = tuple(self._parameters(call, list(scratch)))
    launch = Launch(builds[0].entry, grid, block, parameters, shared, cluster)
    images, zeroed = tuple(b.image for b in builds), tuple(self.launching.zeroed)
    return Plan(expression, images, (launch,), tuple(scratch.values()), zeroed)

  def _parameters(self, call: CudaCall, scratch: Sequence[str]) -> Iterator[Argument]:
    operands, results = iter(enumerate(call.operands)), iter(enumerate(call.results))
    for p in self.function.parameters:
      if p.role == "number":
        yield self._number(p, call)
      elif p.role == "scratch":
        yield Argument.pointer("scratch", scratch.index(p.name))
      else:
        if p.role == "inout":
          next(operands)
        index, array = next(operands if p.role == "in" else results)
        # A pointer, or a view: the pointer and the extents (include/callgate/kernel_device.h).
        extents = array.shape if p.rank else ()
        address = Address(0, "operand" if p.role == "in" else "result", index)
        yield Argument(bytes(8) + struct.pack(f"<{len(extents)}q", *extents), (address,))

  def _number(self, parameter: CudaParameter, call: CudaCall) -> Argument:
    name, element = parameter.name, parameter.element
    if name not in call.static:
      raise GateDefinitionError(
        f"{self.label}: parameter '{name}', a number by value: expected a static value of that "
        f"name, got {', '.join(call.static) or 'none'}; declare it as a pointer for an array"
      )
    dtype = self._dtype(element)
    if dtype is None:  # of a template: that of an array with the same element type
      dtype = next((a.dtype for p, a in self._arrays(call) if p.element == element), None)
    if dtype is None and element in call.static:
      dtype = _source.dtype_by_name(call.static[element])
    if dtype is None:
      raise GateDefinitionError(
        f"{self.label}: parameter '{name}': no array and no keyword tells the type '{element}'"
      )
    frozen = static_values.number(self.label, name, call.static[name], dtype, what="argument")
    return Argument.scalar(frozen.value, dtype)


def _with_roles(
  label: str, function: CudaFunction, aliases: Mapping[int, int], scratch: Mapping[str, Any]
) -> CudaFunction:
  """What pointers to non-const elements are: results, operands in place, or scratch memory."""
  parameters: list[CudaParameter] = []
  operands = results = 0
  for p in function.parameters:
    pointer = p.role == "out" and not p.rank
    if p.name in scratch:
      if not pointer:
        raise GateDefinitionError(f"{label}: scratch: expected '{p.name}' to be a pointer `T*`")
      p = dataclasses.replace(p, role="scratch")
    elif pointer and aliases.get(operands) == results:
      p = dataclasses.replace(p, role="inout")
    operands += p.role in ("in", "inout")
    results += p.role in ("out", "inout")
    parameters.append(p)
  if unknown := scratch.keys() - {p.name for p in parameters}:
    raise GateDefinitionError(
      f"{label}: scratch: expected names of the kernel's parameters, got '{min(unknown)}'"
    )
  return dataclasses.replace(function, parameters=tuple(parameters))


def saved(part: SourcePart) -> dict[str, Any]:
  """A part as files hold it: for programs, which hold the launches."""
  return {
    "source": part.source,
    "function": part.kernel,
    **part.building._asdict(),
    "aliases": sorted(part.aliases.items()),
  }


def restored(label: str, form: Mapping[str, Any]) -> SourcePart:
  """The part that `saved` was given, but for its launches."""
  building = BuildOptions(*(tuple(form[name]) for name in BuildOptions._fields))
  aliases = {int(operand): int(result) for operand, result in form["aliases"]}
  launching = LaunchOptions(grid=1, block=1)
  return SourcePart(label, form["source"], form["function"], launching, building, aliases)
