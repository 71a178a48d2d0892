# SPDX-License-Identifier: Apache-2.0
"""`cg.Buffer`: the protocols through which other libraries read and write XLA's memory."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

import callgate as cg

SCALAR = jax.ShapeDtypeStruct((), np.float32)


def inside(look: Callable[[cg.Buffer], Any], x: Any) -> Any:
  """Returns `look` of the Buffer over `x`, inside a gate. `look` must not keep a view."""
  return inside_each(look, [x])[0]


def inside_each(look: Callable[[cg.Buffer], Any], xs: list[Any]) -> list[Any]:
  """The same of several arrays, in one program, which compiles faster than one each."""
  seen: list[Any] = []

  @cg.gate(out=SCALAR, arrays="buffer", effect="io")
  def look_at(*buffers: cg.Buffer) -> Any:
    seen.extend(map(look, buffers))
    return np.float32(0)

  with cg.errors():
    jax.jit(look_at)(*xs).block_until_ready()
  return seen


def written(write: Callable[[cg.Buffer], Any], like: Any) -> np.ndarray[Any, Any]:
  """Returns the content that `write` leaves in a result's Buffer."""
  return written_each([write], [like])[0]


def written_each(
  writes: list[Callable[[cg.Buffer], Any]], likes: list[Any]
) -> list[np.ndarray[Any, Any]]:
  """The same of several results, in one program."""

  def fill(outs: list[cg.Buffer], _: cg.Buffer) -> None:
    for write, out in zip(writes, outs, strict=True):
      write(out)

  gate = cg.gate(fill, out=lambda _: likes, arrays="buffer", style="inplace")
  with cg.errors():
    return [np.asarray(out) for out in jax.jit(gate)(jnp.float32(0))]


# -- attributes ---
def test_attributes_are_those_of_the_array() -> None:
  shapes = [(), (0,), (3,), (2, 0, 4), (2, 3, 4)]
  dtypes = ["bool", "int8", "float32", "bfloat16", "complex64"]
  xs = [jnp.zeros(shape, dtype) for shape in shapes for dtype in dtypes]
  of = lambda x: {name: getattr(x, name) for name in ("shape", "dtype", "ndim", "size", "nbytes")}
  assert inside_each(of, xs) == [of(np.asarray(x)) for x in xs]


def test_an_input_is_read_only_and_a_result_is_not() -> None:
  assert inside(lambda b: b.readonly, jnp.zeros(3))
  flags: list[bool] = []
  written(lambda b: (flags.append(b.readonly), np.asarray(b).fill(0)), SCALAR)
  assert flags == [False]


def test_the_device_is_the_one_that_runs_the_call() -> None:
  assert inside(lambda b: b.device, jnp.zeros(3)) == f"cpu:{jax.devices()[0].id}"


def test_repr_says_dtype_shape_and_access() -> None:
  assert inside(repr, jnp.zeros((2, 3))) == "Buffer(float32[2,3], device=cpu:0, read-only)"


def test_sub_byte_types_count_whole_bytes() -> None:
  assert inside(lambda b: (b.size, b.nbytes), jnp.zeros(5, "int4")) == (5, 3)


# -- NumPy ---
def address_of(array: np.ndarray[Any, Any]) -> int:
  return array.ctypes.data


def test_asarray_is_the_same_memory_and_cannot_be_made_writable() -> None:
  def look(b: cg.Buffer) -> Any:
    array = np.asarray(b)
    with pytest.raises(ValueError, match="WRITEABLE"):
      array.setflags(write=True)
    return address_of(array) == address_of(np.asarray(b, copy=False)), array.tolist()

  assert inside(look, jnp.arange(4.0)) == (True, [0.0, 1.0, 2.0, 3.0])


def test_copy_true_gives_a_private_writable_array() -> None:
  def look(b: cg.Buffer) -> Any:
    copy = np.array(b)
    copy[:] = 7
    return np.asarray(b).tolist(), copy.tolist(), copy.flags.owndata

  assert inside(look, jnp.arange(2.0)) == ([0.0, 1.0], [7.0, 7.0], True)


@pytest.mark.parametrize("copy", [None, True])
def test_another_dtype_is_converted(copy: bool | None) -> None:
  got = inside(lambda b: b.__array__(np.dtype(np.int64), copy=copy), jnp.arange(3.0))
  assert got.dtype == np.int64
  np.testing.assert_array_equal(got, [0, 1, 2])


def test_another_dtype_without_a_copy_is_refused() -> None:
  with pytest.raises(ValueError, match="copy"):
    inside(lambda b: np.asarray(b, np.int64, copy=False), jnp.arange(3.0))


# -- DLPack ---
class Tensor(ctypes.Structure):
  # https://dmlc.github.io/dlpack/latest/c_api.html
  _fields_ = (
    ("data", ctypes.c_void_p),
    ("device", ctypes.c_int32 * 2),
    ("ndim", ctypes.c_int32),
    ("code", ctypes.c_uint8),
    ("bits", ctypes.c_uint8),
    ("lanes", ctypes.c_uint16),
    ("shape", ctypes.POINTER(ctypes.c_int64)),
    ("strides", ctypes.POINTER(ctypes.c_int64)),
    ("byte_offset", ctypes.c_uint64),
  )


class Versioned(ctypes.Structure):
  _fields_ = (
    ("version", ctypes.c_uint32 * 2),
    ("context", ctypes.c_void_p),
    ("deleter", ctypes.c_void_p),
    ("flags", ctypes.c_uint64),
    ("tensor", Tensor),
  )


READ_ONLY, COPIED = 1, 2


def read_capsule(capsule: Any) -> dict[str, Any]:
  api = ctypes.pythonapi
  api.PyCapsule_GetName.restype = ctypes.c_char_p
  api.PyCapsule_GetName.argtypes = (ctypes.py_object,)
  api.PyCapsule_GetPointer.restype = ctypes.c_void_p
  api.PyCapsule_GetPointer.argtypes = (ctypes.py_object, ctypes.c_char_p)
  name = api.PyCapsule_GetName(capsule)
  pointer = api.PyCapsule_GetPointer(capsule, name)
  versioned = name == b"dltensor_versioned"
  head = Versioned.from_address(pointer) if versioned else None
  tensor = head.tensor if head is not None else Tensor.from_address(pointer)
  return {
    "version": head.version[0] if head is not None else 0,
    "flags": head.flags if head is not None else 0,
    "data": tensor.data,
    "type": (tensor.code, tensor.bits, tensor.lanes),
    "shape": tensor.shape[: tensor.ndim],
    "device": tuple(tensor.device),
  }


@pytest.mark.parametrize(
  ("asked", "given"), [(None, 0), ((0, 8), 0), ((1, 0), 1), ((1, 3), 1), ((2, 0), 1)]
)
def test_the_protocol_version_follows_max_version(asked: Any, given: int) -> None:
  got = inside(lambda b: read_capsule(b.__dlpack__(max_version=asked)), jnp.zeros((2, 3)))
  assert (got["version"], got["shape"], got["device"]) == (given, [2, 3], (1, 0))


@pytest.mark.parametrize(
  ("version", "copy", "flags", "shared"),
  [
    ((1, 0), None, READ_ONLY, True),
    ((1, 0), False, READ_ONLY, True),
    ((1, 0), True, COPIED, False),
    (None, None, 0, False),  # version 0 can't say read-only
    (None, True, 0, False),
  ],
)
def test_an_input_is_exported_read_only_or_copied(
  version: Any, copy: Any, flags: int, shared: bool
) -> None:
  def look(b: cg.Buffer) -> Any:
    got = read_capsule(b.__dlpack__(max_version=version, copy=copy))
    return got["flags"], got["data"] == address_of(np.asarray(b))

  assert inside(look, jnp.zeros(3)) == (flags, shared)


def test_version_0_of_an_input_without_a_copy_is_refused() -> None:
  with pytest.raises(BufferError, match="read-only"):
    inside(lambda b: b.__dlpack__(copy=False), jnp.zeros(3))


@pytest.mark.parametrize("version", [None, (1, 0)])
def test_a_result_is_exported_in_place_and_writable(version: Any) -> None:
  def look(b: cg.Buffer) -> None:
    got = read_capsule(b.__dlpack__(max_version=version, copy=False))
    assert (got["flags"], got["data"]) == (0, address_of(np.asarray(b)))
    np.asarray(b).fill(0)

  written(look, jax.ShapeDtypeStruct((3,), np.float32))


@pytest.mark.parametrize("options", [{"stream": 1}, {"dl_device": (2, 0)}])
def test_requests_for_a_gpu_are_refused_on_the_cpu(options: dict[str, Any]) -> None:
  with pytest.raises(BufferError, match=next(iter(options))):
    inside(lambda b: b.__dlpack__(max_version=(1, 0), **options), jnp.zeros(3))


@pytest.mark.parametrize("options", [{"stream": None}, {"stream": -1}, {"dl_device": (1, 0)}])
def test_requests_for_the_cpu_are_accepted(options: dict[str, Any]) -> None:
  def look(b: cg.Buffer) -> Any:
    return b.__dlpack_device__(), read_capsule(b.__dlpack__(max_version=(1, 0), **options))["shape"]

  assert inside(look, jnp.zeros(3)) == ((1, 0), [3])


def test_dlpack_types_are_those_of_jax() -> None:
  dtypes = ["bool", "int8", "uint16", "int32", "float16", "float32", "bfloat16", "complex64"]
  xs = [jnp.zeros(3, dtype) for dtype in dtypes]
  type_of = lambda x: read_capsule(x.__dlpack__(max_version=(1, 0)))["type"]
  assert inside_each(type_of, xs) == [type_of(x) for x in xs]


def test_numpy_reads_dlpack_in_place_and_read_only() -> None:
  def look(b: cg.Buffer) -> Any:
    array = np.from_dlpack(b)
    return array.tolist(), array.flags.writeable, address_of(array) == address_of(np.asarray(b))

  assert inside(look, jnp.arange(3.0)) == ([0.0, 1.0, 2.0], False, True)


def test_jax_reads_dlpack() -> None:
  x = jnp.arange(6.0).reshape(2, 3)
  got = inside(lambda b: np.asarray(jax.dlpack.from_dlpack(b) * 1).copy(), x)
  np.testing.assert_array_equal(got, x)


def test_torch_reads_dlpack_and_writes_results_in_place() -> None:
  torch = pytest.importorskip("torch", reason="PyTorch is not installed")
  got = inside(lambda b: torch.from_dlpack(b).sum().item(), jnp.arange(4.0))
  assert got == 6.0
  out = written(lambda b: torch.from_dlpack(b).fill_(5.0), jax.ShapeDtypeStruct((3,), np.float32))
  np.testing.assert_array_equal(out, [5.0, 5.0, 5.0])


# -- Python's buffer protocol ---
FORMATS = ["bool", "int8", "int16", "int32", "uint8", "uint16", "uint32"]
FORMATS += ["float16", "float32", "complex64"]


def test_a_memoryview_is_what_numpy_reads_it_to_be() -> None:
  shapes = [(), (0, 2), (5,), (2, 3)]
  numbers = [np.arange(np.prod(shape, dtype=int)).reshape(shape) for shape in shapes]
  xs = [x.astype(dtype) for x in numbers for dtype in FORMATS]

  def look(b: cg.Buffer) -> Any:
    with memoryview(b) as view:
      array = np.array(view)
      return array, view.readonly, view.c_contiguous, view.shape, view.nbytes

  for x, (array, *rest) in zip(xs, inside_each(look, xs), strict=True):
    assert array.dtype == x.dtype
    np.testing.assert_array_equal(array, x)
    assert rest == [True, True, x.shape, x.nbytes]


def test_a_result_is_written_through_a_memoryview() -> None:
  def write(b: cg.Buffer) -> None:
    memoryview(b)[:] = memoryview(np.array([1, 2, 3], np.int32))

  out = written(write, jax.ShapeDtypeStruct((3,), np.int32))
  np.testing.assert_array_equal(out, [1, 2, 3])


def test_a_memoryview_of_an_input_refuses_writes() -> None:
  with pytest.raises(TypeError, match="read-only"):
    inside(lambda b: memoryview(b).__setitem__(0, 1), jnp.zeros(3, np.int32))


def test_types_without_a_format_are_refused_by_name() -> None:
  with pytest.raises(BufferError, match="bfloat16"):
    inside(memoryview, jnp.zeros(3, "bfloat16"))


# -- sub-byte types ---
PACKED = {
  "int4": np.arange(-8, 8),
  "uint4": np.arange(16),
  "int2": np.arange(-2, 2),
  "uint2": np.arange(4),
  "float4_e2m1fn": np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.5, -6]),
}


@pytest.mark.parametrize("dtype", PACKED)
def test_packed_types_round_trip(dtype: str) -> None:
  kind = np.dtype(getattr(ml_dtypes, dtype))
  shapes = [(), (0,), (1,), (2,), (7,), (3, 5), (2, 2, 4)]
  xs = [np.resize(PACKED[dtype], shape).astype(kind) for shape in shapes]
  read = inside_each(lambda b: b.unpack(), [jnp.asarray(x) for x in xs])
  packs = [lambda b, x=x: b.pack(x) for x in xs]
  out = written_each(packs, [jax.ShapeDtypeStruct(shape, kind) for shape in shapes])
  assert {x.dtype for x in read} == {kind}
  for x, got, put in zip(xs, read, out, strict=True):
    np.testing.assert_array_equal(got.astype(np.float32), x.astype(np.float32))
    np.testing.assert_array_equal(put.astype(np.float32), x.astype(np.float32))


def test_other_types_unpack_and_pack_as_copies() -> None:
  x = np.arange(6, dtype=np.float32).reshape(2, 3)
  got = inside(lambda b: b.unpack(), jnp.asarray(x))
  assert got.flags.writeable
  np.testing.assert_array_equal(got, x)
  np.testing.assert_array_equal(written(lambda b: b.pack(x.T.copy().T), x), x)


@pytest.mark.parametrize("read", [np.asarray, np.from_dlpack, memoryview])
def test_a_packed_buffer_has_no_view(read: Callable[[Any], Any]) -> None:
  with pytest.raises(BufferError, match="int4"):
    inside(read, jnp.zeros(4, "int4"))


def test_pack_says_what_it_expected() -> None:
  with pytest.raises(TypeError, match=r"expected float32\[3\], got float64\(3,\)"):
    written(lambda b: b.pack(np.zeros(3)), jax.ShapeDtypeStruct((3,), np.float32))
  with pytest.raises(TypeError, match="read-only"):
    inside(lambda b: b.pack(np.zeros(3, np.float32)), jnp.zeros(3))


# -- orders ---
class PyBuffer(ctypes.Structure):
  _fields_ = [("fields", ctypes.c_byte * 128)]


GET_BUFFER = ctypes.pythonapi.PyObject_GetBuffer
GET_BUFFER.argtypes = (ctypes.py_object, ctypes.c_void_p, ctypes.c_int)
STRIDES, C_ORDER, F_ORDER, ANY_ORDER = 0x18, 0x38, 0x58, 0x98


def grants(buffer: Any, flags: int) -> bool:
  """True if the buffer protocol gives the memory in this order."""
  view = PyBuffer()
  try:
    GET_BUFFER(buffer, ctypes.addressof(view), flags)
  except BufferError as error:
    assert "expected a request for row-major (C) order" in str(error)  # noqa: PT017
    return False
  ctypes.pythonapi.PyBuffer_Release(ctypes.byref(view))
  return True


def test_memory_is_given_in_the_orders_that_it_has() -> None:
  shapes = [(), (3,), (0,), (1, 3), (3, 1), (1, 1), (2, 0), (2, 3), (2, 1, 3), (1, 4, 1)]
  orders = STRIDES, C_ORDER, ANY_ORDER, F_ORDER
  look = lambda b: [grants(b, flags) for flags in orders]
  found = inside_each(look, [jnp.zeros(shape) for shape in shapes])
  assert found == [[True] * 3 + [np.zeros(shape).flags.f_contiguous] for shape in shapes]


# -- lanes of half a byte ---
@pytest.mark.parametrize("dtype", ["int4", "uint4"])
@pytest.mark.parametrize("effect", ["pure", "io", "ordered"])
def test_lanes_that_do_not_begin_with_a_byte_are_right(effect: Any, dtype: str) -> None:
  shapes = [(3, 3), (5, 1), (3, 4), (2, 3, 3)]
  xs = [(np.arange(np.prod(shape)) % 3).reshape(shape) for shape in shapes]
  seen: list[Any] = []

  def doubled(out: cg.Buffer, x: cg.Buffer, y: cg.Buffer) -> None:
    seen.append(np.asarray(x.unpack(), int).tolist())
    out.pack((np.asarray(x.unpack(), int) * 2 + np.asarray(y.unpack(), int)).astype(dtype))

  gate = cg.gate(doubled, out=lambda x, y: x, arrays="buffer", style="inplace", effect=effect)

  def lanes(x: Any) -> Any:
    function = gate
    for _ in x.shape[1:]:
      function = jax.vmap(function, (0, None))
    return function(x, jnp.ones(x.shape[-1], dtype))

  with cg.errors():
    outs = jax.jit(lambda xs: [lanes(x) for x in xs])([jnp.asarray(x, dtype) for x in xs])
  for x, out in zip(xs, outs, strict=True):
    np.testing.assert_array_equal(np.asarray(out).astype(int), x * 2 + 1)
  if effect == "ordered":
    assert seen == [lane for x in xs for lane in x.reshape(-1, x.shape[-1]).tolist()]
