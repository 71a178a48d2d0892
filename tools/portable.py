# SPDX-License-Identifier: Apache-2.0
"""Builds callgate for other systems than this one, with zig's C++ compiler (PyPI's ziglang).

    python tools/portable.py wheel TARGET [--out FOLDER]   # for this Python
    python tools/portable.py tests TARGET                  # the C++ tests, into build/portable
    python tools/portable.py objects TARGET                # every source of src/, compiled alone

The compiler brings headers and C libraries of all targets, and links its own libc++ into what it
makes. On Linux everything that is linked uses the system's libgcc_s to unwind stacks: glibc's
pthread_exit does, by which Python up to 3.13 ends threads, and zig's own unwinder does not
understand libgcc_s's frames. For macOS zig has a list of the system's functions; the module takes
Python's from the process that loads it. No wheel for macOS has been run. The environment needs what
`tools/requirements.py build` prints, ziglang, auditwheel and wheel: `make portable-wheel`,
`make portable-check`.

C++ tests of another processor run under qemu: `--emulator "qemu-aarch64-static;-L;ROOT"`, where
ROOT has that processor's C library, then `ctest` in build/portable/TARGET/tests. `ulimit -v
100000000` comes first: the simulated device reserves all addresses that it gets, and qemu pays for
each. Death tests start their program again, for which the kernel must know qemu (binfmt_misc).
"""

import argparse
import importlib.util
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import nanobind
import numpy
import third_party

ROOT = Path(__file__).resolve().parent.parent
XLA_HEADERS = ROOT / "build" / "xla-headers" / "include"

# By target: what zig calls it, and CMake's names of its system and processor.
TARGETS = {
  "x86_64-linux": ("x86_64-linux-gnu.2.28", "Linux", "x86_64"),
  "aarch64-linux": ("aarch64-linux-gnu.2.28", "Linux", "aarch64"),
  "aarch64-macos": ("aarch64-macos.12.0", "Darwin", "arm64"),
}
PLATFORMS = {"Linux": "manylinux_2_28", "Darwin": "macosx_12_0"}  # with the processor a wheel's tag

# The functions of libgcc_s that libc++abi and compiled C++ call.
UNWINDER = """
DeleteException FindEnclosingFunction ForcedUnwind GetCFA GetDataRelBase GetGR GetIP GetIPInfo
GetLanguageSpecificData GetRegionStart GetTextRelBase RaiseException Resume Resume_or_Rethrow SetGR
SetIP Backtrace
"""

# Options of Apple's linker that zig's doesn't have. nanobind's response file lists Python's
# functions, which the interpreter defines when it loads the module.
APPLE_OPTIONS = """for option; do
  shift
  case $option in
    -bundle) set -- "$@" -shared ;;
    -Wl,@*) set -- "$@" -undefined dynamic_lookup ;;
    *) set -- "$@" "$option" ;;
  esac
done
"""


class Toolchain:
  """zig's compiler for a target as programs that CMake can call, in a folder of the build."""

  def __init__(self, target: str) -> None:
    self.target = target
    self.triple, self.system, self.processor = TARGETS[target]
    self.folder = ROOT / "build" / "portable" / target
    self.folder.mkdir(parents=True, exist_ok=True)
    # Without -O zig adds the undefined-behaviour sanitizer.
    flags = f"-target {self.triple} -fno-sanitize=undefined"
    programs = {"cc": f"cc {flags}", "c++": f"c++ {flags}", "ar": "ar", "ranlib": "ranlib"}
    translate = APPLE_OPTIONS if self.system == "Darwin" else ""
    for name, arguments in programs.items():
      program = self.folder / name
      zig = f'exec "{sys.executable}" -m ziglang {arguments} "$@"'
      program.write_text(f"#!/bin/sh\n{translate}{zig}\n")
      program.chmod(0o755)

  def unwinder(self) -> Path:
    """A library to link with, of libgcc_s's name; at run time there is the system's."""
    library = self.folder / "libgcc_s.so.1"
    source = self.folder / "unwinder.c"
    source.write_text("".join(f"void _Unwind_{name}(void) {{}}\n" for name in UNWINDER.split()))
    link = ["-shared", "-nostdlib", f"-Wl,-soname,{library.name}", str(source), "-o", str(library)]
    run(self.folder / "cc", *link)
    return library

  def numpy_headers(self) -> str:
    """NumPy's headers. On macOS arm64 a long double is a double, and there is no endian.h."""
    if self.system != "Darwin":
      return numpy.get_include()
    made = self.folder / "numpy"
    shutil.copytree(numpy.get_include(), made, dirs_exist_ok=True)
    sizes = made / "numpy" / "_numpyconfig.h"
    text = sizes.read_text().replace("#define NPY_HAVE_ENDIAN_H 1", "")
    text, changed = re.subn(r"(_LONGDOUBLE) (16|32)$", _half, text, flags=re.MULTILINE)
    if changed != 2:
      raise SystemExit(f"portable.py: expected the sizes of two long doubles in {sizes}")
    sizes.write_text(text)
    return str(made)

  def definitions(self) -> dict[str, str]:
    """CMake's variables. It finds libraries and packages of the target alone."""
    known = {
      "CMAKE_C_COMPILER": str(self.folder / "cc"),
      "CMAKE_CXX_COMPILER": str(self.folder / "c++"),
      "CMAKE_AR": str(self.folder / "ar"),
      "CMAKE_RANLIB": str(self.folder / "ranlib"),
      "CALLGATE_XLA_INCLUDE_DIR": str(XLA_HEADERS),
      "CALLGATE_WERROR": "OFF",  # what another compiler warns of is not judged here
    }
    if self.system == "Linux":
      unwinder = str(self.unwinder())
      known |= {f"CMAKE_{kind}_LINKER_FLAGS": unwinder for kind in ("EXE", "SHARED", "MODULE")}
    if self.system == "Darwin":
      known |= {
        "CMAKE_OSX_SYSROOT": "",
        "CMAKE_INSTALL_NAME_TOOL": "true",
      }  # not needed for modules
    machine = os.uname()
    if (self.system, self.processor) != (machine.sysname, machine.machine):
      known |= {"CMAKE_SYSTEM_NAME": self.system, "CMAKE_SYSTEM_PROCESSOR": self.processor}
    return known


def _half(size: re.Match[str]) -> str:
  return f"{size[1]} {int(size[2]) // 2}"


def run(*command: str | Path, **environment: str) -> None:
  subprocess.run([str(part) for part in command], check=True, env=os.environ | environment)


def build_wheel(target: str, out: Path) -> None:
  """A wheel for manylinux or macOS. For another machine the stub is the installed package's."""
  chain = Toolchain(target)
  stable = sys.version_info >= (3, 12)
  suffix = ".abi3.so" if stable else sysconfig.get_config_var("EXT_SUFFIX")
  suffix = suffix.replace(os.uname().machine, chain.processor)
  define = chain.definitions() | {
    "NB_SUFFIX": suffix,
    "NB_SUFFIX_S": suffix,
    "Python_NumPy_INCLUDE_DIR": chain.numpy_headers(),
  }
  # The system's strip knows one processor.
  define["CMAKE_MODULE_LINKER_FLAGS"] = f"{define.get('CMAKE_MODULE_LINKER_FLAGS', '')} -Wl,-s"
  if "CMAKE_SYSTEM_NAME" in define:
    define["CMAKE_CROSSCOMPILING_EMULATOR"] = "env"  # the build's Python is this machine's
    define["CALLGATE_STUB"] = str(installed_stub())
  settings = {f"cmake.define.{name}": value for name, value in define.items()}
  settings["install.strip"] = "false"
  settings["build-dir"] = str(chain.folder / f"cp{sysconfig.get_config_var('py_version_nodot')}")
  options = [f"--config-settings={name}={value}" for name, value in settings.items()]
  pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "wheel", "--no-deps"]
  with tempfile.TemporaryDirectory() as made:
    host = f"linux-{chain.processor}"
    run(*pip, "--no-build-isolation", "-w", made, *options, ROOT, _PYTHON_HOST_PLATFORM=host)
    (wheel,) = Path(made).glob("*.whl")
    tag = f"{PLATFORMS[chain.system]}_{chain.processor}"
    if chain.system == "Linux":
      judge(wheel, tag)
    run(sys.executable, "-m", "wheel", "tags", "--remove", f"--platform-tag={tag}", wheel)
    (wheel,) = Path(made).glob("*.whl")
    name_zig(wheel)
    run(sys.executable, ROOT / "tools" / "check_package.py", wheel)
    out.mkdir(parents=True, exist_ok=True)
    print(shutil.move(wheel, out / wheel.name))


def name_zig(wheel: Path) -> None:
  """Adds the licenses of what zig has linked in to a wheel's metadata."""
  with tempfile.TemporaryDirectory() as folder:
    run(sys.executable, "-m", "wheel", "unpack", "--dest", folder, wheel)
    (unpacked,) = Path(folder).iterdir()
    zig = importlib.util.find_spec("ziglang")
    third_party.add_to_wheel(unpacked, third_party.zig_parts(Path(zig.origin).parent))
    run(sys.executable, "-m", "wheel", "pack", "--dest-dir", wheel.parent, unpacked)


def judge(wheel: Path, tag: str) -> None:
  """Fails where auditwheel finds that the wheel needs more than `tag` promises."""
  audit = [sys.executable, "-m", "auditwheel", "show", str(wheel)]
  found = subprocess.run(audit, check=True, capture_output=True, text=True).stdout
  (needed,) = re.findall(r'following platform\s+tag:\s+"(\w+)"', found)
  print(f"auditwheel: consistent with {needed}")
  if needed not in acceptable(tag):
    raise SystemExit(f"portable.py: expected a wheel for {tag}, got one for {needed}\n{found}")


def acceptable(tag: str) -> set[str]:
  """The tags of `tag`'s processor that promise as much or less: manylinux_2_27_x86_64, ..."""
  minor, processor = re.fullmatch(r"manylinux_2_(\d+)_(\w+)", tag).groups()
  return {f"manylinux_2_{older}_{processor}" for older in range(17, int(minor) + 1)}


def installed_stub() -> Path:
  module = importlib.util.find_spec("callgate")
  if module is None or module.origin is None:
    raise SystemExit("portable.py: install callgate first, as for this machine: its stub is needed")
  return Path(module.origin).with_name("_callgate.pyi")


def configure(target: str, build: str, **define: str) -> Path:
  chain = Toolchain(target)
  folder = chain.folder / build
  define = chain.definitions() | {"CMAKE_EXPORT_COMPILE_COMMANDS": "ON"} | define
  options = [f"-D{name}={value}" for name, value in define.items()]
  run("cmake", "-G", "Ninja", "-S", ROOT, "-B", folder, *options)
  return folder


def build_tests(target: str, emulator: str) -> None:
  """The C++ tests; GoogleTest is compiled along, from where Debian has its source."""
  folder = configure(
    target,
    "tests",
    CALLGATE_BUILD_PYTHON="OFF",
    CALLGATE_BUILD_TESTS="ON",
    CMAKE_CROSSCOMPILING_EMULATOR=emulator,
    CMAKE_DISABLE_FIND_PACKAGE_GTest="ON",
    CMAKE_DISABLE_PRECOMPILE_HEADERS="ON",
    FETCHCONTENT_SOURCE_DIR_GOOGLETEST="/usr/src/googletest",
  )
  run("cmake", "--build", folder)


def compile_objects(target: str) -> None:
  """Fails with the compiler's words where a source of src/ does not compile."""
  chain = Toolchain(target)
  headers = Path(nanobind.include_dir())
  third_party = [XLA_HEADERS, headers, headers.parent / "ext" / "robin_map" / "include"]
  third_party += [sysconfig.get_path("include"), chain.numpy_headers()]
  command = [str(chain.folder / "c++"), "-std=c++20", "-O0", "-fvisibility=hidden", "-include"]
  command += ["cstdio", "-Wall", "-Wextra", "-Wconversion", "-Werror", "-c"]
  command += ["-DNPY_NO_DEPRECATED_API=NPY_2_0_API_VERSION", '-DCALLGATE_VERSION="0"']
  command += [f"-I{ROOT / name}" for name in ("src", "include")]
  command += [f"-isystem{path}" for path in third_party]

  def compile_one(source: Path) -> str:
    made = chain.folder / "-".join(source.relative_to(ROOT).with_suffix(".o").parts)
    done = subprocess.run([*command, str(source), "-o", str(made)], capture_output=True, text=True)
    return done.stderr if done.returncode else ""

  sources = sorted((ROOT / "src").rglob("*.cc"))
  with ThreadPoolExecutor(os.cpu_count()) as workers:
    failures = [text for text in workers.map(compile_one, sources) if text]
  print(
    *failures, f"{len(sources) - len(failures)} of {len(sources)} compile for {target}", sep="\n"
  )
  if failures:
    raise SystemExit(1)


def main() -> None:
  parser = argparse.ArgumentParser()
  parser.add_argument("what", choices=["wheel", "tests", "objects"])
  parser.add_argument("target", choices=TARGETS)
  parser.add_argument("--out", type=Path, default=Path("dist"))
  parser.add_argument("--emulator", default="")
  options = parser.parse_args()
  if options.what == "wheel":
    build_wheel(options.target, options.out)
  elif options.what == "tests":
    build_tests(options.target, options.emulator)
  else:
    compile_objects(options.target)


if __name__ == "__main__":
  main()
