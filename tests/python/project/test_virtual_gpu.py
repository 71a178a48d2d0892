# SPDX-License-Identifier: Apache-2.0
"""virtual_gpu/ is a tool of its own: it works in a copy without the rest of the repository."""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

FOLDER = Path(__file__).resolve().parents[3] / "virtual_gpu"

pytestmark = pytest.mark.skipif(
  not (FOLDER / "pyproject.toml").exists(), reason="source distributions come without"
)


@pytest.fixture(scope="module")
def copy(tmp_path_factory: pytest.TempPathFactory) -> Path:
  """The folder alone, under another name."""
  copy = tmp_path_factory.mktemp("alone") / "tool"
  shutil.copytree(FOLDER, copy, ignore=shutil.ignore_patterns("build", "__pycache__"))
  return copy


def run(command: list[object], folder: Path, **variables: str) -> str:
  """A command's output; it fails the test unless it succeeds."""
  environment = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"} | variables
  done = subprocess.run(
    [str(word) for word in command],
    cwd=folder,
    env=environment,
    capture_output=True,
    text=True,
    timeout=120,
    check=False,
  )
  assert done.returncode == 0, done.stdout + done.stderr
  return done.stdout


def settings(text: str) -> dict[str, str]:
  """The variables that `virtual-gpu env` prints."""
  words = [shlex.split(line) for line in text.splitlines()]
  assert all(word[0] == "export" for word in words)
  return dict(word[1].split("=", 1) for word in words)


def test_a_copy_alone_configures(copy: Path, tmp_path: Path) -> None:
  if shutil.which("cmake") is None or shutil.which("c++") is None:
    pytest.skip("no CMake or no C++ compiler")
  plugin = tmp_path / "plugin.so"
  plugin.write_bytes(b"cuInit\0cuNobodyHasThis\0")
  options = [f"-DVIRTUAL_GPU_PLUGIN={plugin}", f"-DPython3_EXECUTABLE={sys.executable}"]
  run(["cmake", "-S", copy, "-B", tmp_path / "build", *options], tmp_path)
  assert "cuNobodyHasThis" in (tmp_path / "build" / "stubs" / "cuda_stubs.cc").read_text()


def test_the_command_of_a_copy_says_its_help_and_its_variables(copy: Path, tmp_path: Path) -> None:
  command = [sys.executable, copy / "virtual_gpu"]
  assert "virtual-gpu [-h] [--out OUT] {build,env,run}" in run([*command, "--help"], tmp_path)
  said = settings(run([*command, "env"], tmp_path, XLA_FLAGS="--mine", PATH="/mine"))
  assert said["LD_LIBRARY_PATH"].startswith(str(tmp_path / "build" / "virtual-gpu"))
  assert said["XLA_FLAGS"].endswith(" --mine")
  assert said["PATH"] == f"{copy / 'virtual_gpu' / 'bin'}:/mine"
  assert not any("CALLGATE" in name for name in said)


def test_an_installed_copy_brings_its_sources_and_its_command(copy: Path, tmp_path: Path) -> None:
  pytest.importorskip("pip")
  pytest.importorskip("scikit_build_core")
  pip = [sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
  site = tmp_path / "site"
  run([*pip, "--no-deps", "--no-build-isolation", "--no-compile", "--target", site, copy], tmp_path)
  source = site / "virtual_gpu" / "source"
  needed = [copy / "CMakeLists.txt", copy / "stubs.py"]
  for folder in ("driver", "fake_driver", "libraries", "ptx"):
    needed += [path for path in (copy / folder).rglob("*") if path.is_file()]
  for path in needed:
    assert (source / path.relative_to(copy)).read_bytes() == path.read_bytes(), path
  command = site / "bin" / "virtual-gpu"
  said = settings(run([sys.executable, command, "env"], tmp_path, PYTHONPATH=str(site)))
  assert os.access(said["TRITON_PTXAS_PATH"], os.X_OK)
  assert Path(said["TRITON_PTXAS_PATH"]).is_relative_to(site)
  assert Path(said["PYTHONPATH"].split(os.pathsep)[0], "sitecustomize.py").exists()
