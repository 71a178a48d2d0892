#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
# Prints a Python interpreter that callgate supports (3.11 to 3.15, with the GIL): the `python3` on
# PATH if it is one, else the oldest found; with --newest the newest found. Looks on PATH and in
# pyenv's versions.
set -eu
usable='import sys; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 15) or "t" in sys.abiflags)'
real='import sys; print(sys.executable)'

if [ "${1:-}" != --newest ] && python3 -c "$usable" 2>/dev/null; then
  python3 -c "$real"
  exit 0
fi

pyenv_root=${PYENV_ROOT:-$(pyenv root 2>/dev/null || echo "$HOME/.pyenv")}
found=
for minor in 11 12 13 14 15; do
  for candidate in "python3.$minor" "$pyenv_root/versions/3.$minor"[.-]*/bin/python3; do
    # A pyenv shim for a version that is not active answers with an error: it does not count.
    if "$candidate" -c "$usable" >/dev/null 2>&1; then
      found=$("$candidate" -c "$real")
      break
    fi
  done
  if [ -n "$found" ] && [ "${1:-}" != --newest ]; then break; fi
done

if [ -z "$found" ]; then
  echo "callgate needs Python 3.11 to 3.15; found none on PATH or in pyenv" >&2
  exit 1
fi
echo "$found"
