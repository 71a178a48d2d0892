// SPDX-License-Identifier: Apache-2.0
// The board of progress bars. Programs reach it through the callee that is registered here for the
// process's life. They take the GIL only to wake the drawing thread, once for many bars.
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <cstdint>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "bindings/arrays/views.h"
#include "bindings/python/gil.h"
#include "bindings/python/hooks.h"
#include "cells/progress_callee.h"
#include "core/call.h"
#include "core/lifetime.h"

namespace callgate::bindings {
namespace {

nb::list poll() {
  nb::list bars;
  for (const ProgressState& state : ProgressBoard::instance().poll()) {
    using enum ProgressState::Phase;
    const char* phase = state.phase == kLive ? "live" : state.phase == kFailed ? "failed" : "ended";
    bars.append(nb::make_tuple(state.handle, state.bar, state.spec, state.run, state.total,
                               state.count, static_cast<double>(state.age_ns) * 1e-9,
                               static_cast<double>(state.elapsed_ns) * 1e-9, phase, state.lane,
                               state.first, state.last, state.at));
  }
  return bars;
}

// The function of a program's call without callgate's runtime.
nb::callable call_of(std::string text, const nb::dict& held) {
  SiteSpec spec;
  spec.spec = std::move(text);
  spec.held = attributes_of(held);
  ProgressCallee callee(ProgressBoard::instance());
  nb::object function = nb::cpp_function([site = callee.specialise(std::move(spec))](
                                             const std::vector<nb::object>& arrays,
                                             const std::vector<std::int64_t>& shape) {
    std::vector<ArrayView> views;
    views.reserve(arrays.size());
    for (const nb::object& array : arrays) views.push_back(view_of(array, "a bar's number"));
    ArrayView result{nullptr, shape.data(), static_cast<std::int32_t>(shape.size()), DType::kS32};
    std::vector<std::int32_t> numbers(result.size());
    result.data = numbers.data();
    without_gil([&] { site->run(Call{views, {&result, 1}, {}}); });  // waking takes it again
    return numbers;
  });
  return nb::borrow<nb::callable>(function);
}

}  // namespace

void bind_progress(nb::module_& module) {
  static ProgressBoard& board = ProgressBoard::instance();
  struct Registered {  // for the process's life, as the board
    std::shared_ptr<Callee> callee = std::make_shared<ProgressCallee>(board);
  };
  Registry::instance().add(immortal<Registered>().callee);
  module.def(
      "progress_set_wake",
      [](nb::callable wake) {
        board.set_wake([function = wake.release().ptr()] {  // likewise
          GilScope gil;
          call_unraisable(function, nullptr);
        });
      },
      nb::arg("wake"),
      "Sets the function that the first bar calls that begins while no thread draws.");
  module.def("progress_poll", &poll,
             "(handle, bar, text, run, total, count, age, seconds, phase, lane, first, last, at) "
             "of each bar.");
  module.def("progress_release", [](std::int32_t handle) { board.release(handle); });
  module.def(
      "progress_retire", [] { return board.retire(); }, "Stops drawing; False if there are bars.");
  module.def("progress_call", &call_of, nb::arg("text"), nb::arg("held"),
             "Makes the function of a call through JAX's callbacks: it takes the arrays and the "
             "result's shape, and returns the result's numbers.");
}

}  // namespace callgate::bindings
