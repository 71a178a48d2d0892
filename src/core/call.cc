// SPDX-License-Identifier: Apache-2.0
// The registry of names, and a program's mesh.
#include "core/call.h"

#include <algorithm>

namespace callgate {

Mesh Mesh::of(const Attributes& held) {
  Mesh mesh{held.integer("devices", 1), {}};
  const Attributes& names = held.dictionary("names");
  const auto places = names.places();
  const auto sizes = held.integers("sizes");
  if (sizes.size() != places.size())
    throw Error("a program's mesh", "a size for each axis",
                std::to_string(sizes.size()) + " for " + std::to_string(places.size()));
  for (std::size_t i = 0; i < places.size(); ++i) {
    if (sizes[i] <= 0) throw Error("a mesh axis's size", "devices", std::to_string(sizes[i]));
    mesh.axes.emplace_back(names.text(places[i]), sizes[i]);
  }
  return mesh;
}

void Registry::add(const std::shared_ptr<Callee>& callee) {
  std::shared_ptr<Callee> other;  // outlives the lock: its release may run a destructor
  std::lock_guard lock(mutex_);
  std::weak_ptr<Callee>& slot = callees_[callee->name()];
  other = slot.lock();
  if (other != nullptr && other != callee)
    throw Error(ErrorCode::kAlreadyExists,
                "the name '" + callee->name() +
                    "' is taken by another live gate or kernel; choose another name=, or delete "
                    "the other one and the programs that call it");
  slot = callee;
}

void Registry::remove(const Callee& callee) noexcept {
  std::shared_ptr<Callee> held;  // as above
  std::lock_guard lock(mutex_);
  auto it = callees_.find(callee.name());
  if (it == callees_.end()) return;
  held = it->second.lock();
  if (held == nullptr || held.get() == &callee) callees_.erase(it);
}

std::shared_ptr<Callee> Registry::find(std::string_view name) const {
  if (auto callee = lookup(name)) return callee;
  Resolver resolver = [this] {
    std::lock_guard lock(mutex_);
    return resolver_;
  }();
  std::vector<std::string> live;
  if (std::shared_ptr<void> owner = resolver ? resolver(std::string(name), live) : nullptr)
    if (auto callee = lookup(name)) return callee;
  std::string message =
      "no gate or kernel named '" + std::string(name) +
      "' is defined in this process, but a loaded program calls it. Define it before the program "
      "is loaded: run the code that creates it (the same module and order of creation), or pass "
      "name='" +
      std::string(name.substr(0, name.find('['))) +  // a kernel's variant, "name[types]"
      "'. Load saved kernels with callgate.load_kernels, and kernels of a library with "
      "callgate.library.";
  if (live.empty()) live = names();
  for (std::size_t i = 0; i < std::min<std::size_t>(live.size(), 8); ++i)
    message += (i == 0 ? " Defined here: '" : ", '") + live[i] + "'";
  if (live.size() > 8) message += ", …";
  throw Error(ErrorCode::kNotFound, message);
}

void Registry::claim(const std::shared_ptr<Callee>& callee) {
  std::lock_guard lock(mutex_);
  claims_.insert_or_assign(callee->name(), callee);
}

void Registry::release(const Callee& callee) noexcept {
  std::lock_guard lock(mutex_);
  claims_.erase(callee.name());
}

void Registry::set_resolver(Resolver resolver) {
  std::lock_guard lock(mutex_);
  resolver_ = std::move(resolver);
}

bool Registry::has(const std::string& name) const {
  std::lock_guard lock(mutex_);
  auto it = callees_.find(name);
  return it != callees_.end() && !it->second.expired();
}

std::vector<std::string> Registry::names() const {
  std::vector<std::string> live;
  std::lock_guard lock(mutex_);
  for (const auto& [name, callee] : callees_)
    if (!callee.expired()) live.push_back(name);
  std::ranges::sort(live);
  return live;
}

std::shared_ptr<Callee> Registry::lookup(std::string_view name) const {
  const std::string key(name);
  std::lock_guard lock(mutex_);
  for (const Names* names : {&claims_, &callees_}) {
    auto it = names->find(key);
    if (auto callee = it != names->end() ? it->second.lock() : nullptr) return callee;
  }
  return nullptr;
}

}  // namespace callgate
