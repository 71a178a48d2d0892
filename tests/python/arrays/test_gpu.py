# SPDX-License-Identifier: Apache-2.0
"""arrays="cupy", "torch" and "numba" on CUDA, with small stand-ins for the libraries.

Each stand-in records what it was given: device, stream, memory, owner. The libraries themselves are
used by gpu/test_gates.py, on a GPU.
"""

from __future__ import annotations

import contextlib
import sys
import types
from collections.abc import Generator, Iterator
from typing import Any

import device_library
import fake_programs
import numpy as np
import pytest
from fake_cuda import FakeCuda

import callgate as cg
from callgate._arrays import gpu


class Recorder:
  """The state of a stand-in: what is current, and what it was asked for."""

  def __init__(self, fake: FakeCuda) -> None:
    self.fake = fake
    self.devices: list[int] = []
    self.streams: list[Any] = []
    self.log: list[Any] = []

  @contextlib.contextmanager
  def device(self, ordinal: int) -> Generator[None]:
    self.devices.append(ordinal)
    yield
    self.devices.pop()


class LibraryStream:
  """CuPy's and PyTorch's object for a stream of another library's."""

  def __init__(self, recorder: Recorder, pointer: int, device: Any) -> None:
    self.recorder, self.pointer, self.device = recorder, pointer, device

  def __enter__(self) -> LibraryStream:
    self.recorder.streams.append(self)
    return self

  def __exit__(self, *_: object) -> None:
    self.recorder.streams.pop()


class LibraryArray(device_library.Array):
  """An array of a stand-in: a GPU's memory, and what keeps it."""

  def __init__(self, pointer: int, shape: Any, dtype: Any, owner: Any, stream: int) -> None:
    self.pointer, self.shape, self.dtype = pointer, tuple(shape), np.dtype(dtype)
    self.owner, self.stream, self.entries = owner, stream, {}


@pytest.fixture
def modules(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
  """Puts modules into sys.modules, and forgets what was imported before and after."""

  def put(**stand_ins: Any) -> None:
    for name, module in stand_ins.items():
      monkeypatch.setitem(sys.modules, name.replace("__", "."), module)
    forget()

  forget()
  yield put
  forget()


def forget() -> None:
  gpu.library.cache_clear()
  gpu._cupy_stream.cache_clear()
  gpu._torch_stream.cache_clear()


def fake_cupy(recorder: Recorder, version: int = 14) -> Any:
  cupy: Any = types.ModuleType("cupy")

  def external(pointer: int, device: int) -> LibraryStream:
    assert version < 14, "deprecated"
    return LibraryStream(recorder, pointer, device)

  def from_external(stream: Any) -> LibraryStream:
    protocol, pointer = stream.__cuda_stream__()
    assert protocol == 0
    return LibraryStream(recorder, pointer, recorder.devices[-1])

  since_14 = {"from_external": from_external} if version >= 14 else {}
  cupy.cuda = types.SimpleNamespace(
    Device=recorder.device,
    Stream=types.SimpleNamespace(**since_14),
    ExternalStream=external,
    UnownedMemory=lambda pointer, size, owner, device_id: (pointer, size, owner, device_id),
    MemoryPointer=lambda memory, offset: (memory, offset),
  )

  class ndarray(LibraryArray):
    def __init__(self, shape: Any, dtype: Any, memptr: Any) -> None:
      if np.dtype(dtype).kind == "V":
        raise ValueError(f"Unsupported dtype {dtype}")
      (pointer, size, owner, device), offset = memptr
      recorder.log.append((size, device, offset))
      super().__init__(pointer + offset, shape, dtype, owner, recorder.streams[-1].pointer)

  cupy.ndarray = ndarray
  cupy.empty = lambda shape, dtype: np.empty(shape, dtype)
  cupy.ascontiguousarray = lambda x: x
  return cupy


def add(recorder: Recorder, x: Any, out: Any, stream: int) -> None:
  device_library.kernel(
    recorder.fake, lambda a, b: np.add(a, 1, out=b), reads=[x], writes=[out], stream=stream
  )


def numbers(count: int) -> np.ndarray[Any, Any]:
  return np.arange(count, dtype=np.float32)


# -- CuPy ----------------------------------------------------------------------------------------
@pytest.mark.parametrize("version", [13, 14])
def test_cupy_gets_the_memory_with_device_and_stream_current(
  fake: FakeCuda, modules: Any, version: int
) -> None:
  recorder = Recorder(fake)
  modules(cupy=fake_cupy(recorder, version))
  current: list[Any] = []

  def callback(out: Any, x: Any) -> None:
    current.append((recorder.devices[-1], recorder.streams[-1].pointer))
    add(recorder, x, out, recorder.streams[-1].pointer)

  gate = cg.gate(callback, out=lambda x: x, arrays="cupy", style="inplace")
  stream = fake.stream(1)
  program = fake_programs.load(fake, lambda x: gate(x * 2), numbers(3))
  np.testing.assert_array_equal(program(numbers(3), stream=stream), numbers(3) * 2 + 1)
  assert current == [(1, stream.handle)]
  assert recorder.log == [(12, 1, 0)] * 2
  assert recorder.devices == recorder.streams == []


def test_cupy_may_return_an_array(fake: FakeCuda, modules: Any) -> None:
  recorder = Recorder(fake)
  cupy = fake_cupy(recorder)
  modules(cupy=cupy)

  def callback(x: Any) -> Any:
    made = fake.empty(x.shape, x.dtype)
    result = cupy.ndarray(x.shape, x.dtype, ((made.pointer, 12, made, 0), 0))
    add(recorder, x, result, recorder.streams[-1].pointer)
    return {"y": result}

  gate = cg.gate(callback, out=lambda x: {"y": x}, arrays="cupy")
  got = fake_programs.run(fake, gate, numbers(3))
  np.testing.assert_array_equal(got["y"], numbers(3) + 1)


def test_a_type_that_cupy_lacks_is_named(fake: FakeCuda, modules: Any) -> None:
  import ml_dtypes

  modules(cupy=fake_cupy(Recorder(fake)))
  gate = cg.gate(lambda out, x: None, out=lambda x: x, arrays="cupy", style="inplace")
  with pytest.raises(fake_programs.ProgramError, match="CuPy has no arrays of bfloat16"):
    fake_programs.run(fake, gate, np.ones(2, ml_dtypes.bfloat16))


def test_a_kept_array_of_cupy_is_an_escape(fake: FakeCuda, modules: Any) -> None:
  recorder = Recorder(fake)
  modules(cupy=fake_cupy(recorder))
  kept: list[Any] = []

  def leak(out: Any, x: Any) -> None:
    kept.append(x)
    add(recorder, x, out, recorder.streams[-1].pointer)

  gate = cg.gate(leak, out=lambda x: x, arrays="cupy", style="inplace")
  with pytest.raises(fake_programs.ProgramError, match="Don't use the kept object any more"):
    fake_programs.run(fake, gate, numbers(2))
  assert isinstance(cg.last_error(), cg.EscapedViewError)


def test_an_escape_is_found_beside_a_pytorch_without_cuda(fake: FakeCuda, modules: Any) -> None:
  torch: Any = types.ModuleType("torch")
  torch.Tensor = type("Tensor", (), {})
  torch.cuda = types.SimpleNamespace(is_available=lambda: False)  # it has nothing else that works
  modules(torch=torch)
  kept: list[Any] = []

  def leak(out: Any, x: Any) -> None:
    kept.append(x)
    device_library.kernel(fake, np.copyto, reads=[x], writes=[out], stream=x.stream)

  gate = cg.gate(leak, out=lambda x: x, arrays="buffer", style="inplace")
  with pytest.raises(fake_programs.ProgramError, match="argument 'x'"):
    fake_programs.run(fake, gate, numbers(2))
  assert isinstance(cg.last_error(), cg.EscapedViewError)


# -- PyTorch -------------------------------------------------------------------------------------
class Tensor(LibraryArray):
  """torch.Tensor, as far as gates look at one."""

  is_cuda = True

  def data_ptr(self) -> int:
    return self.pointer

  def detach(self) -> Tensor:
    return self

  resolve_conj = resolve_neg = contiguous = detach


def fake_torch(recorder: Recorder) -> dict[str, Any]:
  torch: Any = types.ModuleType("torch")
  utils: Any = types.ModuleType("torch.utils")
  dlpack: Any = types.ModuleType("torch.utils.dlpack")

  def from_dlpack(capsule: Any) -> Tensor:
    read = device_library.read_capsule(capsule)
    recorder.log.append((read.name, read.device))
    # The capsule, not consumed, keeps the memory.
    stream = recorder.streams[-1].pointer
    return Tensor(read.data, read.shape, np.float32, capsule, stream)

  dlpack.from_dlpack = from_dlpack
  torch.Tensor = Tensor
  torch.device = lambda kind, ordinal: (kind, ordinal)
  torch.cuda = types.SimpleNamespace(
    is_available=lambda: True,
    stream=lambda stream: stream,
    ExternalStream=lambda pointer, device: LibraryStream(recorder, pointer, device),
  )
  torch.utils, utils.dlpack = utils, dlpack
  return {"torch": torch, "torch__utils": utils, "torch__utils__dlpack": dlpack}


def test_torch_gets_the_memory_with_its_stream_current(fake: FakeCuda, modules: Any) -> None:
  recorder = Recorder(fake)
  modules(**fake_torch(recorder))
  current: list[Any] = []

  def callback(out: Any, x: Any) -> None:
    current.append((recorder.streams[-1].pointer, recorder.streams[-1].device))
    add(recorder, x, out, x.stream)

  gate = cg.gate(callback, out=lambda x: x, arrays="torch", style="inplace")
  stream = fake.stream()
  program = fake_programs.load(fake, lambda x: gate(x) * 2, numbers(3))
  waits = fake.calls("cuStreamWaitEvent")
  np.testing.assert_array_equal(program(numbers(3), stream=stream), numbers(3) * 2 + 2)
  assert current == [(stream.handle, ("cuda", 0))]
  assert recorder.log == [("dltensor", (2, 0))] * 2
  assert fake.calls("cuStreamWaitEvent") == waits


def test_torch_may_return_a_tensor(fake: FakeCuda, modules: Any) -> None:
  recorder = Recorder(fake)
  modules(**fake_torch(recorder))

  def callback(x: Any) -> Any:
    made = fake.empty(x.shape, x.dtype)
    result = Tensor(made.pointer, x.shape, x.dtype, made, x.stream)
    add(recorder, x, result, x.stream)
    return result

  gate = cg.gate(callback, out=lambda x: x, arrays="torch")
  np.testing.assert_array_equal(fake_programs.run(fake, gate, numbers(3)), numbers(3) + 1)


# -- Numba ---------------------------------------------------------------------------------------
def fake_numba(recorder: Recorder) -> dict[str, Any]:
  numba, cuda = types.ModuleType("numba"), types.ModuleType("numba.cuda")
  package: Any = numba
  module: Any = cuda

  def as_cuda_array(buffer: Any, sync: bool) -> LibraryArray:
    entries = buffer.__cuda_array_interface__
    recorder.log.append(sync)
    pointer, _ = entries["data"]
    return LibraryArray(pointer, entries["shape"], entries["typestr"], buffer, entries["stream"])

  class Gpus:
    def __getitem__(self, ordinal: int) -> Any:
      return recorder.device(ordinal)

  module.as_cuda_array, module.gpus = as_cuda_array, Gpus()
  module.external_stream = lambda pointer: ("numba", pointer)
  package.cuda = module
  return {"numba": numba, "numba__cuda": cuda}


@pytest.mark.parametrize("default", [False, True])
def test_numba_may_use_the_arrays_stream_or_the_default_one(
  fake: FakeCuda, modules: Any, default: bool
) -> None:
  recorder = Recorder(fake)
  modules(**fake_numba(recorder))

  def callback(out: Any, x: Any) -> None:
    assert recorder.devices == [0]
    add(recorder, x, out, device_library.LEGACY if default else x.stream)

  gate = cg.gate(callback, out=lambda x: x, arrays="numba", style="inplace")
  got = fake_programs.run(fake, lambda x: gate(x * 2) * 3, numbers(3))
  np.testing.assert_array_equal(got, (numbers(3) * 2 + 1) * 3)
  assert recorder.log == [False, False]  # nobody waits


# -- streams on request, and what is missing -----------------------------------------------------
def test_a_context_makes_the_stream_of_a_library(fake: FakeCuda, modules: Any) -> None:
  recorder = Recorder(fake)
  driver: Any = types.ModuleType("cuda.bindings.driver")
  driver.CUstream = lambda pointer: ("CUstream", pointer)
  modules(
    cupy=fake_cupy(recorder),
    **fake_torch(recorder),
    **fake_numba(recorder),
    cuda=types.ModuleType("cuda"),
    cuda__bindings=types.ModuleType("cuda.bindings"),
    cuda__bindings__driver=driver,
  )
  seen: dict[str, Any] = {}

  def callback(ctx: Any, out: Any, x: Any) -> None:
    for library in ("cupy", "torch", "numba", "cuda"):
      seen[library] = ctx.stream_as(library)
    seen["pointer"] = ctx.stream
    device_library.copy(fake, x, out, ctx.stream)

  gate = cg.gate(callback, out=lambda x: x, arrays="buffer", style="context")
  fake_programs.run(fake, gate, numbers(2))
  pointer = seen["pointer"]
  assert (seen["cupy"].pointer, seen["cupy"].device) == (pointer, 0)
  assert (seen["torch"].pointer, seen["torch"].device) == (pointer, ("cuda", 0))
  assert (seen["numba"], seen["cuda"]) == (("numba", pointer), ("CUstream", pointer))


@pytest.mark.parametrize(
  ("kind", "module", "extra"),
  [("cupy", "cupy", "cupy"), ("torch", "torch", "torch"), ("numba", "numba.cuda", "numba-cuda")],
)
def test_a_missing_library_is_named_with_its_extra(
  fake: FakeCuda, modules: Any, kind: Any, module: str, extra: str
) -> None:
  modules(**{module.replace(".", "__"): None})
  gate = cg.gate(lambda out, x: None, out=lambda x: x, arrays=kind, style="inplace")
  with pytest.raises(fake_programs.ProgramError, match=rf"pip install 'callgate\[{extra}\]'"):
    fake_programs.run(fake, gate, numbers(2))
  assert isinstance(cg.last_error(), cg.GateDefinitionError)


@pytest.mark.parametrize("kind", ["cupy", "numba"])
def test_arrays_of_gpus_alone_are_refused_on_the_cpu(kind: Any) -> None:
  gate = cg.gate(lambda x: x, out=lambda x: x, arrays=kind)
  with pytest.raises(cg.GateDefinitionError, match="needs a CUDA device"), cg.errors():
    gate(numbers(2)).block_until_ready()


def test_a_stream_is_refused_on_the_cpu_and_by_another_name() -> None:
  with pytest.raises(cg.GateDefinitionError, match="got a call on the CPU"):
    gpu.stream_as("cupy", 0, -1)
  with pytest.raises(cg.GateDefinitionError, match=r"expected one of 'cupy'.*got 'jax'"):
    gpu.stream_as("jax", 1, 0)

  def callback(ctx: Any, out: Any, x: Any) -> None:
    assert ctx.ordinal == -1
    ctx.stream_as("torch")

  gate = cg.gate(callback, out=lambda x: x, style="context")
  with pytest.raises(cg.GateDefinitionError, match="got a call on the CPU"), cg.errors():
    gate(numbers(2)).block_until_ready()
