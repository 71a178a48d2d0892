// SPDX-License-Identifier: Apache-2.0
// The attributes of a call, of any kind.
#include "core/attributes.h"

#include <cstdint>
#include <cstring>
#include <string_view>
#include <utility>

#include "built_attributes.h"
#include "core/error.h"
#include "targets.h"

namespace callgate::fuzz {
namespace {

void look_at(const callgate_attribute& attribute) {
  require(std::strlen(attribute.name) < 256, "a name ends in a zero");
  const auto dtype = dtype_from_code(attribute.dtype);
  switch (attribute.kind) {
    case CALLGATE_STRING: return touch(attribute.data, attribute.count);
    case CALLGATE_DICTIONARY:
      for (std::size_t i = 0; i < attribute.count; ++i)
        look_at(static_cast<const callgate_attribute*>(attribute.data)[i]);
      return;
    default:
      if (!dtype) return require(false, "numbers have a type");
      require(attribute.kind != CALLGATE_NUMBER || attribute.count == 1, "a number is one");
      touch(attribute.data, storage_bytes(*dtype, attribute.count));
  }
}

}  // namespace

void attributes(std::string_view bytes) {
  Bytes in(bytes);
  try {
    Attributes read = read_attributes(in);
    for (const std::string& place : read.places())
      require(read.find(place) != nullptr, "a list has its places");
    Attributes taken = read.take_dictionary("taken");
    Attributes holder;
    holder.add_dictionary("all", std::move(read));
    holder.add_dictionary("taken", std::move(taken));
    look_at(*holder.find("all"));
    look_at(*holder.find("taken"));
  } catch (const Error&) {  // NOLINT(bugprone-empty-catch): the promised one
  }
}

}  // namespace callgate::fuzz
