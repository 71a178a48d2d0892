// Which call site a call is at, found from what the call frame holds.
//
// XLA's own way, State_Get, takes as long as the rest of a kernel's call. So a thread remembers the
// sites of its last calls by the attribute `_key` that programs give each call of a kernel: a hash
// of the call's other attributes. Sites of one key are one object, shared by all executables that
// hold the call, so that it lives as long as any of them; a key that stands for two different sites
// (a kernel was defined anew under its name, say) is not remembered. Any change of what a key
// stands for raises the generation, which makes every thread forget.
#pragma once

#include <atomic>
#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <string_view>
#include <unordered_map>
#include <utility>

#include "core/dtype.h"
#include "core/kernel.h"
#include "core/lifetime.h"
#include "xla/call_site.h"
#include "xla/ffi.h"

namespace callgate::xla_ffi {

// A kernel bound to one call of a program.
struct BoundKernel : Immovable {
  ~BoundKernel();

  std::unique_ptr<KernelSite> site;
  bool poison_on_error = false;  // see settled() in ffi.h
  Shards shards;
  std::string key, contents;           // of the call; key is "" when it is not to be remembered
  std::atomic<bool> remembered{true};  // the key stands for this alone
};

// What a key stands for.
struct KnownKernel {
  std::weak_ptr<BoundKernel> bound;
  bool ambiguous = false;  // for good: an older site of the key may live as long as it likes
};

// For loading and unloading of programs; calls take no lock.
inline constinit std::mutex known_kernels_mutex;

// XLA unloads programs at exit.
inline std::unordered_map<std::string, KnownKernel>& known_kernels() {
  return immortal<std::unordered_map<std::string, KnownKernel>>();
}

inline BoundKernel::~BoundKernel() {
  if (key.empty()) return;
  // Threads may go on remembering this: no call has the key until share() gives it another site.
  std::scoped_lock lock(known_kernels_mutex);
  auto it = known_kernels().find(key);
  if (it != known_kernels().end() && !it->second.ambiguous && it->second.bound.expired())
    known_kernels().erase(it);
}

// The site of a call, if this thread remembers it, else the one that `get` gives, which it then
// remembers. `get` returns a site that the call keeps alive.
class RecentKernels {
 public:
  template <typename Get>
  static BoundKernel& find(const XLA_FFI_Attrs& attributes, Get&& get) {
    const char* key = key_of(attributes);
    if (key == nullptr) [[unlikely]]
      return get();
    // Acquire: with a generation goes what `remembered` was when it began. A call comes after its
    // executable was loaded, and so after the last change that matters to it.
    std::uint64_t now = generation_.load(std::memory_order_acquire);
    Slot& slot = slots_[static_cast<unsigned char>(key[0]) % kSlots];
    if (slot.generation == now && std::char_traits<char>::compare(slot.key, key, kKeyBytes) == 0)
        [[likely]] {
      return *slot.bound;
    }
    BoundKernel& bound = get();
    if (bound.remembered.load(std::memory_order_relaxed)) {  // see above
      slot.generation = now;
      slot.bound = &bound;
      std::char_traits<char>::copy(slot.key, key, kKeyBytes);
    }
    return bound;
  }

  // The first attribute's bytes, if it may be a key: attributes are sorted by name, and no other
  // value that programs hold looks like one. Null otherwise.
  static const char* key_of(const XLA_FFI_Attrs& attributes) noexcept {
    if (attributes.size == 0 || attributes.types[0] != XLA_FFI_AttrType_STRING) return nullptr;
    const auto& text = *static_cast<const XLA_FFI_ByteSpan*>(attributes.attrs[0]);
    return text.len == kKeyBytes ? text.ptr : nullptr;
  }

  static constexpr std::size_t kKeyBytes = 16;  // hexadecimal digits

 private:
  friend std::shared_ptr<BoundKernel> share(const XLA_FFI_Attrs&, const KernelCallee&,
                                            const std::function<std::shared_ptr<BoundKernel>()>&);
  static constexpr std::size_t kSlots = 8;
  struct Slot {
    std::uint64_t generation;  // 0: empty
    BoundKernel* bound;
    char key[kKeyBytes];
  };

  static inline constinit std::atomic<std::uint64_t> generation_{1};
  static inline constinit thread_local Slot slots_[kSlots] = {};
};

inline void append(std::string& to, std::string_view bytes) {
  to += std::to_string(bytes.size()) + ':';
  to += bytes;
}

// The attributes as bytes that are equal when the attributes are.
inline void append(std::string& to, const XLA_FFI_Attrs& attributes) {
  auto elements = [&](XLA_FFI_DataType dtype, const void* data, std::size_t count) {
    to += std::to_string(static_cast<int>(dtype)) + ',';
    append(to, {static_cast<const char*>(data), storage_bytes(static_cast<DType>(dtype), count)});
  };
  for (std::int64_t i = 0; i < attributes.size; ++i) {
    append(to, {attributes.names[i]->ptr, attributes.names[i]->len});
    to += std::to_string(static_cast<int>(attributes.types[i])) + ';';
    const void* value = attributes.attrs[i];
    if (attributes.types[i] == XLA_FFI_AttrType_STRING) {
      const auto& text = *static_cast<const XLA_FFI_ByteSpan*>(value);
      append(to, {text.ptr, text.len});
    } else if (attributes.types[i] == XLA_FFI_AttrType_SCALAR) {
      const auto& scalar = *static_cast<const XLA_FFI_Scalar*>(value);
      elements(scalar.dtype, scalar.value, 1);
    } else if (attributes.types[i] == XLA_FFI_AttrType_ARRAY) {
      const auto& array = *static_cast<const XLA_FFI_Array*>(value);
      elements(array.dtype, array.data, array.size);
    } else if (attributes.types[i] == XLA_FFI_AttrType_DICTIONARY) {
      to += '{';
      append(to, *static_cast<const XLA_FFI_Attrs*>(value));
      to += '}';
    }
  }
}

// The live site of a call of `kernel` with these attributes, or the one that `make` gives.
inline std::shared_ptr<BoundKernel> share(
    const XLA_FFI_Attrs& attributes, const KernelCallee& kernel,
    const std::function<std::shared_ptr<BoundKernel>()>& make) {
  const char* key = RecentKernels::key_of(attributes);
  if (key == nullptr) {
    std::shared_ptr<BoundKernel> made = make();
    made->remembered.store(false, std::memory_order_relaxed);  // nobody else has it yet
    return made;
  }
  std::string contents;
  append(contents, attributes);
  std::shared_ptr<BoundKernel> mine = make(), other;  // `other` outlives the lock
  std::scoped_lock lock(known_kernels_mutex);
  KnownKernel& slot = known_kernels()[std::string(key, RecentKernels::kKeyBytes)];
  other = slot.bound.lock();
  if (other != nullptr && !slot.ambiguous && other->contents == contents &&
      &other->site->callee() == &kernel)
    return other;
  if (other != nullptr) {
    slot.ambiguous = true;
    other->remembered.store(false, std::memory_order_relaxed);  // published by the generation
  }
  if (slot.ambiguous) mine->remembered.store(false, std::memory_order_relaxed);
  mine->key.assign(key, RecentKernels::kKeyBytes);
  mine->contents = std::move(contents);
  slot.bound = mine;
  // What a thread remembers under the key may be a site that is no more.
  RecentKernels::generation_.fetch_add(1, std::memory_order_release);
  return mine;
}

}  // namespace callgate::xla_ffi
