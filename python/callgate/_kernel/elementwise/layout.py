"""How the arrays of an elementwise kernel's call lie, for its variants on CUDA.

Pure functions of shapes and dtypes, called while a call is lowered.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from callgate._kernel.elementwise.source import Code

_VECTOR = 16  # bytes that a thread loads or stores at once


class Layout(NamedTuple):
  """What a variant knows of how a call's arrays lie."""

  # For each argument that is not raw "f" where it has the result's elements, "o" where it has one,
  # "s" where it is broadcast along some axes.
  kinds: str
  axes: int  # how many axes, once neighbours are collapsed, those of kind "s" take; 0 for none
  vector: int  # elements that a thread takes at once
  wide: bool  # whether there are more elements than 32 bits count
  ranks: tuple[int, ...]  # of the raw arguments

  @property
  def text(self) -> str:
    """As part of a variant's key."""
    ranks = ",".join(map(str, self.ranks))
    return f"{self.kinds}:{self.axes}:{self.vector}:{int(self.wide)}:{ranks}"

  @staticmethod
  def parse(text: str) -> Layout:
    """The inverse of `text`."""
    kinds, axes, vector, wide, ranks = text.split(":")
    numbers = tuple(int(rank) for rank in ranks.split(",") if rank)
    return Layout(kinds, int(axes), int(vector), wide == "1", numbers)


def layout_of(code: Code, operands: Sequence[Any], results: Sequence[Any]) -> Layout:
  """The layout of a call, by the types of all its arguments, raw ones too."""
  size = math.prod(results[0].shape)
  mapped = [x for p, x in zip(code.inputs, operands, strict=True) if not p.raw]
  own = [math.prod(x.shape) for x in mapped]
  kinds = "".join("f" if each == size else "o" if each == 1 else "s" for each in own)
  full = [x for x, kind in zip(mapped, kinds, strict=True) if kind == "f"]
  items = [np.dtype(x.dtype).itemsize for x in (*full, *results)]
  vector = 1 if "s" in kinds else max(1, _VECTOR // max(items))
  # Lanes of a batch that the runtime loops over begin at multiples of their size; others are the
  # whole buffers, which are aligned.
  if code.knows_place and any(size * item % (vector * item) for item in items):
    vector = 1
  strided = [x.shape for x, kind in zip(mapped, kinds, strict=True) if kind == "s"]
  ranks = tuple(len(x.shape) for p, x in zip(code.inputs, operands, strict=True) if p.raw)
  return Layout(kinds, len(collapsed(strided, results)), vector, size >= 2**31, ranks)


def collapsed(
  shapes: Sequence[Sequence[int]], results: Sequence[Any]
) -> list[tuple[int, list[int]]]:
  """The result's axes, innermost first, each with the strides of the operands that are broadcast.

  Neighbours along which all strides continue are one; no operands give no axes.
  """
  axes: list[tuple[int, list[int]]] = []
  if not shapes:
    return axes
  result = tuple(results[0].shape)
  steps = [1] * len(shapes)
  for back, extent in enumerate(reversed(result), 1):
    strides = [0] * len(shapes)
    for k, shape in enumerate(shapes):
      if len(shape) >= back and shape[-back] != 1:
        strides[k] = steps[k]
        steps[k] *= shape[-back]
    if extent == 1:
      continue
    if axes and strides == [s * axes[-1][0] for s in axes[-1][1]]:
      axes[-1] = (axes[-1][0] * extent, axes[-1][1])
    else:
      axes.append((extent, strides))
  return axes
