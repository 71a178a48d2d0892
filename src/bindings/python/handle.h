// Callees as Python holds them: `Callee`, `Check`, `Kernel`, `CudaKernel` and `Tap`.
#pragma once

#include <memory>
#include <string>
#include <utility>

#include "bindings/python/deferred.h"
#include "core/registry.h"

namespace callgate::bindings {

// Keeps a callee, and its name, alive: what the Python object holds. The GIL is held, so what has
// died elsewhere, and what dies with the callee, dies at once.
template <typename C>
class Handle {
 public:
  explicit Handle(std::shared_ptr<C> callee) : callee_(std::move(callee)) {
    drain_released();
    Registry::instance().add(callee_);
  }
  Handle(Handle&&) noexcept = default;
  ~Handle() {
    if (callee_ == nullptr) return;
    Registry::instance().remove(*callee_);
    callee_.reset();
    drain_released();
  }

  C& callee() const { return *callee_; }
  const std::shared_ptr<C>& shared() const { return callee_; }
  const std::string& name() const { return callee_->name(); }

 private:
  std::shared_ptr<C> callee_;
};

}  // namespace callgate::bindings
