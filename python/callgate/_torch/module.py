# SPDX-License-Identifier: Apache-2.0
"""`torch.nn.Module`s as functions of their parameters; imported when the first one is made."""

from __future__ import annotations

import contextlib
import threading
import weakref
from collections.abc import Generator, Mapping
from typing import Any

import ml_dtypes
import numpy as np
import torch  # pyright: ignore[reportMissingImports]
from torch.nn.modules import batchnorm  # pyright: ignore[reportMissingImports]

from callgate._core.errors import GateDefinitionError
from callgate._torch.calls import is_abstract

# Batch and instance normalization. They write their statistics in C++, without a new `_version`.
_NormBase = batchnorm._NormBase  # pyright: ignore[reportPrivateUsage]
_OF_RNNS = ("_flat_weights", "_flat_weight_refs")  # a call of an RNN keeps its parameters here
# Atomic: single steps. All functions of a module share its lock.
_locks: weakref.WeakKeyDictionary[Any, threading.RLock] = weakref.WeakKeyDictionary()


class ModuleFunction:
  """`f(params, *args, **kwargs)`: the module's forward with these parameters and buffers.

  Calls of one module run one after another, because torch puts the parameters into the module
  during a call.
  """

  def __init__(self, label: str, module: Any, mutable: bool) -> None:
    self.label, self.module, self.mutable = label, module, mutable
    self.__name__ = type(module).__name__
    self._lock = _locks.setdefault(module, threading.RLock())

  def __call__(self, params: Mapping[str, Any], /, *args: Any, **kwargs: Any) -> Any:
    with self._lock:
      return self._call(dict(params), args, kwargs)

  def _call(self, tensors: dict[str, Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    buffers = {name: tensors[name] for name, _ in self.module.named_buffers()}
    if self.mutable or self.module.training:
      # The module may write to its buffers, and the arguments are XLA's memory.
      buffers = {name: value.clone() for name, value in buffers.items()}
      tensors.update(buffers)
    watched = not self.mutable and any(map(is_abstract, tensors.values()))
    versions = {name: value._version for name, value in buffers.items()} if watched else {}
    with self._holding(tensors):
      result = self.module(*args, **kwargs)
    written = [name for name, version in versions.items() if buffers[name]._version != version]
    for prefix, part in self.module.named_modules() if watched else ():
      if isinstance(part, _NormBase) and part.training and part.track_running_stats:
        written.append(f"{prefix}.running_mean".removeprefix("."))
    if written:
      what = f"{self.label}: the module writes its buffer '{written[0]}' when called"
      returns = "whose calls return (result, new buffers)"
      expected = f"Call module.eval() first, or pass mutable=True, {returns}"
      raise GateDefinitionError(f"{what}. {expected}")
    return (result, buffers) if self.mutable else result

  @contextlib.contextmanager
  def _holding(self, tensors: Mapping[str, Any]) -> Generator[None]:
    """Puts these tensors into the module, under all names of the tensors that they replace.

    `torch.func.functional_call` does not put the module's own tensors back into a submodule that is
    registered twice, nor into RNNs.
    """
    names = {id(own): name for name, own in self._own().items()}
    held: list[tuple[dict[str, Any], str, Any]] = []
    try:
      for part in self.module.modules():
        if isinstance(part, torch.nn.RNNBase):
          held.extend((vars(part), name, vars(part)[name]) for name in _OF_RNNS)
        for own in (vars(part)["_parameters"], vars(part)["_buffers"]):
          for key, value in own.items():
            if value is not None:
              held.append((own, key, value))
              own[key] = tensors[names[id(value)]]
      yield
    finally:
      for own, key, value in held:
        own[key] = value

  def _own(self) -> dict[str, Any]:
    return {**dict(self.module.named_parameters()), **dict(self.module.named_buffers())}

  def tensors(self) -> dict[str, Any]:
    """Returns parameters and buffers by name, each shared tensor once."""
    with self._lock:  # a call replaces them
      return self._own()

  def trainable(self) -> dict[str, bool]:
    with self._lock:
      wanted = {name: p.requires_grad for name, p in self.module.named_parameters()}
    return {name: wanted.get(name, False) for name in self.tensors()}

  def load(self, params: Mapping[str, Any]) -> None:
    # Before taking the lock: the arrays may come from a program whose calls need it.
    values: dict[str, Any] = {}
    for name, value in params.items():
      array = np.asarray(value)  # NumPy lacks bfloat16 and the like
      dtype = np.float32 if hasattr(ml_dtypes, array.dtype.name) else array.dtype
      values[name] = torch.from_numpy(np.array(array, dtype))
    with torch.no_grad(), self._lock:
      for name, tensor in self.tensors().items():
        tensor.copy_(values[name])
