// SPDX-License-Identifier: Apache-2.0
// See targets.h.
#include <sys/mman.h>
#include <unistd.h>

#include <cstdio>
#include <cstdlib>

#include "targets.h"

namespace callgate::fuzz {

void require(bool holds, const char* promise) {
  if (holds) return;
  std::fprintf(stderr, "broken promise: %s\n", promise);
  std::abort();
}

void touch(const void* data, std::size_t size) {
  const auto* bytes = static_cast<const volatile unsigned char*>(data);
  for (std::size_t i = 0; i < size; ++i) static_cast<void>(bytes[i]);
}

MemoryFile::MemoryFile(std::string_view bytes)
    : fd_(memfd_create("callgate-fuzz", MFD_CLOEXEC)),
      path_("/proc/self/fd/" + std::to_string(fd_)) {
  while (fd_ >= 0 && !bytes.empty()) {
    const ssize_t written = ::write(fd_, bytes.data(), bytes.size());
    if (written <= 0) break;
    bytes.remove_prefix(static_cast<std::size_t>(written));
  }
  require(fd_ >= 0 && bytes.empty(), "a file in memory can be written");
}

MemoryFile::~MemoryFile() { ::close(fd_); }

std::string MemoryFile::contents() const {
  std::string bytes(static_cast<std::size_t>(lseek(fd_, 0, SEEK_END)), '\0');
  const ssize_t got = pread(fd_, bytes.data(), bytes.size(), 0);
  require(got == static_cast<ssize_t>(bytes.size()), "a file in memory can be read");
  return bytes;
}

}  // namespace callgate::fuzz
