// Capture of streams into graphs, and their replay. See world.h.
//
// A graph is its works in the order in which they were given, over all streams of the capture: that
// is one of the orders that their dependencies allow.
#include "world.h"

namespace fakecuda {
namespace {

thread_local cu::CaptureMode thread_mode = cu::CaptureMode::kGlobal;

}  // namespace

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
  if (found == nullptr || found->capture != nullptr) return 1;
  auto capture = std::make_shared<Capture>();
  capture->mode = static_cast<cu::CaptureMode>(mode);
  capture->thread = std::this_thread::get_id();
  capture->origin = found;
  capture->streams.insert(found);
  found->capture_clock.clear();
  found->capture = capture;
  world.captures.insert(capture);
  return 0;
}
FAKECUDA_API void* fakecuda_end_capture(void* stream) {
  World& world = World::instance();
  Lock lock(world.mutex);
  StreamState* found = find_stream(world, static_cast<cu::Stream>(stream), "fakecuda_end_capture");
  if (found == nullptr || found->capture == nullptr || found->capture->origin != found)
    return nullptr;
  auto capture = found->capture;
  bool good = !capture->invalidated;
  for (StreamState* side : capture->streams) {
    if (found->capture_clock[side->number] < side->capture_clock[side->number]) {
      good = false;
      world.violation("a capture ends with work on stream " + std::to_string(side->number) +
                      " that is not joined");
    }
    if (side != found) side->capture_clock.clear();
    side->capture = nullptr;
  }
  found->capture_clock.clear();
  world.captures.erase(capture);
  if (!good) return nullptr;
  auto graph = std::make_unique<Graph>(std::move(capture->graph));
  void* handle = graph.get();
  world.graphs.emplace(handle, std::move(graph));
  return handle;
}
FAKECUDA_API int fakecuda_replay(void* graph, void* stream) {
  World& world = World::instance();
  Lock lock(world.mutex);
  StreamState* found = find_stream(world, static_cast<cu::Stream>(stream), "fakecuda_replay");
  auto it = world.graphs.find(graph);
  if (found == nullptr || it == world.graphs.end()) return static_cast<int>(Result::kInvalidHandle);
  for (const Work& work : it->second->works) {
    Result result = enqueue(world, *found, work, "fakecuda_replay", true);
    if (result != Result::kSuccess) return static_cast<int>(result);
  }
  return 0;
}
FAKECUDA_API std::size_t fakecuda_graph_size(void* graph) {
  World& world = World::instance();
  Lock lock(world.mutex);
  auto it = world.graphs.find(graph);
  return it == world.graphs.end() ? 0 : it->second->works.size();
}
FAKECUDA_API void fakecuda_delete_graph(void* graph) {
  World& world = World::instance();
  std::unique_ptr<Graph> dies;  // without the mutex
  Lock lock(world.mutex);
  auto it = world.graphs.find(graph);
  if (it == world.graphs.end()) return;
  dies = std::move(it->second);
  world.graphs.erase(it);
  lock.unlock();
}

}  // namespace fakecuda
