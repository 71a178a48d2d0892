// SPDX-License-Identifier: Apache-2.0
// Readers of bytes or text that somebody else may have written, as functions that take any bytes.
//
// Each reads them as callgate does, and checks what must hold whatever they are: the promised error
// or a value that goes there and back, every view inside its memory. An exception of another kind
// leaves the function, and a broken promise ends the process: both are findings, as is whatever the
// sanitizers see.
//
// `make fuzz` links each with libFuzzer (entry.cc), which looks for such bytes; the C++ tests run
// all seeds and a fixed number of mutations (tests/cpp/core/test_fuzz.cc). Seeds are the files of
// tests/fuzz/seeds/TARGET: what tests/fuzz/make_seeds.py takes from real output, and the findings.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>

// One function a file, tests/fuzz/<name>.cc; its seeds are in seeds/<name>.
#define CALLGATE_FUZZ_TARGETS(X) \
  X(attributes)                  \
  X(lanes)                       \
  X(launch_plan)                 \
  X(npy)                         \
  X(outfeed_2020)                \
  X(stream)                      \
  X(stream_address)              \
  X(tap)

namespace callgate::fuzz {

#define CALLGATE_DECLARE(name) void name(std::string_view bytes);
CALLGATE_FUZZ_TARGETS(CALLGATE_DECLARE)
#undef CALLGATE_DECLARE

// Ends the process with the promise unless it holds.
void require(bool holds, const char* promise);

// Reads every byte, for the sanitizers to see.
void touch(const void* data, std::size_t size);

// A file in memory that holds the bytes, under a path that can be opened.
class MemoryFile {
 public:
  explicit MemoryFile(std::string_view bytes);
  ~MemoryFile();
  MemoryFile(const MemoryFile&) = delete;
  MemoryFile& operator=(const MemoryFile&) = delete;

  const std::string& path() const noexcept { return path_; }
  std::string contents() const;

 private:
  int fd_;
  std::string path_;
};

// Numbers and texts from bytes, for targets that build what they read; zeros where there is nothing
// left.
class Bytes {
 public:
  explicit Bytes(std::string_view bytes) : rest_(bytes) {}

  bool done() const noexcept { return rest_.empty(); }
  std::uint8_t number() {
    if (rest_.empty()) return 0;
    const auto value = static_cast<std::uint8_t>(rest_.front());
    rest_.remove_prefix(1);
    return value;
  }
  // At most `size` of them.
  std::string_view take(std::size_t size) {
    const std::string_view taken = rest_.substr(0, size);
    rest_.remove_prefix(taken.size());
    return taken;
  }
  // Up to the separator or the end.
  std::string_view until(char separator) {
    const std::string_view taken = take(rest_.find(separator));
    take(1);
    return taken;
  }
  std::string_view rest() const noexcept { return rest_; }

 private:
  std::string_view rest_;
};

}  // namespace callgate::fuzz
