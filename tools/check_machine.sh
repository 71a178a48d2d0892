#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
# Says what `make $1` is about to do and how long it takes, then checks what it needs and the machine
# may lack, before anything is built: sh tools/check_machine.sh test|demo PYTHON
#
# Times are for 2 cores and a quick network. All that is missing is named at once.
set -u
what=$1 python=$2
missing=0

lack() {  # what is missing, then how to get it
  echo "make $what: missing: $1"
  echo "    $2"
  missing=1
}

case $what in
  test)
    cat <<'TEXT'
make test does four things, in about 10 minutes the first time and 8 afterwards:
  1. installs what the tests use into .venv (1.2 GB, from PyPI) while the compiler works
  2. builds the C++ tests with the address and undefined-behaviour sanitizers, and the package
  3. runs the C++ tests (a quarter of a minute)
  4. runs the Python tests (7 minutes)
`make quick` runs what belongs to the files you changed, in under two minutes.
TEXT
    ;;
  demo)
    cat <<'TEXT'
make demo does three things, in about 2 minutes the first time and 30 seconds afterwards:
  1. installs JAX, SciPy, scikit-learn and Matplotlib into .venv (900 MB, from PyPI)
  2. builds the package
  3. trains a classifier of digits with SciPy in the loop, compares with JAX's own callback, draws
TEXT
    ;;
esac

headers='import os, sysconfig; print(os.path.join(sysconfig.get_path("include"), "Python.h"))'
if [ -z "$python" ] || ! "$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null
then
  lack "Python 3.11 or newer" "apt install python3, pyenv install 3.12, or PYTHON=/path/to/python3"
else
  "$python" -c 'import ensurepip, venv' 2>/dev/null \
    || lack "the modules venv and ensurepip of $python" "apt install python3-venv"
  test -e "$("$python" -c "$headers")" \
    || lack "the C headers of $python" "apt install python3-dev, or dnf install python3-devel"
fi

compiler=${CXX:-c++}
scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT
cat > "$scratch/try.cc" <<'CODE'
#include <concepts>
#include <latch>
#include <span>
#include <stop_token>
#include <thread>
int main() {
  int values[] = {1, 2};
  std::latch done(1);
  std::jthread thread([&](std::stop_token) { done.count_down(); });
  done.wait();
  return static_cast<int>(std::span(values).size()) - 2;
}
CODE
# shellcheck disable=SC2086  # CXX may have arguments
if ! command -v ${compiler%% *} >/dev/null 2>&1; then
  lack "a C++ compiler ($compiler)" "apt install g++, dnf install gcc-c++, or CXX=/path/to/g++"
elif ! $compiler -std=c++20 -pthread "$scratch/try.cc" -o "$scratch/try" 2>"$scratch/said"; then
  head -n 3 "$scratch/said"
  lack "a C++20 compiler and library: $compiler can't build the program above" \
    "GCC 12 or newer is tested: apt install g++-12, then CXX=g++-12"
elif [ "$what" = test ] \
    && ! $compiler -std=c++20 -pthread -fsanitize=address,undefined "$scratch/try.cc" \
      -o "$scratch/try" 2>/dev/null; then
  lack "the sanitizers' libraries of $compiler" \
    "they come with g++ on Debian and Ubuntu; dnf install libasan libubsan libtsan"
fi

free=$(df -Pk . | awk 'NR == 2 { print int($4 / 1048576) }')
[ "$free" -ge 4 ] || lack "room on the disk: $free GiB are free here, 4 are needed" "df -h ."

[ "$missing" = 0 ] || exit 1
