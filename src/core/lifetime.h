// SPDX-License-Identifier: Apache-2.0
// How long objects live, where, and in which process.
#pragma once

#include <pthread.h>

#include <array>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>

namespace callgate {

// The process's one object of a type made for this; never destroyed: users may outlast statics.
template <typename T>
T& immortal() {
  static auto* object = new T();
  return *object;
}

// Base of what is neither copied nor moved.
class Immovable {
 public:
  Immovable(const Immovable&) = delete;
  Immovable& operator=(const Immovable&) = delete;

 protected:
  Immovable() = default;
  ~Immovable() = default;
};

// Room for some objects, left as it is, since clearing it would cost as much as a call: within
// itself for up to kInline of them, else allocated.
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
    alignas(16) std::array<T, kInline> objects;  // aligned as operator new does
  } room_;
  std::unique_ptr<T[]> large_;
  T* data_ = room_.objects.data();
};

// Which process an object belongs to. A fork's child has the parent's memory and descriptors, but
// none of its threads, and locks that these held are held for ever. So what has threads, or what
// lies outside of the process, remembers where it was made, and leaves both alone in a child.
class OfProcess {
 public:
  // False in a fork's child of the process that the object was made in.
  bool here() const noexcept { return made_ == forks(); }

 private:
  // Forks between the first process and this one.
  static std::uint32_t forks() noexcept {
    return forks_.load(std::memory_order_relaxed);  // changes while there is one thread alone
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
