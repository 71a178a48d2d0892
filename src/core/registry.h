// The names that programs call by.
//
// A program holds names, never pointers. The registry knows a callee for as long as somebody else
// keeps it alive (the gate in Python, or an executable that calls it). Two live callees never share
// a name. Any thread.
#pragma once

#include <algorithm>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <string_view>
#include <unordered_map>
#include <utility>
#include <vector>

#include "core/call.h"
#include "core/error.h"
#include "core/lifetime.h"

namespace callgate {

class Registry {
 public:
  static Registry& instance() { return immortal<Registry>(); }

  // Throws Error(kAlreadyExists) when another live callee has the name.
  void add(const std::shared_ptr<Callee>& callee) {
    std::shared_ptr<Callee> other;  // outlives the lock: dropping it may run a destructor
    std::lock_guard lock(mutex_);
    std::weak_ptr<Callee>& slot = callees_[callee->name()];
    other = slot.lock();
    if (other != nullptr && other != callee) {
      throw Error(ErrorCode::kAlreadyExists,
                  "the name '" + callee->name() +
                      "' is taken by another live gate or kernel; choose another name=, or drop "
                      "the other one and the programs that call it");
    }
    slot = callee;
  }

  // Frees the name if `callee` still has it. Executables that hold the callee go on calling it.
  void remove(const Callee& callee) noexcept {
    std::shared_ptr<Callee> held;  // as above
    std::lock_guard lock(mutex_);
    auto it = callees_.find(callee.name());
    if (it == callees_.end()) return;
    held = it->second.lock();
    if (held == nullptr || held.get() == &callee) callees_.erase(it);
  }

  // The live callee of the name. One that is not there yet is asked of the resolver. Throws
  // Error(kNotFound), with names that are defined, when there is none.
  std::shared_ptr<Callee> find(std::string_view name) const {
    if (auto callee = lookup(name)) return callee;
    Resolver resolver = [this] {
      std::lock_guard lock(mutex_);
      return resolver_;
    }();
    if (resolver && resolver(std::string(name)))
      if (auto callee = lookup(name)) return callee;
    std::string message =
        "no gate or kernel named '" + std::string(name) +
        "' is defined in this process; a program that calls it was loaded or is still alive. "
        "Define it before the program is loaded: run the code that creates it (the same module "
        "and order of creation), or give it name='" +
        std::string(name.substr(0, name.find('['))) +  // a variant, "name[types]", of a kernel
        "'. A kernel that was saved with the program comes with callgate.load_kernels, one in a "
        "library of yours with callgate.library.";
    std::vector<std::string> live = names();
    for (std::size_t i = 0; i < std::min<std::size_t>(live.size(), 8); ++i)
      message += (i == 0 ? " Defined here: '" : ", '") + live[i] + "'";
    if (live.size() > 8) message += ", …";
    throw Error(ErrorCode::kNotFound, message);
  }

  // Called without a lock for names that are not defined; returns true once it has defined the
  // name: a variant of a kernel, say, that nothing in this process has asked for yet.
  using Resolver = std::function<bool(const std::string& name)>;
  void set_resolver(Resolver resolver) {
    std::lock_guard lock(mutex_);
    resolver_ = std::move(resolver);
  }

  // The live names, sorted.
  std::vector<std::string> names() const {
    std::vector<std::string> live;
    std::lock_guard lock(mutex_);
    for (const auto& [name, callee] : callees_)
      if (!callee.expired()) live.push_back(name);
    std::ranges::sort(live);
    return live;
  }

 private:
  std::shared_ptr<Callee> lookup(std::string_view name) const {
    std::lock_guard lock(mutex_);
    auto it = callees_.find(std::string(name));
    return it != callees_.end() ? it->second.lock() : nullptr;
  }

  mutable std::mutex mutex_;  // guards the map alone: no callee is destroyed or called under it
  Resolver resolver_;
  std::unordered_map<std::string, std::weak_ptr<Callee>> callees_;
};

}  // namespace callgate
