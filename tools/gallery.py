# SPDX-License-Identifier: Apache-2.0
"""docs/gallery.md: all examples, each with its code and what it printed.

    python tools/gallery.py --write [NAME...]   # runs them (or those named), and writes the page
    python tools/gallery.py --check             # fails when the page is not made of the examples

An example's output lies in docs/gallery/<name>.txt, its pictures beside it. Examples for GPUs run
on a machine with one; their output is left out until then.
"""

from __future__ import annotations

import ast
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PAGE, SHOWN = ROOT / "docs" / "gallery.md", ROOT / "docs" / "gallery"
# Sections, and in them examples with the libraries that they call.
SECTIONS = {
  "Python libraries in compiled programs": {
    "demo": "SciPy, scikit-learn, Matplotlib, TensorBoard",
    "lambertw": "SciPy",
    "traffic": "NetworkX, Matplotlib",
    "lynx": "SciPy",
    "hospital_ward": "Python in worker processes",
    "sparse_solver": "SciPy, SuperLU",
    "cooling_plate": "SciPy, SuperLU",
    "overlapping_requests": "asyncio",
    "early_stopping": "scikit-learn",
    "export_forest": "scikit-learn",
    "torch_module": "PyTorch",
    "xgboost_design": "XGBoost",
    "opencv_tracking": "OpenCV",
    "gymnasium_cartpole": "Gymnasium",
    "ppo_cartpole": "Gymnasium",
    "cartpole_seeds": "Gymnasium",
    "mujoco_swing": "MuJoCo",
  },
  "Native code": {
    "simplex": "C++",
    "sparse": "C++, SciPy",
    "pendulum": "SymPy, C++, Matplotlib",
    "nbody": "C++",
    "lapack": "LAPACK",
    "soft_dtw": "Numba",
    "user_library/run": "C++, CMake",
  },
  "Values out and in": {
    "taps_training": "scikit-learn",
    "four_runs": "scikit-learn",
    "follow_stream": "scikit-learn",
    "feed": "SciPy, scikit-learn",
    "duckdb_loop": "DuckDB",
  },
  "Many devices": {"sharded_training": "scikit-learn", "launch_processes": "scikit-learn"},
  "GPUs": {"gpu_cuda_scan": "CUDA", "gpu_triton_softmax": "Triton", "gpu_fft_filter": "CuPy"},
}
PARTS = {"digits", "against_jax", "taps_against_jax"}  # of the demo
ARGUMENTS = {
  "taps_training": ["out/taps.jsonl"],
  "follow_stream": ["out/run.cgs"],
  "user_library/run": ["build"],
  "export_forest": ["export", "forest.bin"],
  "sharded_training": ["out"],
  "launch_processes": ["out"],
}
HEAD = {"demo": 2}  # lines that are shown; the others are times, for which there is a page
PICTURES = {
  "demo": ["out/learning_curve.png", "out/augmented.png"],
  "traffic": ["out/traffic.png"],
  "pendulum": ["out/pendulum.png"],
}


def flat(name: str) -> str:
  return name.replace("/", "_")


def entry(name: str, libraries: str) -> str:
  """An example's part of the page."""
  path = ROOT / "examples" / f"{name}.py"
  text = ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or ""
  title, _, rest = text.partition("\n\n")
  about = rest.partition("\n\n    python")[0]
  parts = [f"### {title.rstrip('.')}", f"*{libraries}.* {about}".strip()]
  for picture in PICTURES.get(name, []):
    own = f"gallery/{flat(name)}_{Path(picture).name}"
    parts.append(f"![What {name}.py drew]({own})")
  if (SHOWN / f"{flat(name)}.txt").exists():
    parts.append(f'```text title="Output"\n--8<-- "docs/gallery/{flat(name)}.txt"\n```')
  snippet = f'    ```python\n    --8<-- "examples/{name}.py"\n    ```'
  parts.append(f'??? example "examples/{name}.py"\n\n{snippet}')
  return "\n\n".join(parts)


def page() -> str:
  intro = (
    "# Gallery\n\nEach example solves a problem from start to end in at most 80 lines, and runs in "
    "the tests. The\noutput is of a small machine with a CPU."
  )
  sections = [
    "\n\n".join([f"## {title}", *(entry(name, used) for name, used in examples.items())])
    for title, examples in SECTIONS.items()
  ]
  return "\n\n".join([intro, *sections]) + "\n"


def show(name: str) -> None:
  """Runs an example in a folder of its own, and keeps what it printed and drew."""
  with tempfile.TemporaryDirectory() as folder:
    script = ROOT / "examples" / f"{name}.py"
    command = [sys.executable, str(script), *ARGUMENTS.get(name, [])]
    done = subprocess.run(
      command, cwd=folder, capture_output=True, text=True, timeout=600, check=True, env=os.environ
    )
    SHOWN.mkdir(exist_ok=True)
    printed = [line for line in done.stdout.splitlines() if not line.startswith("[Gloo]")]
    lines = [line.rpartition("\r")[2].rstrip() for line in printed]
    text = "\n".join(lines[: HEAD.get(name)]).strip("\n").replace(folder + "/", "")
    (SHOWN / f"{flat(name)}.txt").write_text(text + "\n", encoding="utf-8")
    for picture in PICTURES.get(name, []):
      shutil.copy(Path(folder) / picture, SHOWN / f"{flat(name)}_{Path(picture).name}")


def main(options: list[str]) -> int:
  if options[:1] not in (["--write"], ["--check"]):
    print(__doc__, file=sys.stderr)
    return 2
  here = {path.stem for path in (ROOT / "examples").glob("*.py")} - PARTS
  listed = {name for examples in SECTIONS.values() for name in examples}
  if here != {name for name in listed if "/" not in name}:
    print(f"expected the examples {sorted(here)} in tools/gallery.py, got {sorted(listed)}")
    return 1
  if options[0] == "--write":
    for name in options[1:] or sorted(listed - set(SECTIONS["GPUs"])):
      show(name)
    PAGE.write_text(page(), encoding="utf-8")
  elif not PAGE.exists() or PAGE.read_text(encoding="utf-8") != page():
    print("stale: docs/gallery.md: run python tools/gallery.py --write")
    return 1
  return 0


if __name__ == "__main__":
  sys.exit(main(sys.argv[1:]))
