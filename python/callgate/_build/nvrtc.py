# SPDX-License-Identifier: Apache-2.0
"""CUDA's run-time compiler: finding it, calling it, its messages.

It is found without importing or linking anything of CUDA. The results are cached
(`_build/cache.py`), so a cached kernel needs no compilation. No device is needed.
"""

from __future__ import annotations

import functools
import glob
import importlib.util
import os
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from callgate import _callgate
from callgate._build import cache, toolchain
from callgate._core.errors import CompileError

# The PTX architecture for the driver if no device is known; all devices of CUDA 12 and 13 run it.
_LOWEST = 75
_TOOLKITS = ("/usr/local/cuda", "/opt/cuda")
_INCLUDE = re.compile(r'^[ \t]*#[ \t]*include[ \t]*[<"]([^>"\n]+)[>"]', re.MULTILINE)
_ARCHITECTURE = re.compile(r"^(?:--gpu-architecture|-arch)=(?:sm|compute)_(\d+)[af]?$")
# CUDA's headers by the names in a source that need them.
_HEADERS = (
  (re.compile(r"\b(?:__half2?|half2?|float16)\b"), "cuda_fp16.h"),
  (re.compile(r"\b(?:__nv_bfloat16|nv_bfloat16|__nv_bfloat162|bfloat16)\b"), "cuda_bf16.h"),
  (re.compile(r"\b(?:__nv_fp8\w*|float8_\w+)\b"), "cuda_fp8.h"),
  (re.compile(r"\bcu(?:Float|Double)?Complex\b"), "cuComplex.h"),
)


class Compiler(NamedTuple):
  """A loaded NVRTC."""

  nvrtc: _callgate.Nvrtc  # the runtime's handle
  include_dirs: tuple[str, ...]  # folders of CUDA's own headers
  identity: tuple[str, float, int]  # identifies its library, for the cache


def compiler() -> Compiler:
  """Returns NVRTC from `CALLGATE_NVRTC`, a package nvidia-cuda-nvrtc, a toolkit, or the loader."""
  toolkit = os.environ.get("CUDA_HOME") or os.environ.get("CUDA_PATH")
  usual = next((path for path in _TOOLKITS if os.path.isdir(path)), "")
  return _compiler(os.environ.get("CALLGATE_NVRTC", ""), toolkit or usual)


@functools.cache  # never emptied: one entry for each compiler that variables have named
def _compiler(given: str, toolkit: str) -> Compiler:
  found = ""
  for path in (given,) if given else _candidates(toolkit):
    try:
      nvrtc = _callgate.Nvrtc.open(path)
    except ValueError as error:
      found += f"\n{error}"
      continue
    real = os.path.realpath(path)
    stamp = os.path.getmtime(real) if os.path.exists(real) else 0
    return Compiler(nvrtc, tuple(_cuda_headers(path, toolkit)), (real, stamp, nvrtc.version))
  named = f"CALLGATE_NVRTC={given}" if given else "packages, toolkits and the loader's folders"
  raise CompileError(
    f"CUDA's run-time compiler, libnvrtc, was not found (searched {named}). Kernels in CUDA C++ "
    f"need it: pip install 'callgate[cuda]', or set CALLGATE_NVRTC to the library's path{found}"
  )


def _candidates(toolkit: str) -> Iterator[str]:
  nvidia = importlib.util.find_spec("nvidia")  # a namespace package of NVIDIA's packages
  for folder in (nvidia and nvidia.submodule_search_locations) or ():
    yield from _newest(f"{folder}/cuda_nvrtc/lib/libnvrtc.so.*", f"{folder}/cu1?/lib/libnvrtc.so.*")
  if toolkit:
    yield from _newest(f"{toolkit}/lib64/libnvrtc.so.1?", f"{toolkit}/targets/*/lib/libnvrtc.so.1?")
  if usual := _callgate.Nvrtc.usual_name():
    yield usual


def _newest(*patterns: str) -> list[str]:
  """Returns libraries, the best first: JAX's CUDA plugin needs one major version."""
  plugins = [n for n in (12, 13) if importlib.util.find_spec(f"jax_cuda{n}_plugin") is not None]
  found = {path for pattern in patterns for path in glob.glob(pattern)}
  majors = {path: int(re.findall(r"\.so\.(\d+)", path)[0]) for path in found}
  return sorted(found, key=lambda path: (majors[path] in plugins, majors[path]), reverse=True)


def _cuda_headers(path: str, toolkit: str) -> Iterator[str]:
  """Yields folders of CUDA's headers next to a library of the same toolkit."""
  folders = [Path(toolkit or "/usr/local/cuda") / "include", Path("/usr/include")]
  if os.path.isabs(path):
    _, root, packages, *_ = Path(path).parents
    near = [root / "include", root / "targets/x86_64-linux/include"]
    if root.name == "cuda_nvrtc":
      near += [packages / name / "include" for name in ("cuda_runtime", "cuda_cccl", "cuda_nvcc")]
    folders = [*near, *folders[:1]] if toolkit else near
  # CUDA 13 has its C++ libraries in another folder, which its packages may lack.
  libraries = [folder / "cccl" for folder in folders]
  libraries.append(Path(toolkit or "/usr/local/cuda") / "include" / "cccl")
  for folder in dict.fromkeys([*folders, *libraries]):
    if any((folder / name).exists() for name in ("cuda_fp16.h", "cuda/std", "crt")):
      yield str(folder)


class CompiledImage(NamedTuple):
  """Machine code, or PTX that the driver compiles."""

  code: bytes  # a cubin, or PTX text with a final zero byte
  capability: int  # the compute capability of a cubin, such as 90; 0 for PTX


class Built(NamedTuple):
  """A compiled kernel; `entry` is the function's name in the image."""

  image: CompiledImage
  entry: str


def build(
  label: str,
  name: str,
  source: str,
  expression: str,
  capability: int,
  *,
  options: Sequence[str] = (),
  include_dirs: Sequence[str | os.PathLike[str]] = (),
) -> Built:
  """Returns a kernel's image, from the cache if it is there.

  It is machine code for `capability`, such as 90, or PTX if the compiler doesn't know that
  capability; 0 is PTX for every device. `expression` is the function in C++: "scale<float, 4>".
  Messages call the kernel `label` and its source `name`.
  """
  used, folders = compiler(), [os.path.abspath(d) for d in include_dirs]
  arguments, made_for = _target(used, capability, options)
  arguments += [] if any(o.lstrip("-").startswith("std=") for o in options) else ["--std=c++17"]
  headers = (toolchain.include_dir(), *folders, *used.include_dirs)
  arguments += [*(f"--include-path={folder}" for folder in headers), *options]
  includes = [i for pattern, i in _HEADERS if pattern.search(f"{source}\n{expression}")]
  includes = "".join(f"#include <{i}>\n" for i in includes)  # keeps the line numbers of the source
  unit = f'{includes}#include "callgate/kernel_device.h"\n#line 1 "{name}"\n{source}\n'
  own = toolchain.headers_digest("kernel_device.h")
  key = cache.digest(["nvrtc", unit, expression, arguments, used.identity, own])

  def make(folder: Path) -> tuple[Path, list[str]]:
    made = folder / "kernel.cuda"
    made.write_bytes(_compile(label, used, unit, name, expression, arguments))
    return made, _included(source, folders)

  entry, _, code = cache.find_or_make(key, make).read_bytes().partition(b"\n")
  return Built(CompiledImage(code, made_for), entry.decode())


def _target(used: Compiler, capability: int, options: Sequence[str]) -> tuple[list[str], int]:
  """Returns the target option and the image's capability; the user's option takes precedence."""
  for option in options:
    if match := _ARCHITECTURE.match(option):
      return [], 0 if "compute_" in option else int(match[1])
  known = used.nvrtc.architectures
  if capability in known and makes_machine_code():
    return [f"--gpu-architecture=sm_{capability}"], capability
  older = [each for each in known if each <= (capability or max(_LOWEST, known[0]))]
  return [f"--gpu-architecture=compute_{max(older, default=known[0])}"], 0


def makes_machine_code() -> bool:
  """Returns True if present devices get machine code; else PTX, which the driver compiles."""
  output = os.environ.get(variable := "CALLGATE_NVRTC_OUTPUT", "").strip() or "cubin"
  if output not in ("cubin", "ptx"):
    expected = "expected 'cubin' or 'ptx'"
    raise CompileError(f"environment variable {variable}: {expected}, got {output!r}")
  return output == "cubin"


def _compile(
  label: str, used: Compiler, unit: str, name: str, expression: str, arguments: list[str]
) -> bytes:
  """Returns the function's name in the code, a newline, and the code."""
  ok, code, names, log = used.nvrtc.compile(unit, name, arguments, [], [expression])
  output = log.decode(errors="replace").strip()
  if not ok:
    version = f"{used.nvrtc.version // 1000}.{used.nvrtc.version % 1000 // 10}"
    said = output or "no message"
    if re.search(r'cannot open source file "(cuda/std|cub|thrust|nv)/', output):
      package = "nvidia-cuda-cccl-cu12" if used.nvrtc.version < 13000 else "nvidia-cuda-cccl"
      said += (
        f"\nThese headers belong to CUDA's C++ libraries: pip install {package}, or "
        "install the CUDA toolkit"
      )
    raise CompileError(
      f"{label}: CUDA's compiler (NVRTC {version}) reported an error:\n{said}", output
    )
  return names[0].encode() + b"\n" + code


def _included(source: str, folders: Sequence[str]) -> list[str]:
  """Returns the user's headers that a source includes, also indirectly, since NVRTC doesn't."""
  found, texts = list[str](), [(source, list(folders))]
  while texts:
    text, near = texts.pop()
    for name in _INCLUDE.findall(text):
      path = next(filter(os.path.isfile, (os.path.join(folder, name) for folder in near)), None)
      if path is not None and path not in found:
        found.append(path)
        inner = Path(path).read_text(encoding="utf-8", errors="replace")
        texts.append((inner, [os.path.dirname(path), *folders]))
  return found
