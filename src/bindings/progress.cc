// The board of progress bars. Programs reach the board through the callee that is registered here
// for the life of the process; they take the GIL only to wake whoever draws, once for many bars.
#include "core/progress.h"

#include <nanobind/stl/string.h>

#include <memory>

#include "bindings/python/gil.h"
#include "core/lifetime.h"
#include "core/registry.h"

namespace callgate::bindings {
namespace {

// For the life of the process, as the board.
struct Registered {
  std::shared_ptr<Callee> callee = std::make_shared<ProgressCallee>(ProgressBoard::instance());
};

// `wake` is held for the life of the process.
void set_wake(nb::callable wake) {
  PyObject* function = wake.release().ptr();
  ProgressBoard::instance().set_wake([function] {
    GilScope gil;
    nb::object done = nb::steal(call_python(function, nullptr));
    if (!done.is_valid()) PyErr_WriteUnraisable(function);
  });
}

nb::list poll() {
  nb::list bars;
  for (const ProgressState& state : ProgressBoard::instance().poll()) {
    const char* phase = state.phase == ProgressState::Phase::kLive     ? "live"
                        : state.phase == ProgressState::Phase::kFailed ? "failed"
                                                                       : "ended";
    bars.append(nb::make_tuple(state.handle, state.bar, state.spec, state.run, state.total,
                               state.count, static_cast<double>(state.age_ns) * 1e-9,
                               static_cast<double>(state.elapsed_ns) * 1e-9, phase));
  }
  return bars;
}

// A program without callgate's runtime comes by way of JAX's callbacks.
std::int32_t begin(const std::string& text, std::int64_t every, std::int64_t total) {
  const ProgressStart start{.site = 0, .every = every, .total = total};
  // Waking takes it again.
  return without_gil([&] { return ProgressBoard::instance().begin(text, start, CallContext{}); });
}

}  // namespace

void bind_progress(nb::module_& module) {
  Registry::instance().add(immortal<Registered>().callee);
  module.def("progress_set_wake", &set_wake, nb::arg("wake"),
             "Called by the first bar that begins while nobody draws.");
  module.def("progress_poll", &poll,
             "(handle, bar, text, run, total, count, age, seconds, phase) of all.");
  module.def("progress_release",
             [](std::int32_t handle) { ProgressBoard::instance().release(handle); });
  module.def(
      "progress_retire", [] { return ProgressBoard::instance().retire(); },
      "Stops drawing, unless there are bars: then False.");
  module.def("progress_begin", &begin, nb::arg("text"), nb::arg("every"), nb::arg("total"));
  module.def("progress_update", [](std::int32_t handle, std::int32_t count) {
    return ProgressBoard::instance().update(handle, static_cast<std::uint32_t>(count));
  });
  module.def("progress_end", [](std::int32_t handle, std::int32_t count) {
    ProgressBoard::instance().end(handle, static_cast<std::uint32_t>(count));
  });
}

}  // namespace callgate::bindings
