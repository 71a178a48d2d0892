// SPDX-License-Identifier: Apache-2.0
// Streams, which are threads, and events. See world.h.
#include <pthread.h>

#include <algorithm>
#include <chrono>

#include "world.h"

namespace fakecuda {

namespace {

// On a stream's thread: of the work that runs.
thread_local const Clock* running_clock = nullptr;

// A work's result on the stream's thread. The mutex is held, and let go while the work runs.
Result run_one(World& world, Lock& lock, StreamState& stream, Queued& next) {
  if (stream.failed != Result::kSuccess) return stream.failed;
  if (world.sticky != Result::kSuccess) return world.sticky;
  if (world.lost) return Result::kLaunchFailed;
  // A marker is no work that could fail.
  if (next.work.run == nullptr) return Result::kSuccess;
  if (stream.fails_next != Result::kSuccess) {
    return std::exchange(stream.fails_next, Result::kSuccess);
  }
  unsigned delay = next.work.copies ? world.copy_delay : 0;
  if (world.delay != 0) delay += static_cast<unsigned>(world.random()) % world.delay;
  running_clock = &next.marker->clock;
  lock.unlock();
  if (delay != 0) std::this_thread::sleep_for(std::chrono::microseconds(delay));
  Result result = next.work.run(next.replayed);
  lock.lock();
  return result;
}

void run_stream(StreamState& stream) {
  World& world = World::instance();
  Lock lock(world.mutex);
  set_current_device(stream.device);
  while (true) {
    stream.changed.wait(lock,
                        [&] { return !stream.held && (!stream.queue.empty() || !stream.alive); });
    if (stream.queue.empty()) return;
    Queued& next = stream.queue.front();  // a deque's elements stay where they are
    Result result = run_one(world, lock, stream, next);
    stream.failed = result;
    next.marker->result = result;
    next.marker->done = true;
    for (const auto& allocation : next.uses) {
      if (--allocation->pending == 0 && allocation->dropped) free_memory(*allocation);
    }
    // The work's closure may own what takes the mutex to let go.
    Queued done = std::move(next);
    stream.queue.pop_front();
    world.ended.notify_all();
    lock.unlock();
    done = {};
    lock.lock();
  }
}

// What a host function does on the host is ordered after its stream.
Result run_host_function(void (*function)(void*), void* data) {
  World& world = World::instance();
  {
    Lock lock(world.mutex);
    join(world.host_clock, *running_clock);
  }
  in_host_function = true;
  function(data);
  in_host_function = false;
  return Result::kSuccess;
}

}  // namespace

Result wait_on_stream(const std::shared_ptr<Marker>& marker) {
  World& world = World::instance();
  Lock lock(world.mutex);
  world.ended.wait(lock, [&] { return marker->done || world.lost; });
  return marker->done ? marker->result : Result::kLaunchFailed;
}

Result wait_on_host(World& world, Lock& lock, const std::shared_ptr<Marker>& marker) {
  world.ended.wait(lock, [&] { return marker->done || world.lost; });
  if (!marker->done) return Result::kLaunchFailed;
  join(world.host_clock, marker->clock);
  return marker->result;
}

std::shared_ptr<Marker> mark(World& world, StreamState& stream) {
  auto marker = std::make_shared<Marker>();
  join(stream.clock, world.host_clock);
  marker->clock = stream.clock;
  if (stream.queue.empty() && !stream.held) {
    marker->done = true;
    marker->result = stream.failed;
    return marker;
  }
  Queued point;
  point.marker = marker;
  stream.queue.push_back(std::move(point));
  stream.changed.notify_one();
  return marker;
}

void join(Clock& clock, const Clock& other) {
  for (auto [stream, epoch] : other) {
    std::uint64_t& own = clock[stream];
    own = std::max(own, epoch);
  }
}

StreamState* new_stream(World& world, int device) {
  auto owned = std::make_unique<StreamState>();
  StreamState* stream = owned.get();
  stream->number = world.next_stream++;
  stream->device = device;
  stream->held = world.hold_all;
  world.streams.emplace(stream, std::move(owned));
  world.stream_order.push_back(stream);
  // Detached: the world outlives it, and one that waits at the end of the process dies with it.
  std::thread thread([stream] {
    std::string name = "fake-stream-" + std::to_string(stream->number);
    pthread_setname_np(pthread_self(), name.substr(0, 15).c_str());
    run_stream(*stream);
  });
  thread.detach();
  return stream;
}

StreamState* find_stream(World& world, cu::Stream stream, const char* symbol) {
  auto number = reinterpret_cast<std::uintptr_t>(stream);
  if (number <= 2) {  // none or 1: the legacy default stream; 2: the threads', one for all of them
    int device = current_device();
    if (device < 0) {
      world.violation(std::string(symbol) + ": the default stream, and no context is current");
      return nullptr;
    }
    auto& at = world.devices[device];
    StreamState*& own = number == 2 ? at.thread_stream : at.default_stream;
    if (own == nullptr) own = new_stream(world, device);
    return own;
  }
  auto it = world.streams.find(stream);
  if (it != world.streams.end() && it->second->alive) return it->second.get();
  world.violation(std::string(symbol) +
                  (it == world.streams.end() ? ": no stream" : ": a destroyed stream"));
  return nullptr;
}

Result stream_here(World& world, cu::Stream stream, const char* symbol, StreamState*& found) {
  found = find_stream(world, stream, symbol);
  if (found == nullptr) return Result::kInvalidHandle;
  if (found->device == current_device() || !world.strict) return Result::kSuccess;
  world.violation(std::string(symbol) + ": a stream of device " + std::to_string(found->device) +
                  " where device " + std::to_string(current_device()) + " is current");
  return Result::kInvalidHandle;
}

Result enqueue(World& world, StreamState& stream, Work work, const char* symbol, bool replayed) {
  std::vector<std::shared_ptr<Allocation>> uses;
  if (!world.strict) work.accesses.clear();
  for (const Access& access : work.accesses) {
    if (access.begin == access.end) continue;
    auto allocation = find_memory(world, access.begin);
    if (allocation != nullptr && !allocation->freed &&
        access.end <= allocation->base + allocation->bytes) {
      uses.push_back(std::move(allocation));
      continue;
    }
    world.violation(std::string(symbol) + ": " +
                    (allocation == nullptr ? "no memory of the driver's"
                     : allocation->freed   ? "freed memory"
                                           : "beyond the end of an allocation") +
                    " at " + hex(access.begin));
    return Result::kInvalidValue;
  }
  if (stream.capture != nullptr) {
    Capture& capture = *stream.capture;
    if (capture.invalidated) return Result::kStreamCaptureInvalidated;
    std::uint64_t epoch = ++stream.capture_clock[stream.number];
    for (const Access& access : work.accesses) {
      check_order(world, capture.history, {access, stream.number, epoch, work.what},
                  stream.capture_clock);
    }
    auto node = std::make_unique<Node>();
    node->kind = work.kind;
    node->work = std::move(work);
    if (capture.last != nullptr) node->after.push_back(capture.last);
    capture.last = node.get();
    capture.graph->nodes.push_back(std::move(node));
    return Result::kSuccess;
  }
  join(stream.clock, world.host_clock);
  std::uint64_t epoch = ++stream.clock[stream.number];
  for (const Access& access : work.accesses) {
    if (access.begin == access.end) continue;
    check_order(world, find_memory(world, access.begin)->history,
                {access, stream.number, epoch, work.what}, stream.clock);
  }
  for (const auto& allocation : uses) ++allocation->pending;
  auto marker = std::make_shared<Marker>();
  marker->clock = stream.clock;
  stream.queue.push_back({std::move(work), std::move(marker), replayed, std::move(uses)});
  stream.changed.notify_one();
  return Result::kSuccess;
}

Result synchronise(World& world, Lock& lock, StreamState& stream) {
  return wait_on_host(world, lock, mark(world, stream));
}

void wait_for_all(World& world, Lock& lock) {
  if (world.strict) return;
  std::vector<std::shared_ptr<Marker>> markers;
  for (const auto& [handle, stream] : world.streams) {
    if (stream->alive && stream->capture == nullptr) markers.push_back(mark(world, *stream));
  }
  for (const auto& marker : markers) wait_on_host(world, lock, marker);
}

FAKECUDA_API Result cuStreamCreate(cu::Stream* stream, unsigned flags) {
  return call("cuStreamCreate", kContext, [&](World& world, Lock&) {
    if (flags > 1) return Result::kInvalidValue;
    *stream = reinterpret_cast<cu::Stream>(new_stream(world, current_device()));
    return Result::kSuccess;
  });
}
FAKECUDA_API Result cuStreamDestroy_v2(cu::Stream stream) {
  return call("cuStreamDestroy_v2", kInit, [&](World& world, Lock&) {
    StreamState* found = find_stream(world, stream, "cuStreamDestroy_v2");
    if (found == nullptr) return Result::kInvalidHandle;
    found->alive = false;
    found->changed.notify_one();
    return Result::kSuccess;
  });
}
FAKECUDA_API Result cuStreamGetCtx(cu::Stream stream, cu::Context* context) {
  return call("cuStreamGetCtx", kInit, [&](World& world, Lock&) {
    StreamState* found = find_stream(world, stream, "cuStreamGetCtx");
    if (found == nullptr) return Result::kInvalidHandle;
    *context = context_of(found->device);
    return Result::kSuccess;
  });
}
FAKECUDA_API Result cuStreamSynchronize(cu::Stream stream) {
  return call("cuStreamSynchronize", kInit, [&](World& world, Lock& lock) {
    StreamState* found = find_stream(world, stream, "cuStreamSynchronize");
    if (found == nullptr) return Result::kInvalidHandle;
    if (found->capture != nullptr) {
      found->capture->invalidated = true;
      return Result::kStreamCaptureUnsupported;
    }
    if (disturbs_capture(world)) return Result::kStreamCaptureUnsupported;
    return synchronise(world, lock, *found);
  });
}
FAKECUDA_API Result cuLaunchHostFunc(cu::Stream stream, void (*function)(void*), void* data) {
  return call("cuLaunchHostFunc", kInit, [&](World& world, Lock&) {
    StreamState* found = find_stream(world, stream, "cuLaunchHostFunc");
    if (found == nullptr) return Result::kInvalidHandle;
    Work work;
    work.what = "a host function";
    work.kind = NodeKind::kHost;
    work.run = [function, data](bool) { return run_host_function(function, data); };
    return enqueue(world, *found, std::move(work), "cuLaunchHostFunc");
  });
}

}  // namespace fakecuda
