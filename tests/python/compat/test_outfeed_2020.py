# SPDX-License-Identifier: Apache-2.0
"""The framing of 2020 against an encoder and a decoder made of the msgpack package."""

from __future__ import annotations

import struct

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from property_checks import examples

from callgate import _callgate

msgpack = pytest.importorskip("msgpack")

NAMES = [
  "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64", "float16", "float32",
  "float64", "bfloat16", "bool", "complex64", "complex128",
]  # fmt: skip


def dtype_of(name: str) -> np.dtype:
  return np.dtype(getattr(ml_dtypes, name, None) or name)


def header(consumer: int, types: list[tuple[str, tuple[int, ...]]]) -> bytes:
  """Header and continuations: 4 words, then the metadata in words whose first byte is highest."""
  metadata = msgpack.packb([(NAMES.index(name), list(dims)) for name, dims in types])
  words = [2178, consumer >> 32, consumer & 0xFFFFFFFF, len(metadata)]
  total = 32
  while (total - 4) * 4 < len(metadata):
    total += 32
  metadata = metadata.ljust((total - 4) * 4, b"\0")
  return struct.pack("<4I", *words) + b"".join(
    metadata[i : i + 4][::-1] for i in range(0, len(metadata), 4)
  )


types = st.lists(
  st.tuples(st.sampled_from(NAMES), st.lists(st.integers(0, 4), max_size=4).map(tuple)), max_size=40
)
large_dims = st.lists(st.integers(0, 2**62), max_size=20)


@examples(17)
@given(st.integers(1, 2**64 - 1), st.lists(st.tuples(st.sampled_from(NAMES), large_dims)))
def test_a_header_is_that_of_msgpack(consumer, types):
  assert _callgate.outfeed_2020_header(consumer, types) == header(consumer, types)


@examples(17)
@given(st.lists(st.tuples(st.integers(1, 2**64 - 1), types), max_size=4))
def test_messages_made_with_msgpack_are_read(tmp_path_factory, messages):
  random = np.random.default_rng(0)
  path = tmp_path_factory.mktemp("feed") / "feed"
  expected, data = [], b""
  for consumer, kinds in messages:
    arrays = [random.integers(0, 2, dims).astype(dtype_of(name)) for name, dims in kinds]
    expected.append((consumer, arrays))
    data += header(consumer, kinds) + b"".join(array.tobytes() for array in arrays)
  path.write_bytes(data + header(0, []))
  read = _callgate.read_outfeed_2020(str(path))
  assert read.pop() == (0, [])  # the end marker
  assert [consumer for consumer, _ in read] == [consumer for consumer, _ in expected]
  for (_, got), (_, want) in zip(read, expected, strict=True):
    for one, other in zip(got, want, strict=True):
      assert one.dtype == other.dtype
      np.testing.assert_array_equal(one, other)


def test_metadata_that_a_header_cannot_hold_continues_in_more_blocks():
  kinds = [("float32", (1000, 1000))] * 50
  made = _callgate.outfeed_2020_header(3, kinds)
  assert made == header(3, kinds)
  assert len(made) > 128


def test_a_sink_that_got_nothing_writes_the_end_marker(tmp_path):
  path = tmp_path / "feed"
  sink = _callgate.outfeed_2020_sink(str(path))
  assert "outfeed of 2020" in repr(sink)
  del sink
  assert struct.unpack("<32I", path.read_bytes()) == (2178, *[0] * 31)
  assert _callgate.read_outfeed_2020(str(path)) == [(0, [])]


def test_dtypes_that_the_framing_lacks_and_bad_files_are_named(tmp_path):
  with pytest.raises(ValueError, match="int4"):
    _callgate.outfeed_2020_header(1, [("int4", [2])])
  path = tmp_path / "feed"
  path.write_bytes(b"x" * 128)
  with pytest.raises(ValueError, match=r"feed', at byte 0: .*2178"):
    _callgate.read_outfeed_2020(str(path))
