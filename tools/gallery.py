# SPDX-License-Identifier: Apache-2.0
"""The gallery: docs/gallery.md has a card for each example, docs/gallery a page for each.

    python tools/gallery.py --write [NAME...]   # runs them (or those named), and writes all pages
    python tools/gallery.py --pages             # writes the pages without running anything
    python tools/gallery.py --check             # fails when a page is not made of the examples

A page has the example's text, picture, code and output. The output lies in docs/gallery/<name>.txt,
the pictures beside it: those that the example draws, one of what it computed
(tools/gallery_drawings.py), or a curve of the numbers that it prints (tools/gallery_charts.py). An
example without one has an icon on its card. Examples for GPUs run on a machine with one; their
output is left out until then. The pages are in the nav of mkdocs.yml, which this tool writes too.
"""

from __future__ import annotations

import ast
import os
import re
import shutil
import subprocess
import sys
import tempfile
import tomllib
from pathlib import Path
from typing import NamedTuple

import gallery_charts
from gallery_drawings import DRAWINGS

ROOT = Path(__file__).resolve().parent.parent
PAGE, SHOWN = ROOT / "docs" / "gallery.md", ROOT / "docs" / "gallery"
CONFIG, DRAWER = ROOT / "mkdocs.yml", ROOT / "tools" / "gallery_drawings.py"
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
SOURCE = PROJECT["urls"]["Repository"] + "/blob/main/examples/"


class Example(NamedTuple):
  """The words on a card: a short title, the libraries that are called, an icon of Material's."""

  title: str
  libraries: str
  icon: str


SECTIONS = {
  "Python libraries in compiled programs": {
    "demo": Example(
      "Digits, end to end", "SciPy, scikit-learn, Matplotlib, TensorBoard", "numeric-8-box-outline"
    ),
    "lambertw": Example("A solar cell's current", "SciPy", "solar-panel"),
    "traffic": Example("Braess's paradox", "NetworkX, Matplotlib", "road-variant"),
    "lynx": Example("Hares and lynxes", "SciPy", "chart-bell-curve"),
    "hospital_ward": Example("A hospital ward", "worker processes", "hospital-building"),
    "sparse_solver": Example("Conductivity of a rod", "SciPy, SuperLU", "matrix"),
    "cooling_plate": Example("A plate that cools", "SciPy, SuperLU", "thermometer"),
    "eight_schools": Example("Eight schools", "NumPyro", "school-outline"),
    "cached_search": Example("A search that keeps its scores", "scikit-learn", "database-outline"),
    "overlapping_requests": Example("Requests that overlap", "asyncio", "cloud-sync-outline"),
    "early_stopping": Example("Early stopping", "scikit-learn", "stop-circle-outline"),
    "export_forest": Example("Export with a model", "scikit-learn", "export"),
    "torch_module": Example("A PyTorch network in JAX", "PyTorch", "fire"),
    "xgboost_design": Example("Design of concrete", "XGBoost", "file-tree-outline"),
    "opencv_tracking": Example("Tracking a disc", "OpenCV", "target"),
    "gymnasium_cartpole": Example("CartPole by REINFORCE", "Gymnasium", "cart-outline"),
    "ppo_cartpole": Example("CartPole by PPO", "Gymnasium", "cart-outline"),
    "cartpole_seeds": Example("CartPole, four seeds", "Gymnasium", "cart-outline"),
    "mujoco_swing": Example("A pendulum's swing-up", "MuJoCo", "robot-industrial-outline"),
  },
  "Native code": {
    "simplex": Example("Spectra on the simplex", "C++", "triangle-outline"),
    "sparse": Example("Sparse conjugate gradients", "C++, SciPy", "matrix"),
    "pendulum": Example("Double pendulums", "SymPy, C++, Matplotlib", "sine-wave"),
    "nbody": Example("Two star clusters", "C++", "star-four-points-outline"),
    "lapack": Example("A LAPACK routine", "LAPACK", "function-variant"),
    "soft_dtw": Example("Soft-DTW", "Numba", "waveform"),
    "user_library/run": Example("Your own C++ library", "C++, CMake", "language-cpp"),
  },
  "Values out and in": {
    "taps_training": Example("Inside a network", "scikit-learn", "eye-outline"),
    "four_runs": Example("Four runs compared", "scikit-learn", "chart-line"),
    "follow_stream": Example("Following a stream", "scikit-learn", "access-point"),
    "feed": Example("Augmented data", "SciPy, scikit-learn", "tray-arrow-down"),
    "duckdb_loop": Example("A database in the loop", "DuckDB", "database-outline"),
  },
  "Many devices": {
    "sharded_training": Example("Data-parallel training", "scikit-learn", "view-grid-outline"),
    "launch_processes": Example("Several processes", "scikit-learn", "server-network"),
  },
  "GPUs": {
    "gpu_cuda_scan": Example("A prefix sum", "CUDA", "sigma"),
    "gpu_triton_softmax": Example("A softmax", "Triton", "expansion-card"),
    "gpu_fft_filter": Example("A blurred picture", "CuPy", "blur"),
  },
}
EXAMPLES = {name: each for examples in SECTIONS.values() for name, each in examples.items()}
# Files beside an example's own, which its page shows too; Python's are the demo's parts.
OTHERS = {
  "demo": ["digits.py", "against_jax.py", "taps_against_jax.py"],
  "user_library/run": ["user_library/kernels.cc", "user_library/CMakeLists.txt"],
}
LANGUAGES = {".py": "python", ".cc": "cpp", ".txt": "cmake"}
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
ELSEWHERE = {"four_runs": ["../runs.png"]}  # pictures of what an example wrote


def flat(name: str) -> str:
  return name.replace("/", "_")


def described(name: str) -> tuple[str, str]:
  """The title and the text of an example: its docstring."""
  path = ROOT / "examples" / f"{name}.py"
  text = ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or ""
  title, _, rest = text.partition("\n\n")
  return title.rstrip("."), rest.partition("\n\n    python")[0].strip()


def curve(name: str) -> str | None:
  """The curve of what an example printed, as SVG."""
  path = SHOWN / f"{flat(name)}.txt"
  if name not in gallery_charts.CURVES or not path.exists():
    return None
  return gallery_charts.drawn(name, path.read_text(encoding="utf-8"))


def pictures(name: str) -> list[str]:
  """The pictures of an example, as paths in docs/gallery."""
  found = [f"{flat(name)}_{Path(picture).name}" for picture in PICTURES.get(name, [])]
  found += ELSEWHERE.get(name, []) + ([f"{flat(name)}.png"] if name in DRAWINGS else [])
  return [*found, f"{flat(name)}.svg"] if name in gallery_charts.CURVES else found


def code(file: str) -> str:
  language = LANGUAGES[Path(file).suffix]
  return f'```{language} title="examples/{file}"\n--8<-- "examples/{file}"\n```'


def page(name: str) -> str:
  """An example's page."""
  title, about = described(name)
  file = f"{name}.py"
  command = " ".join(["python", f"examples/{file}", *ARGUMENTS.get(name, [])])
  libraries = EXAMPLES[name].libraries
  parts = [f"# {title}", about, f"Uses: {libraries}. Source: [examples/{file}]({SOURCE}{file})."]
  parts += [f"![Made from the output of {file}]({picture})" for picture in pictures(name)]
  parts += ["## Code", code(file)]
  parts += ["## Output", f"```console\n$ {command}\n```"]
  if (SHOWN / f"{flat(name)}.txt").exists():
    parts.append(f'```text\n--8<-- "docs/gallery/{flat(name)}.txt"\n```')
  else:
    parts.append("The output is not shown yet: the example needs a GPU.")
  if others := OTHERS.get(name):
    parts += ["## Other files", *map(code, others)]
  parts.append("[All examples](../gallery.md)")
  return "\n\n".join(parts) + "\n"


def card(name: str) -> str:
  """An example's card: its first picture or its icon, its title, and the first words about it."""
  each, link = EXAMPLES[name], f"gallery/{flat(name)}.md"
  if shown := pictures(name):
    source = (SHOWN / shown[0]).resolve().relative_to(PAGE.parent)
    top = f"[![{each.title}]({source}){{ loading=lazy }}]({link})"
  else:
    top = f"[:material-{each.icon}:]({link}){{ .icon }}"
  parts = [top, f"**[{each.title}]({link})**", described(name)[0] + ".", f"*{each.libraries}*"]
  return "-   " + "\n\n    ".join(parts)


def cards() -> str:
  """The gallery's own page."""
  parts = [
    "# Gallery",
    "Each example solves a complete problem in at most 80 lines and runs in the tests. Its page "
    "has the code\nand the output; all pictures are made from the output of a run on a small CPU.",
  ]
  for title, examples in SECTIONS.items():
    shown = "\n\n".join(map(card, examples))
    parts += [f"## {title}", f'<div class="grid cards gallery" markdown>\n\n{shown}\n\n</div>']
  return "\n\n".join(parts) + "\n"


def navigated(config: str) -> str:
  """mkdocs.yml, with the gallery's pages in its nav."""
  lines = ["  - Gallery:", "      - gallery.md"]
  for title, examples in SECTIONS.items():
    lines.append(f"      - {title}:")
    lines += [f'          - "{each.title}": gallery/{flat(n)}.md' for n, each in examples.items()]
  pattern = re.compile(r"^  - Gallery:.*\n(?:    .*\n)*", re.MULTILINE)
  return pattern.sub("\n".join(lines) + "\n", config)


def made() -> dict[Path, str]:
  """All files that are made without running an example."""
  files = {PAGE: cards(), CONFIG: navigated(CONFIG.read_text(encoding="utf-8"))}
  for name in EXAMPLES:
    files[SHOWN / f"{flat(name)}.md"] = page(name)
    if (text := curve(name)) is not None:
      files[SHOWN / f"{flat(name)}.svg"] = text
  return files


def show(name: str) -> None:
  """Runs an example in a folder of its own, and keeps what it printed and drew."""
  with tempfile.TemporaryDirectory() as folder:
    script = [str(ROOT / "examples" / f"{name}.py")]
    if name in DRAWINGS:  # runs the example, and draws
      script = [str(DRAWER), name, str(SHOWN / f"{flat(name)}.png")]
    command = [sys.executable, *script, *ARGUMENTS.get(name, [])]
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
  if options[:1] not in (["--write"], ["--pages"], ["--check"]):
    print(__doc__, file=sys.stderr)
    return 2
  parts = {Path(file).stem for files in OTHERS.values() for file in files if file.endswith(".py")}
  here = {path.stem for path in (ROOT / "examples").glob("*.py")} - parts
  if here != {name for name in EXAMPLES if "/" not in name}:
    print(f"expected the examples {sorted(here)} in tools/gallery.py, got {sorted(EXAMPLES)}")
    return 1
  if options[0] == "--write":
    for name in options[1:] or sorted(EXAMPLES.keys() - SECTIONS["GPUs"].keys()):
      show(name)
  stale = {path: text for path, text in made().items() if _text(path) != text}
  left = {path for path in SHOWN.glob("*.md") if path not in made()}
  if options[0] == "--check" and (stale or left):
    names = ", ".join(sorted(str(path.relative_to(ROOT)) for path in {*stale, *left}))
    print(f"stale: {names}: run python tools/gallery.py --pages")
    return 1
  for path, text in stale.items():
    path.write_text(text, encoding="utf-8")
  for path in left:
    path.unlink()
  return 0


def _text(path: Path) -> str | None:
  return path.read_text(encoding="utf-8") if path.exists() else None


if __name__ == "__main__":
  sys.exit(main(sys.argv[1:]))
