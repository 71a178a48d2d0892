// SPDX-License-Identifier: Apache-2.0
// Memory that processes share.
//
// The memory has no name (memfd_create): it is passed on as a descriptor, and gone with the last
// process that has it. Linux alone; elsewhere whoever makes one gets an Error.
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

// What a failing system call says.
inline Error system_error(const std::string& what) {
  return {ErrorCode::kResourceExhausted, what + ": " + std::strerror(errno)};
}

// A descriptor of this process's own.
class Descriptor {
 public:
  Descriptor() = default;
  explicit Descriptor(int number) noexcept : number_(number) {}
  Descriptor(Descriptor&& other) noexcept : number_(std::exchange(other.number_, -1)) {}
  Descriptor& operator=(Descriptor&& other) noexcept {
    std::swap(number_, other.number_);
    return *this;
  }
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
  // New memory, of zeros. Throws Error where the system gives none.
  explicit SharedMemory(std::size_t bytes) {
#ifdef __linux__
    file_ = Descriptor(memfd_create("callgate", MFD_CLOEXEC));
#else
    errno = ENOSYS;
#endif
    if (!file_.open()) throw system_error("memory for worker processes");
    grow(bytes);
  }
  // That of another process, by its descriptor, which it takes over.
  SharedMemory(int file, std::size_t bytes) : file_(file) { map(bytes); }
  ~SharedMemory() {
    if (data_ != nullptr) munmap(data_, bytes_);
  }

  std::byte* data() const noexcept { return data_; }
  std::size_t size() const noexcept { return bytes_; }
  int file() const noexcept { return file_.get(); }

  // Has at least so many bytes from here on. What was there stays; the address may change.
  void grow(std::size_t bytes) {
    if (bytes <= bytes_) return;
    bytes = (bytes + kPage - 1) / kPage * kPage;
    // Not left to the first write, where there being no memory would end the process.
#ifdef __linux__
    if (int error = posix_fallocate(file_.get(), 0, static_cast<off_t>(bytes)); error != 0) {
      errno = error;
      throw system_error(std::to_string(bytes) + " bytes of memory for a worker process");
    }
#endif
    map(bytes);
  }
  // The same where another process has grown it to so many bytes.
  void follow(std::size_t bytes) {
    if (bytes > bytes_) map(bytes);
  }

 private:
  static constexpr std::size_t kPage = 4096, kHuge = std::size_t{2} << 20;

  void map(std::size_t bytes) {
    void* mapped = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, file_.get(), 0);
    if (mapped == MAP_FAILED) throw system_error("memory of a worker process");
#ifdef __linux__
    if (bytes >= kHuge) (void)madvise(mapped, bytes, MADV_HUGEPAGE);  // where the system has it so
#endif
    if (data_ != nullptr) munmap(data_, bytes_);
    data_ = static_cast<std::byte*>(mapped);
    bytes_ = bytes;
  }

  Descriptor file_;
  std::byte* data_ = nullptr;
  std::size_t bytes_ = 0;
};

}  // namespace callgate
