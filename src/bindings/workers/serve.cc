// SPDX-License-Identifier: Apache-2.0
// A worker process: it runs call sites of gates like the runtime in the parent, which calls them.
#include "workers/serve.h"

#include <nanobind/stl/string.h>

#include <cstdint>
#include <memory>
#include <string>
#include <string_view>
#include <unordered_map>
#include <utility>

#include "bindings/gate/gate.h"
#include "bindings/python/gil.h"
#include "bindings/python/handle.h"
#include "bindings/python/hooks.h"
#include "core/call.h"
#include "workers/protocol.h"

namespace callgate::bindings {
namespace {

constinit thread_local std::int64_t current_lane = 0;  // the running call's

// `handler` comes from python/callgate/_places/worker.py.
class PyServed final : public Served {
 public:
  explicit PyServed(nb::object handler) : handler_(std::move(handler)) {}

  void start(std::string_view text) override {
    GilScope gil;
    (void)answer([&] { return handler_.attr("start")(nb::bytes(text.data(), text.size())); });
  }

  void define(std::uint64_t id, std::uint64_t of, std::string_view text) override {
    GilScope gil;
    nb::bytes bytes(text.data(), text.size());
    if (of == 0) {
      nb::object made = answer([&] { return handler_.attr("define")(id, bytes); });
      gates_[id] = nb::cast<const Handle<PyCallee>&>(made).callee;
      return;
    }
    nb::object site = answer([&] { return handler_.attr("describe")(of, bytes); });
    SiteSpec spec;
    spec.spec = nb::cast<std::string>(site[0]);
    if (nb::cast<bool>(site[1])) spec.held.add_string("cast", "yes");
    relayed([&] { sites_[id] = gates_.at(of)->specialise(std::move(spec)); });
  }

  void forget(std::uint64_t id) noexcept override {
    GilScope gil;
    if ((id & kObject) != 0) {
      call_unraisable(nb::object(handler_.attr("drop")).ptr(), "K", id & ~kObject);
      return drain_released();
    }
    sites_.erase(id);
    if (gates_.erase(id) != 0) call_unraisable(nb::object(handler_.attr("forget")).ptr(), "K", id);
    drain_released();
  }

  void run(std::uint64_t site, const Call& call, std::int64_t lane) override {
    current_lane = lane;
    relayed([&] { sites_.at(site)->run(call); });
  }

  void check_writes(bool on) override {
    settings.check_writes.store(on, std::memory_order_relaxed);  // see Settings
  }

 private:
  // Returns body(). Converts a Python exception into Raised.
  template <typename Body>
  nb::object answer(Body&& body) {
    nb::object result;
    auto raised = raised_by([&] { result = body(); });
    if (raised) throw Raised(bytes_of_failure("raised", nb::borrow(raised->value())));
    return result;
  }

  // The same for a call site's failure, whose text names the exception.
  template <typename Body>
  void relayed(Body&& body) try {
    body();
  } catch (const Error& error) {
    GilScope gil;
    throw Raised(bytes_of_failure("failed", nb::str(error.what())));
  }

  std::string bytes_of_failure(const char* method, const nb::object& what) {
    std::string text;
    auto raised = raised_by([&] {
      auto bytes = nb::cast<nb::bytes>(handler_.attr(method)(what));
      text.assign(bytes.c_str(), bytes.size());
    });
    if (raised) PyErr_Clear();
    return text;
  }

  nb::object handler_;
  std::unordered_map<std::uint64_t, std::shared_ptr<PyCallee>> gates_;
  std::unordered_map<std::uint64_t, std::shared_ptr<Site>> sites_;
};

}  // namespace

void bind_serve(nb::module_& module) {
  module.def(
      "serve_worker",
      [](nb::object handler, int memory, int calls, int parent_socket, int parent) {
        passes_interrupts_on = false;
        PyServed served(std::move(handler));
        without_gil([&] { serve({memory, calls, parent_socket, parent}, served); });
      },
      nb::arg("handler"), nb::arg("memory"), nb::arg("calls"), nb::arg("parent_socket"),
      nb::arg("parent"), "Answers the parent's requests until the parent closes its workers.");
  module.def("worker_interrupted", &is_interrupted,
             "True if the parent wants the code of this thread, serve_worker()'s, to end.");
  module.def(
      "worker_lane", [] { return current_lane; },
      "In a worker: the number of this thread's running lane.");
}

}  // namespace callgate::bindings
