// SPDX-License-Identifier: Apache-2.0
// The types of PTX: names, sizes, classes.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <string_view>

namespace vgpu::ptx {

// X(enumerator, name in PTX, bytes, class)
#define VGPU_PTX_TYPES(X)          \
  X(kPred, "pred", 1, kPredicate)  \
  X(kB8, "b8", 1, kBits)           \
  X(kB16, "b16", 2, kBits)         \
  X(kB32, "b32", 4, kBits)         \
  X(kB64, "b64", 8, kBits)         \
  X(kB128, "b128", 16, kBits)      \
  X(kU8, "u8", 1, kUnsigned)       \
  X(kU16, "u16", 2, kUnsigned)     \
  X(kU32, "u32", 4, kUnsigned)     \
  X(kU64, "u64", 8, kUnsigned)     \
  X(kS8, "s8", 1, kSigned)         \
  X(kS16, "s16", 2, kSigned)       \
  X(kS32, "s32", 4, kSigned)       \
  X(kS64, "s64", 8, kSigned)       \
  X(kF16, "f16", 2, kFloat)        \
  X(kBF16, "bf16", 2, kFloat)      \
  X(kTF32, "tf32", 4, kFloat)      \
  X(kF32, "f32", 4, kFloat)        \
  X(kF64, "f64", 8, kFloat)        \
  X(kF16x2, "f16x2", 4, kFloat)    \
  X(kBF16x2, "bf16x2", 4, kFloat)  \
  X(kF32x2, "f32x2", 8, kFloat)    \
  X(kE4M3, "e4m3", 1, kFloat)      \
  X(kE5M2, "e5m2", 1, kFloat)      \
  X(kE4M3x2, "e4m3x2", 2, kFloat)  \
  X(kE5M2x2, "e5m2x2", 2, kFloat)  \
  X(kU16x2, "u16x2", 4, kUnsigned) \
  X(kS16x2, "s16x2", 4, kSigned)

enum class Type : std::uint8_t {
#define VGPU_PTX_ENUMERATOR(enumerator, name, bytes, class) enumerator,
  VGPU_PTX_TYPES(VGPU_PTX_ENUMERATOR)
#undef VGPU_PTX_ENUMERATOR
};

enum class TypeClass : std::uint8_t { kPredicate, kBits, kUnsigned, kSigned, kFloat };

std::optional<Type> type_named(std::string_view name);  // without its dot
std::string_view name_of(Type type);
std::uint32_t size_of(Type type);  // bytes; 1 for predicates
TypeClass class_of(Type type);
inline bool is_signed(Type type) { return class_of(type) == TypeClass::kSigned; }
inline bool is_float(Type type) { return class_of(type) == TypeClass::kFloat; }
// The untyped one of so many bytes.
Type bits_of(std::uint32_t bytes);

enum class Space : std::uint8_t {
  kGeneric,
  kGlobal,
  kConst,
  kShared,
  kSharedCluster,
  kLocal,
  kParam
};
// "global", "shared", "shared::cta", "shared::cluster", "param::entry", ...
std::optional<Space> space_named(std::string_view name);

}  // namespace vgpu::ptx
