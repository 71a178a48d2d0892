// See the header.
#include "xla/call_site.h"

#include "core/interrupt.h"
#include "core/lifecycle.h"
#include "core/registry.h"
#include "xla/attributes.h"
#include "xla/guard.h"

namespace callgate::xla_ffi {

Outcome CallSite::run(const Call& call) const {
  if (!poison_on_error) return site->run(call);
  return poisoned_on_error(
      *callee, [&] { return site->run(call); },
      [&] {
        for (const ArrayView& view : call.results) poison(view);
      });
}

std::shared_ptr<CallSite> make_call_site(const ::xla::ffi::Dictionary& attributes) {
  auto text = [&](std::string_view name) { return text_attribute(attributes, name); };
  Interrupts::watch();
  auto made = std::make_shared<CallSite>();
  made->callee = Registry::instance().find(text("name"));
  made->poison_on_error = text("on_error") == "poison";
  made->reads_context = made->callee->reads_context();
  made->site = made->callee->specialise(SiteSpec{
      text("spec"), text("site"), Lanes::parse(text("batch")), text("mesh"), text("layout")});
  made->shards = Shards(text("shards"));
  return made;
}

Outcome shutting_down(const Callee& callee) {
  if (callee.quiet_at_exit()) {
    LateCalls::instance().add(callee.name());
    return Outcome::success();
  }
  return Outcome::failure(ErrorCode::kAborted, "callgate: gate '" + callee.name() +
                                                   "' was called while the process is ending");
}

Failure interrupted(const std::string& callee) {
  return {ErrorCode::kAborted,
          "callgate: Ctrl-C ended the program at its call of '" + callee + "'"};
}

}  // namespace callgate::xla_ffi
