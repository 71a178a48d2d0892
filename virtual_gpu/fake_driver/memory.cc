// SPDX-License-Identifier: Apache-2.0
// Device memory, pinned memory, copies and fills. See world.h.
//
// A device pointer is an address in a range that is reserved and can't be touched, so that a host
// that dereferences one crashes at once; what the device holds there lies elsewhere. No address is
// given twice, so the use of freed memory is always noticed. Pinned memory that is freed can't be
// touched any more either.
#include <sys/mman.h>

#include <algorithm>
#include <cstdlib>
#include <cstring>

#include "world.h"

namespace fakecuda {
namespace {

constexpr std::size_t kAlignment = 256, kPage = 4096;

// Device addresses: reserved once, handed out in order.
class Addresses {
 public:
  Addresses() {
    for (std::size_t size : {std::size_t{1} << 42, std::size_t{1} << 38, std::size_t{1} << 34}) {
      void* at = mmap(nullptr, size, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
      if (at == MAP_FAILED) continue;
      next_ = reinterpret_cast<std::uint64_t>(at);
      end_ = next_ + size;
      return;
    }
  }
  // 0 where there are no more. A gap follows each, so that overruns meet nothing.
  std::uint64_t take(std::size_t bytes) {
    std::uint64_t room = (bytes + 2 * kAlignment - 1) / kAlignment * kAlignment;
    if (bytes > end_ - next_ || room > end_ - next_) return 0;
    return std::exchange(next_, next_ + room);
  }

 private:
  std::uint64_t next_ = 0, end_ = 0;
};

}  // namespace

std::shared_ptr<Allocation> new_device_memory(World& world, int device, std::size_t bytes) {
  static auto* addresses = new Addresses();
  auto allocation = std::make_shared<Allocation>();
  // Filled, so that reading what was never written shows.
  allocation->host = static_cast<char*>(std::malloc(bytes));
  allocation->base = allocation->host == nullptr ? 0 : addresses->take(bytes);
  if (allocation->base == 0) return nullptr;
  std::memset(allocation->host, 0xA5, std::min(bytes, std::size_t{1} << 20));
  allocation->bytes = bytes;
  allocation->device = device;
  world.memory[allocation->base] = allocation;
  return allocation;
}

namespace {

void free_device_memory(World& world, Allocation& allocation, const char* symbol) {
  if (allocation.pending > 0) {
    world.violation(std::string(symbol) + ": memory at " + hex(allocation.base) +
                    " is freed while work that uses it is pending");
    return;  // and is kept: that work runs yet
  }
  free_memory(allocation);
}

std::shared_ptr<Allocation> live(World& world, std::uint64_t pointer, const char* symbol) {
  auto found = find_memory(world, pointer);
  if (found != nullptr && !found->freed && found->base == pointer) return found;
  world.violation(std::string(symbol) +
                  (found == nullptr ? ": no allocation at "
                   : found->freed   ? ": freed before: "
                                    : ": inside an allocation: ") +
                  hex(pointer));
  return nullptr;
}

bool ordered(const Past& before, const Clock& clock) {
  auto it = clock.find(before.stream);
  return it != clock.end() && it->second >= before.epoch;
}

std::uint64_t address(const void* pointer) { return reinterpret_cast<std::uint64_t>(pointer); }

// The access of a copy to or from the host; none where that memory isn't pinned.
void add_host_access(World& world, Work& work, const void* host, std::size_t bytes, bool writes,
                     const char* symbol) {
  auto found = find_memory(world, address(host));
  if (found == nullptr || !found->pinned) {
    world.violation(std::string(symbol) + ": pageable host memory at " + hex(address(host)));
    return;
  }
  work.accesses.push_back({address(host), address(host) + bytes, writes});
}

bool is_pinned(World& world, std::uint64_t host) {
  auto found = find_memory(world, host);
  return found != nullptr && found->pinned && !found->freed;
}

Result copy(const char* symbol, std::uint64_t to, std::uint64_t from, std::size_t bytes,
            cu::Stream stream, bool to_host, bool from_host) {
  return call(symbol, kContext, [&](World& world, Lock& lock) {
    StreamState* here = nullptr;
    if (Result bad = stream_here(world, stream, symbol, here); bad != Result::kSuccess) return bad;
    if (bytes == 0) return Result::kSuccess;
    if (!world.strict)
      return loose_copy(world, lock, {symbol, to, from, bytes, to_host, from_host}, *here);
    Work work;
    work.what = symbol;
    work.kind = NodeKind::kMemcpy;
    work.copies = true;
    auto add = [&](std::uint64_t at, bool on_host, bool writes) {
      if (on_host)
        return add_host_access(world, work, reinterpret_cast<void*>(at), bytes, writes, symbol);
      work.accesses.push_back({at, at + bytes, writes});
    };
    add(from, from_host, false);
    add(to, to_host, true);
    work.run = [=](bool) {
      char* target = to_host ? reinterpret_cast<char*>(to) : resolve(to, bytes);
      char* source = from_host ? reinterpret_cast<char*>(from) : resolve(from, bytes);
      if (target == nullptr || source == nullptr) return Result::kIllegalAddress;
      std::memmove(target, source, bytes);
      return Result::kSuccess;
    };
    return enqueue(world, *here, std::move(work), symbol);
  });
}

Result fill(const char* symbol, std::uint64_t to, std::uint32_t value, std::size_t value_bytes,
            std::size_t count, cu::Stream stream) {
  return call(symbol, kContext, [&](World& world, Lock&) {
    StreamState* here = nullptr;
    if (Result bad = stream_here(world, stream, symbol, here); bad != Result::kSuccess) return bad;
    if (to % value_bytes != 0) return Result::kInvalidValue;
    if (count == 0) return Result::kSuccess;
    return enqueue(world, *here, fill_work(symbol, to, value, value_bytes, count), symbol);
  });
}

}  // namespace

void free_memory(Allocation& allocation) {
  allocation.freed = true;
  allocation.history.clear();
  std::free(std::exchange(allocation.host, nullptr));
}

std::shared_ptr<Allocation> find_memory(World& world, std::uint64_t pointer) {
  auto it = world.memory.upper_bound(pointer);
  if (it == world.memory.begin()) return nullptr;
  --it;
  return pointer < it->first + std::max<std::size_t>(it->second->bytes, 1) ? it->second : nullptr;
}

Work copy_work(const Copy& copy, std::shared_ptr<std::vector<char>> staged) {
  Work work;
  work.what = copy.symbol;
  work.kind = NodeKind::kMemcpy;
  work.copies = true;
  work.run = [copy, staged = std::move(staged)](bool) {
    char* to = copy.to_host ? reinterpret_cast<char*>(copy.to) : resolve(copy.to, copy.bytes);
    const char* from = staged != nullptr ? staged->data()
                       : copy.from_host  ? reinterpret_cast<const char*>(copy.from)
                                         : resolve(copy.from, copy.bytes);
    if (to == nullptr || from == nullptr) return Result::kIllegalAddress;
    std::memmove(to, from, copy.bytes);
    return Result::kSuccess;
  };
  return work;
}

Work fill_work(const char* symbol, std::uint64_t to, std::uint32_t value, std::size_t value_bytes,
               std::size_t count) {
  Work work;
  work.what = symbol;
  work.kind = NodeKind::kMemset;
  work.accesses.push_back({to, to + count * value_bytes, true});
  work.run = [=](bool) {
    char* target = resolve(to, count * value_bytes);
    if (target == nullptr) return Result::kIllegalAddress;
    auto put = [&](auto narrow) {
      std::fill_n(reinterpret_cast<decltype(narrow)*>(target), count, narrow);
    };
    if (value_bytes == 1) put(static_cast<std::uint8_t>(value));
    if (value_bytes == 2) put(static_cast<std::uint16_t>(value));
    if (value_bytes == 4) put(value);
    return Result::kSuccess;
  };
  return work;
}

// As real drivers do it: memory that isn't pinned is read before the call returns, or written when
// it does.
Result loose_copy(World& world, Lock& lock, const Copy& copy, StreamState& stream) {
  std::shared_ptr<std::vector<char>> staged;
  if (copy.from_host && !is_pinned(world, copy.from) && stream.capture == nullptr) {
    const char* begin = reinterpret_cast<const char*>(copy.from);
    staged = std::make_shared<std::vector<char>>(begin, begin + copy.bytes);
  }
  Work work = copy_work(copy, std::move(staged));
  Result result = enqueue(world, stream, std::move(work), copy.symbol);
  bool waits = copy.to_host && !is_pinned(world, copy.to) && stream.capture == nullptr;
  return waits && result == Result::kSuccess ? synchronise(world, lock, stream) : result;
}

char* resolve(std::uint64_t pointer, std::size_t bytes) {
  World& world = World::instance();
  Lock lock(world.mutex);
  auto found = find_memory(world, pointer);
  if (found == nullptr || found->freed || pointer + bytes > found->base + found->bytes) {
    world.violation("work on a stream: freed or no memory at " + hex(pointer));
    return nullptr;
  }
  return found->host + (pointer - found->base);
}

void check_order(World& world, History& history, const Past& now, const Clock& clock) {
  auto overlaps = [&](const Past& before) {
    return before.access.begin < now.access.end && now.access.begin < before.access.end;
  };
  for (const Past& before : history) {
    if (!overlaps(before) || !(before.access.writes || now.access.writes)) continue;
    if (before.stream == now.stream || ordered(before, clock)) continue;
    world.violation(std::string(now.what) + (now.access.writes ? " writes " : " reads ") +
                    hex(now.access.begin) + " on stream " + std::to_string(now.stream) +
                    ", not ordered after " + before.what +
                    (before.access.writes ? ", which writes it" : ", which reads it") +
                    " on stream " + std::to_string(before.stream));
  }
  // A write hides what it covers; so does a read of the same stream an earlier one.
  std::erase_if(history, [&](const Past& before) {
    bool covered = now.access.begin <= before.access.begin && before.access.end <= now.access.end;
    return covered && (now.access.writes || (!before.access.writes && before.stream == now.stream));
  });
  history.push_back(now);
}

FAKECUDA_API Result cuMemAlloc_v2(cu::DevicePointer* pointer, std::size_t bytes) {
  return call("cuMemAlloc_v2", kContext | kUnsafe, [&](World& world, Lock&) {
    if (bytes == 0) return Result::kInvalidValue;
    auto allocation = new_device_memory(world, current_device(), bytes);
    if (allocation == nullptr) return Result::kOutOfMemory;
    *pointer = allocation->base;
    return Result::kSuccess;
  });
}
FAKECUDA_API Result cuMemFree_v2(cu::DevicePointer pointer) {
  return call("cuMemFree_v2", kContext | kUnsafe, [&](World& world, Lock& lock) {
    wait_for_all(world, lock);
    auto found = live(world, pointer, "cuMemFree_v2");
    if (found == nullptr || found->pinned) return Result::kInvalidValue;
    free_device_memory(world, *found, "cuMemFree_v2");
    return Result::kSuccess;
  });
}
FAKECUDA_API Result cuMemHostAlloc(void** pointer, std::size_t bytes, unsigned flags) {
  return call("cuMemHostAlloc", kContext | kUnsafe, [&](World& world, Lock&) {
    if (bytes == 0 || flags > 7) return Result::kInvalidValue;
    std::size_t room = (bytes + kPage - 1) / kPage * kPage;
    void* at = mmap(nullptr, room, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (at == MAP_FAILED) return Result::kOutOfMemory;
    auto allocation = std::make_shared<Allocation>();
    allocation->base = address(at);
    allocation->bytes = bytes;
    allocation->device = current_device();
    allocation->pinned = true;
    allocation->host = static_cast<char*>(at);
    world.memory[allocation->base] = allocation;
    *pointer = at;
    return Result::kSuccess;
  });
}
FAKECUDA_API Result cuMemFreeHost(void* pointer) {
  return call("cuMemFreeHost", kContext | kUnsafe, [&](World& world, Lock& lock) {
    wait_for_all(world, lock);
    auto found = live(world, address(pointer), "cuMemFreeHost");
    if (found == nullptr || !found->pinned) return Result::kInvalidValue;
    if (found->pending > 0) {
      world.violation("cuMemFreeHost: memory is freed while work that uses it is pending");
      return Result::kSuccess;
    }
    found->freed = true;
    std::size_t room = (found->bytes + kPage - 1) / kPage * kPage;
    madvise(pointer, room, MADV_DONTNEED);
    mprotect(pointer, room, PROT_NONE);
    return Result::kSuccess;
  });
}
// The host's own memory, which copies may then use without waiting.
FAKECUDA_API Result cuMemHostRegister_v2(void* pointer, std::size_t bytes, unsigned flags) {
  return call("cuMemHostRegister_v2", kContext | kUnsafe, [&](World& world, Lock&) {
    if (pointer == nullptr || bytes == 0 || flags > 15) return Result::kInvalidValue;
    auto found = find_memory(world, address(pointer));
    if (found != nullptr && !found->freed) return Result{712};
    auto allocation = std::make_shared<Allocation>();
    allocation->base = address(pointer);
    allocation->bytes = bytes;
    allocation->device = current_device();
    allocation->pinned = true;
    allocation->foreign = true;
    allocation->host = static_cast<char*>(pointer);
    world.memory[allocation->base] = allocation;
    return Result::kSuccess;
  });
}
FAKECUDA_API Result cuMemHostUnregister(void* pointer) {
  return call("cuMemHostUnregister", kContext | kUnsafe, [&](World& world, Lock& lock) {
    wait_for_all(world, lock);
    auto found = live(world, address(pointer), "cuMemHostUnregister");
    if (found == nullptr || !found->pinned) return Result{713};
    if (found->pending > 0)
      world.violation(
          "cuMemHostUnregister: memory is given back while work that uses it is pending");
    else
      world.memory.erase(found->base);  // it is its owner's: the address may come again
    return Result::kSuccess;
  });
}
FAKECUDA_API Result cuPointerGetAttribute(void* value, cu::PointerAttribute attribute,
                                          cu::DevicePointer pointer) {
  return call("cuPointerGetAttribute", kInit, [&](World& world, Lock&) {
    auto found = find_memory(world, pointer);
    if (found == nullptr || found->freed) return Result::kInvalidValue;
    switch (static_cast<int>(attribute)) {
      case 1: *static_cast<cu::Context*>(value) = context_of(found->device); break;
      case 2: *static_cast<unsigned*>(value) = found->pinned ? 1 : 2; break;  // host, device
      case 3: *static_cast<std::uint64_t*>(value) = pointer; break;
      case 7: *static_cast<std::uint64_t*>(value) = found->base; break;  // the buffer's number
      case 8: *static_cast<unsigned*>(value) = 0; break;                 // managed
      case 9: *static_cast<int*>(value) = found->device; break;
      case 11: *static_cast<std::uint64_t*>(value) = found->base; break;
      case 12: *static_cast<std::size_t*>(value) = found->bytes; break;
      default: return Result::kNotSupported;
    }
    return Result::kSuccess;
  });
}
FAKECUDA_API Result cuMemcpyDtoHAsync_v2(void* to, cu::DevicePointer from, std::size_t bytes,
                                         cu::Stream stream) {
  return copy("cuMemcpyDtoHAsync_v2", address(to), from, bytes, stream, true, false);
}
FAKECUDA_API Result cuMemcpyHtoDAsync_v2(cu::DevicePointer to, const void* from, std::size_t bytes,
                                         cu::Stream stream) {
  return copy("cuMemcpyHtoDAsync_v2", to, address(from), bytes, stream, false, true);
}
FAKECUDA_API Result cuMemcpyDtoDAsync_v2(cu::DevicePointer to, cu::DevicePointer from,
                                         std::size_t bytes, cu::Stream stream) {
  return copy("cuMemcpyDtoDAsync_v2", to, from, bytes, stream, false, false);
}
FAKECUDA_API Result cuMemsetD8Async(cu::DevicePointer to, unsigned char value, std::size_t count,
                                    cu::Stream stream) {
  return fill("cuMemsetD8Async", to, value, 1, count, stream);
}
FAKECUDA_API Result cuMemsetD16Async(cu::DevicePointer to, unsigned short value, std::size_t count,
                                     cu::Stream stream) {
  return fill("cuMemsetD16Async", to, value, 2, count, stream);
}
FAKECUDA_API Result cuMemsetD32Async(cu::DevicePointer to, unsigned value, std::size_t count,
                                     cu::Stream stream) {
  return fill("cuMemsetD32Async", to, value, 4, count, stream);
}

FAKECUDA_API std::uint64_t fakecuda_new_memory(int device, std::size_t bytes) {
  World& world = World::instance();
  Lock lock(world.mutex);
  auto allocation = new_device_memory(world, device, std::max<std::size_t>(bytes, 1));
  if (allocation == nullptr) return 0;
  allocation->foreign = true;
  return allocation->base;
}
FAKECUDA_API void fakecuda_drop_memory(std::uint64_t pointer) {
  World& world = World::instance();
  Lock lock(world.mutex);
  auto found = live(world, pointer, "fakecuda_drop_memory");
  if (found == nullptr) return;
  found->dropped = true;
  if (found->pending == 0) free_memory(*found);
}
FAKECUDA_API void fakecuda_delete_memory(std::uint64_t pointer) {
  World& world = World::instance();
  Lock lock(world.mutex);
  auto found = live(world, pointer, "fakecuda_delete_memory");
  if (found != nullptr) free_device_memory(world, *found, "fakecuda_delete_memory");
}
FAKECUDA_API void* fakecuda_host(std::uint64_t pointer) { return resolve(pointer, 0); }
FAKECUDA_API int fakecuda_read(void* to, std::uint64_t from, std::size_t bytes) {
  const char* source = resolve(from, bytes);
  if (source == nullptr) return 1;
  if (bytes != 0) std::memcpy(to, source, bytes);
  return 0;
}
FAKECUDA_API int fakecuda_write(std::uint64_t to, const void* from, std::size_t bytes) {
  char* target = resolve(to, bytes);
  if (target == nullptr) return 1;
  if (bytes != 0) std::memcpy(target, from, bytes);
  return 0;
}

}  // namespace fakecuda
