// See the header.
#include "xla/call_site.h"

#include "core/interrupt.h"
#include "core/lifecycle.h"
#include "core/registry.h"
#include "xla/attributes.h"
#include "xla/guard.h"

namespace callgate::xla_ffi {

void CallSite::run(const Call& call) const {
  settled(poison_on_error, *callee, [&] { site->run(call); }, [&] { poison(call.results); });
}

std::shared_ptr<CallSite> make_call_site(const XLA_FFI_Attrs& attributes) {
  Attributes held = decode_attributes(attributes);
  Interrupts::watch();
  auto made = std::make_shared<CallSite>();
  made->callee = Registry::instance().find(held.text("name"));
  made->poison_on_error = held.text("on_error") == "poison";
  made->reads_context = made->callee->reads_context();
  made->shards = Shards(std::string(held.text("shards")));
  SiteSpec spec{std::string(held.text("spec")),      std::string(held.text("site")),
                Lanes::of(held.dictionary("batch")), Mesh::of(held.dictionary("mesh")),
                std::string(held.text("layout")),    std::move(held)};
  made->site = made->callee->specialise(std::move(spec));
  return made;
}

void refuse_at_exit(const Callee& callee) {
  if (callee.quiet_at_exit()) return LateCalls::instance().add(callee.name());
  throw Error(ErrorCode::kAborted,
              "gate '" + callee.name() + "' was called while the process is ending");
}

Error interrupted(const std::string& callee) {
  return {ErrorCode::kAborted, "Ctrl-C ended the program at its call of '" + callee + "'"};
}

}  // namespace callgate::xla_ffi
