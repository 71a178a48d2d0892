# SPDX-License-Identifier: Apache-2.0
"""Images for CUDA: which kernels they have, what parameters these declare, who can't make them."""

from __future__ import annotations

import struct as binary
from typing import Any

import jax
import numpy as np
import pytest

import callgate as cg
from callgate._build import nvrtc
from callgate._kernel.cuda.kernel import entries
from callgate._kernel.launch import CudaCall

_KPARAM_INFO, _KPARAM_INFO_WIDE = 0x17, 0x45
_SIZED = 4  # the format of entries of .nv.info whose payload follows


def _missing_nvrtc() -> str:
  try:
    nvrtc.compiler()
  except cg.CompileError as error:
    return str(error).partition("\n")[0]
  return ""


_MISSING = _missing_nvrtc()
needs_nvrtc = pytest.mark.skipif(bool(_MISSING), reason=_MISSING or "has NVRTC")


def struct(shape: tuple[int, ...], dtype: Any = np.float32) -> Any:
  return jax.ShapeDtypeStruct(shape, dtype)


def call(
  operands: Any, results: Any, capabilities: Any = (90,), batch: Any = None, **static: Any
) -> CudaCall:
  """A call with these arrays and static values, as plans are made for it."""
  return CudaCall(tuple(operands), tuple(results), static, batch, capabilities)


def declared(image: Any, entry: str) -> list[tuple[int, int]]:
  """The offset and size of each parameter of a kernel in an image."""
  if image.capability == 0:
    found: list[tuple[int, int]] = []
    end = 0
    for size, align in entries(image.code.rstrip(b"\0").decode())[entry]:
      start = -(-end // align) * align
      found.append((start, size))
      end = start + size
    return found
  section = _sections(image.code)[f".nv.info.{entry}"]
  parameters: dict[int, tuple[int, int]] = {}
  at = 0
  while at < len(section):
    form, attribute, size = binary.unpack_from("<BBH", section, at)
    at += 4
    if form != _SIZED:
      continue
    if attribute == _KPARAM_INFO:
      _, ordinal, offset, packed = binary.unpack_from("<IHHI", section, at)
      parameters[ordinal] = (offset, packed >> 18)
    assert attribute != _KPARAM_INFO_WIDE
    at += size
  return [parameters[i] for i in range(len(parameters))]


def passed(launch: Any) -> list[tuple[int, int]]:
  """The offset and size of each parameter of a launch, each aligned to what its size allows."""
  found: list[tuple[int, int]] = []
  end = 0
  for parameter in launch.parameters:
    size = len(parameter.data)
    align = next(a for a in (8, 4, 2, 1) if size % a == 0)
    end = -(-end // align) * align
    found.append((end, size))
    end += size
  return found


def check_plan(plan: Any) -> None:
  """The images have each launch's kernel, whose parameters are those that the launch passes."""
  for launch in plan.launches:
    for image in plan.images:
      assert image.code[:4] == b"\x7fELF" if image.capability else image.code[-1:] == b"\0"
      assert declared(image, launch.entry) == passed(launch)


def _sections(elf: bytes) -> dict[str, bytes]:
  assert elf[:5] == b"\x7fELF\x02"
  (table,) = binary.unpack_from("<Q", elf, 0x28)
  size, count, names = binary.unpack_from("<HHH", elf, 0x3A)
  heads = [binary.unpack_from("<IIQQQQ", elf, table + i * size) for i in range(count)]
  text = elf[heads[names][4] : heads[names][4] + heads[names][5]]
  return {
    text[name : text.index(b"\0", name)].decode(): elf[at : at + length]
    for name, kind, _, _, at, length in heads
    if kind != 8  # of no bytes in the file
  }
