#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
# Prints a free-threaded Python interpreter (3.13t or newer): the newest on PATH or in pyenv's
# versions, or the one that `--build` has made in the cache folder. If there is none, `--build` makes
# it, on Debian or a system with Debian's mirror: from the source package of Python 3.13 in Debian's
# newer stable release, without changes to the system's list of packages, in some five minutes.
# `--build --thread-sanitizer` makes one that reports data races, for `make free-threaded-tsan`.
set -eu
usable='import sys, sysconfig; sys.exit(not sysconfig.get_config_var("Py_GIL_DISABLED"))'
cache=${XDG_CACHE_HOME:-$HOME/.cache}/callgate/python-free-threaded
pyenv_root=${PYENV_ROOT:-$(pyenv root 2>/dev/null || echo "$HOME/.pyenv")}
release=trixie
option=
if [ "${2:-}" = --thread-sanitizer ]; then
  cache=$cache-tsan
  option=--with-thread-sanitizer
fi

for minor in 15 14 13; do
  for candidate in "python3.${minor}t" "$pyenv_root/versions/3.$minor"*t/bin/python3 \
      "$cache/bin/python3.${minor}t"; do
    if [ -n "$option" ] && [ "$candidate" != "$cache/bin/python3.${minor}t" ]; then continue; fi
    if "$candidate" -c "$usable" >/dev/null 2>&1; then
      "$candidate" -c 'import sys; print(sys.executable)'
      exit 0
    fi
  done
done

if [ "${1:-}" != --build ]; then
  echo "no free-threaded Python found on PATH, in pyenv or in $cache; make it: sh $0 --build" >&2
  exit 1
fi

mirror=$(apt-get indextargets --format '$(REPO_URI)' 2>/dev/null | grep -m 1 '/debian/*$' || true)
keys=/usr/share/keyrings/debian-archive-keyring.gpg
if [ -z "$mirror" ] || [ ! -e "$keys" ]; then
  echo "expected a system with a mirror of Debian in apt's sources; install a free-threaded Python" \
    "(3.13t or newer) and put it on PATH" >&2
  exit 1
fi
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
log=$work/log
mkdir -p "$work/lists/partial" "$work/cache/archives/partial" "$work/source"
echo "deb-src [signed-by=$keys] $mirror $release main" >"$work/sources.list"
apt() {
  apt-get -q -o "Dir::Etc::SourceList=$work/sources.list" -o Dir::Etc::SourceParts=/dev/null \
    -o "Dir::State::Lists=$work/lists" -o "Dir::Cache=$work/cache" \
    -o "APT::Sandbox::User=$(id -un)" "$@"
}
build() {
  apt update &&
    cd "$work/source" &&
    apt source --download-only python3.13 &&
    tar xf python3.13_*.orig.tar.xz &&
    cd Python-3.13* &&
    ./configure -q --disable-gil $option --prefix="$cache" &&
    unset MAKEFLAGS &&
    make -s -j "$(nproc 2>/dev/null || echo 2)" &&
    make -s install
}
echo "building Python 3.13 without the GIL in $cache" >&2
if ! (build) >"$log" 2>&1; then
  tail -n 20 "$log" >&2
  echo "expected a C compiler, make, and the headers of OpenSSL, zlib and libffi" >&2
  exit 1
fi
"$cache/bin/python3.13t" -c "$usable"
echo "$cache/bin/python3.13t"
