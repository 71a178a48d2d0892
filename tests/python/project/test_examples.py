# SPDX-License-Identifier: Apache-2.0
"""Each example runs in a process of its own, and its claims are checked against other sources."""

import json
import os
import pathlib
import re
import shutil
import sys

import interpreters
import numpy as np
import process_groups
import pytest

import callgate as cg

EXAMPLES = pathlib.Path(__file__).resolve().parents[3] / "examples"

pytest.importorskip("scipy")
pytest.importorskip("sklearn")


def run(name, *args, cwd):
  """The output of `examples/<name>`. Works wherever callgate is imported from here."""
  path = interpreters.same_path()
  return interpreters.succeed(EXAMPLES / name, *args, cwd=cwd, environment=path, timeout=300)


def numbers(text):
  return [float(word) for word in re.findall(r"-?\d+(?:\.\d+)?(?:e[-+]\d+)?", text)]


def line_with(text, words):
  return next(line for line in text.splitlines() if words in line)


def test_examples_are_short():
  for path in EXAMPLES.rglob("*.py"):
    licence, *lines = path.read_text().splitlines()
    assert licence.startswith("# SPDX")
    assert len(lines) <= 80, path.name


def test_four_runs_are_four_folders_and_the_rate_that_is_too_high_crashes(tmp_path):
  text = run("four_runs.py", "trainings", cwd=tmp_path)
  assert all(number > 80 for number in numbers(text)[:3])
  abouts = {p.parent.name: json.loads(p.read_text()) for p in tmp_path.rglob("run.json")}
  states = {name: about["state"] for name, about in abouts.items()}
  assert states == dict.fromkeys(("wide", "narrow", "slow"), "finished") | {"too-fast": "crashed"}
  assert "the loss is nan" in abouts["too-fast"]["alerts"][0]["text"]
  for about in (abouts[name] for name in ("wide", "narrow", "slow")):
    assert line_with(text, about["name"]).split()[1] == f"{about['summary']['accuracy']:.1%}"


def test_the_eight_schools_are_sampled_with_a_bar_in_numpyro_s_loop(tmp_path):
  pytest.importorskip("numpyro")
  path, same = EXAMPLES / "eight_schools.py", interpreters.same_path()
  done = interpreters.run(path, cwd=tmp_path, environment=same, timeout=300)
  text = done.stdout
  assert done.returncode == 0
  assert re.search(r"fori_loop \(util\.py:\d+\): 100%.* 1500/1500", done.stderr)
  assert "without bars they are the same: True" in text
  mean, r_hat = numbers(line_with(text, "mean effect"))
  assert 3.5 < mean < 5.5  # 4.4 in Gelman et al., Bayesian Data Analysis
  assert r_hat < 1.05
  found = [numbers(line) for line in text.splitlines() if " seen, " in line]
  assert len(found) == 8
  for seen, shrunk, low, high in found:
    assert abs(shrunk - mean) < abs(seen - mean) + 1
    assert low < shrunk < high


def test_the_second_search_computes_new_scores_alone(tmp_path):
  text = run("cached_search.py", "scores.cgr", cwd=tmp_path)
  first, second = (numbers(line) for line in text.splitlines())
  assert first[0::4] == [4, 24]
  assert second[0::4] == [6, 12]
  assert second[3] >= first[3] > 90
  assert sorted(p.name for p in tmp_path.iterdir()) == ["scores.cgr"]


@pytest.mark.limit(300)  # about 80 seconds of computing
def test_the_demo_learns_digits_draws_them_and_agrees_with_jax_s_callbacks(tmp_path):
  pytest.importorskip("matplotlib")
  pytest.importorskip("tensorboardX")
  text = run("demo.py", cwd=tmp_path)
  accuracy = re.search(r"accuracy (\d\.\d+)", text)
  assert accuracy is not None
  assert float(accuracy[1]) > 0.95
  assert "bit for bit" in text  # the example itself compares the parameters
  out = tmp_path / "out"
  for picture in ("learning_curve.png", "augmented.png"):
    assert (out / picture).read_bytes().startswith(b"\x89PNG")
  # One call an image through JAX, over callgate: 50 on a quiet machine, less on a busy one.
  each, _, ours, *_ = numbers(line_with(text, "a copy in its place"))
  assert each / ours > 3
  assert len(numbers(line_with(text, "by jax.debug.callback"))) == 2
  assert len(numbers(line_with(text, "by cg.tap"))) == 2
  lines = [json.loads(line) for line in (out / "training.jsonl").read_text().splitlines()]
  steps = [line["value"] for line in lines if line["name"] == "step"]
  scores = [line["value"] for line in lines if line["name"] == "macro F1"]
  assert (len(steps), len(scores)) == (25 * 21, 25)  # each step and each epoch, once
  assert np.mean([s["loss"] for s in steps[-21:]]) < 0.2 * np.mean([s["loss"] for s in steps[:5]])
  assert min(step["gradient norm"] for step in steps) > 0
  assert f"macro F1 {scores[-1]:.3f}" in text
  assert [file.name.startswith("events") for file in (out / "tensorboard").iterdir()] == [True]


def test_the_tapped_training_writes_down_what_its_statistics_count(tmp_path):
  path = tmp_path / "taps.jsonl"
  text = run("taps_training.py", path, cwd=tmp_path)
  lines = [json.loads(line) for line in path.read_text().splitlines()]
  delivered, accuracy = numbers(text.splitlines()[-1])
  assert len(lines) == delivered
  assert accuracy > 0.95
  losses = [line["value"]["loss"] for line in lines if line["name"] == "step"]
  assert len(losses) == 1500
  records, mean, least, most, last = numbers(line_with(text, "step/loss"))
  assert records == 1500
  np.testing.assert_allclose(
    (mean, least, most, last), (np.mean(losses), min(losses), max(losses), losses[-1]), atol=1e-4
  )
  layers = [line for line in lines if line["name"] == "layers"]
  assert len(layers) == 1500 // 25
  # `where` sent the losses that were above twice their running mean, and those alone.
  running, jumps = np.float32(3), 0
  for loss in np.float32(losses):
    jumps += bool(loss > 2 * running + np.float32(0.1))
    running = np.float32(0.9) * running + np.float32(0.1) * loss
  sent = sum(line["name"] == "jump" for line in lines)
  assert abs(sent - jumps) <= 1  # a loss may lie on the edge
  assert 0 < sent < 1500


def test_traffic_balances_as_braess_computed_it(tmp_path):
  pytest.importorskip("networkx")
  pytest.importorskip("matplotlib")
  text = run("traffic.py", cwd=tmp_path)
  without, with_it, delay = (numbers(line)[-1] for line in text.splitlines())
  assert without == pytest.approx(65, abs=0.1)  # half of the cars each way: 20 + 45
  assert with_it == pytest.approx(80, abs=0.1)  # all of them by the new road: 40 + 40
  assert delay == pytest.approx(1, abs=0.02)  # 4000 d b / 4, of the time 45 + 4000 b b' / (b + b')
  assert (tmp_path / "out" / "traffic.png").read_bytes().startswith(b"\x89PNG")


def test_simulated_wards_refuse_as_many_as_erlang_says(tmp_path):
  pytest.importorskip("cloudpickle")
  lines = run("hospital_ward.py", cwd=tmp_path).splitlines()
  rows = [numbers(line) for line in lines[1:-1]]
  assert [row[0] for row in rows] == list(range(6, 20, 2))
  for _, refused, erlang, occupied, _ in rows:
    assert refused == pytest.approx(erlang, abs=0.04)
    assert occupied == pytest.approx(12 * (1 - erlang), rel=0.05)  # Little's law
  cost = {row[0]: row[4] for row in rows}
  assert numbers(lines[-1])[0] == min(cost, key=cost.__getitem__)


def test_the_conductivity_of_a_rod_is_found_with_one_factorisation_a_step(tmp_path):
  assert "truth: [ 0.3 -0.8  0.5]" in run("sparse_solver.py", cwd=tmp_path)


def test_a_cooled_plate_is_followed_back_with_one_factorisation_a_gradient(tmp_path):
  text = run("cooling_plate.py", cwd=tmp_path)
  assert "heated at (0.300, 0.600)" in text
  assert "100 steps, factorised 1 time\n" in text
  assert "questions asked, 0 failed" in text


def test_requests_are_on_their_way_at_once(tmp_path):
  assert " by 160 requests of 0.02 s in " in run("overlapping_requests.py", cwd=tmp_path)


def test_pendulums_swing_with_the_frequencies_of_small_swings(tmp_path):
  pytest.importorskip("sympy")
  pytest.importorskip("matplotlib")
  text = run("pendulum.py", cwd=tmp_path)
  for line in [line for line in text.splitlines() if "frequency" in line]:
    found, exact = numbers(line)
    assert found == pytest.approx(exact, rel=1e-3)
  share, count, _ = numbers(text.splitlines()[-1].replace(",", ""))
  assert count == 40_000
  assert 40 < share < 70
  assert (tmp_path / "out" / "pendulum.png").read_bytes().startswith(b"\x89PNG")


def test_a_stream_is_followed_to_its_end_by_another_process(tmp_path):
  path = tmp_path / "run.cgs"
  lines = run("follow_stream.py", path, cwd=tmp_path).splitlines()
  assert lines.pop() == "the writer ended with status 0"
  rows = np.array([numbers(line) for line in lines])
  np.testing.assert_array_equal(rows[:, 0], np.arange(0, 2000, 100))
  assert rows[0, 2] == pytest.approx(np.log(2), abs=1e-4)  # the loss of no knowledge
  assert (np.diff(rows[:, 2]) < 0).all()  # plain gradient descent on a convex loss
  assert rows[-1, 1] > 0.97
  with cg.open_stream(path) as stream:
    np.testing.assert_allclose(stream.columns("train")["['loss']"], rows[:, 2], atol=1e-4)


def test_processes_of_one_machine_train_together_and_are_read_as_one_stream(tmp_path):
  text = run("launch_processes.py", tmp_path / "out", cwd=tmp_path)
  assert "processes ended with [0, 0]" in text
  with cg.open_stream(tmp_path / "out" / "run-{process}.cgs") as stream:
    columns = stream.columns("shard")
  pairs = set(zip(columns["process"].tolist(), columns["device"].tolist(), strict=True))
  assert len(pairs) == 4
  for process, device in pairs:
    mine = columns["device"] == device
    assert set(columns["process"][mine]) == {process}
    np.testing.assert_array_equal(columns["['step']"][mine], np.arange(200))
  # The same steps on all rows at once, in NumPy.
  from sklearn.datasets import load_breast_cancer
  from sklearn.preprocessing import StandardScaler

  x, y = load_breast_cancer(return_X_y=True)
  x, y = np.c_[StandardScaler().fit_transform(x), np.ones(len(x))][:568], y[:568]
  w, losses = np.zeros(x.shape[1]), []
  for _ in range(201):
    logits = x @ w
    losses.append(np.mean(np.logaddexp(0, logits) - y * logits))
    w -= 0.5 * x.T @ (1 / (1 + np.exp(-logits)) - y) / len(x)
  means = [np.mean(columns["['loss']"][columns["['step']"] == i]) for i in range(200)]
  np.testing.assert_allclose(means, losses[:200], rtol=1e-3)
  assert numbers(line_with(text, "loss of all rows")) == [pytest.approx(losses[200], rel=1e-3)]


def check_the_sharded_training(text, paths, devices):
  """Against the same training in NumPy: what each device tapped, and where the weights ended.

  Args:
    text: what the example printed.
    paths: of the streams.
    devices: (process, device) of each part of the rows, in order.
  """
  from sklearn.datasets import load_digits

  x, y = load_digits(return_X_y=True)
  x, y = np.c_[x / 16, np.ones(len(x))][:1796].reshape(4, 449, 65), y[:1796].reshape(4, 449)
  w, losses, norms = np.zeros((65, 10)), np.zeros((300, 4)), np.zeros((300, 4))
  for step in range(300):
    scores = np.exp(x @ w)
    shares = scores / scores.sum(2, keepdims=True)
    losses[step] = -np.log(np.take_along_axis(shares, y[..., None], 2)).mean((1, 2))
    slopes = x.transpose(0, 2, 1) @ (shares - np.eye(10)[y]) / 449
    norms[step] = np.sqrt((slopes**2).sum((1, 2)))
    w -= 0.2 * slopes.mean(0)
  with cg.open_stream(paths) as stream:
    found = stream.columns("shard")
  assert len(found["device"]) == 4 * 300  # each step of each device, once
  for part, (process, device) in enumerate(devices):
    mine = found["device"] == device
    assert set(found["process"][mine]) == {process}
    np.testing.assert_array_equal(found["['step']"][mine], np.arange(300))
    assert found["['norm']"][mine].shape == (300, 1)  # a shard, not the whole
    np.testing.assert_allclose(found["['norm']"][mine][:, 0], norms[:, part], rtol=1e-3)
    np.testing.assert_allclose(found["['loss']"][mine][:, 0], losses[:, part], rtol=1e-3)
    said = line_with(text, f"process {process}, device {device}:")
    assert numbers(said)[2:] == pytest.approx(norms[[0, -1], part], abs=2e-4)
  right = np.mean((x @ w).argmax(2) == y)
  assert numbers(line_with(text, "read right")) == [pytest.approx(right, abs=2e-3)]


def test_the_devices_of_a_sharded_training_tap_their_own_gradients(tmp_path):
  text = run("sharded_training.py", tmp_path, cwd=tmp_path)
  check_the_sharded_training(text, tmp_path / "run-0.cgs", [(0, i) for i in range(4)])


def test_the_same_training_on_two_processes_makes_one_merged_stream(tmp_path):
  address = f"127.0.0.1:{process_groups.free_port()}"
  with open(tmp_path / "second.err", "wb") as err:
    second = interpreters.start(
      EXAMPLES / "sharded_training.py", tmp_path, 2, address, 1,
      environment=interpreters.same_path(), stdout=err, stderr=err,
    )  # fmt: skip
    try:
      text = run("sharded_training.py", tmp_path, 2, address, 0, cwd=tmp_path)
      status = second.wait(120)
    finally:
      second.kill()
      second.wait()
  assert status == 0, (tmp_path / "second.err").read_text()
  paths = tmp_path / "run-{process}.cgs"
  with cg.open_stream(paths) as stream:
    pairs = sorted({(record.process, record.device) for record in stream})
  assert [process for process, _ in pairs] == [0, 0, 1, 1]
  check_the_sharded_training(text, paths, pairs)


def test_lambertw_finds_the_published_parameters_of_the_solar_cell(tmp_path):
  text = run("lambertw.py", cwd=tmp_path)
  # Exact fits of these data in the literature agree on 0.76079 A, 0.3107 uA, 0.03655 and 52.89 ohms
  # and ideality 1.4773, with a root mean square error of 7.7301e-4 A.
  expected = {"photo": 0.7608, "log10 I0": -6.5077, "series": 0.0365, "shunt": 52.89}
  for name, value in {**expected, "ideality": 1.4773}.items():
    assert numbers(line_with(text, name))[-1] == pytest.approx(value, rel=2e-3)
  assert numbers(line_with(text, "root mean square"))[-1] == pytest.approx(7.7301e-4, rel=1e-3)


def test_lynx_finds_the_rates_that_a_bayesian_fit_of_the_same_data_finds(tmp_path):
  text = run("lynx.py", cwd=tmp_path)
  *rates, hares, lynxes = numbers(line_with(text, "births").replace("1900", ""))
  # Posterior means of Stan's case study, whose standard errors are about a tenth.
  assert rates == pytest.approx([0.55, 0.028, 0.80, 0.024], rel=0.1)
  assert (hares, lynxes) == pytest.approx((34, 5.9), rel=0.1)
  before, after = numbers(line_with(text, "error of the logarithms"))
  assert after < 0.6 * before


def test_early_stopping_stops_by_the_metric(tmp_path):
  text = run("early_stopping.py", cwd=tmp_path)
  epochs, best = numbers(line_with(text, "stopped after"))
  assert 5 < epochs < 200
  assert best > 0.99
  assert best >= max(numbers(line)[-1] for line in text.splitlines()[:-1])


def test_export_forest_runs_in_a_process_that_never_traced_it(tmp_path):
  program = tmp_path / "forest.bin"
  run("export_forest.py", "export", program, cwd=tmp_path)
  assert b"digits.forest" in program.read_bytes()
  decided, right = numbers(run("export_forest.py", "run", program, cwd=tmp_path))[-2:]
  assert decided > 70
  assert right > 97


def test_feed_trains_on_every_batch_that_it_takes(tmp_path):
  text = run("feed.py", cwd=tmp_path)
  losses = [numbers(line)[-1] for line in text.splitlines() if line.startswith("epoch")]
  assert losses[-1] < losses[0] / 2
  batches = (1797 - 400) // 32
  assert numbers(line_with(text, "batches taken")) == [30 * batches]
  assert numbers(line_with(text, "held-out"))[-1] > 0.93


def test_simplex_unmixes_spectra_and_agrees_with_jax(tmp_path):
  text = run("simplex.py", cwd=tmp_path)
  assert numbers(line_with(text, "error of a weight"))[-1] < 1e-2
  assert numbers(line_with(text, "difference from JAX"))[-1] < 1e-5
  assert numbers(line_with(text, "difference of gradients"))[-1] < 1e-5


def test_sparse_solves_for_heat_as_scipy_does(tmp_path):
  text = run("sparse.py", cwd=tmp_path)
  for line, bound in (
    ("product", 1e-13),
    ("transpose", 1e-13),
    ("solution", 1e-8),
    ("gradient", 1e-8),
  ):
    assert numbers(line_with(text, line))[-1] < bound


def test_the_user_s_library_is_built_by_cmake_and_cleans_its_signals(tmp_path):
  cmake = pathlib.Path(sys.executable).parent
  os_path = os.pathsep.join([str(cmake), os.environ["PATH"]])
  if shutil.which("cmake", path=os_path) is None or shutil.which("c++", path=os_path) is None:
    pytest.skip("cmake and a C++ compiler are needed")
  with pytest.MonkeyPatch.context() as patch:
    patch.setenv("PATH", os_path)
    text = run("user_library/run.py", tmp_path / "build", cwd=tmp_path)
  assert "median(Attr<int32> reach, In<float32,1> x, Out<float32,1> y)" in text
  before, after = numbers(text.splitlines()[-1])
  assert before > 5
  assert after < 0.5


def test_nbody_keeps_its_energy_and_moves_as_plain_jax_does(tmp_path):
  text = run("nbody.py", cwd=tmp_path)
  energy, reference = numbers(line_with(text, "by plain JAX "))
  assert energy == pytest.approx(reference, rel=1e-5)
  assert numbers(line_with(text, "drift"))[-1] < 1e-3
  assert numbers(line_with(text, "distance"))[-1] < 1e-3


def test_soft_dtw_agrees_with_the_same_recursion_in_scan(tmp_path):
  pytest.importorskip("numba")
  text = run("soft_dtw.py", cwd=tmp_path)
  wave, nearest, value, gradient = numbers(line_with(text, "nearest"))
  assert wave == nearest
  assert value < 1e-5
  assert gradient < 1e-4


def test_the_torch_module_learns_digits_as_in_torch(tmp_path):
  pytest.importorskip("torch")
  text = run("torch_module.py", cwd=tmp_path)
  steps, first, last, accuracy = numbers(line_with(text, "accuracy"))
  assert steps == 6 * (1347 // 64)
  assert last < first / 5
  assert accuracy > 0.93
  assert numbers(line_with(text, "largest difference"))[0] < 1e-3


def test_lapack_agrees_with_scipy_and_its_derivative_with_differences(tmp_path):
  text = run("lapack.py", cwd=tmp_path)
  assert numbers(line_with(text, "difference from SciPy"))[0] < 1e-10
  ours, differences = numbers(line_with(text, "slope"))
  assert abs(ours) > 1e-3
  assert ours == pytest.approx(differences, rel=1e-3)
  before, after = (numbers(line)[0] for line in text.splitlines() if line.startswith("error"))
  assert after < before


def test_the_cartpole_program_learns_to_balance(tmp_path):
  pytest.importorskip("gymnasium", reason="gymnasium is not installed")
  text = run("gymnasium_cartpole.py", cwd=tmp_path)
  first = numbers(text.splitlines()[0].partition("up for")[2])[0]
  assert numbers(line_with(text, "at the end"))[0] > 2 * first


def test_ppo_balances_the_pole_to_the_end(tmp_path):
  pytest.importorskip("gymnasium", reason="gymnasium is not installed")
  text = run("ppo_cartpole.py", cwd=tmp_path)
  first, last = (numbers(text.splitlines()[i].partition(":")[2])[0] for i in (0, -1))
  assert first < 100
  assert last >= 400  # the mean length of the last 100 episodes; 500 ends one


def test_each_seed_of_a_training_under_vmap_learns(tmp_path):
  pytest.importorskip("gymnasium", reason="gymnasium is not installed")
  lines = run("cartpole_seeds.py", cwd=tmp_path).splitlines()
  first, last = (numbers(lines[i].partition(":")[2]) for i in (0, -1))
  assert len(first) == len(last) == 4
  assert max(first) < 150
  assert min(last) > 170
  assert max(last) > 400


def test_the_mujoco_pendulum_comes_up_by_its_own_derivatives(tmp_path):
  pytest.importorskip("mujoco", reason="mujoco is not installed")
  angle, speed = numbers(line_with(run("mujoco_swing.py", cwd=tmp_path), "at the end"))
  assert angle == pytest.approx(180, abs=10)
  assert speed < 0.3


def test_the_search_under_xgboost_improves_and_calls_once_a_generation(tmp_path):
  pytest.importorskip("xgboost", reason="xgboost is not installed")
  text = run("xgboost_design.py", cwd=tmp_path)
  explained, *_ = numbers(text)
  assert explained > 95
  first, last = numbers(line_with(text, "best design"))
  assert last > first
  assert "40 calls of XGBoost" in text  # one a generation, for four restarts together


def test_the_disc_is_followed_behind_the_pillar(tmp_path):
  pytest.importorskip("cv2", reason="opencv-python-headless is not installed")
  frames, whole, mean, _ = numbers(run("opencv_tracking.py", cwd=tmp_path))
  assert frames == 59
  assert 20 < whole < frames
  assert mean < 3


def test_duckdb_gives_the_batches_and_keeps_the_losses(tmp_path):
  pytest.importorskip("duckdb", reason="duckdb is not installed")
  text = run("duckdb_loop.py", cwd=tmp_path)
  hundreds = [numbers(line) for line in text.splitlines() if line.startswith("steps from")]
  assert [(start, count) for start, count, _ in hundreds] == [(0, 100), (100, 100), (200, 100)]
  assert hundreds[2][2] < 0.2 * hundreds[0][2]
  np.testing.assert_allclose(numbers(line_with(text, "fare =")), [3.0, 1.5, 4.0], atol=0.4)
