// SPDX-License-Identifier: Apache-2.0
// Capture of streams into graphs, and their replay. See world.h.
//
// A captured graph has its works in the order in which they were given, over all streams of the
// capture: that is one of the orders that their dependencies allow.
#include "world.h"

namespace fakecuda {

namespace {

thread_local cu::CaptureMode thread_mode = cu::CaptureMode::kGlobal;

// Takes references away; what has none left is destroyed without the mutex.
void release(World& world, Lock& lock, UserObject* object, unsigned references) {
  object->references -= references;
  if (object->references > 0) return;
  auto owned = world.objects.extract(object);
  lock.unlock();
  in_host_function = true;  // it may not call the driver
  owned.mapped()->destroy(owned.mapped()->data);
  in_host_function = false;
  lock.lock();
}

UserObject* find_object(World& world, cu::UserObject object, const char* symbol) {
  auto it = world.objects.find(object);
  if (it != world.objects.end()) return it->second.get();
  world.violation(std::string(symbol) + ": no user object, or a destroyed one");
  return nullptr;
}

}  // namespace

// With the graph's works, whose closures may take the mutex when they die, and the graphs in it.
void destroy_graph(World& world, Lock& lock, std::unique_ptr<Graph> graph) {
  for (auto [object, references] : graph->objects) release(world, lock, object, references);
  for (const auto& node : graph->nodes) {
    for (Graph* body : node->bodies) {
      auto owned = world.graphs.extract(body);
      if (!owned.empty()) destroy_graph(world, lock, std::move(owned.mapped()));
    }
  }
  lock.unlock();
  graph.reset();
  lock.lock();
}

bool begin_capture(World& world, StreamState& stream, cu::CaptureMode mode) {
  if (stream.capture != nullptr) return false;
  auto capture = std::make_shared<Capture>();
  capture->mode = mode;
  capture->thread = std::this_thread::get_id();
  capture->origin = &stream;
  capture->streams.insert(&stream);
  stream.capture_clock.clear();
  stream.capture = capture;
  world.captures.insert(capture);
  return true;
}

Graph* end_capture(World& world, Lock& lock, StreamState& stream) {
  auto capture = stream.capture;
  bool good = !capture->invalidated;
  for (StreamState* side : capture->streams) {
    if (stream.capture_clock[side->number] < side->capture_clock[side->number]) {
      good = false;
      world.violation("a capture ends with work on stream " + std::to_string(side->number) +
                      " that is not joined");
    }
    if (side != &stream) side->capture_clock.clear();
    side->capture = nullptr;
  }
  stream.capture_clock.clear();
  world.captures.erase(capture);
  Graph* graph = capture->graph;
  if (capture->own == nullptr) return good ? graph : nullptr;
  if (!good) {
    destroy_graph(world, lock, std::move(capture->own));
    return nullptr;
  }
  world.graphs.emplace(graph, std::move(capture->own));
  return graph;
}

bool disturbs_capture(World& world) {
  bool disturbs = false;
  auto here = std::this_thread::get_id();
  for (const auto& capture : world.captures) {
    bool own = capture->thread == here && capture->mode != cu::CaptureMode::kRelaxed;
    bool all = capture->mode == cu::CaptureMode::kGlobal;
    bool hit = thread_mode == cu::CaptureMode::kGlobal        ? own || all
               : thread_mode == cu::CaptureMode::kThreadLocal ? own
                                                              : false;
    if (hit) disturbs = capture->invalidated = true;
  }
  return disturbs;
}

FAKECUDA_API Result cuStreamIsCapturing(cu::Stream stream, cu::CaptureStatus* status) {
  return call("cuStreamIsCapturing", kInit, [&](World& world, Lock&) {
    StreamState* found = find_stream(world, stream, "cuStreamIsCapturing");
    if (found == nullptr) return Result::kInvalidHandle;
    *status = found->capture == nullptr     ? cu::CaptureStatus::kNone
              : found->capture->invalidated ? cu::CaptureStatus::kInvalidated
                                            : cu::CaptureStatus::kActive;
    return Result::kSuccess;
  });
}
FAKECUDA_API Result cuThreadExchangeStreamCaptureMode(cu::CaptureMode* mode) {
  return call("cuThreadExchangeStreamCaptureMode", kInit, [&](World&, Lock&) {
    std::swap(*mode, thread_mode);
    return Result::kSuccess;
  });
}

FAKECUDA_API int fakecuda_begin_capture(void* stream) {
  return fakecuda_begin_capture_mode(stream, static_cast<int>(cu::CaptureMode::kThreadLocal));
}
FAKECUDA_API int fakecuda_begin_capture_mode(void* stream, int mode) {
  World& world = World::instance();
  Lock lock(world.mutex);
  StreamState* found =
      find_stream(world, static_cast<cu::Stream>(stream), "fakecuda_begin_capture");
  if (found == nullptr) return 1;
  return begin_capture(world, *found, static_cast<cu::CaptureMode>(mode)) ? 0 : 1;
}
FAKECUDA_API void* fakecuda_end_capture(void* stream) {
  World& world = World::instance();
  Lock lock(world.mutex);
  StreamState* found = find_stream(world, static_cast<cu::Stream>(stream), "fakecuda_end_capture");
  if (found == nullptr || found->capture == nullptr || found->capture->origin != found)
    return nullptr;
  return end_capture(world, lock, *found);
}
FAKECUDA_API int fakecuda_replay(void* graph, void* stream) {
  World& world = World::instance();
  Lock lock(world.mutex);
  StreamState* found = find_stream(world, static_cast<cu::Stream>(stream), "fakecuda_replay");
  auto it = world.graphs.find(graph);
  if (found == nullptr || it == world.graphs.end()) return static_cast<int>(Result::kInvalidHandle);
  for (const auto& node : it->second->nodes) {
    Result result = enqueue(world, *found, node->work, "fakecuda_replay", true);
    if (result != Result::kSuccess) return static_cast<int>(result);
  }
  return 0;
}
FAKECUDA_API std::size_t fakecuda_graph_size(void* graph) {
  World& world = World::instance();
  Lock lock(world.mutex);
  auto it = world.graphs.find(graph);
  return it == world.graphs.end() ? 0 : it->second->nodes.size();
}
FAKECUDA_API void fakecuda_delete_graph(void* graph) {
  World& world = World::instance();
  Lock lock(world.mutex);
  auto it = world.graphs.find(graph);
  if (it == world.graphs.end()) return;
  auto dies = std::move(it->second);
  world.graphs.erase(it);
  destroy_graph(world, lock, std::move(dies));
}

FAKECUDA_API Result cuStreamGetCaptureInfo_v2(cu::Stream stream, cu::CaptureStatus* status,
                                              std::uint64_t* id, cu::Graph* graph,
                                              const cu::GraphNode** dependencies,
                                              std::size_t* count) {
  return call("cuStreamGetCaptureInfo_v2", kInit, [&](World& world, Lock&) {
    StreamState* found = find_stream(world, stream, "cuStreamGetCaptureInfo_v2");
    if (found == nullptr) return Result::kInvalidHandle;
    Capture* capture = found->capture.get();
    *status = capture == nullptr     ? cu::CaptureStatus::kNone
              : capture->invalidated ? cu::CaptureStatus::kInvalidated
                                     : cu::CaptureStatus::kActive;
    bool active = *status == cu::CaptureStatus::kActive;
    if (id != nullptr) *id = active ? reinterpret_cast<std::uint64_t>(capture) : 0;
    if (graph != nullptr) *graph = active ? reinterpret_cast<cu::Graph>(capture->graph) : nullptr;
    if (!active) return Result::kSuccess;
    if (dependencies != nullptr) *dependencies = reinterpret_cast<cu::GraphNode*>(&capture->last);
    if (count != nullptr) *count = capture->last == nullptr ? 0 : 1;
    return Result::kSuccess;
  });
}
FAKECUDA_API Result cuUserObjectCreate(cu::UserObject* object, void* data, void (*destroy)(void*),
                                       unsigned references, unsigned flags) {
  return call("cuUserObjectCreate", kInit, [&](World& world, Lock&) {
    if (destroy == nullptr || references == 0 || flags != 1) return Result::kInvalidValue;
    auto owned = std::make_unique<UserObject>(UserObject{data, destroy, references});
    *object = reinterpret_cast<cu::UserObject>(owned.get());
    world.objects.emplace(owned.get(), std::move(owned));
    return Result::kSuccess;
  });
}
FAKECUDA_API Result cuUserObjectRelease(cu::UserObject object, unsigned references) {
  return call("cuUserObjectRelease", kInit, [&](World& world, Lock& lock) {
    UserObject* found = find_object(world, object, "cuUserObjectRelease");
    if (found == nullptr || references == 0 || references > found->references)
      return Result::kInvalidValue;
    release(world, lock, found, references);
    return Result::kSuccess;
  });
}
FAKECUDA_API Result cuGraphRetainUserObject(cu::Graph graph, cu::UserObject object,
                                            unsigned references, unsigned flags) {
  return call("cuGraphRetainUserObject", kInit, [&](World& world, Lock&) {
    UserObject* found = find_object(world, object, "cuGraphRetainUserObject");
    Graph* holder = nullptr;
    if (auto it = world.graphs.find(graph); it != world.graphs.end()) holder = it->second.get();
    for (const auto& capture : world.captures) {
      if (reinterpret_cast<cu::Graph>(capture->graph) == graph) holder = capture->graph;
    }
    if (found == nullptr || holder == nullptr || references == 0) return Result::kInvalidValue;
    if (flags == 0) found->references += references;  // else the caller's become the graph's
    holder->objects[found] += references;
    return Result::kSuccess;
  });
}

}  // namespace fakecuda
