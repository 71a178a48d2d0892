# SPDX-License-Identifier: Apache-2.0
"""Reads the needs of a 64-bit Mach-O library, such as a module for macOS.

The linker's tables say which functions the library binds to which other library; names without a
library ("flat namespace") come from what the process has loaded, as Python's do. Tables of Apple's
own linker for macOS 12 ("chained fixups") are not read. Formats: Apple's <mach-o/loader.h>.
"""

import dataclasses
import struct
from collections.abc import Iterator

MAGIC = 0xFEEDFACF
ARM64 = 0x0100000C
LOAD_DYLIB, DYLD_INFO_ONLY, BUILD_VERSION, CODE_SIGNATURE = 0xC, 0x80000022, 0x32, 0x1D
FLAT = -2  # BIND_SPECIAL_DYLIB_FLAT_LOOKUP
SYSTEM = ("/usr/lib/libSystem.B.dylib", "/usr/lib/libc++.1.dylib")
NEWEST = (12, 0)  # the macOS that wheels for arm64 promise to run on


@dataclasses.dataclass(frozen=True)
class Library:
  processor: int
  macos: tuple[int, int]  # the oldest that it runs on
  signed: bool  # arm64 loads nothing else; the linker's own signature is enough
  libraries: list[str]
  bound: dict[
    str, int
  ]  # each name that it takes from elsewhere: a library's number from 1, or FLAT


def read(data: bytes) -> Library:
  """Raises ValueError for data that is not a 64-bit Mach-O file."""
  magic, processor, _, _, commands = struct.unpack_from("<5I", data)
  if magic != MAGIC:
    raise ValueError(f"expected a 64-bit Mach-O file, got one that begins with {magic:#x}")
  macos, signed, bound = (0, 0), False, {}
  libraries: list[str] = []
  at = 32
  for _ in range(commands):
    kind, size = struct.unpack_from("<2I", data, at)
    if kind == LOAD_DYLIB:
      (name,) = struct.unpack_from("<I", data, at + 8)
      libraries.append(data[at + name : at + size].split(b"\0")[0].decode())
    elif kind == BUILD_VERSION:
      (oldest,) = struct.unpack_from("<I", data, at + 12)
      macos = (oldest >> 16, oldest >> 8 & 0xFF)
    elif kind == DYLD_INFO_ONLY:
      tables = struct.unpack_from("<10I", data, at + 8)
      for offset, length in (tables[2:4], tables[6:8]):  # names bound at once, and at first calls
        bound |= dict(bindings(data[offset : offset + length]))
    signed = signed or kind == CODE_SIGNATURE
    at += size
  return Library(processor, macos, signed, libraries, bound)


def bindings(code: bytes) -> Iterator[tuple[str, int]]:
  """The names that a program of dyld's binding instructions binds, with their libraries."""
  at, library, name = 0, 0, ""

  def number() -> int:
    nonlocal at
    value = shift = 0
    while True:
      byte = code[at]
      at, value, shift = at + 1, value | (byte & 0x7F) << shift, shift + 7
      if byte < 0x80:
        return value

  while at < len(code):
    operation, operand = code[at] & 0xF0, code[at] & 0x0F
    at += 1
    if operation == 0x10:
      library = operand
    elif operation == 0x20:
      library = number()
    elif operation == 0x30:
      library = operand - 16 if operand else 0
    elif operation == 0x40:
      end = code.index(b"\0", at)
      name, at = code[at:end].decode(), end + 1
    elif operation >= 0x90:
      yield name, library
    for _ in range({0x60: 1, 0x70: 1, 0x80: 1, 0xA0: 1, 0xC0: 2}.get(operation, 0)):
      number()


def problems(module: Library) -> list[str]:
  """The reasons why a module can't be loaded into Python on macOS for arm64."""
  found = []
  if module.processor != ARM64:
    found.append(f"expected code for arm64, got {module.processor:#x}")
  if module.macos != NEWEST:
    found.append(f"expected macOS {NEWEST}, got {module.macos}")
  if not module.signed:
    found.append("no signature")
  found += [f"it needs {name}" for name in module.libraries if name not in SYSTEM]
  for name, library in module.bound.items():
    python = name.startswith(("_Py", "__Py"))
    if python and library != FLAT:
      found.append(f"{name} is looked for in a library of the system")
    elif not python and library == FLAT:
      found.append(f"no library of the system has {name}")
  return found
