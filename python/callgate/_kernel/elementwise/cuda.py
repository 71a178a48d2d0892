"""The CUDA part of `callgate.elementwise`: the same code of an element, gone through by threads.

The source is a function that knows no device (`source.body`) and loops around it
(include/callgate/elementwise_device.h). A variant is compiled for how operands lie along the
result's elements; extents and strides are passed by the launch. Runs on lowering threads.
"""

from __future__ import annotations

import dataclasses
import math
import re
import struct
import weakref
from collections.abc import Sequence
from typing import Any

import numpy as np

from callgate._build import nvrtc, toolchain
from callgate._build.nvrtc import Image
from callgate._core.errors import CompileError
from callgate._kernel import launch as _launch
from callgate._kernel.elementwise.layout import Layout, collapsed, layout_of
from callgate._kernel.elementwise.params import Param
from callgate._kernel.elementwise.source import Bound, Code, body, element
from callgate._kernel.launch import Address, Launch, Parameter, Plan
from callgate._kernel.program import CudaCall, CudaPart

_THREADS = 256
_BLOCKS = 1 << 14  # more elements than these have threads are gone through in strides of the grid
_HEADERS = ("elementwise_device.h", "elementwise_body.h", "complex_device.h", "small_floats.h")
# Without it a function of the user's preamble would be the host's.
_OPTIONS = ("--std=c++20", "-default-device")


@dataclasses.dataclass(frozen=True)
class CudaOptions:
  """How an elementwise kernel is compiled for CUDA."""

  options: tuple[str, ...] = ()  # for NVRTC, after callgate's own
  arch: tuple[int, ...] = ()  # compute capabilities, where the process has no device


def entry_of(name: str) -> str:
  """The function of a kernel, as profilers show it."""
  return f"callgate_{re.sub(r'[^A-Za-z0-9_]', '_', name)}"


# -- the source ----------------------------------------------------------------------------------
def _on_device(text: str) -> str:
  return text.replace("std::complex<", "callgate::elementwise::complex<").replace(
    "cg::", "callgate::small::"
  )


def cuda_unit(what: str, entry: str, bound: Bound, layout: Layout) -> str:
  """A whole source for CUDA; `entry` is the function's name, `what` the kernel in messages."""
  # CUDA has functions of these names that treat NaN otherwise.
  text = body(what, bound).replace(
    "  using namespace callgate::elementwise;\n",
    "  using namespace callgate::elementwise;\n"
    "  using callgate::elementwise::max;\n"
    "  using callgate::elementwise::min;\n",
    1,
  )
  if bound.has_complex:
    text = _on_device(text)  # the user's part as well
  return (
    f"// {toolchain.headers_digest(*_HEADERS)}\n"  # in the key of the compiled source
    '#include "callgate/elementwise_device.h"\n\n'
    f"{text}\nnamespace {{\n{_elements(bound, layout)}}}  // namespace\n\n"
    f"{_kernel(entry, bound, layout)}"
  )


def _strided(code: Code, layout: Layout) -> list[Param]:
  return [p for p, k in zip(code.mapped, layout.kinds, strict=True) if k == "s"]


def _elements(bound: Bound, layout: Layout) -> str:
  """The struct that goes through a thread's elements."""
  fields = ["int64_t _size", *bound.pointers]
  strided = _strided(bound.code, layout)
  if strided:
    fields.append(f"const callgate::elementwise::Strides<{layout.axes}, {len(strided)}>& _strides")
  ones = [
    f"const auto _one_{p.name} = static_cast<{bound.value(p)}>({p.name}[0]);"
    for p, kind in zip(bound.code.mapped, layout.kinds, strict=True)
    if kind == "o"
  ]
  lines = [
    "const int64_t _first = callgate::elementwise::first_of_thread();",
    "const int64_t _step = callgate::elementwise::threads();",
    *ones,
    *(_packs(bound, layout) if layout.vector > 1 else ["const int64_t _done = 0;"]),
    *_singles(bound, layout),
  ]
  return (
    "struct Elements {\n"
    + "".join(f"  {field};\n" for field in fields)
    + "  template <class Each>\n"
    "  __device__ __forceinline__ void operator()(const Each& _each) const {\n"
    + "".join(f"    {line}\n" for line in lines)
    + "  }\n"
    "};\n"
  )


def _packs(bound: Bound, layout: Layout) -> list[str]:
  """The loop over several neighbours at once."""
  count = layout.vector
  loads: list[str] = []
  arguments = [f"_pack * {count} + _k"]
  for param, kind in zip(bound.code.mapped, layout.kinds, strict=True):
    if kind == "o":
      arguments.append(f"_one_{param.name}")
      continue
    pack = f"callgate::elementwise::Pack<{bound.stored(param)}, {count}>"
    loads.append(
      f"const {pack} _in_{param.name} = reinterpret_cast<const {pack}*>({param.name})[_pack];"
    )
    arguments.append(f"static_cast<{bound.value(param)}>(_in_{param.name}.values[_k])")
  stores: list[str] = []
  for param in bound.code.outputs:
    pack = f"callgate::elementwise::Pack<{bound.stored(param)}, {count}>"
    loads.append(f"{pack} _out_{param.name};")
    stores.append(f"reinterpret_cast<{pack}*>({param.name})[_pack] = _out_{param.name};")
  inner = element(bound, arguments, "_out_{}.values[_k]")
  return [
    f"const int64_t _packs = _size / {count}, _done = _packs * {count};",
    "for (int64_t _pack = _first; _pack < _packs; _pack += _step) {",
    *(f"  {line}" for line in loads),
    "#pragma unroll",
    f"  for (int _k = 0; _k < {count}; ++_k) {{",
    *(f"    {line}" for line in inner),
    "  }",
    *(f"  {line}" for line in stores),
    "}",
  ]


def _singles(bound: Bound, layout: Layout) -> list[str]:
  """The loop over elements one by one: the tail of the packs, or all."""
  arguments = ["_i"]
  offsets: list[str] = []
  strided = _strided(bound.code, layout)
  if strided:
    whole = "uint64_t" if layout.wide else "uint32_t"
    offsets.append(f"int64_t _offsets[{len(strided)}];")
    offsets.append(f"_strides.template place<{whole}>(_i, _offsets);")
  for param, kind in zip(bound.code.mapped, layout.kinds, strict=True):
    place = f"_offsets[{strided.index(param)}]" if kind == "s" else "_i"
    arguments.append(
      f"_one_{param.name}"
      if kind == "o"
      else f"static_cast<{bound.value(param)}>({param.name}[{place}])"
    )
  inner = element(bound, arguments, "{}[_i]")
  return [
    "for (int64_t _i = _done + _first; _i < _size; _i += _step) {",
    *(f"  {line}" for line in (*offsets, *inner)),
    "}",
  ]


def _kernel(entry: str, bound: Bound, layout: Layout) -> str:
  """The function that a launch runs."""
  strided = _strided(bound.code, layout)
  raws = [p for p in bound.code.inputs if p.raw]
  params = ["int64_t _size", *bound.pointers]
  if strided:
    params.append(f"callgate::elementwise::Strides<{layout.axes}, {len(strided)}> _strides")
  params += [
    f"callgate::elementwise::Raw<{bound.stored(p)}, {bound.value(p)}, {rank}> {p.name}"
    for p, rank in zip(raws, layout.ranks, strict=True)
  ]
  fields = ["_size", *(p.name for p in (*bound.code.mapped, *bound.code.outputs))]
  fields += ["_strides"] if strided else []
  passed = "".join(f", {p.name}" for p in raws)
  return (
    f"__global__ void __launch_bounds__({_THREADS}) {entry}(\n    "
    + ",\n    ".join(params)
    + f") {{\n  callgate_body(Elements{{{', '.join(fields)}}}, _size{passed});\n}}\n"
  )


# -- launches ------------------------------------------------------------------------------------
def parameters_of(
  code: Code, layout: Layout, operands: Sequence[Any], results: Sequence[Any]
) -> tuple[Parameter, ...]:
  """What a launch passes: see `_kernel`."""
  size = math.prod(results[0].shape)
  indices = {p.name: i for i, p in enumerate(code.inputs)}
  found = [Parameter.scalar(size, np.int64)]
  found += [Parameter.pointer("operand", indices[p.name]) for p in code.mapped]
  found += [Parameter.pointer("result", i) for i in range(len(code.outputs))]
  shapes = [operands[indices[p.name]].shape for p in _strided(code, layout)]
  axes = collapsed(shapes, results)
  if axes:
    numbers = [extent for extent, _ in axes]
    numbers += [step for _, strides in axes for step in strides]
    found.append(Parameter(struct.pack(f"<{len(numbers)}q", *numbers)))
  for param in code.inputs:
    if param.raw:
      index = indices[param.name]
      extents = tuple(operands[index].shape) or (1,)
      data = bytes(8) + struct.pack(f"<{len(extents)}q", *extents)
      found.append(Parameter(data, (Address(0, "operand", index),)))
  return tuple(found)


class ElementwisePart(CudaPart):
  """What runs an elementwise kernel on CUDA devices; tracing and lowering threads use it at once.

  Attributes:
    options: of the compilation.
  """

  def __init__(self, kernel: Any, options: CudaOptions) -> None:
    self._kernel = weakref.ref(kernel)  # which holds this
    self.options = options

  def arch(self) -> tuple[int, ...]:
    return self.options.arch

  def plan(self, call: CudaCall) -> Plan:
    kernel = self._kernel()
    assert kernel is not None  # whose call this is
    code: Code = kernel.user_code
    layout = layout_of(
      code, [x.shape for x in call.operands], [x.dtype for x in call.operands], call.results
    )
    key = f"{kernel.letters_text(call.operands, call.static)}:{layout.text}"
    built = self._built(kernel, key, call.capabilities)
    taken = -(-math.prod(call.results[0].shape) // layout.vector)
    blocks = min(-(-taken // _THREADS), _BLOCKS)
    grid, block, _, _ = _launch.checked(kernel.label, blocks, _THREADS)
    parameters = parameters_of(code, layout, call.operands, call.results)
    launch = Launch(built[0].entry, grid, block, parameters)
    return Plan(key, tuple(each.image for each in built), (launch,))

  def images(self, key: str, capabilities: tuple[int, ...]) -> tuple[Image, ...] | None:
    kernel = self._kernel()
    assert kernel is not None
    if not kernel.has_key(key):
      return None
    return tuple(built.image for built in self._built(kernel, key, capabilities))

  def _built(self, kernel: Any, key: str, capabilities: tuple[int, ...]) -> list[nvrtc.Built]:
    entry, layout = entry_of(kernel.name), Layout.parse(key.partition(":")[2])
    source = cuda_unit(kernel.label, entry, kernel.bound(key, _on_device), layout)
    options = (*_OPTIONS, *self.options.options)
    folders = kernel.build_options["include_dirs"]
    try:
      return [
        nvrtc.build(
          kernel.label, f"{kernel.name}.cu", source, entry, capability, options=options,
          include_dirs=folders,
        )
        for capability in capabilities or (0,)
      ]  # fmt: skip
    except CompileError as error:
      raise kernel.explained(error) from None
