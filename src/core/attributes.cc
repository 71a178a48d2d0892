// See the header.
#include "core/attributes.h"

#include <algorithm>
#include <cstring>
#include <utility>

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
  nested_.push_back(std::make_unique<Attributes>(std::move(entries)));
  const Attributes& kept = *nested_.back();
  add(name, CALLGATE_DICTIONARY, DType::kInvalid, nullptr, 0, kept.size()).data =
      kept.values_.data();
}

const callgate_attribute* Attributes::find(std::string_view name) const noexcept {
  for (const callgate_attribute& value : values_)
    if (value.name == name) return &value;
  return nullptr;
}

}  // namespace callgate
