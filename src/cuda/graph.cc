// See the header.
#include "cuda/graph.h"

#include "cuda/driver.h"

namespace callgate::cuda {
namespace {

constexpr unsigned kNoDestructorSync = 1;
constexpr unsigned kMoveReference = 1;

}  // namespace

bool give_to_graph(Stream stream, const std::shared_ptr<void>& kept) {
  const Driver& cuda = driver();
  if (cuda.capture_info == nullptr || cuda.user_object_create == nullptr ||
      cuda.graph_retain_object == nullptr) {
    return false;
  }
  CaptureStatus status = CaptureStatus::kNone;
  Graph graph = nullptr;
  Result found = cuda.capture_info(stream, &status, nullptr, &graph, nullptr, nullptr);
  if (found != Result::kSuccess || graph == nullptr) return false;
  auto owner = std::make_unique<std::shared_ptr<void>>(kept);
  auto destroy = [](void* data) { delete static_cast<std::shared_ptr<void>*>(data); };
  UserObject object = nullptr;
  if (cuda.user_object_create(&object, owner.get(), destroy, 1, kNoDestructorSync) !=
      Result::kSuccess) {
    return false;
  }
  owner.release();  // NOLINT: the object's
  if (cuda.graph_retain_object(graph, object, 1, kMoveReference) == Result::kSuccess) return true;
  cuda.user_object_release(object, 1);
  return false;
}

}  // namespace callgate::cuda
