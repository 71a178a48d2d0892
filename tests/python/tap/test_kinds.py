# SPDX-License-Identifier: Apache-2.0
"""Taps with `kind=`: images and texts from programs, as consumers and streams have them."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

import callgate as cg
from callgate._core.png import png
from callgate._tap import kinds


def tapped(program: Any, *args: Any) -> list[Any]:
  """The second run's values of a program that runs twice, as the channel "t" has them."""
  seen: list[Any] = []
  with cg.channel("t", to=lambda value, info: seen.append((value, info))):
    program(*args)
    cg.barrier()
    seen.clear()
    program(*args)
  assert all(info.kind in ("image", "text") for _, info in seen)
  return [value for value, _ in seen]


def through(value: Any, kind: str, x: Any) -> Any:
  cg.tap(value, "t", kind=kind)
  return x


STEP = np.arange(3)
TEXTS: dict[str, tuple[Any, list[str]]] = {
  "a text": (jax.jit(lambda: through("hällo", "text", 1)), ["hällo"]),
  "outside of jit": (lambda: cg.tap("hällo", "t", kind="text"), ["hällo"]),
  "bytes": (jax.jit(lambda: through(np.array([104, 105, 0, 0], np.uint8), "text", 1)), ["hi"]),
  "no bytes": (jax.jit(lambda: through(np.zeros(4, np.uint8), "text", 1)), [""]),
  "broken bytes": (jax.jit(lambda: through(np.array([255], np.uint8), "text", 1)), ["\ufffd"]),
  "fields": (
    jax.jit(lambda: through(("{} of {n:.2f} {s}", 3, {"n": 0.5, "s": STEP}), "text", 1)),
    ["3 of 0.50 [0 1 2]"],
  ),
  "no fields": (jax.jit(lambda: through(("{{done}}",), "text", 1)), ["{done}"]),
  "bfloat16": (
    jax.jit(lambda: through(("{:.1f}", jnp.bfloat16(2)), "text", 1)), ["2.0"]
  ),
  "vmap": (
    lambda: jax.vmap(lambda i: through(("lane {}", i), "text", i))(jnp.arange(3)),
    ["lane 0", "lane 1", "lane 2"],
  ),
  "vmap of bytes": (
    lambda: jax.vmap(lambda x: through(x, "text", x))(
      np.array([[97, 0], [98, 99]], np.uint8)
    ),
    ["a", "bc"],
  ),
  "scan": (
    jax.jit(lambda: jax.lax.map(lambda i: through(("step {}", i), "text", i), jnp.arange(2))),
    ["step 0", "step 1"],
  ),
  "grad": (
    lambda: jax.jit(jax.grad(lambda x: through(("x is {}", x), "text", x * x)))(2.0),
    ["x is 2.0"],
  ),
  "a loop of Python": (
    lambda: [cg.tap("x" * n, "t", kind="text") for n in (1, 2)], ["x", "xx"]
  ),
}  # fmt: skip


@pytest.mark.parametrize("name", TEXTS)
def test_a_text_comes_as_one(name):
  if name == "bfloat16" and "__format__" not in vars(ml_dtypes.bfloat16):
    pytest.skip("ml_dtypes before 0.6 can't format numbers of its types")
  program, want = TEXTS[name]
  assert tapped(program) == want


def test_many_rows_at_once_are_a_list_of_texts():
  seen: list[Any] = []
  with cg.channel("t", to=seen.append, batch=True):
    jax.jit(lambda: jax.lax.map(lambda i: through(("{}", i), "text", i), jnp.arange(3)))()
  assert [text for batch in seen for text in batch] == ["0", "1", "2"]


def test_an_image_comes_as_the_array_that_it_is():
  pixels = np.arange(48, dtype=np.uint8).reshape(4, 4, 3)
  (got,) = tapped(jax.jit(lambda: through(pixels, "image", 1)))
  np.testing.assert_array_equal(got, pixels)
  floats = jnp.linspace(0, 1, 16, dtype=jnp.bfloat16).reshape(4, 4)
  program = jax.jit(jax.grad(lambda x: through(floats * x, "image", x)))
  assert [one.shape for one in tapped(program, jnp.bfloat16(1))] == [(4, 4)]
  assert len(tapped(lambda: jax.vmap(lambda x: through(x, "image", x))(np.ones((3, 4, 4))))) == 3


def test_a_tap_returns_what_it_was_given():
  with cg.channel("t", to=lambda value: None):
    assert cg.tap("text", "t", kind="text") == "text"
    pixels = jnp.ones((4, 4))
    assert cg.tap(pixels, "t", kind="image") is pixels


@pytest.mark.parametrize(
  ("array", "shape", "first"),
  [
    (np.full((2, 3), 0.5), (1, 2, 3, 1), [128]),
    (np.full((2, 3, 3), 2.0, np.float32), (1, 2, 3, 3), [255, 255, 255]),
    (np.full((2, 3, 4), np.nan), (1, 2, 3, 4), [0, 0, 0, 0]),
    (np.full((5, 2, 7), -1.0), (5, 2, 7, 1), [0]),
    (np.full((5, 2, 7, 4), 7, np.uint8), (5, 2, 7, 4), [7, 7, 7, 7]),
  ],
)
def test_images_are_of_bytes_and_in_a_batch(array, shape, first):
  batch = kinds.images(array)
  assert (batch.shape, batch.dtype) == (shape, np.uint8)
  assert batch[0, 0, 0].tolist() == first
  sheet = kinds.sheet(array)
  side = int(np.ceil(np.sqrt(shape[0])))
  assert sheet.shape[1:] == (side * shape[2], shape[3])


@pytest.mark.parametrize("channels", [1, 3, 4])
def test_a_png_is_read_back(channels):
  images = pytest.importorskip("PIL.Image")
  pixels = np.random.default_rng(0).integers(0, 255, (5, 7, channels), np.uint8)
  read = np.asarray(images.open(io.BytesIO(png(pixels)))).reshape(pixels.shape)
  np.testing.assert_array_equal(read, pixels)


def test_a_stream_says_of_which_kind_a_tap_is(tmp_path: Path):
  with cg.channel("t", to=cg.sinks.Stream(tmp_path / "t.cgs")):
    jax.jit(lambda: through(("{a} {}", 1, {"a": 2}), "text", 1))()
  (record,) = cg.open_stream(tmp_path / "t.cgs")
  assert record.description["kind"] == "text"
  assert kinds.text(list(record.leaves.values()), record.description["fields"]) == "2 1"


def test_a_native_sink_that_chooses_gets_a_texts_bytes(tmp_path: Path):
  with cg.channel("t", to=cg.sinks.JSONL(tmp_path / "t.jsonl", where=lambda r: r.value == "hi")):
    for text in ("hi", "no"):
      cg.tap(text, "t", kind="text")
  (line,) = (tmp_path / "t.jsonl").read_text().splitlines()
  assert '"value":[104,105]' in line


IMAGE = r"leaf 0: expected an image, uint8, or floats from 0 to 1, of \[height, width\].*got "
REFUSED: dict[str, tuple[Any, dict[str, Any], str]] = {
  "another kind": (1.0, {"kind": "video"}, "kind: expected 'image' or 'text', got 'video'"),
  "a vector": (np.ones(3), {"kind": "image"}, IMAGE + r"float32\[3\]"),
  "integers": (np.ones((4, 4), np.int32), {"kind": "image"}, IMAGE + r"int32\[4, 4\]"),
  "two channels": (np.ones((1, 4, 4, 2), np.uint8), {"kind": "image"}, IMAGE),
  "two channels of one": (np.ones((4, 4, 2), np.uint8), {"kind": "image"}, IMAGE),
  "five channels": (np.ones((9, 8, 5), np.float32), {"kind": "image"}, IMAGE + r".*\[9, 8, 5\]"),
  "floats": (np.ones(3), {"kind": "text"}, r"uint8\[bytes\] of UTF-8.*got float32\[3\]"),
  "rows": (np.ones((2, 3), np.uint8), {"kind": "text"}, r"got uint8\[2, 3\]"),
  "a dict": ({"a": np.ones(3, np.uint8), "b": np.ones(3, np.uint8)}, {"kind": "text"}, "one text"),
  "a field too many": (("{} {}", 1), {"kind": "text"}, "a text with fields for the arrays"),
  "a wrong format": (("{:s}", 1.0), {"kind": "text"}, "fields for the arrays, got '{:s}'"),
  "a pytree": (("{a[w]}", {"a": {"w": 1}}), {"kind": "text"}, "an array for each.*dict for 'a'"),
  "a list": (("{} {}", 1.0, [1, 2]), {"kind": "text"}, "an array for each field, got list for 1"),
  "no array": (("{}", object()), {"kind": "text"}, "expected an array"),
  "a dataflow": ("x", {"kind": "text", "effect": "dataflow"}, "effect: expected 'io' with kind="),
  "on a device": ("x", {"kind": "text", "on_device": True}, "on_device: expected False"),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_no_image_and_no_text_is_refused(name):
  value, options, words = REFUSED[name]
  with pytest.raises(cg.GateDefinitionError, match=words):
    jax.eval_shape(lambda: (cg.tap(value, "t", **options), 0)[1])
