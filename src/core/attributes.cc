// SPDX-License-Identifier: Apache-2.0
// Attributes by name, and their equality.
#include "core/attributes.h"

#include <utility>

namespace callgate {

void Attributes::add_dictionary(std::string_view name, Attributes entries) {
  Attributes& kept = *nested_.emplace_back(std::make_unique<Attributes>(std::move(entries)));
  auto& added = add(name, CALLGATE_DICTIONARY, DType::kInvalid, nullptr, 0, kept.size());
  added.data = kept.values_.data();
}

const callgate_attribute* Attributes::find(std::string_view name) const noexcept {
  auto found = std::ranges::find(values_, name, &callgate_attribute::name);
  return found == values_.end() ? nullptr : &*found;
}

std::string_view Attributes::text(std::string_view name) const {
  const auto* found = find(name, CALLGATE_STRING, DType::kInvalid, "a string");
  return found == nullptr ? "" : std::string_view(elements<char>(*found), found->count);
}

bool Attributes::flag(std::string_view name) const {
  const callgate_attribute* found = find(name, CALLGATE_NUMBER, DType::kPred, "one bool");
  return found != nullptr && *elements<std::uint8_t>(*found) != 0;  // not every byte is a bool
}

std::int64_t Attributes::integer(std::string_view name, std::int64_t missing) const {
  const callgate_attribute* found = find(name, CALLGATE_NUMBER, DType::kS64, "one int64");
  return found == nullptr ? missing : *elements<std::int64_t>(*found);
}

const Attributes& Attributes::dictionary(std::string_view name) const {
  static const auto& none = immortal<Attributes>();
  const auto* found = find(name, CALLGATE_DICTIONARY, DType::kInvalid, "a dictionary");
  return found == nullptr || found->count == 0 ? none : nested(*found);
}

std::vector<std::string> Attributes::places() const {
  std::vector<std::string> places;
  for (std::string next = "0"; find(next) != nullptr; next = std::to_string(places.size()))
    places.push_back(next);
  return places;
}

Attributes Attributes::take_dictionary(std::string_view name) {
  const auto* found = find(name, CALLGATE_DICTIONARY, DType::kInvalid, "a dictionary");
  Attributes taken;
  if (found == nullptr) return taken;
  if (found->count != 0) taken = std::move(nested(*found));
  values_.erase(values_.begin() + (found - values_.data()));
  return taken;
}

bool Attributes::same(const callgate_attribute& a, const callgate_attribute& b) noexcept {
  if (a.kind != b.kind || a.dtype != b.dtype || a.count != b.count) return false;
  if (std::string_view(a.name) != b.name) return false;
  if (a.kind == CALLGATE_DICTIONARY) {
    auto entries = [](const auto& of) {
      return std::span(elements<callgate_attribute>(of), of.count);
    };
    return std::ranges::equal(entries(a), entries(b), &Attributes::same);
  }
  auto dtype = a.kind == CALLGATE_STRING ? DType::kU8 : static_cast<DType>(a.dtype);
  return a.count == 0 || std::memcmp(a.data, b.data, storage_bytes(dtype, a.count)) == 0;
}

callgate_attribute& Attributes::add(std::string_view name, int kind, DType dtype, const void* bytes,
                                    std::size_t size, std::size_t count) {
  // One block: the elements, aligned as by new[], then the name with its terminating zero.
  auto block = std::make_unique<std::byte[]>(size + name.size() + 1);
  if (size != 0) std::memcpy(block.get(), bytes, size);
  auto* text = reinterpret_cast<char*>(block.get() + size);
  std::ranges::copy(name, text);
  callgate_attribute value{text, block.get(), count, kind, static_cast<std::uint8_t>(dtype)};
  memory_.push_back(std::move(block));
  auto place = std::ranges::lower_bound(values_, name, {}, &callgate_attribute::name);
  return *values_.insert(place, value);
}

const callgate_attribute* Attributes::find(std::string_view name, int kind, DType dtype,
                                           const char* expected) const {
  const callgate_attribute* found = find(name);
  if (found == nullptr) return nullptr;
  if (found->kind == kind && found->dtype == static_cast<int>(dtype)) return found;
  std::string got(callgate::name(static_cast<DType>(found->dtype)));
  if (found->kind == CALLGATE_STRING) got = "a string";
  if (found->kind == CALLGATE_DICTIONARY) got = "a dictionary";
  if (found->kind == CALLGATE_NUMBER) got.insert(0, "one ");
  if (found->kind == CALLGATE_NUMBERS) got.insert(0, "an array of ");
  throw Error("attribute '" + std::string(found->name) + "'", expected, got);
}

Attributes& Attributes::nested(const callgate_attribute& value) const {
  auto entries = [](const auto& each) -> const void* { return each->values_.data(); };
  return **std::ranges::find(nested_, value.data, entries);
}

}  // namespace callgate
