# SPDX-License-Identifier: Apache-2.0
"""The data behind `python -m callgate watch`: curves, counts, lanes, sessions, feeds.

Streams are those of `stream_bytes`, an encoder of its own. The page is in watch/test_page.py.
"""

from __future__ import annotations

import os
import socket
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import numpy as np
import pytest
import stream_bytes as sb
from hypothesis import given
from hypothesis import strategies as st
from waiting import until

import callgate as cg
from callgate._watch import feed as _feed
from callgate._watch.curves import Curve, RecordCounts
from callgate._watch.feed import Follower
from callgate._watch.model import Key, Model, Series
from callgate.sinks._native import Stream

LOSS = Key("loss", "primal", "")


def modelled(path: Path, data: bytes, *, points: int = 1000, chunk: int = 7) -> Model:
  """A model of a stream, which gets the records in small chunks."""
  path.write_bytes(data)
  model = Model(points)
  with cg.open_stream(path) as stream:
    records = list(stream)
  for start in range(0, len(records), chunk):
    model.add(records[start : start + chunk])
  return model


def mean(model: Model, key: Key = LOSS, device: int = 0) -> np.ndarray:
  return model.curves(key)[Series(0, device)]["mean"]


# -- curves ----------------------------------------------------------------------------------------
def rows(values: Sequence[float], begin: int = 0, session: int = 0) -> np.ndarray:
  v = np.asarray(values, np.float64)
  x = np.arange(begin, begin + len(v))
  return np.stack([x, x * 0.5, np.full(len(v), session), v, v, v, np.ones(len(v))])


@given(
  st.lists(st.floats(-1e6, 1e6), min_size=1, max_size=300),
  st.integers(2, 20),
  st.integers(1, 40),
)
def test_a_curve_is_the_minimum_mean_and_maximum_of_equal_runs_of_its_points(values, limit, chunk):
  curve = Curve(limit)
  for start in range(0, len(values), chunk):
    curve.extend(rows(values[start : start + chunk], start))
  got = curve.columns("whole")
  stride = 1
  while -(-len(values) // stride) > limit:
    stride *= 2
  runs = [np.array(values[i : i + stride]) for i in range(0, len(values), stride)]
  np.testing.assert_array_equal(got["low"], [run.min() for run in runs])
  np.testing.assert_array_equal(got["high"], [run.max() for run in runs])
  np.testing.assert_allclose(got["mean"], [run.mean() for run in runs], rtol=1e-9, atol=1e-6)
  np.testing.assert_array_equal(got["record"], np.arange(len(runs)) * stride)
  np.testing.assert_array_equal(got["seconds"], got["record"] * 0.5)
  np.testing.assert_array_equal(curve.columns("recent")["mean"], values[-limit:])


def test_a_curve_of_a_million_points_stays_small_and_keeps_every_peak():
  curve = Curve(500)
  values = np.zeros(1_000_000)
  values[[3, 654_321]] = 7, -9
  for start in range(0, len(values), 4096):
    curve.extend(rows(values[start : start + 4096], start))
  got = curve.columns("whole")
  assert 250 <= len(got["mean"]) <= 500
  assert (got["high"].max(), got["low"].min()) == (7, -9)
  assert len(curve.columns("recent")["mean"]) == 500


def test_sessions_are_never_merged_into_one_point():
  curve = Curve(4)
  for session in range(3):
    curve.extend(rows([session] * 5, 5 * session, session))
  got = curve.columns("whole")
  assert np.isnan(got["mean"]).sum() == 2
  assert set(got["mean"][~np.isnan(got["mean"])]) == {0, 1, 2}


def test_more_sessions_than_points_are_all_there():
  curve = Curve(2)
  for session in range(9):
    curve.extend(rows([session], session, session))
  got = curve.columns("whole")["mean"]
  np.testing.assert_array_equal(got[~np.isnan(got)], np.arange(9))


@given(st.lists(st.floats(0, 1e5), min_size=1, max_size=50), st.integers(1, 9))
def test_lanes_count_every_record_in_its_bucket(times, chunk):
  lanes = RecordCounts()
  for start in range(0, len(times), chunk):
    lanes.add(0, np.array(times[start : start + chunk]))
  counts = lanes.counts()[0]
  assert len(counts) <= RecordCounts.BUCKETS
  want = np.bincount((np.array(times) / lanes.width).astype(int), minlength=len(counts))
  np.testing.assert_array_equal(counts, want)


# -- models ----------------------------------------------------------------------------------------
def test_scalars_become_curves_by_record_and_by_seconds(tmp_path):
  model = modelled(tmp_path / "s", sb.losses([3.0, 2.0, 1.5]))
  curve = model.curves(LOSS)[Series(0, 0)]
  np.testing.assert_array_equal(curve["mean"], [3, 2, 1.5])
  np.testing.assert_array_equal(curve["record"], [0, 1, 2])
  np.testing.assert_allclose(curve["seconds"], [0, 1e-6, 2e-6])
  assert not model.ask(LOSS, lambda panel: panel.is_array)
  totals = model.totals()
  assert (totals.records, totals.missing, totals.sessions) == (3, 0, 1)


def test_arrays_become_bands_and_their_latest_values(tmp_path):
  arrays = np.random.default_rng(0).normal(size=(5, 2, 3)).astype(np.float32)
  data = sb.session() + sb.source(0, "g", [("['w']", "float32", (2, 3))])
  for seq, array in enumerate(arrays):
    data += sb.record(0, [array], seq=seq)
  model = modelled(tmp_path / "s", data, chunk=2)
  key = Key("g", "primal", "['w']")
  curve = model.curves(key)[Series(0, 0)]
  np.testing.assert_allclose(curve["low"], arrays.min((1, 2)))
  np.testing.assert_allclose(curve["mean"], arrays.mean((1, 2)), rtol=1e-5)
  np.testing.assert_allclose(curve["high"], arrays.max((1, 2)))
  np.testing.assert_array_equal(model.ask(key, lambda p: p.latest), arrays[-1].reshape(-1))
  assert model.ask(key, lambda p: p.is_array)
  assert model.table()["kind"] == ["float32[2, 3]"]


def test_the_lanes_of_a_vmap_are_one_point(tmp_path):
  data = sb.session() + sb.source(0, "x", [("", "float32", (4,))], lanes="4:1")
  for seq in range(3):
    data += sb.record(0, [np.arange(4, dtype=np.float32) + seq], seq=seq)
  model = modelled(tmp_path / "s", data, chunk=3)  # chunks that cut records
  key = Key("x", "primal", "")
  curve = model.curves(key)[Series(0, 0)]
  np.testing.assert_array_equal(curve["low"], [0, 1, 2])
  np.testing.assert_array_equal(curve["mean"], [1.5, 2.5, 3.5])
  np.testing.assert_array_equal(curve["high"], [3, 4, 5])
  assert model.ask(key, lambda p: p.is_array)
  assert (model.totals().records, model.totals().missing) == (12, 0)


def test_numbers_that_are_not_finite_are_counted_and_left_out(tmp_path):
  data = sb.losses([1.0, np.nan, np.inf, 2.0])
  data += sb.source(1, "a", [("", "float32", (3,))])
  data += sb.record(1, [np.array([np.nan, 2, 4], np.float32)], seq=4)
  model = modelled(tmp_path / "s", data)
  np.testing.assert_array_equal(mean(model), [1, np.nan, np.nan, 2])
  np.testing.assert_array_equal(mean(model, Key("a", "primal", "")), [3])
  assert model.table()["nonfinite"] == [2, 1]


@pytest.mark.parametrize(
  ("dtype", "value", "want"),
  [("bool", True, 1), ("int8", -5, -5), ("uint64", 2**63, 2.0**63), ("complex64", 3 + 4j, 5),
   ("bfloat16", 1.5, 1.5), ("int4", 0x0B, -5)],
)  # fmt: skip
def test_every_kind_of_number_is_drawn(tmp_path, dtype, value, want):
  ml_dtypes = pytest.importorskip("ml_dtypes")
  stored = bytes([value]) if dtype == "int4" else np.array(value, getattr(ml_dtypes, dtype, dtype))
  data = sb.session() + sb.source(0, "loss", [("", dtype, ())]) + sb.record(0, [stored])
  assert mean(modelled(tmp_path / "s", data)) == [want]


def test_devices_have_curves_and_lanes_of_their_own(tmp_path):
  data = sb.session() + sb.source(0, "loss", sb.LOSS)
  for seq in range(4):
    for device in (0, 3):
      data += sb.record(
        0, [np.float32(seq + device)], seq=seq, device=device, time_ns=(seq + 1) * 10**9
      )
  model = modelled(tmp_path / "s", data)
  np.testing.assert_array_equal(mean(model, device=0), [0, 1, 2, 3])
  np.testing.assert_array_equal(mean(model, device=3), [3, 4, 5, 6])
  width, counts = model.lanes()
  for device in (0, 3):
    np.testing.assert_allclose(np.flatnonzero(counts[device]) * width, [0, 1, 2, 3])
  assert model.table()["devices"] == ["0, 3"]


@pytest.mark.parametrize("chunk", [1, 7, 1000])
def test_rates_are_those_of_the_last_ten_seconds_of_the_stream(tmp_path, chunk):
  data = sb.session() + sb.source(0, "loss", sb.LOSS)
  times = [*range(100), *(100 + 0.25 * i for i in range(81))]  # one a second, then four
  for seq, seconds in enumerate(times):
    data += sb.record(0, [np.float32(0)], seq=seq, time_ns=int(seconds * 10**9))
  model = modelled(tmp_path / "s", data, chunk=chunk)
  assert model.totals().per_second == pytest.approx(4, rel=0.1)
  assert model.table()["per_second"] == [pytest.approx(4, rel=0.1)]


def test_numbers_that_did_not_come_are_missing(tmp_path):
  data = sb.session() + sb.source(0, "loss", sb.LOSS)
  for seq in (5, 6, 9, 12):
    data += sb.record(0, [np.float32(seq)], seq=seq)
  model = modelled(tmp_path / "s", data)
  assert model.totals().missing == 4
  np.testing.assert_array_equal(model.curves(LOSS)[Series(0, 0)]["record"], [5, 6, 9, 12])


def test_roles_have_plots_of_their_own_and_say_so(tmp_path):
  data = sb.session() + sb.source(0, "w", sb.LOSS) + sb.source(1, "w", sb.LOSS, role=2)
  data += sb.record(0, [np.float32(1)], seq=0) + sb.record(1, [np.float32(2)], seq=1)
  labels = [key.label for key in modelled(tmp_path / "s", data).versions()]
  assert labels == ["w", "w (cotangent)"]


@pytest.mark.parametrize(
  ("path", "label"),
  [("", "x"), ("['w']", "x/w"), ("['a'][0].b", "x/a/0/b"), ("['a b']", "x/a b"),
   ("['it']s']", "x/['it']s']"), ("plain", "x/plain")],
)  # fmt: skip
def test_labels_are_paths_as_people_read_them(path, label):
  assert Key("x", "primal", path).label == label


@pytest.mark.parametrize("chunk", [1, 2, 100])
def test_a_writer_that_restarts_continues_behind_a_gap(tmp_path, chunk):
  data = sb.losses([3.0, 2.0, 1.0]) + sb.losses([9.0, 8.0]) + sb.losses([5.0])
  model = modelled(tmp_path / "s", data, chunk=chunk)
  curve = model.curves(LOSS)[Series(0, 0)]
  np.testing.assert_array_equal(curve["mean"], [3, 2, 1, np.nan, 9, 8, np.nan, 5])
  np.testing.assert_array_equal(curve["record"], [0, 1, 2, np.nan, 3, 4, np.nan, 5])
  assert (model.totals().sessions, model.totals().missing) == (3, 0)


def test_a_version_changes_with_its_leaf_alone(tmp_path):
  data = sb.losses([1.0]) + sb.source(1, "other", sb.LOSS) + sb.record(1, [np.float32(2)], seq=1)
  model = modelled(tmp_path / "s", data)
  before = model.versions()
  with cg.open_stream(tmp_path / "s") as stream:
    model.add([next(stream)])
  after = model.versions()
  assert after[LOSS] != before[LOSS]
  assert after[Key("other", "primal", "")] == before[Key("other", "primal", "")]


def test_an_empty_array_and_a_long_one_are_no_trouble(tmp_path):
  data = sb.session() + sb.source(0, "e", [("", "float32", (0,))])
  data += sb.source(1, "l", [("", "int32", (100_000,))])
  data += sb.record(0, [np.zeros(0, np.float32)], seq=0)
  data += sb.record(1, [np.arange(100_000, dtype=np.int32)], seq=1)
  model = modelled(tmp_path / "s", data)
  assert np.isnan(mean(model, Key("e", "primal", ""))).all()
  latest = model.ask(Key("l", "primal", ""), lambda p: p.latest)
  assert (len(latest), latest[0], latest[-1]) == (2048, 0, 99_999)


def test_too_few_points_are_refused():
  with pytest.raises(ValueError) as error:
    Model(1)
  assert "points: expected at least 2 for each curve, got 1" in str(error.value)


# -- feeds -----------------------------------------------------------------------------------------
@pytest.fixture
def fed() -> Iterator[Callable[[str], tuple[Follower, Model]]]:
  """Starts feeds, which are stopped at the end."""
  feeds: list[Follower] = []

  def start(where: str) -> tuple[Follower, Model]:
    model = Model()
    feeds.append(Follower(where, model, 0, retry_seconds=0.02))
    feeds[-1].start()
    return feeds[-1], model

  yield start
  for feed in feeds:
    feed.stop()
  assert not [t.name for t in threading.enumerate() if t.name.startswith("callgate-watch")]


def test_a_feed_waits_for_its_file_and_follows_it_through_restarts(tmp_path, fed):
  path = tmp_path / "run.cgs"
  feed, model = fed(str(path))
  assert feed.state == "waiting for it"
  data = sb.losses([3.0])
  (tmp_path / "partial").write_bytes(data)
  os.rename(tmp_path / "partial", path)
  until(lambda: model.totals().records == 1, "the first record")
  with path.open("ab") as file:
    file.write(sb.record(0, [np.float32(2)], seq=1) + sb.end(2))
  until(lambda: feed.state == "closed by its writer", "the end")
  with path.open("ab") as file:
    file.write(sb.losses([9.0]))
  until(lambda: model.totals().records == 3, "the second writer's record")
  np.testing.assert_array_equal(mean(model), [3, 2, np.nan, 9])
  assert model.totals().sessions == 2


def test_a_file_that_comes_while_a_feed_opens_it_is_read_once(tmp_path, fed, monkeypatch):
  path = tmp_path / "run.cgs"
  path.write_bytes(sb.losses([3.0]))
  asked: list[str] = []

  def inode(where: str) -> int:
    asked.append(where)
    return path.stat().st_ino if len(asked) > 1 else 0  # not there yet when first looked for

  monkeypatch.setattr(_feed, "_inode", inode)
  _, model = fed(str(path))
  until(lambda: len(asked) >= 8, "the feed has looked for another file several times")
  assert (model.totals().records, model.totals().sessions) == (1, 1)


def test_a_feed_goes_over_to_the_file_that_replaces_its_own(tmp_path, fed):
  path = tmp_path / "run.cgs"
  path.write_bytes(sb.losses([3.0, 2.0]))
  _, model = fed(str(path))
  until(lambda: model.totals().records == 2, "two records")
  (tmp_path / "next").write_bytes(sb.losses([7.0]))
  os.replace(tmp_path / "next", path)
  until(lambda: model.totals().records == 3, "the other file's record")
  np.testing.assert_array_equal(mean(model), [3, 2, np.nan, 7])


def test_a_feed_keeps_what_came_before_the_damage_and_says_where_it_is(tmp_path, fed):
  data = bytearray(sb.losses([3.0, 2.0, 1.0]))
  data[-3] ^= 1
  path = tmp_path / "run.cgs"
  path.write_bytes(data)
  feed, model = fed(str(path))
  until(lambda: "byte" in feed.state, "the damage")
  np.testing.assert_array_equal(mean(model), [3, 2])


def test_a_feed_returns_to_a_socket_that_is_served_again(tmp_path, fed):
  path = tmp_path / "s"
  feed, model = fed(f"unix:{path}")
  for served, value in enumerate([3.0, 7.0], 1):
    with socket.socket(socket.AF_UNIX) as listener:
      listener.bind(str(path))
      listener.listen()
      peer, _ = listener.accept()
      with peer:
        peer.sendall(sb.losses([value]) + (sb.end(1) if served == 1 else b""))
        until(lambda served=served: model.totals().records == served, "the record")
    path.unlink()
  # The broken connection, or the attempt after it, which finds no socket.
  until(lambda: "trying again" in feed.state or "connecting" in feed.state, "the broken connection")
  np.testing.assert_array_equal(mean(model), [3, np.nan, 7])
  assert model.totals().sessions == 2


def test_a_feed_reads_what_the_sink_writes(tmp_path, fed):
  import jax

  sink = Stream(tmp_path / "run.cgs")
  assert sink.address == str(tmp_path / "run.cgs")
  assert repr(sink) == f"Stream({sink.address!r})"
  _, model = fed(sink.address)
  with cg.channel("watched", to=sink):
    jax.jit(lambda: jax.lax.fori_loop(0, 50, lambda i, c: (cg.tap(i, "watched"), c)[1], 0))()
  until(lambda: model.totals().records == 50, "all records")
  np.testing.assert_array_equal(mean(model, Key("watched", "primal", "")), np.arange(50))


def test_a_sink_that_serves_a_port_says_which():
  assert Stream("tcp://127.0.0.1:0").address.rsplit(":", 1)[1] != "0"
