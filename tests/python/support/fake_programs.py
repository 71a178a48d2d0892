# SPDX-License-Identifier: Apache-2.0
"""Runs JAX programs for CUDA without a GPU, on the fake driver.

A function is traced and lowered for platform "cuda" by JAX, as for a real GPU. Its program's custom
calls go to the handlers that were registered for CUDA, with call frames as XLA makes them, memory
of the fake driver and one of its streams. All other operations are StableHLO's own: each is
computed on the stream by the reference interpreter that comes with jaxlib, in its place among the
rest, so a program never waits for its stream but where XLA would: for a loop's condition and a
branch's index.

XLA's use of memory is imitated, too: a call site's state lives as long as the program; a result
that is an operand's memory gets a copy first, unless the memory is the program's own; and
intermediate arrays are overwritten on the stream when the program is over, as other programs would.
"""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jaxlib.xla_client
import numpy as np
from fake_cuda import DeviceArray, FakeCuda, Graph, Stream, run_ids
from fake_stablehlo import Evaluator, array_type, dtype_code
from jaxlib.mlir import ir

_MESSAGE = 1 << 16

# -- handlers ------------------------------------------------------------------------------------
_handlers: dict[str, Mapping[str, Any]] = {}
_registered = False


def handlers(target: str) -> Mapping[str, Any]:
  """The handlers for CUDA; stands in for the plugin that would ask for them."""
  global _registered
  if not _registered:
    _registered = True

    def register(name: Any, function: Any, _platform: str, _version: int, _traits: Any) -> None:
      name = name.decode() if isinstance(name, bytes) else name
      _handlers[name] = function if isinstance(function, Mapping) else {"execute": function}

    jaxlib.xla_client.register_custom_call_handler("CUDA", register)
  if target not in _handlers:
    raise NotImplementedError(f"no handler is registered for CUDA and target {target!r}")
  return _handlers[target]


def _address(capsule: Any) -> int | None:
  if capsule is None:
    return None
  name, pointer = ctypes.pythonapi.PyCapsule_GetName, ctypes.pythonapi.PyCapsule_GetPointer
  name.argtypes, name.restype = [ctypes.py_object], ctypes.c_char_p
  pointer.argtypes, pointer.restype = [ctypes.py_object, ctypes.c_char_p], ctypes.c_void_p
  return pointer(capsule, name(capsule))


def is_capturable(target: str) -> bool:
  """True if XLA may record the target's calls into a command buffer."""
  from fake_cuda import open_fake

  runner = open_fake().runner
  runner.runner_traits.argtypes = [ctypes.c_void_p]
  return runner.runner_traits(_address(handlers(target)["execute"])) == 1


class ProgramError(RuntimeError):
  """The error that a handler returned; `code` is XLA's, 13 for an internal error."""

  def __init__(self, code: int, message: str) -> None:
    super().__init__(message)
    self.code = code


class _Array(ctypes.Structure):
  _fields_ = (
    ("dtype", ctypes.c_int),
    ("rank", ctypes.c_int64),
    ("dims", ctypes.POINTER(ctypes.c_int64)),
    ("data", ctypes.c_void_p),
  )


class _Run(ctypes.Structure):
  _fields_ = (("stream", ctypes.c_void_p), ("device", ctypes.c_int), ("id", ctypes.c_int64))


TOKEN = object()  # a value of the program that has no memory


class Site:
  """One custom call of one executable: instantiated once, executed often.

  For calls that no program makes: attributes are Python's numbers with a NumPy type, text, arrays
  and dictionaries of these.
  """

  def __init__(self, fake: FakeCuda, target: str, attributes: Mapping[str, Any]) -> None:
    self.fake, self.runner = fake, fake.runner
    for name in ("new_site", "attributes", "add_dictionary"):
      getattr(self.runner, f"runner_{name}").restype = ctypes.c_void_p
    found = handlers(target)
    stages = ("instantiate", "prepare", "initialize", "execute")
    self._site = ctypes.c_void_p(
      self.runner.runner_new_site(*(ctypes.c_void_p(_address(found.get(s))) for s in stages))
    )
    self._fill(ctypes.c_void_p(self.runner.runner_attributes(self._site)), attributes)
    message = ctypes.create_string_buffer(_MESSAGE)
    code = self.runner.runner_instantiate(self._site, message, ctypes.c_size_t(_MESSAGE))
    if code != 0:
      raise ProgramError(code, message.value.decode())

  def close(self) -> None:
    """Destroys its state, as XLA does with the executable."""
    site, self._site = self._site, None
    if site is not None:
      self.runner.runner_delete_site(site)

  def __del__(self) -> None:
    if getattr(self, "_site", None) is not None:
      self.close()

  def _fill(self, to: Any, attributes: Mapping[str, Any]) -> None:
    size = ctypes.c_size_t
    for name, value in attributes.items():
      key = name.encode()
      if isinstance(value, str | bytes):
        text = value.encode() if isinstance(value, str) else value
        self.runner.runner_add_string(to, key, text, size(len(text)))
      elif isinstance(value, Mapping):
        inner = ctypes.c_void_p(self.runner.runner_add_dictionary(to, key))
        self._fill(inner, value)
      else:
        array = np.asarray(value)
        code, data = dtype_code(array.dtype), array.tobytes()
        if array.ndim == 0:
          self.runner.runner_add_scalar(to, key, code, data, size(len(data)))
        else:
          count = size(array.size)
          self.runner.runner_add_array(to, key, code, count, data, size(len(data)))

  def execute(self, operands: Sequence[Any], results: Sequence[Any], stream: Stream) -> None:
    """Calls the handler; operands and results are DeviceArrays, or TOKEN."""
    message = ctypes.create_string_buffer(_MESSAGE)
    run = _Run(stream.handle, stream.device, next(run_ids))
    code = self.runner.runner_execute(
      self._site,
      *(x for side in (operands, results) for x in (_arrays(side), ctypes.c_size_t(len(side)))),
      ctypes.byref(run),
      message,
      ctypes.c_size_t(_MESSAGE),
    )
    if code != 0:
      raise ProgramError(code, message.value.decode())

  def release_scratch(self) -> None:
    self.runner.runner_release_scratch(self._site)


def _arrays(values: Sequence[Any]) -> Any:
  out = (_Array * len(values))()
  for array, value in zip(out, values, strict=True):
    if value is TOKEN:
      array.dtype = 17
      continue
    array.dtype, array.rank = dtype_code(value.dtype), len(value.shape)
    array.dims = (ctypes.c_int64 * len(value.shape))(*value.shape)
    array.data = value.pointer
  return out


# -- programs ------------------------------------------------------------------------------------
class Pending:
  """A run of a program: its work has been given to the stream."""

  def __init__(self, program: Program, stream: Stream) -> None:
    self.program, self.stream = program, stream
    self.results: list[Any] = []  # the program's flat results: DeviceArrays, or TOKEN
    self.temporaries: list[DeviceArray] = []
    self.constants: list[DeviceArray] = []
    self.failures: list[BaseException] = []  # of operations, on the stream's thread
    self.graph: Graph | None = None

  def get(self) -> Any:
    """Waits for the stream; the results, as NumPy's arrays."""
    failed = self.stream.finish()
    if self.failures:
      raise self.failures[0]
    if failed:
      raise ProgramError(13, f"the stream failed with {failed}")
    arrays = [value.get() for value in self.results if value is not TOKEN]
    return jax.tree.unflatten(self.program.out_tree, arrays)


class Program:
  """A function compiled for CUDA, as far as that goes without a GPU.

  Args:
    fake: the driver.
    function: what jax.jit takes; it may be jitted before.
    arguments: arrays, or what has their shapes and dtypes.
    donate: which of the flat arguments the program may write to.
  """

  def __init__(
    self,
    fake: FakeCuda,
    function: Callable[..., Any],
    *arguments: Any,
    donate: Sequence[int] = (),
  ) -> None:
    self.fake, self.donate = fake, frozenset(donate)
    traced = jax.jit(function, keep_unused=True).trace(*arguments)
    # Kept: what the program needs while it lives hangs on it.
    self.lowered = traced.lower(lowering_platforms=("cuda",))
    self.out_tree = jax.tree.structure(self.lowered.out_info)
    self.module: Any = self.lowered.compiler_ir()
    self.functions = {op.name.value: op for op in self.module.body.operations if _is_func(op)}
    self.sites: dict[tuple[Any, ...], Site] = {}
    self._evaluators: dict[tuple[Any, ...], Evaluator] = {}
    self._lock = threading.Lock()

  @property
  def text(self) -> str:
    """The program, as StableHLO."""
    return str(self.module)

  def targets(self) -> list[str]:
    """The targets of its custom calls, in the order of the text."""
    found: list[str] = []

    def visit(op: Any) -> Any:
      if op.name == "stablehlo.custom_call":
        found.append(ir.StringAttr(op.attributes["call_target_name"]).value)
      return ir.WalkResult.ADVANCE

    self.module.operation.walk(visit)
    return found

  def start(self, *arguments: Any, stream: Stream | None = None) -> Pending:
    """Runs it as far as its host side goes; arguments are arrays or DeviceArrays."""
    from fake_interpreter import Interpreter

    pending = Pending(self, stream or self.fake.stream())
    flat = jax.tree.leaves(arguments)
    Interpreter(self, pending).run(flat)
    return pending

  def __call__(self, *arguments: Any, stream: Stream | None = None) -> Any:
    """Runs it and gives its results as NumPy's arrays."""
    return self.start(*arguments, stream=stream).get()

  def capture(self, *arguments: Any, stream: Stream | None = None) -> Pending:
    """Records a run into a graph instead of running it: `pending.graph.replay(stream)` runs it.

    Results are in `pending.results` after each replay. Raises ProgramError where the capture was
    invalidated.
    """
    stream = stream or self.fake.stream()
    flat = [self._device(value, stream.device) for value in jax.tree.leaves(arguments)]
    stream.begin_capture()
    try:
      from fake_interpreter import Interpreter

      pending = Pending(self, stream)
      Interpreter(self, pending, capturing=True).run(flat)
    finally:
      graph = stream.end_capture()
    if graph is None:
      raise ProgramError(13, "the capture was invalidated")
    graph.kept += [flat, pending.temporaries, pending.constants]
    pending.graph = graph
    return pending

  def _device(self, value: Any, device: int) -> DeviceArray:
    return value if isinstance(value, DeviceArray) else self.fake.put(value, device)

  def close(self) -> None:
    """Ends the executable; its call sites' states die."""
    for site in self.sites.values():
      site.close()
    self.sites.clear()

  def site(self, path: tuple[Any, ...], make: Callable[[], Site]) -> Site:
    with self._lock:
      if path not in self.sites:
        self.sites[path] = make()
      return self.sites[path]

  def evaluator(self, path: tuple[Any, ...], op: Any) -> Evaluator:
    with self._lock:
      if path not in self._evaluators:
        self._evaluators[path] = Evaluator(op)
      return self._evaluators[path]


def _is_func(op: Any) -> bool:
  return op.operation.name == "func.func"


def load(
  fake: FakeCuda, function: Callable[..., Any], *arguments: Any, donate: Sequence[int] = ()
) -> Program:
  """See `Program`."""
  return Program(fake, function, *arguments, donate=donate)


def run(fake: FakeCuda, function: Callable[..., Any], *arguments: Any) -> Any:
  """The results of `jax.jit(function)(*arguments)` on a GPU, as NumPy's arrays."""
  return Program(fake, function, *arguments)(*arguments)


__all__ = ["TOKEN", "Pending", "Program", "ProgramError", "Site", "array_type", "load", "run"]
