# SPDX-License-Identifier: Apache-2.0
"""The text that the partitioner answers XLA with, and the text that it reads."""

from __future__ import annotations

import jaxlib.mlir.ir as ir
import ml_dtypes
import numpy as np
import pytest
from held_calls import value
from hypothesis import given
from hypothesis import strategies as st
from jax.interpreters import mlir

from callgate._core import attributes
from callgate._sharding.module import Raw, local_module, read_attributes

DTYPES = [
  "bool", "int4", "uint4", "int8", "uint8", "int16", "uint16", "int32", "uint32", "int64", "uint64",
  "float16", "bfloat16", "float32", "float64", "complex64", "complex128", "float8_e4m3fn",
  "float8_e5m2", "float8_e4m3b11fnuz", "float8_e4m3fnuz", "float8_e5m2fnuz", "float8_e3m4",
  "float8_e4m3", "float8_e8m0fnu", "float4_e2m1fn",
]  # fmt: skip


def dtype_of(name: str) -> np.dtype:
  return np.dtype(getattr(ml_dtypes, name, name))


def verified(module: bytes) -> str:
  """The module as MLIR has read it, verified it and written it again."""
  with mlir.make_ir_context():
    parsed = ir.Module.parse(module.decode())
    assert parsed.operation.verify()
    return str(parsed)


@given(st.dictionaries(st.from_regex(r"[a-z_]{1,8}", fullmatch=True), st.text(), max_size=4))
def test_texts_survive_being_attributes(texts):
  with mlir.make_ir_context():
    written = ir.DictAttr.get({k: ir.StringAttr.get(v) for k, v in texts.items()})
    assert read_attributes(str(written).encode()) == texts
    assert value(ir.Attribute.parse(attributes.text(texts))) == texts


NAMES = st.from_regex(r"[a-z_]\w{0,7}|[0-9]{1,3}", fullmatch=True)


@given(
  st.recursive(
    st.one_of(
      st.text(),
      st.booleans().map(np.bool_),
      st.integers(-(2**63), 2**63 - 1).map(np.int64),
      st.lists(st.integers(-(2**63), 2**63 - 1)).map(lambda x: np.array(x, np.int64)),
      st.binary().map(lambda x: np.frombuffer(x, np.uint8)),
    ),
    lambda inner: st.dictionaries(
      st.from_regex(r"[a-z_]\w{0,7}|[0-9]{1,3}", fullmatch=True), inner
    ),
    max_leaves=6,
  ).filter(lambda held: isinstance(held, dict))
)
def test_attributes_are_written_as_jax_writes_them(held):
  with mlir.make_ir_context(), ir.Location.unknown():
    parsed = ir.Attribute.parse(attributes.text(held))
    assert str(parsed) == str(mlir.ir_attribute(held))


def test_other_attributes_stay_as_they_are():
  text = (
    b'{a = "x, \\22{y}\\22", b = {c = 1 : i32, d = "e, f}", g = [1, 2]}, "odd-name" = true, '
    b"h = dense<[1, 2]> : tensor<2xi64>, i = array<i32: 1, 2>, j = -1.5e+00 : f32}"
  )
  held = read_attributes(text)
  assert held["a"] == 'x, "{y}"'
  assert held["b"] == '{c = 1 : i32, d = "e, f}", g = [1, 2]}'
  assert held["odd-name"] == "true"
  assert held["h"] == "dense<[1, 2]> : tensor<2xi64>"
  assert held["i"] == "array<i32: 1, 2>"
  assert held["j"] == "-1.5e+00 : f32"
  assert [key for key, value in held.items() if isinstance(value, Raw)] == [
    "b", "odd-name", "h", "i", "j"
  ]  # fmt: skip
  assert read_attributes(b"{}") == {}


@pytest.mark.parametrize("name", DTYPES)
def test_modules_of_every_dtype_are_valid(name):
  dtype = dtype_of(name)
  text = verified(
    local_module(
      "callgate.gate",
      [((2, 3), dtype), ((), dtype)],
      [((2, 3), dtype), ((), dtype)],
      {"name": "f", "kept": Raw("{a = 1 : i32}")},
      has_side_effect=False,
      aliases={0: 0},
      partition_id=True,
      broadcast=[[0, 1], [2, 3]],
    )
  )
  assert "@callgate.gate(%arg0, %arg1, %" in text
  assert text.count("all_reduce") == (4 if dtype.kind == "c" else 2)
  assert "dense<[[0, 1], [2, 3]]>" in text


def test_modules_of_tokens_and_of_nothing_are_valid():
  token = ((), None)
  one = local_module("t", [token], [token], {}, has_side_effect=True, aliases={},
                     partition_id=False, broadcast=None)  # fmt: skip
  assert "-> !stablehlo.token" in verified(one)
  none = local_module("t", [], [], {}, has_side_effect=True, aliases={},
                      partition_id=True, broadcast=[[0]])  # fmt: skip
  assert "partition_id" in verified(none)
