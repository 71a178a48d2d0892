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
#include <string>

#include "core/kernel.h"
#include "xla/ffi.h"
#include "xla/shards.h"

namespace callgate::xla_ffi {

// A kernel bound to one call of a program.
struct BoundKernel : Immovable {
  ~BoundKernel();

  std::unique_ptr<KernelSite> site;
  bool poison_on_error = false;  // see settled() in guard.h
  Shards shards;
  std::string key, contents;           // of the call; key is "" when it is not to be remembered
  std::atomic<bool> remembered{true};  // the key stands for this alone
};

// The live site of a call of `kernel` with these attributes, or the one that `make` gives.
std::shared_ptr<BoundKernel> share(const XLA_FFI_Attrs& attributes, const KernelCallee& kernel,
                                   const std::function<std::shared_ptr<BoundKernel>()>& make);

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

}  // namespace callgate::xla_ffi
