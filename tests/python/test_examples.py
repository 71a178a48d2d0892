"""Each example runs in a process of its own, and its claims are checked against other sources."""

import os
import pathlib
import re
import subprocess
import sys

import pytest

EXAMPLES = pathlib.Path(__file__).resolve().parents[2] / "examples"

pytest.importorskip("scipy")
pytest.importorskip("sklearn")


def run(name, *args, cwd):
  """What `examples/<name>` prints. Works wherever callgate is imported from here."""
  environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
  done = subprocess.run(
    [sys.executable, str(EXAMPLES / name), *map(str, args)],
    cwd=cwd, env=environment, capture_output=True, text=True, timeout=300,
  )  # fmt: skip
  assert done.returncode == 0, done.stderr
  return done.stdout


def numbers(text):
  return [float(word) for word in re.findall(r"-?\d+(?:\.\d+)?(?:e[-+]\d+)?", text)]


def line_with(text, words):
  return next(line for line in text.splitlines() if words in line)


def test_examples_are_short():
  for path in EXAMPLES.glob("*.py"):
    assert len(path.read_text().splitlines()) <= 80, path.name


def test_the_demo_learns_digits_draws_them_and_agrees_with_jax_s_callbacks(tmp_path):
  pytest.importorskip("matplotlib")
  text = run("demo.py", cwd=tmp_path)
  accuracy = re.search(r"accuracy (\d\.\d+)", text)
  assert accuracy is not None
  assert float(accuracy[1]) > 0.95
  assert "bit for bit" in text  # the example itself compares the parameters
  for picture in ("learning_curve.png", "augmented.png"):
    assert (tmp_path / "out" / picture).read_bytes().startswith(b"\x89PNG")
  # One call an image through JAX, over callgate: 50 on a quiet machine, less on a busy one.
  each, _, ours, *_ = numbers(line_with(text, "a copy in its place"))
  assert each / ours > 3


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
