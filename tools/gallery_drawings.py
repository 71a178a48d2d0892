# SPDX-License-Identifier: Apache-2.0
"""Pictures of the gallery's examples that compute something to see and draw nothing themselves.

    python tools/gallery_drawings.py NAME PICTURE.png [ARGUMENT...]

It runs the example in the working folder, as a script with those arguments, and draws what one of
its functions had when it returned. tools/gallery.py calls it.
"""

from __future__ import annotations

import json
import sys
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
Drawing = Callable[[Any, dict[str, Any], dict[str, Any]], None]
BLUE, ORANGE, GRAY = "#3f51b5", "#e8890c", "#9aa0a6"


def _lambertw(figure: Any, of: dict[str, Any], its: dict[str, Any]) -> None:
  import numpy as np

  plot = figure.subplots()
  volts = np.linspace(-0.21, 0.595, 200)
  plot.plot(volts, [of["current"](its["fit"].x, v) for v in volts], color=BLUE, label="fitted")
  plot.plot(of["VOLTS"], of["AMPERES"], ".", color=ORANGE, label="measured")
  plot.set(xlabel="volts", ylabel="amperes")
  plot.legend()


def _lynx(figure: Any, of: dict[str, Any], its: dict[str, Any]) -> None:
  import numpy as np

  plot, years, fitted = figure.subplots(), range(1900, 1921), of["solve"](np.exp(its["x"]))
  for k, (who, color) in enumerate((("hares", BLUE), ("lynxes", ORANGE))):
    plot.plot(years, fitted[:, k], color=color, label=f"{who}, fitted")
    plot.plot(years, of["FURS"][:, k], ".", color=color, label="furs")
  plot.set(ylabel="thousands", xticks=range(1900, 1921, 5))
  plot.legend(fontsize=8)


def _lapack(figure: Any, of: dict[str, Any], its: dict[str, Any]) -> None:
  import numpy as np

  plot, years, count = figure.subplots(), of["YEARS"], len(of["YEARS"])
  base, slope = of["gglse"](*of["problem"](its["decades"], count))
  ahead = np.array([1940, 2030])
  plot.plot(years, of["MILLIONS"], ".", color=ORANGE, label="census")
  plot.plot(ahead, base + slope * (ahead - years[-1]) / 10, color=BLUE, label="line to 2030")
  plot.set(ylabel="millions")
  plot.legend()


def _cooling_plate(figure: Any, of: dict[str, Any], its: dict[str, Any]) -> None:
  titles = "heated", f"after {of['STEPS']} steps"
  plates = of["heated"](of["truth"]), of["measured"]
  for plot, title, plate in zip(figure.subplots(1, 2), titles, plates, strict=True):
    shown = plot.imshow(plate.reshape(of["N"], -1), origin="lower", extent=(0, 1, 0, 1))
    plot.set(title=title, xticks=(0, 1), yticks=(0, 1))
    figure.colorbar(shown, ax=plot, shrink=0.6)


def _sparse(figure: Any, of: dict[str, Any], its: dict[str, Any]) -> None:
  plot = figure.subplots()
  figure.colorbar(plot.imshow(its["found"].reshape(60, 60)), label="temperature")
  plot.set(xticks=(), yticks=())


def _simplex(figure: Any, of: dict[str, Any], its: dict[str, Any]) -> None:
  plot, wave, weights = figure.subplots(), its["wave"], its["found"][0]
  mixture = its["truth"][0] @ its["spectra"]
  parts = [w * spectrum for w, spectrum in zip(weights, its["spectra"], strict=True) if w > 0]
  for k, part in enumerate(parts):
    plot.fill_between(wave, part, color=BLUE, alpha=0.35, label="parts found" if k == 0 else None)
  plot.plot(wave, mixture, color=ORANGE, label="mixture")
  plot.set(xlabel="wave", ylabel="intensity")
  plot.legend()


def _soft_dtw(figure: Any, of: dict[str, Any], its: dict[str, Any]) -> None:
  waves = its["waves"]
  cost = (waves[0][:, None] - waves[5]) ** 2
  plot = figure.subplots()
  shown = plot.imshow(of["path_weights"](cost, of["soft_dtw"](cost)[1]), origin="lower")
  plot.set(xlabel="time of wave 5", ylabel="time of wave 0")
  figure.colorbar(shown, label="weight of the pair")


def _xgboost_design(figure: Any, of: dict[str, Any], its: dict[str, Any]) -> None:
  plot = figure.subplots()
  plot.plot(its["values"].T, color=BLUE)
  plot.set(xlabel="generation", ylabel="best value, four restarts")


def _torch_module(figure: Any, of: dict[str, Any], its: dict[str, Any]) -> None:
  plot = figure.subplots()
  plot.plot(its["losses"], color=BLUE)
  plot.set(xlabel="step", ylabel="loss")


def _user_library(figure: Any, of: dict[str, Any], its: dict[str, Any]) -> None:
  plot = figure.subplots()
  plot.plot(its["signals"][0], ".", color=GRAY, markersize=2, label="measured")
  plot.plot(its["cleaned"][0], color=BLUE, label="cleaned")
  plot.set(xlabel="time (the gross errors lie outside)", ylim=(-3, 3))
  plot.legend()


def _opencv_tracking(figure: Any, of: dict[str, Any], its: dict[str, Any]) -> None:
  import jax

  key = jax.random.key(0)
  for plot, i in zip(figure.subplots(1, 3), (10, 30, 50), strict=True):
    image = of["frame"](i, jax.random.fold_in(key, i))
    (x, y), usable = of["found"](image)
    plot.imshow(image, cmap="gray", vmin=0, vmax=255)
    color, size = (BLUE, 90) if usable else (ORANGE, 90)
    plot.scatter([x], [y], marker="+", s=size, color=color)
    plot.set(title=f"frame {i}: {'whole' if usable else 'hidden'}", xticks=(), yticks=())
    plot.title.set_fontsize(9)


def _nbody(figure: Any, of: dict[str, Any], its: dict[str, Any]) -> None:
  half = of["STARS"] // 2
  shown = ("start", its["x"]), (f"after {of['STEPS']} steps", its["ours"])
  for plot, (title, x) in zip(figure.subplots(1, 2), shown, strict=True):
    for part, color in ((x[:half], BLUE), (x[half:], ORANGE)):
      plot.scatter(part[:, 0], part[:, 1], s=5, color=color)
    plot.set(title=title, xlim=(-3, 3), ylim=(-3, 3), aspect="equal", xticks=(), yticks=())


def _sharded_training(figure: Any, of: dict[str, Any], its: dict[str, Any]) -> None:
  plot, found = figure.subplots(), its["found"]
  for device in sorted(set(found["device"].tolist())):
    mine = found["device"] == device
    plot.plot(found["['step']"][mine], found["['norm']"][mine].ravel(), label=f"device {device}")
  plot.set(xlabel="step", ylabel="norm of the gradient")
  plot.legend(fontsize=8)


def _taps_training(figure: Any, of: dict[str, Any], its: dict[str, Any]) -> None:
  lines = [json.loads(line) for line in its["path"].read_text(encoding="utf-8").splitlines()]
  steps = [line["value"] for line in lines if line["name"] == "step"]
  plot = figure.subplots()
  plot.semilogy([step["gradient"] for step in steps], color=GRAY, label="gradient", linewidth=0.6)
  plot.semilogy([step["loss"] for step in steps], color=BLUE, label="loss", linewidth=0.6)
  plot.set(xlabel="step")
  plot.legend()


def _duckdb_loop(figure: Any, of: dict[str, Any], its: dict[str, Any]) -> None:
  rows = its["database"].execute("select step, loss from losses order by step").fetchall()
  plot = figure.subplots()
  plot.semilogy(*zip(*rows, strict=True), color=BLUE)
  plot.set(xlabel="step", ylabel="loss, from the database")


# By example: the function whose names are drawn ("" is the module), and how.
DRAWINGS: dict[str, tuple[str, Drawing]] = {
  "lambertw": ("main", _lambertw),
  "lynx": ("main", _lynx),
  "lapack": ("main", _lapack),
  "cooling_plate": ("", _cooling_plate),
  "sparse": ("main", _sparse),
  "simplex": ("main", _simplex),
  "soft_dtw": ("main", _soft_dtw),
  "xgboost_design": ("main", _xgboost_design),
  "torch_module": ("main", _torch_module),
  "user_library/run": ("main", _user_library),
  "opencv_tracking": ("main", _opencv_tracking),
  "nbody": ("main", _nbody),
  "sharded_training": ("report", _sharded_training),
  "taps_training": ("main", _taps_training),
  "duckdb_loop": ("main", _duckdb_loop),
}


def run(path: Path, function: str) -> tuple[dict[str, Any], dict[str, Any]]:
  """The names of an example that has run as a script, and those of a function of it at its end."""
  found: dict[str, Any] = {}
  module = types.ModuleType("__main__")
  module.__file__ = str(path)

  def look(frame: types.FrameType, event: str, _: Any) -> None:
    code = frame.f_code
    if event == "return" and code.co_name == function and code.co_filename == str(path):
      found.update(frame.f_locals)

  sys.modules["__main__"] = module
  sys.setprofile(look)
  try:
    exec(compile(path.read_text(encoding="utf-8"), str(path), "exec"), module.__dict__)
  finally:
    sys.setprofile(None)
  return module.__dict__, found


def main(name: str, picture: str, *arguments: str) -> None:
  import matplotlib as mpl

  mpl.use("Agg")
  from matplotlib import pyplot

  path = ROOT / "examples" / f"{name}.py"
  sys.argv = [str(path), *arguments]
  sys.path.insert(0, str(path.parent))
  function, draw = DRAWINGS[name]
  of, its = run(path, function)
  figure = pyplot.figure(figsize=(4.4, 2.7), layout="constrained")
  draw(figure, of, its)
  figure.savefig(picture, dpi=160)


if __name__ == "__main__":
  main(*sys.argv[1:])
