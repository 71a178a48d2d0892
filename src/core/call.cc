// See the header.
#include "core/call.h"

namespace callgate {

Mesh Mesh::of(const Attributes& held) {
  Mesh mesh;
  mesh.devices = held.integer("devices", 1);
  const Attributes& names = held.dictionary("names");
  const auto places = names.places();
  const auto sizes = held.integers("sizes");
  if (sizes.size() != places.size()) {
    throw Error(ErrorCode::kInvalidArgument, "a program's mesh", "a size for each axis",
                std::to_string(sizes.size()) + " for " + std::to_string(places.size()));
  }
  for (std::size_t i = 0; i < places.size(); ++i) {
    if (sizes[i] <= 0)
      throw Error(ErrorCode::kInvalidArgument, "a mesh axis's size", "devices",
                  std::to_string(sizes[i]));
    mesh.axes.emplace_back(names.text(places[i]), sizes[i]);
  }
  return mesh;
}

}  // namespace callgate
