# SPDX-License-Identifier: Apache-2.0
"""Feeds from data loaders: PyTorch's, Grain's, Hugging Face's and TensorFlow's, and their likes.

The truth is the loader's own iteration, as NumPy's arrays.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import callgate as cg

X, Y = np.arange(24, dtype=np.float32).reshape(8, 3), np.arange(8)  # Y is int64


def torch_loader() -> Any:
  torch = pytest.importorskip("torch")

  class Rows(torch.utils.data.Dataset):
    def __len__(self) -> int:
      return len(X)

    def __getitem__(self, i: int) -> Any:
      return {
        "x": torch.from_numpy(X[i]),
        "pair": (Y[i], {"half": torch.tensor(i, dtype=torch.half)}),
      }

  return torch.utils.data.DataLoader(Rows(), batch_size=2)


def grain_loader() -> Any:
  grain = pytest.importorskip("grain", reason="needs Grain (pip install grain)")
  rows = grain.MapDataset.range(8).map(lambda i: {"x": X[i], "y": Y[i]})
  return rows.batch(2).to_iter_dataset()


def hugging_face_dataset() -> Any:
  datasets = pytest.importorskip("datasets", reason="needs datasets (pip install datasets)")
  return datasets.Dataset.from_dict({"x": X, "y": Y}).with_format("numpy").batch(2)


def tensorflow_dataset() -> Any:
  tf = pytest.importorskip("tensorflow", reason="needs TensorFlow (pip install tensorflow)")
  return tf.data.Dataset.from_tensor_slices({"x": X, "y": (Y, X.astype(np.float16))}).batch(2)


class PlainLoader:
  """As the others: batches, which begin anew with each iteration, and count these."""

  def __init__(self) -> None:
    self.epochs = 0

  def __iter__(self) -> Iterator[Any]:
    self.epochs += 1
    return ({"x": X[i : i + 2], "y": [Y[i : i + 2]]} for i in range(0, 8, 2))


LOADERS = [torch_loader, grain_loader, hugging_face_dataset, tensorflow_dataset, PlainLoader]


def as_jax(batch: Any) -> Any:
  """A batch as JAX holds it: 64-bit types of NumPy's are 32-bit ones."""
  return jax.tree.map(lambda leaf: jnp.asarray(np.asarray(leaf)), batch)


@pytest.mark.parametrize("make", LOADERS)
def test_a_program_reads_the_epochs_of_a_loader(make: Callable[[], Any]) -> None:
  loader = make()
  expected = jax.tree.map(lambda *x: jnp.stack(x), *map(as_jax, loader), *map(as_jax, loader))
  with cg.feed(loader, epochs=2) as feed:
    epoch = jax.jit(lambda: jax.lax.scan(lambda c, _: (c, feed.next()), 0, length=4)[1])
    got = jax.tree.map(lambda *x: jnp.concatenate(x), epoch(), epoch())
    with pytest.raises(cg.EndOfFeed, match=r"ended after 8 item\(s\)"), cg.errors():
      jax.block_until_ready(epoch())
  assert jax.tree.structure(got) == jax.tree.structure(expected)
  for one, other in zip(jax.tree.leaves(got), jax.tree.leaves(expected), strict=True):
    assert one.dtype == other.dtype
    np.testing.assert_array_equal(one, other)


@pytest.mark.parametrize("make", LOADERS)
def test_a_new_feed_of_a_loader_begins_anew(make: Callable[[], Any]) -> None:
  loader = make()
  for _ in range(2):
    with cg.feed(loader) as feed:
      for got, batch in zip(feed, loader, strict=True):
        jax.tree.map(np.testing.assert_array_equal, got, as_jax(batch))


def test_torch_s_workers_are_fed_from() -> None:
  torch = pytest.importorskip("torch")
  loader = torch.utils.data.DataLoader(
    torch.utils.data.TensorDataset(torch.from_numpy(X)), batch_size=2, num_workers=1,
    multiprocessing_context="forkserver",
  )  # fmt: skip
  with cg.feed(loader, epochs=2) as feed:
    got = [x for (x,) in feed]
  np.testing.assert_array_equal(jnp.concatenate(got), np.concatenate([X, X]))


# -- epochs ---
def test_epochs_none_goes_on_for_ever() -> None:
  loader = PlainLoader()
  with cg.feed(loader, epochs=None) as feed:
    got = [float(batch["y"][0][0]) for batch in itertools.islice(feed, 10)]
  assert got == [0, 2, 4, 6, 0, 2, 4, 6, 0, 2]
  assert loader.epochs >= 3


def test_a_loader_is_asked_for_an_epoch_when_it_comes() -> None:
  loader = PlainLoader()
  with cg.feed(loader, epochs=3, prefetch=1) as feed:
    assert loader.epochs == 1
    assert len(list(feed)) == 12
  assert loader.epochs == 3


def test_a_loader_that_has_nothing_any_more_ends_its_feed() -> None:
  left = [1, 2]

  class Shrinking:
    def __iter__(self) -> Iterator[int]:
      return iter([left.pop()] if left else [])

  with cg.feed(Shrinking(), epochs=None) as feed:
    assert [int(x) for x in feed] == [2, 1]


def test_a_later_epochs_exception_is_raised_at_its_item() -> None:
  class Once:
    used = False

    def __iter__(self) -> Iterator[int]:
      if self.used:
        raise OSError("the file is gone")
      self.used = True
      return iter([1])

  with cg.feed(Once(), epochs=2) as feed:
    assert int(next(feed)) == 1
    with pytest.raises(OSError, match="the file is gone"):
      next(feed)


# -- casts ---
def test_cast_gives_items_the_dtypes_of_shape() -> None:
  shape = {"x": jax.ShapeDtypeStruct((2,), jnp.bfloat16), "n": jax.ShapeDtypeStruct((), jnp.uint8)}
  items = [
    {"x": np.array([1, 2.5]), "n": np.uint32(7)},
    {"x": np.array([3, 4], np.float32), "n": np.uint8(9)},
  ]
  default = {"x": np.zeros(2), "n": np.uint16(1)}
  with cg.feed(items, shape=shape, cast=True, default=default) as feed:
    got = [next(feed) for _ in range(3)]
  assert {x["x"].dtype for x in got} == {jnp.dtype(jnp.bfloat16)}
  assert [(x["x"].tolist(), int(x["n"])) for x in got] == [([1, 2.5], 7), ([3, 4], 9), ([0, 0], 1)]


def test_only_casts_of_the_same_kind_are_made() -> None:
  with cg.feed([np.int32(1), np.float32(1.5)], cast=True) as feed:
    next(feed)
    with pytest.raises(cg.ResultError, match=r"item 1: expected int32\[\], got float32\[\]"):
      next(feed)


def test_integers_of_another_width_are_converted_where_they_fit() -> None:
  with cg.feed([Y, Y.astype(np.int8), Y + 2**40]) as feed:
    assert feed.shape.dtype == jnp.int32
    assert [next(feed).tolist() for _ in range(2)] == [Y.tolist()] * 2
    with pytest.raises(cg.ResultError, match=r"item 2: .* 1099511627776 at \[0\], outside int32"):
      next(feed)


def test_without_cast_the_errors_name_it() -> None:
  with pytest.raises(cg.GateDefinitionError, match="expected float32 without it, or cast=True"):
    cg.feed([X.astype(np.float64)])
  with cg.feed([X, X.astype(np.float16)]) as feed:
    next(feed)
    with pytest.raises(cg.ResultError, match="pass cast=True"):
      next(feed)


def test_the_configuration_has_the_default_of_cast() -> None:
  with cg.config(cast=True), cg.feed([X.astype(np.float64)] * 2) as feed:
    assert next(feed).dtype == jnp.float32
  with cg.config(cast=True), pytest.raises(cg.GateDefinitionError, match="float64 needs"):
    cg.feed([X.astype(np.float64)], cast=False)


@pytest.mark.parametrize(
  ("options", "message"),
  [
    ({"epochs": 0}, "epochs: expected an integer of 1 or more, got 0"),
    ({"epochs": 1.5}, "epochs: expected an integer of 1 or more, got 1.5"),
    ({"cast": "yes"}, "cast: expected a bool, got 'yes'"),
  ],
)
def test_wrong_options_are_said(options: dict[str, Any], message: str) -> None:
  with pytest.raises(cg.GateDefinitionError, match=message):
    cg.feed([1], **options)


def test_an_iterator_has_one_epoch() -> None:
  for epochs in (2, None):
    with pytest.raises(cg.GateDefinitionError, match=f"epochs={epochs}: expected .* got generator"):
      cg.feed((i for i in range(3)), epochs=epochs)
