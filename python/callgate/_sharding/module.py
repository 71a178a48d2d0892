# SPDX-License-Identifier: Apache-2.0
"""Writes the module of a call on shards: the partitioner's answer to XLA, as text.

XLA parses the text. MLIR's bindings would take ten times as long, mostly for their context, which
no two answers can share.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from callgate._core.attributes import Raw
from callgate._core.attributes import text as attribute_text

Groups = Sequence[Sequence[int]]
_DTYPE = re.compile(r"(u?int|b?float|complex)(\d+)_?(e\dm\d\w*)?")
_TOKEN = re.compile(rb'"(?:[^"\\]|\\.)*"|->|[][(){}<>,]', re.DOTALL)
_ESCAPE = re.compile(rb'\\([0-9A-Fa-f]{2}|[\\"nt])')
_NAMED = {b"\\": b"\\", b'"': b'"', b"n": b"\n", b"t": b"\t"}


def read_attributes(config: bytes) -> dict[str, Any]:
  """Reads a call's attributes from XLA's text: strings as str, others as `Raw` text."""

  def plain(match: re.Match[bytes]) -> bytes:
    return _NAMED.get(match[1]) or bytes([int(match[1], 16)])

  held: dict[str, Any] = {}
  for entry in _entries(config.strip()[1:-1]):
    name, _, value = map(bytes.strip, entry.partition(b"="))
    is_text = value.startswith(b'"')
    text = (_ESCAPE.sub(plain, value[1:-1]) if is_text else value).decode()
    held[name.strip(b'"').decode()] = text if is_text else Raw(text)
  return held


def _entries(text: bytes) -> list[bytes]:
  """Splits a text at the commas outside brackets and strings."""
  parts: list[bytes] = []
  start = depth = 0
  for token in _TOKEN.finditer(text):
    depth += (token[0] in b"{[(<") - (token[0] in b"}])>")
    if token[0] == b"," and depth == 0:
      parts.append(text[start : token.start()])
      start = token.end()
  last = text[start:].strip()
  return [*parts, last] if last else parts


def _element(dtype: Any) -> str:
  """Returns MLIR's name: int8 is i8, bfloat16 is bf16, float8_e4m3fn is f8E4M3FN."""
  name = np.dtype(dtype).name
  match = _DTYPE.fullmatch(name)
  if match is None and name != "bool":
    raise TypeError(f"callgate: expected a dtype of XLA, got {name}")
  kind, bits, form = match.groups("") if match else ("int", "1", "")
  if kind == "complex":
    return f"complex<f{int(bits) // 2}>"
  return kind.replace("int", "i").replace("float", "f") + bits + form.upper()


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
  """Returns a module whose `main` makes one FFI call.

  Arrays are (shape, dtype); the dtype None is a token. With `partition_id` the device's number is
  the last operand. The results of each group in `broadcast` are added up, bit by bit.
  """

  def typed(array: tuple[Sequence[int], Any]) -> str:
    return "!stablehlo.token" if array[1] is None else _tensor(array[0], _element(array[1]))

  arguments = ", ".join(f"%a{i}: {typed(array)}" for i, array in enumerate(operands))
  lines: list[str] = []
  if partition_id:
    lines.append(f"%a{len(operands)} = stablehlo.partition_id : tensor<ui32>")
    operands = [*operands, ((), np.uint32)]
  outputs = [typed(array) for array in results]
  shared = ", ".join(
    "#stablehlo.output_operand_alias<"
    f"output_tuple_indices = [{o if len(outputs) > 1 else ''}], operand_index = {i}, "
    "operand_tuple_indices = []>"
    for i, o in aliases.items()
  )
  many = f":{len(outputs)}" if len(outputs) > 1 else ""
  lines.append(
    f"{f'%r{many} = ' if outputs else ''}stablehlo.custom_call @{target}("
    f"{', '.join(f'%a{i}' for i in range(len(operands)))}) "
    f"{{api_version = 4 : i32, backend_config = {attribute_text(attributes)}, "
    f"has_side_effect = {'true' if has_side_effect else 'false'}, "
    f"operand_layouts = [{', '.join(_layout(len(shape)) for shape, _ in operands)}], "
    f"output_operand_aliases = [{shared}], "
    f"result_layouts = [{', '.join(_layout(len(shape)) for shape, _ in results)}]}} : "
    f"({', '.join(map(typed, operands))}) -> ({', '.join(outputs)})"
  )
  returned = [f"%r#{i}" for i in range(len(outputs))] if many else ["%r"] * len(outputs)
  if broadcast is not None:
    pairs = enumerate(zip(returned, results, strict=True))
    returned = [_added_up(lines, f"%s{i}", value, *array, broadcast) for i, (value, array) in pairs]
  lines.append(f"return {', '.join(returned)}{' : ' if outputs else ''}{', '.join(outputs)}")
  head = f"module {{ func.func public @main({arguments}) -> ({', '.join(outputs)}) {{"
  return "\n".join([head, *lines, "} }"]).encode()


def _added_up(
  lines: list[str], name: str, value: str, shape: Sequence[int], dtype: Any, groups: Groups
) -> str:
  """Adds up a value's bits over groups of devices; all devices but one have zeros."""
  if dtype is None:
    return value
  own = _tensor(shape, _element(dtype))
  if np.dtype(dtype).kind == "c":
    part = np.dtype(f"f{np.dtype(dtype).itemsize // 2}")
    half = _tensor(shape, _element(part))
    sums: list[str] = []
    for which in ("real", "imag"):
      lines.append(f"{name}_{which} = stablehlo.{which} {value} : ({own}) -> {half}")
      sums.append(_added_up(lines, f"{name}_{which}_", f"{name}_{which}", shape, part, groups))
    lines.append(f"{name} = stablehlo.complex {', '.join(sums)} : {own}")
    return name
  bits = re.fullmatch(r"(?:ui|i|f|bf)(\d+).*", _element(dtype))
  assert bits is not None
  # A sub-byte type has no bits to add up; its values are small enough for a number.
  convert = "bitcast_convert" if int(bits[1]) >= 8 else "convert"
  element = f"ui{bits[1]}" if int(bits[1]) >= 8 else "f32"
  word = _tensor(shape, element)
  lines += [
    f"{name}_w = stablehlo.{convert} {value} : ({own}) -> {word}",
    f'{name}_s = "stablehlo.all_reduce"({name}_w) ({{',
    f"^bb0(%x: tensor<{element}>, %y: tensor<{element}>):",
    f"  %z = stablehlo.add %x, %y : tensor<{element}>",
    f"  stablehlo.return %z : tensor<{element}>",
    "}) {channel_handle = #stablehlo.channel_handle<handle = 1, type = 1>, "
    f"replica_groups = dense<{[list(group) for group in groups]}> : "
    f"tensor<{len(groups)}x{len(groups[0])}xi64>, use_global_device_ids}} : ({word}) -> {word}",
    f"{name} = stablehlo.{convert} {name}_s : ({word}) -> {own}",
  ]
  return name
