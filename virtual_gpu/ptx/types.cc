// SPDX-License-Identifier: Apache-2.0
// The types of PTX. See types.h.
#include "types.h"

#include <array>
#include <stdexcept>
#include <string>
#include <utility>

namespace vgpu::ptx {
namespace {

struct Row {
  std::string_view name;
  std::uint32_t bytes;
  TypeClass type_class;
};

constexpr auto kRows = std::to_array<Row>({
#define VGPU_PTX_ROW(enumerator, name, bytes, class) {name, bytes, TypeClass::class},
    VGPU_PTX_TYPES(VGPU_PTX_ROW)
#undef VGPU_PTX_ROW
});

constexpr auto kSpaces = std::to_array<std::pair<std::string_view, Space>>({
    {"global", Space::kGlobal},
    {"const", Space::kConst},
    {"shared", Space::kShared},
    {"shared::cta", Space::kShared},
    {"shared::cluster", Space::kSharedCluster},
    {"local", Space::kLocal},
    {"param", Space::kParam},
    {"param::entry", Space::kParam},
    {"param::func", Space::kParam},
});

const Row& row(Type type) { return kRows[static_cast<std::size_t>(type)]; }

}  // namespace

std::optional<Type> type_named(std::string_view name) {
  for (std::size_t i = 0; i < kRows.size(); ++i) {
    if (kRows[i].name == name) return static_cast<Type>(i);
  }
  return std::nullopt;
}

std::string_view name_of(Type type) { return row(type).name; }
std::uint32_t size_of(Type type) { return row(type).bytes; }
TypeClass class_of(Type type) { return row(type).type_class; }

Type bits_of(std::uint32_t bytes) {
  switch (bytes) {
    case 1: return Type::kB8;
    case 2: return Type::kB16;
    case 4: return Type::kB32;
    case 8: return Type::kB64;
    case 16: return Type::kB128;
    default: throw std::logic_error("no type of " + std::to_string(bytes) + " bytes");
  }
}

std::optional<Space> space_named(std::string_view name) {
  for (const auto& [known, space] : kSpaces) {
    if (known == name) return space;
  }
  return std::nullopt;
}

}  // namespace vgpu::ptx
