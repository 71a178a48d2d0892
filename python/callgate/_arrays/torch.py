# SPDX-License-Identifier: Apache-2.0
"""PyTorch's tensors as NumPy arrays over the same memory, and the runtime's Buffers as tensors."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from callgate._core import extras


def torch_converter() -> Callable[[Any], Any]:
  """Makes a tensor of a Buffer, on the CPU or a GPU; there XLA's stream is torch's current one."""
  dlpack = extras.library("torch.utils.dlpack", "PyTorch", "torch", by="arrays='torch'")

  def convert(buffer: Any) -> Any:
    # A capsule, so that nothing is waited for. Unversioned: torch has no read-only tensors, and
    # would warn about each input.
    return dlpack.from_dlpack(buffer._dlpack_unchecked())

  return convert


def to_numpy(value: Any) -> Any:
  """A returned array as NumPy: torch tensors need help with gradients and bfloat16."""
  if not (hasattr(value, "detach") and hasattr(value, "data_ptr")):
    return value
  tensor = value.detach().cpu()
  name = str(tensor.dtype).removeprefix("torch.")
  if name == "bfloat16" or name.startswith("float8"):
    import ml_dtypes
    import torch  # pyright: ignore[reportMissingImports]

    words = torch.int16 if name == "bfloat16" else torch.uint8
    # A clone has memory, where torch's own stands for zeros.
    return tensor.clone().view(words).numpy().view(getattr(ml_dtypes, name))
  return tensor.numpy(force=True)  # also of zeros without memory and lazy conjugates
