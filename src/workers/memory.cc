// SPDX-License-Identifier: Apache-2.0
// Shared memory that grows.
#include "workers/memory.h"

namespace callgate {

Descriptor& Descriptor::operator=(Descriptor&& other) noexcept {
  std::swap(number_, other.number_);
  return *this;
}

SharedMemory::SharedMemory(std::size_t bytes) {
#ifdef __linux__
  file_ = Descriptor(memfd_create("callgate", MFD_CLOEXEC));
#else
  errno = ENOSYS;
#endif
  if (!file_.open()) throw system_error("memory for worker processes");
  grow(bytes);
}

void SharedMemory::grow(std::size_t bytes) {
  if (bytes <= bytes_) return;
  bytes = (bytes + kPage - 1) / kPage * kPage;
  // Allocated here and not at the first write, where missing memory would end the process.
#ifdef __linux__
  if (int error = posix_fallocate(file_.get(), 0, static_cast<off_t>(bytes)); error != 0) {
    errno = error;
    throw system_error(std::to_string(bytes) + " bytes of memory for a worker process");
  }
#endif
  map(bytes);
}

void SharedMemory::map(std::size_t bytes) {
  void* mapped = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, file_.get(), 0);
  if (mapped == MAP_FAILED) throw system_error("memory of a worker process");
#ifdef __linux__
  if (bytes >= kHuge) (void)madvise(mapped, bytes, MADV_HUGEPAGE);  // if the system supports it
#endif
  if (data_ != nullptr) munmap(data_, bytes_);
  data_ = static_cast<std::byte*>(mapped);
  bytes_ = bytes;
}

}  // namespace callgate
