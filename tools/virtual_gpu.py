"""The virtual GPU: builds it, and runs programs on it (tests/virtual_gpu/README.md).

  python tools/virtual_gpu.py build           # into build/virtual-gpu
  python tools/virtual_gpu.py run -m pytest -m gpu tests/python/gpu
  python tools/virtual_gpu.py env             # what `run` sets, for a shell

The Python that runs this must have JAX and XLA's CUDA plugin of the same version, without NVIDIA's
libraries: pip install --no-deps jax-cuda12-pjrt jax-cuda12-plugin.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import shlex
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
SOURCE = ROOT / "tests" / "virtual_gpu"
BUILD = ROOT / "build" / "virtual-gpu"

# No libraries of NVIDIA's: nothing to tune by, and products become plain fusions. Narrow casts there
# and back stay, as on the CPU.
XLA_FLAGS = (
  "--xla_gpu_autotune_level=0",
  "--xla_gpu_enable_command_buffer=",
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
  "CALLGATE_NVRTC_OUTPUT": "ptx",
  "CUDA_PYTHON_DISABLE_MAJOR_VERSION_WARNING": "1",
  "NUMBA_CUDA_LOW_OCCUPANCY_WARNINGS": "0",
  "VIRTUAL_GPU": "1",
}


def plugin() -> Path:
  """XLA's CUDA plugin in this Python."""
  for version in ("12", "13"):
    name = f"jax_plugins.xla_cuda{version}"
    try:
      spec = importlib.util.find_spec(name)
    except ModuleNotFoundError:
      continue
    if spec is not None and spec.origin is not None:
      found = Path(spec.origin).parent / "xla_cuda_plugin.so"
      if found.exists():
        return found
  raise SystemExit(
    "tools/virtual_gpu.py: XLA's CUDA plugin is not installed in this Python. "
    f"{sys.executable} -m pip install --no-deps jax-cuda12-pjrt jax-cuda12-plugin (of JAX's version)"
  )


def build(out: Path) -> None:
  """The libraries, into `out`/lib."""
  commands = (
    ["cmake", "-G", "Ninja", "-S", str(SOURCE), "-B", str(out), f"-DVIRTUAL_GPU_PLUGIN={plugin()}",
     f"-DPython3_EXECUTABLE={sys.executable}"],
    ["cmake", "--build", str(out)],
  )  # fmt: skip
  for command in commands:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode != 0:
      raise SystemExit(f"{shlex.join(command)}\n{done.stdout}{done.stderr}")


def environment(out: Path) -> dict[str, str]:
  """What a program needs to find the libraries and to compile for them.

  What the caller has set already stays, and goes behind.
  """
  before = os.environ
  paths = {
    "LD_LIBRARY_PATH": str(out / "lib"),
    "PATH": str(SOURCE / "bin"),
    "PYTHONPATH": str(SOURCE / "site"),
  }
  found = {
    name: os.pathsep.join(filter(None, (path, before.get(name)))) for name, path in paths.items()
  }
  found |= {name: before.get(name, value) for name, value in SETTINGS.items()}
  found["XLA_FLAGS"] = " ".join(filter(None, (*XLA_FLAGS, before.get("XLA_FLAGS"))))
  found["TRITON_PTXAS_PATH"] = str(SOURCE / "bin" / "ptxas")
  return found


def main() -> None:
  parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n\n")[0])
  parser.add_argument("--out", type=Path, default=BUILD, help="the build's folder")
  commands = parser.add_subparsers(dest="command", required=True)
  commands.add_parser("build", help="build the libraries")
  commands.add_parser("env", help="print what `run` sets, as a shell reads it")
  commands.add_parser("run", help="run a Python program: its file or -m module, its arguments")
  # What stands behind `run` is the program's, also where it looks like an option.
  words = sys.argv[1:]
  end = words.index("run") + 1 if "run" in words else len(words)
  given, program = parser.parse_args(words[:end]), words[end:]
  out: Path = given.out.resolve()
  if given.command == "build":
    build(out)
  elif given.command == "env":
    for name, value in environment(out).items():
      print(f"export {name}={shlex.quote(value)}")
  else:
    if not (out / "lib" / "libcuda.so.1").exists():
      build(out)
    os.execve(sys.executable, [sys.executable, *program], {**os.environ, **environment(out)})


if __name__ == "__main__":
  main()
