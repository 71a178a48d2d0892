// SPDX-License-Identifier: Apache-2.0
// The control interface, as far as it belongs to no other file. See fakecuda.h and world.h.
#include <algorithm>
#include <cstdio>

#include "world.h"

namespace fakecuda {
namespace {

StreamState* known(World& world, void* stream) {
  auto it = world.streams.find(stream);
  return it == world.streams.end() ? nullptr : it->second.get();
}

// Its graphs and kernels stay, and what streams are held go on.
void let_go(World& world) {
  world.hold_all = false;
  for (const auto& [handle, stream] : world.streams) {
    stream->held = false;
    stream->failed = stream->fails_next = Result::kSuccess;
    stream->changed.notify_one();
  }
  world.ended.notify_all();
}

}  // namespace

FAKECUDA_API void fakecuda_set_devices(int count) {
  World& world = World::instance();
  Lock lock(world.mutex);
  world.device_count = std::clamp(count, 0, 64);
}
FAKECUDA_API void fakecuda_set_version(int version) {
  World& world = World::instance();
  Lock lock(world.mutex);
  world.version = version;
}
FAKECUDA_API void fakecuda_set_attribute(int device, int attribute, int value) {
  World& world = World::instance();
  Lock lock(world.mutex);
  world.devices[device].attributes[attribute] = value;
}

FAKECUDA_API void fakecuda_clear(void) {
  World& world = World::instance();
  Lock lock(world.mutex);
  world.lost = false;
  world.copy_delay = 0;
  world.failures.clear();
  world.violations.clear();
  world.launches.clear();
  world.calls.clear();
  let_go(world);
}

FAKECUDA_API void fakecuda_fail(const char* symbol, int result, int after, int count) {
  World& world = World::instance();
  Lock lock(world.mutex);
  if (count != 0) world.failures.push_back({symbol, Result{result}, after, count});
}
FAKECUDA_API void fakecuda_lose(int lost) {
  World& world = World::instance();
  Lock lock(world.mutex);
  world.lost = lost != 0;
  for (const auto& [handle, stream] : world.streams) {
    stream->failed = world.lost ? Result::kLaunchFailed : Result::kSuccess;
  }
  world.ended.notify_all();
}
FAKECUDA_API void fakecuda_fail_stream(void* stream, int result) {
  World& world = World::instance();
  Lock lock(world.mutex);
  if (StreamState* found = known(world, stream)) found->fails_next = Result{result};
}

FAKECUDA_API void fakecuda_hold(void* stream) {
  World& world = World::instance();
  Lock lock(world.mutex);
  if (StreamState* found = known(world, stream)) found->held = true;
}
FAKECUDA_API void fakecuda_release(void* stream) {
  World& world = World::instance();
  Lock lock(world.mutex);
  StreamState* found = known(world, stream);
  if (found == nullptr) return;
  found->held = false;
  found->changed.notify_one();
}
FAKECUDA_API void fakecuda_hold_all(int hold) {
  World& world = World::instance();
  Lock lock(world.mutex);
  world.hold_all = hold != 0;
  for (const auto& [handle, stream] : world.streams) {
    stream->held = world.hold_all;
    stream->changed.notify_one();
  }
}
FAKECUDA_API void fakecuda_delay_copies(unsigned microseconds) {
  World& world = World::instance();
  Lock lock(world.mutex);
  world.copy_delay = microseconds;
}
FAKECUDA_API int fakecuda_finish(void* stream) {
  World& world = World::instance();
  Lock lock(world.mutex);
  StreamState* found = known(world, stream);
  if (found == nullptr) return static_cast<int>(Result::kInvalidHandle);
  return static_cast<int>(synchronise(world, lock, *found));
}
FAKECUDA_API std::size_t fakecuda_queued(void* stream) {
  World& world = World::instance();
  Lock lock(world.mutex);
  StreamState* found = known(world, stream);
  return found == nullptr ? 0 : found->queue.size();
}
FAKECUDA_API std::size_t fakecuda_streams(void** out, std::size_t capacity) {
  World& world = World::instance();
  Lock lock(world.mutex);
  std::size_t count = 0;
  for (StreamState* stream : world.stream_order) {
    if (!stream->alive) continue;
    if (count < capacity) out[count] = stream;
    ++count;
  }
  return count;
}
FAKECUDA_API int fakecuda_device_of(void* stream) {
  World& world = World::instance();
  Lock lock(world.mutex);
  StreamState* found = known(world, stream);
  return found == nullptr ? -1 : found->device;
}
FAKECUDA_API void* fakecuda_new_stream(int device) {
  World& world = World::instance();
  Lock lock(world.mutex);
  if (device < 0 || device >= world.device_count) return nullptr;
  StreamState* stream = new_stream(world, device);
  stream->foreign = true;
  return stream;
}
FAKECUDA_API void fakecuda_delete_stream(void* stream) {
  World& world = World::instance();
  Lock lock(world.mutex);
  StreamState* found = known(world, stream);
  if (found == nullptr) return;
  found->alive = false;
  found->changed.notify_one();
}
FAKECUDA_API int fakecuda_enqueue(void* stream, void (*function)(void*), void* data,
                                  const std::uint64_t* reads, std::size_t read_count,
                                  const std::uint64_t* writes, std::size_t write_count) {
  World& world = World::instance();
  Lock lock(world.mutex);
  bool by_default = reinterpret_cast<std::uintptr_t>(stream) <= 2;  // see find_stream()
  StreamState* found = by_default
                           ? find_stream(world, static_cast<cu::Stream>(stream), "fakecuda_enqueue")
                           : known(world, stream);
  if (found == nullptr) return static_cast<int>(Result::kInvalidHandle);
  Work work;
  work.what = "a test's work";
  auto add = [&](std::uint64_t pointer, bool write) {
    auto memory = find_memory(world, pointer);
    std::uint64_t end = memory == nullptr ? pointer + 1 : memory->base + memory->bytes;
    work.accesses.push_back({pointer, end, write});
  };
  for (std::size_t i = 0; i < read_count; ++i) add(reads[i], false);
  for (std::size_t i = 0; i < write_count; ++i) add(writes[i], true);
  work.run = [function, data](bool) {
    if (function != nullptr) function(data);
    return Result::kSuccess;
  };
  return static_cast<int>(enqueue(world, *found, std::move(work), "fakecuda_enqueue"));
}

FAKECUDA_API std::size_t fakecuda_launch_count(void) {
  World& world = World::instance();
  Lock lock(world.mutex);
  return world.launches.size();
}
FAKECUDA_API int fakecuda_launch_at(std::size_t index, fakecuda_launch* launch) {
  World& world = World::instance();
  Lock lock(world.mutex);
  if (index >= world.launches.size()) return 1;
  *launch = world.launches[index];
  return 0;
}
FAKECUDA_API std::size_t fakecuda_violation_count(void) {
  World& world = World::instance();
  Lock lock(world.mutex);
  return world.violations.size();
}
FAKECUDA_API const char* fakecuda_violation_at(std::size_t index) {
  World& world = World::instance();
  Lock lock(world.mutex);
  return index < world.violations.size() ? world.violations[index].c_str() : nullptr;
}
FAKECUDA_API std::size_t fakecuda_calls(const char* symbol) {
  World& world = World::instance();
  Lock lock(world.mutex);
  auto it = world.calls.find(symbol);
  return it == world.calls.end() ? 0 : it->second;
}
FAKECUDA_API void fakecuda_count_live(fakecuda_live* live) {
  World& world = World::instance();
  Lock lock(world.mutex);
  *live = {};
  for (const auto& [address, memory] : world.memory) {
    if (memory->freed || memory->foreign) continue;
    ++(memory->pinned ? live->pinned_allocations : live->device_allocations);
    (memory->pinned ? live->pinned_bytes : live->device_bytes) += memory->bytes;
  }
  auto alive = [](const auto& pair) {
    if constexpr (requires { pair.second->foreign; }) {
      if (pair.second->foreign) return false;
    }
    return pair.second->alive;
  };
  auto count = [&](const auto& objects) {
    return static_cast<std::size_t>(std::ranges::count_if(objects, alive));
  };
  live->streams = count(world.streams);
  live->events = count(world.events);
  live->modules = count(world.modules);
  live->graphs = world.graphs.size();
}

}  // namespace fakecuda
