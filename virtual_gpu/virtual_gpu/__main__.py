# SPDX-License-Identifier: Apache-2.0
"""The virtual GPU's command: builds it, and runs programs on it (README.md).

  virtual-gpu build                 # into ./build/virtual-gpu
  virtual-gpu run program.py
  virtual-gpu run -m pytest tests
  virtual-gpu env                   # what `run` sets, for a shell

For the JAX of the Python that runs this. XLA's CUDA plugin, and what else compiles for CUDA, come
from pip, into a folder of the build that only `run` shows to Python. Exits with 77 where pip can't
get them.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import importlib.util
import os
import shlex
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

HERE = Path(__file__).resolve().parent
# What CMake builds: in an installed package beside this file, else in the folder that it lies in.
SOURCE = HERE / "source" if (HERE / "source").exists() else HERE.parent
CANNOT_BE_HAD = 77

# Without NVIDIA's libraries: nothing to tune by, and products become plain fusions. Narrow casts
# there and back stay, as on the CPU.
XLA_FLAGS = (
  "--xla_gpu_autotune_level=0",
  "--xla_allow_excess_precision=false",
  "--xla_gpu_enable_cub_radix_sort=false",
  "--xla_gpu_enable_triton_gemm=false",
  "--xla_disable_hlo_passes=cublas-gemm-rewriter,gemm-rewriter",
)
SETTINGS = {
  "JAX_PLATFORMS": "cuda,cpu",
  "JAX_SKIP_CUDA_CONSTRAINTS_CHECK": "1",
  "XLA_PYTHON_CLIENT_PREALLOCATE": "false",
  "TF_CPP_MIN_LOG_LEVEL": "3",
  "CUDA_PYTHON_DISABLE_MAJOR_VERSION_WARNING": "1",
  "NUMBA_CUDA_LOW_OCCUPANCY_WARNINGS": "0",
  "VIRTUAL_GPU": "1",
}


@dataclass(frozen=True)
class Place:
  """Where the build for one JAX and one Python lies."""

  out: Path

  @property
  def name(self) -> str:
    return f"jax-{importlib.metadata.version('jax')}-py{sys.version_info[0]}.{sys.version_info[1]}"

  @property
  def site(self) -> Path:
    return self.out / self.name / "site"

  @property
  def lib(self) -> Path:
    return self.out / self.name / "lib"

  @property
  def plugin(self) -> Path:
    return self.site / "jax_plugins" / "xla_cuda12" / "xla_cuda_plugin.so"


def do(command: list[str], **settings: str) -> None:
  """Runs a command; what it prints is shown if it fails."""
  environment = {**os.environ, **settings}
  done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
  if done.returncode != 0:
    raise SystemExit(f"{shlex.join(command)}\n{done.stdout}{done.stderr}")


def wheels(more: list[str]) -> list[str]:
  """What pip brings, each without what it asks for: NVIDIA's own libraries stay away."""
  jax = importlib.metadata.version("jax")
  found = [f"jax-cuda12-pjrt=={jax}", f"jax-cuda12-plugin=={jax}", *more]
  if shutil.which("cmake") is None:
    found.append("cmake>=3.26")
  if shutil.which("ninja") is None:
    found.append("ninja>=1.11")
  return found


def install(place: Place, more: list[str]) -> None:
  """The wheels, into `place.site`. Exits with 77 where they can't be had."""
  done = place.site.parent / "installed"
  wanted = wheels(more)
  if done.exists() and set(wanted) <= set(done.read_text().splitlines()):
    return
  shutil.rmtree(place.site, ignore_errors=True)
  command = [sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
  command += ["--no-deps", "--no-compile", "--target", str(place.site), *wanted]
  got = subprocess.run(command, capture_output=True, text=True, check=False)
  if got.returncode != 0:
    reason = (got.stderr.strip().splitlines() or ["pip said nothing"])[-1]
    print(f"virtual-gpu: pip can't get XLA's CUDA plugin: {reason}", file=sys.stderr)
    raise SystemExit(CANNOT_BE_HAD)
  # The plugin would find it before the virtual one.
  for real in place.site.glob("nvidia/cuda_runtime/lib/libcudart.so*"):
    real.unlink()
  done.write_text("\n".join(wanted))


def build(place: Place, more: list[str], tests: bool) -> None:
  """The libraries, into `place.lib`. What is the same for every plugin is compiled once."""
  install(place, more)
  cmake = [
    "cmake", "-G", "Ninja", "-S", str(SOURCE), "-B", str(place.out / "cmake"),
    f"-DVIRTUAL_GPU_PLUGIN={place.plugin}", f"-DVIRTUAL_GPU_LIB={place.lib}",
    f"-DPython3_EXECUTABLE={sys.executable}",
    *(["-DVIRTUAL_GPU_TESTS=ON"] if tests else []),  # and a later build leaves it on
  ]  # fmt: skip
  path = os.pathsep.join([os.environ.get("PATH", ""), str(place.site / "bin")])
  do(cmake, PATH=path, PYTHONPATH=str(place.site))
  do(["cmake", "--build", str(place.out / "cmake")], PATH=path, PYTHONPATH=str(place.site))


def environment(place: Place) -> dict[str, str]:
  """What a program needs to find the libraries and to compile for them.

  What the caller has set already stays, and goes behind.
  """
  before = os.environ
  paths = {
    "LD_LIBRARY_PATH": str(place.lib),
    "PATH": str(HERE / "bin"),
    "PYTHONPATH": os.pathsep.join([str(HERE / "site"), str(place.site)]),
  }
  found = {
    name: os.pathsep.join(filter(None, (path, before.get(name)))) for name, path in paths.items()
  }
  found |= {name: before.get(name, value) for name, value in SETTINGS.items()}
  found["VIRTUAL_GPU_SITE"] = str(place.site)
  # Not the user's own, which may hold machine code.
  found["TRITON_CACHE_DIR"] = str(place.out / place.name / "triton_cache")
  found["XLA_FLAGS"] = " ".join(filter(None, (*XLA_FLAGS, before.get("XLA_FLAGS"))))
  for name in ("TRITON_PTXAS_PATH", "TRITON_PTXAS_BLACKWELL_PATH"):  # it asks by the device's age
    found[name] = str(HERE / "bin" / "ptxas")
  return found


def parser() -> argparse.ArgumentParser:
  made = argparse.ArgumentParser(
    prog="virtual-gpu", description=(__doc__ or "").partition("\n\n")[0]
  )
  made.add_argument(
    "--out", type=Path, default=Path("build/virtual-gpu"),
    help="the build's folder; build/virtual-gpu in the current one unless given",
  )  # fmt: skip
  commands = made.add_subparsers(dest="command", required=True)
  builds = commands.add_parser("build", help="install the wheels and build the libraries")
  builds.add_argument(
    "--with", nargs="*", default=[], metavar="REQUIREMENT", dest="more",
    help="packages that compile for CUDA, as pip takes them; what they depend on is not installed",
  )  # fmt: skip
  builds.add_argument(
    "--tests", action="store_true", help="and the C++ tests, which need GoogleTest"
  )
  commands.add_parser("env", help="print what `run` sets, as a shell reads it")
  commands.add_parser("run", help="run a Python program: its file or -m module, its arguments")
  return made


def main() -> None:
  # What stands behind `run` is the program's, also where it looks like an option.
  words = sys.argv[1:]
  end = words.index("run") + 1 if "run" in words else len(words)
  given, program = parser().parse_args(words[:end]), words[end:]
  if importlib.util.find_spec("jax") is None:
    raise SystemExit(f"virtual-gpu: JAX is not installed in {sys.executable}")
  place = Place(given.out.resolve())
  missing = not (place.lib / "libcuda.so.1").exists()
  if given.command == "build":
    build(place, given.more, given.tests)
  elif missing:
    print(f"virtual-gpu: nothing is built in {place.out} for this JAX", file=sys.stderr)
  if given.command == "env":
    for name, value in environment(place).items():
      print(f"export {name}={shlex.quote(value)}")
  elif given.command == "run":
    if missing:
      print("virtual-gpu: building it, in about two minutes", file=sys.stderr)
      build(place, [], tests=False)
    os.execve(sys.executable, [sys.executable, *program], {**os.environ, **environment(place)})


if __name__ == "__main__":
  main()
