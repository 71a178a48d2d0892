// See the header. The lock is for loading and unloading of programs; calls take none.
#include "xla/kernel_cache.h"

#include <mutex>
#include <string_view>
#include <unordered_map>
#include <utility>

#include "core/dtype.h"
#include "core/lifetime.h"

namespace callgate::xla_ffi {
namespace {

struct Known {
  std::weak_ptr<BoundKernel> bound;
  bool ambiguous = false;  // for good: an older site of the key may live as long as it likes
};

constinit std::mutex g_mutex;

// XLA unloads programs at exit.
std::unordered_map<std::string, Known>& known() {
  return immortal<std::unordered_map<std::string, Known>>();
}

void append(std::string& to, std::string_view bytes) {
  to += std::to_string(bytes.size()) + ':';
  to += bytes;
}

// The attributes as bytes that are equal when the attributes are.
void append(std::string& to, const XLA_FFI_Attrs& attributes) {
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

}  // namespace

std::shared_ptr<BoundKernel> share(const XLA_FFI_Attrs& attributes, const KernelCallee& kernel,
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
  std::scoped_lock lock(g_mutex);
  Known& slot = known()[std::string(key, RecentKernels::kKeyBytes)];
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

BoundKernel::~BoundKernel() {
  if (key.empty()) return;
  // Threads may go on remembering this: no call has the key until share() gives it another site.
  std::scoped_lock lock(g_mutex);
  auto it = known().find(key);
  if (it != known().end() && !it->second.ambiguous && it->second.bound.expired()) known().erase(it);
}

}  // namespace callgate::xla_ffi
