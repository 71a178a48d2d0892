// SPDX-License-Identifier: Apache-2.0
// Memory that processes share.
//
// The memory has no name (memfd_create): it is passed on as a descriptor, and ends with its last
// process. Only on Linux; elsewhere its creation throws an Error.
#pragma once

#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <cerrno>
#include <cstddef>
#include <cstring>
#include <string>
#include <utility>

#include "core/error.h"
#include "core/lifetime.h"

namespace callgate {

// The error of a failed system call.
inline Error system_error(const std::string& what) {
  return {ErrorCode::kResourceExhausted, what + ": " + std::strerror(errno)};
}

// A descriptor that this process owns.
class Descriptor {
 public:
  Descriptor() = default;
  explicit Descriptor(int number) noexcept : number_(number) {}
  Descriptor(Descriptor&& other) noexcept : number_(std::exchange(other.number_, -1)) {}
  Descriptor& operator=(Descriptor&& other) noexcept;
  ~Descriptor() { reset(); }

  int get() const noexcept { return number_; }
  bool open() const noexcept { return number_ >= 0; }
  void reset() noexcept {
    if (number_ >= 0) close(std::exchange(number_, -1));
  }

 private:
  int number_ = -1;
};

class SharedMemory : Immovable {
 public:
  // New memory, zeroed. Throws Error if the system has none.
  explicit SharedMemory(std::size_t bytes);
  // Another process's memory, by its descriptor, which this takes over.
  SharedMemory(int file, std::size_t bytes) : file_(file) { map(bytes); }
  ~SharedMemory() {
    if (data_ != nullptr) munmap(data_, bytes_);
  }

  std::byte* data() const noexcept { return data_; }
  std::size_t size() const noexcept { return bytes_; }
  int file() const noexcept { return file_.get(); }

  // Grows to at least this size. The content stays; the address may change.
  void grow(std::size_t bytes);
  // The same after another process has grown it to this size.
  void follow(std::size_t bytes) {
    if (bytes > bytes_) map(bytes);
  }

 private:
  static constexpr std::size_t kPage = 4096, kHuge = std::size_t{2} << 20;

  void map(std::size_t bytes);

  Descriptor file_;
  std::byte* data_ = nullptr;
  std::size_t bytes_ = 0;
};

}  // namespace callgate
