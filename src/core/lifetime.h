// SPDX-License-Identifier: Apache-2.0
// Lifetimes of objects, and the process to which they belong.
#pragma once

#include <pthread.h>

#include <array>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>

namespace callgate {

// The process's single object of a type; never destroyed, because users may outlive static objects.
template <typename T>
T& immortal() {
  static auto* object = new T();
  return *object;
}

// Base class of objects that are neither copied nor moved.
class Immovable {
 public:
  Immovable(const Immovable&) = delete;
  Immovable& operator=(const Immovable&) = delete;

 protected:
  Immovable() = default;
  ~Immovable() = default;
};

// Uninitialized storage for objects, because clearing it would cost as much as a call: inline for
// up to kInline objects, otherwise allocated.
template <typename T, std::size_t kInline>
class SmallBuffer : Immovable {
 public:
  explicit SmallBuffer(std::size_t count) {
    if (count <= kInline) [[likely]]
      return;
    large_ = std::make_unique_for_overwrite<T[]>(count);
    data_ = large_.get();
  }
  T* data() const noexcept { return data_; }

 private:
  union Room {
    Room() noexcept {}                           // NOLINT: left as it is
    alignas(16) std::array<T, kInline> objects;  // aligned as by operator new
  } room_;
  std::unique_ptr<T[]> large_;
  T* data_ = room_.objects.data();
};

// The process to which an object belongs. A fork's child has the parent's memory and descriptors,
// but none of its threads, and locks that these threads held are never released. Objects with
// threads or resources outside the process therefore remember their process, and leave both alone
// in a child.
class OfProcess {
 public:
  // False in a fork's child of the process that created the object.
  bool here() const noexcept { return made_ == forks(); }

 private:
  // The number of forks between the first process and this one.
  static std::uint32_t forks() noexcept {
    return forks_.load(std::memory_order_relaxed);  // only changes while there is one thread
  }
  static std::uint32_t watched() {
    static const int registered =
        pthread_atfork(nullptr, nullptr, [] { forks_.fetch_add(1, std::memory_order_relaxed); });
    (void)registered;
    return forks();
  }

  static inline std::atomic<std::uint32_t> forks_{0};
  std::uint32_t made_ = watched();
};

}  // namespace callgate
