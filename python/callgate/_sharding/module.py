"""The module that a call on shards is: what the partitioner answers XLA with, as text.

XLA parses it. Made with MLIR's bindings it would take ten times as long: a context for them, which
no two answers can share, is most of that.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from callgate._core.attributes import Raw
from callgate._core.attributes import text as attribute_text

Groups = Sequence[Sequence[int]]
_ELEMENTS = {
  "bool": "i1",
  "float16": "f16",
  "bfloat16": "bf16",
  "float32": "f32",
  "float64": "f64",
  "complex64": "complex<f32>",
  "complex128": "complex<f64>",
}
_SMALL_FLOAT = re.compile(r"float(\d)_(e\dm\d\w*)")  # float8_e4m3fn is f8E4M3FN
_INTEGER = re.compile(r"(u?)int(\d+)")
_ESCAPE = re.compile(rb'\\([0-9A-Fa-f]{2}|[\\"nt])')
_NAMED = {b"\\": b"\\", b'"': b'"', b"n": b"\n", b"t": b"\t"}


def read_attributes(config: bytes) -> dict[str, Any]:
  """A call's attributes from XLA's text of them: strings as str, others as they are, in `Raw`."""
  held: dict[str, Any] = {}
  for entry in _entries(config.strip()[1:-1]):
    name, _, value = entry.partition(b"=")
    key, text = name.strip().strip(b'"').decode(), value.strip()
    held[key] = _unquoted(text[1:-1]) if text.startswith(b'"') else Raw(text.decode())
  return held


def _entries(text: bytes) -> list[bytes]:
  """The parts between commas that are in no brackets and no string."""
  parts: list[bytes] = []
  start = depth = 0
  position, end = 0, len(text)
  while position < end:
    letter = text[position : position + 1]
    if letter == b'"':
      position += 1
      while text[position : position + 1] != b'"':
        position += 2 if text[position : position + 1] == b"\\" else 1
    elif letter in b"{[(<":
      depth += 1
    elif letter in b"}])" or (letter == b">" and text[position - 1 : position] != b"-"):
      depth -= 1
    elif letter == b"," and depth == 0:
      parts.append(text[start:position])
      start = position + 1
    position += 1
  last = text[start:].strip()
  return [*parts, last] if last else parts


def _unquoted(text: bytes) -> str:
  def plain(match: re.Match[bytes]) -> bytes:
    code = match[1]
    return _NAMED.get(code) or bytes([int(code, 16)])

  return _ESCAPE.sub(plain, text).decode()


def _element(dtype: Any) -> str:
  name = np.dtype(dtype).name
  if known := _ELEMENTS.get(name):
    return known
  if match := _INTEGER.fullmatch(name):
    return f"{(match[1] and 'ui') or 'i'}{match[2]}"
  if match := _SMALL_FLOAT.fullmatch(name):
    return f"f{match[1]}{match[2].upper()}"
  raise TypeError(f"callgate: expected a dtype that XLA has, got {name}")


def _tensor(shape: Sequence[int], element: str) -> str:
  return f"tensor<{''.join(f'{extent}x' for extent in shape)}{element}>"


def _layout(rank: int) -> str:
  order = ", ".join(map(str, reversed(range(rank))))
  return f"dense<[{order}]> : tensor<{rank}xindex>" if rank else "dense<> : tensor<0xindex>"


def local_module(
  target: str,
  operands: Sequence[tuple[Sequence[int], Any]],
  results: Sequence[tuple[Sequence[int], Any]],
  attributes: Mapping[str, Any],
  *,
  has_side_effect: bool,
  aliases: Mapping[int, int],
  partition_id: bool,
  broadcast: Groups | None,
) -> bytes:
  """A module whose `main` makes one FFI call.

  Of arrays (shape, dtype), where a dtype None is a token. With `partition_id` the device's number
  is the last operand. The results of each group in `broadcast` are added up, bit by bit.
  """

  def typed(array: tuple[Sequence[int], Any]) -> str:
    return "!stablehlo.token" if array[1] is None else _tensor(array[0], _element(array[1]))

  inputs, outputs = [typed(array) for array in operands], [typed(array) for array in results]
  arguments = ", ".join(f"%a{i}: {text}" for i, text in enumerate(inputs))
  values = [f"%a{i}" for i in range(len(inputs))]
  types, ranks = list(inputs), [len(shape) for shape, _ in operands]
  lines: list[str] = []
  if partition_id:
    lines.append("%p = stablehlo.partition_id : tensor<ui32>")
    values.append("%p")
    types.append("tensor<ui32>")
    ranks.append(0)
  held = ", ".join(
    f"{name} = {attribute_text(value)}" for name, value in sorted(attributes.items())
  )
  shared = ", ".join(
    "#stablehlo.output_operand_alias<"
    f"output_tuple_indices = [{o if len(outputs) > 1 else ''}], operand_index = {i}, "
    "operand_tuple_indices = []>"
    for i, o in aliases.items()
  )
  many = f":{len(outputs)}" if len(outputs) > 1 else ""
  lines.append(
    f"{f'%r{many} = ' if outputs else ''}stablehlo.custom_call @{target}({', '.join(values)}) "
    f"{{api_version = 4 : i32, backend_config = {{{held}}}, "
    f"has_side_effect = {'true' if has_side_effect else 'false'}, "
    f"operand_layouts = [{', '.join(map(_layout, ranks))}], "
    f"output_operand_aliases = [{shared}], "
    f"result_layouts = [{', '.join(_layout(len(shape)) for shape, _ in results)}]}} : "
    f"({', '.join(types)}) -> ({', '.join(outputs)})"
  )
  returned = [f"%r#{i}" for i in range(len(outputs))] if many else ["%r"] * len(outputs)
  if broadcast is not None:
    returned = [
      value
      if dtype is None
      else _added_up(lines, f"%s{i}", value, shape, np.dtype(dtype), broadcast)
      for i, (value, (shape, dtype)) in enumerate(zip(returned, results, strict=True))
    ]
  lines.append(f"return {', '.join(returned)}{' : ' if outputs else ''}{', '.join(outputs)}")
  body = "\n".join(lines)
  text = (
    f"module {{ func.func public @main({arguments}) -> ({', '.join(outputs)}) {{\n{body}\n}} }}"
  )
  return text.encode()


def _added_up(
  lines: list[str],
  name: str,
  value: str,
  shape: Sequence[int],
  dtype: np.dtype[Any],
  groups: Groups,
) -> str:
  """Adds up a value's bits over groups of devices, of which all but one have zeros."""
  own = _tensor(shape, _element(dtype))
  if dtype.kind == "c":
    part = np.dtype(np.float32 if dtype.itemsize == 8 else np.float64)
    half = _tensor(shape, _element(part))
    sums: list[str] = []
    for which in ("real", "imag"):
      lines.append(f"{name}_{which} = stablehlo.{which} {value} : ({own}) -> {half}")
      sums.append(_added_up(lines, f"{name}_{which}_", f"{name}_{which}", shape, part, groups))
    lines.append(f"{name} = stablehlo.complex {', '.join(sums)} : {own}")
    return name
  bits = re.fullmatch(r"(?:ui|i|f|bf)(\d+).*", _element(dtype))
  assert bits is not None
  # What is smaller than a byte has no bits of its own to add up; it is small enough for a number.
  convert = "bitcast_convert" if int(bits[1]) >= 8 else "convert"
  element = f"ui{bits[1]}" if int(bits[1]) >= 8 else "f32"
  word = _tensor(shape, element)
  extent = len(groups[0])
  lines += [
    f"{name}_w = stablehlo.{convert} {value} : ({own}) -> {word}",
    f'{name}_s = "stablehlo.all_reduce"({name}_w) ({{',
    f"^bb0(%x: tensor<{element}>, %y: tensor<{element}>):",
    f"  %z = stablehlo.add %x, %y : tensor<{element}>",
    f"  stablehlo.return %z : tensor<{element}>",
    "}) {channel_handle = #stablehlo.channel_handle<handle = 1, type = 1>, "
    f"replica_groups = dense<{[list(group) for group in groups]}> : "
    f"tensor<{len(groups)}x{extent}xi64>, use_global_device_ids}} : ({word}) -> {word}",
    f"{name} = stablehlo.{convert} {name}_s : ({word}) -> {own}",
  ]
  return name
