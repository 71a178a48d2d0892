// The registry's lock guards the map alone: no callee is destroyed and no callback runs under it.
#include "core/registry.h"

#include <algorithm>
#include <utility>

namespace callgate {

void Registry::add(const std::shared_ptr<Callee>& callee) {
  std::shared_ptr<Callee> other;  // outlives the lock: dropping it may run a destructor
  std::lock_guard lock(mutex_);
  std::weak_ptr<Callee>& slot = callees_[callee->name()];
  other = slot.lock();
  if (other != nullptr && other != callee) {
    throw Error(ErrorCode::kAlreadyExists,
                "the name '" + callee->name() +
                    "' is taken by another live gate or kernel; choose another "
                    "name=, or drop the other one and the programs that call it");
  }
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

void Registry::set_resolver(Resolver resolver) {
  std::lock_guard lock(mutex_);
  resolver_ = std::move(resolver);
}

std::shared_ptr<Callee> Registry::lookup(std::string_view name) const {
  std::lock_guard lock(mutex_);
  auto it = callees_.find(std::string(name));
  return it != callees_.end() ? it->second.lock() : nullptr;
}

std::shared_ptr<Callee> Registry::find(std::string_view name) const {
  if (auto callee = lookup(name)) return callee;
  Resolver resolver;
  {
    std::lock_guard lock(mutex_);
    resolver = resolver_;
  }
  if (resolver && resolver(std::string(name))) {
    if (auto callee = lookup(name)) return callee;
  }
  // A variant of a kernel, "name[types]", comes with its kernel.
  std::string defined(name.substr(0, name.find('[')));
  std::string message = "no gate or kernel named '" + std::string(name) +
                        "' is defined in this process; a program that calls it was loaded or is "
                        "still alive. Define it before the program is loaded: run the code "
                        "that creates it (the same module and order of creation), or give it "
                        "name='" +
                        defined +
                        "'. A kernel that was saved with the program comes with "
                        "callgate.load_kernels, one in a library of yours with callgate.library.";
  std::vector<std::string> live = names();
  if (!live.empty()) {
    message += " Defined here:";
    for (std::size_t i = 0; i < std::min<std::size_t>(live.size(), 8); ++i)
      message += (i == 0 ? " '" : ", '") + live[i] + "'";
    if (live.size() > 8) message += ", …";
  }
  throw Error(ErrorCode::kNotFound, message);
}

std::vector<std::string> Registry::names() const {
  std::vector<std::shared_ptr<Callee>> held;
  std::vector<std::string> live;
  {
    std::lock_guard lock(mutex_);
    for (const auto& [name, callee] : callees_) {
      held.push_back(callee.lock());
      if (held.back() != nullptr) live.push_back(name);
    }
  }
  std::sort(live.begin(), live.end());
  return live;
}

}  // namespace callgate
