# SPDX-License-Identifier: Apache-2.0
"""Converts PyTorch tensors to NumPy arrays over the same memory, and Buffers to tensors."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from callgate._core import extras


def torch_converter() -> Callable[[Any], Any]:
  """Returns a function that makes a tensor of a Buffer; torch's current stream is XLA's."""
  dlpack = extras.library("torch.utils.dlpack", "PyTorch", "torch", by="arrays='torch'")

  def convert(buffer: Any) -> Any:
    # A capsule needs no wait. Unversioned, because torch has no read-only tensors, and would warn
    # about each input.
    return dlpack.from_dlpack(buffer._dlpack_unchecked())

  return convert


def to_numpy(value: Any) -> Any:
  """Returns a returned array as NumPy; handles torch tensors with gradients or bfloat16."""
  if not (hasattr(value, "detach") and hasattr(value, "data_ptr")):
    return value
  tensor = value.detach().cpu()
  name = str(tensor.dtype).removeprefix("torch.")
  if name == "bfloat16" or name.startswith("float8"):
    import ml_dtypes
    import torch  # pyright: ignore[reportMissingImports]

    words = torch.int16 if name == "bfloat16" else torch.uint8
    # A clone has memory; torch may represent zeros without memory.
    return tensor.clone().view(words).numpy().view(getattr(ml_dtypes, name))
  return tensor.numpy(force=True)  # also for zeros without memory and lazy conjugates
