// See the header.
#include "core/attributes.h"

#include <algorithm>
#include <cstring>
#include <utility>

#include "core/error.h"
#include "core/lifetime.h"

namespace callgate {

callgate_attribute& Attributes::add(std::string_view name, int kind, DType dtype, const void* bytes,
                                    std::size_t size, std::size_t count) {
  // One block: the elements, aligned as new[] aligns, then the name with its final zero.
  auto block = std::make_unique<std::byte[]>(size + name.size() + 1);
  if (size != 0) std::memcpy(block.get(), bytes, size);
  auto* text = reinterpret_cast<char*>(block.get() + size);
  std::ranges::copy(name, text);
  text[name.size()] = '\0';
  callgate_attribute value{text, block.get(), count, kind, static_cast<std::uint8_t>(dtype)};
  memory_.push_back(std::move(block));
  auto place = std::ranges::lower_bound(values_, name, {}, &callgate_attribute::name);
  return *values_.insert(place, value);
}

void Attributes::add_number(std::string_view name, DType dtype, const void* element) {
  add(name, CALLGATE_NUMBER, dtype, element, storage_bytes(dtype, 1), 1);
}

void Attributes::add_numbers(std::string_view name, DType dtype, const void* elements,
                             std::size_t count) {
  add(name, CALLGATE_NUMBERS, dtype, elements, storage_bytes(dtype, count), count);
}

void Attributes::add_string(std::string_view name, std::string_view text) {
  add(name, CALLGATE_STRING, DType::kInvalid, text.data(), text.size(), text.size());
}

void Attributes::add_dictionary(std::string_view name, Attributes entries) {
  const Attributes& kept = *nested_.emplace_back(std::make_unique<Attributes>(std::move(entries)));
  add(name, CALLGATE_DICTIONARY, DType::kInvalid, nullptr, 0, kept.size()).data =
      kept.values_.data();
}

const callgate_attribute* Attributes::find(std::string_view name) const noexcept {
  for (const callgate_attribute& value : values_)
    if (value.name == name) return &value;
  return nullptr;
}

namespace {

[[noreturn]] void refuse(const callgate_attribute& found, const char* expected) {
  auto got = [&]() -> std::string {
    const std::string type(name(static_cast<DType>(found.dtype)));
    switch (found.kind) {
      case CALLGATE_STRING: return "a string";
      case CALLGATE_DICTIONARY: return "a dictionary";
      case CALLGATE_NUMBER: return "one " + type;
      default: return "an array of " + type;
    }
  };
  throw Error(ErrorCode::kInvalidArgument, "attribute '" + std::string(found.name) + "'", expected,
              got());
}

}  // namespace

const callgate_attribute* Attributes::find(std::string_view name, int kind,
                                           const char* expected) const {
  const callgate_attribute* found = find(name);
  if (found != nullptr && found->kind != kind) refuse(*found, expected);
  return found;
}

std::string_view Attributes::text(std::string_view name) const {
  const callgate_attribute* found = find(name, CALLGATE_STRING, "a string");
  if (found == nullptr) return {};
  return {static_cast<const char*>(found->data), found->count};
}

bool Attributes::flag(std::string_view name) const {
  const callgate_attribute* found = find(name, CALLGATE_NUMBER, "one bool");
  if (found == nullptr) return false;
  if (found->dtype != static_cast<int>(DType::kPred)) refuse(*found, "one bool");
  return *static_cast<const std::uint8_t*>(found->data) != 0;  // not every byte is a bool
}

std::int64_t Attributes::integer(std::string_view name, std::int64_t missing) const {
  const callgate_attribute* found = find(name, CALLGATE_NUMBER, "one int64");
  if (found == nullptr) return missing;
  if (found->dtype != static_cast<int>(DType::kS64)) refuse(*found, "one int64");
  return *static_cast<const std::int64_t*>(found->data);
}

const callgate_attribute* Attributes::numbers(std::string_view name, DType dtype,
                                              const char* expected) const {
  const callgate_attribute* found = find(name, CALLGATE_NUMBERS, expected);
  if (found != nullptr && found->dtype != static_cast<int>(dtype)) refuse(*found, expected);
  return found;
}

std::span<const std::int64_t> Attributes::integers(std::string_view name) const {
  const callgate_attribute* found = numbers(name, DType::kS64, "an array of int64");
  if (found == nullptr) return {};
  return {static_cast<const std::int64_t*>(found->data), found->count};
}

std::span<const std::byte> Attributes::bytes(std::string_view name) const {
  const callgate_attribute* found = numbers(name, DType::kU8, "an array of uint8");
  if (found == nullptr) return {};
  return {static_cast<const std::byte*>(found->data), found->count};
}

// By what the value points to: names may have a zero inside, or come twice.
Attributes& Attributes::nested(const callgate_attribute& value) const {
  auto entries = [](const auto& each) -> const void* { return each->values_.data(); };
  return **std::ranges::find(nested_, value.data, entries);
}

const Attributes& Attributes::dictionary(std::string_view name) const {
  static const auto& none = immortal<Attributes>();
  const callgate_attribute* found = find(name, CALLGATE_DICTIONARY, "a dictionary");
  return found == nullptr || found->count == 0 ? none : nested(*found);
}

std::vector<std::string> Attributes::places() const {
  std::vector<std::string> places;
  while (find(std::to_string(places.size())) != nullptr)
    places.push_back(std::to_string(places.size()));
  return places;
}

Attributes Attributes::take_dictionary(std::string_view name) {
  const callgate_attribute* found = find(name, CALLGATE_DICTIONARY, "a dictionary");
  Attributes taken;
  if (found == nullptr) return taken;
  if (found->count != 0) taken = std::move(nested(*found));
  values_.erase(values_.begin() + (found - values_.data()));
  return taken;
}

}  // namespace callgate
