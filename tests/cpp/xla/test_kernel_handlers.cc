// SPDX-License-Identifier: Apache-2.0
// The handlers of `callgate.kernel`, driven as XLA drives them.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <atomic>
#include <cmath>
#include <cstdint>
#include <memory>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "core/call.h"
#include "fake_callee.h"
#include "fake_kernel.h"
#include "fake_xla.h"
#include "kernels/kernel_debug.h"

namespace callgate {
namespace {

using fake::AttributeMap;
using fake::in_out;
using fake::KernelProgram;
using fake::parameter;
using ::testing::Each;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsNan;

using Parameters = std::vector<callgate_parameter>;

std::shared_ptr<KernelCallee> define(const std::string& name, callgate_function function,
                                     Parameters parameters = in_out(),
                                     std::vector<std::string> names = {}) {
  auto kernel = fake::kernel(name, function, std::move(parameters), std::move(names));
  Registry::instance().add(kernel);
  return kernel;
}

fake::Array array(std::vector<float>& memory, std::vector<std::int64_t> dims) {
  return {XLA_FFI_DataType_F32, std::move(dims), memory.data()};
}
fake::Array array(std::vector<float>& memory) {
  return array(memory, {static_cast<std::int64_t>(memory.size())});
}

std::int32_t fails(const callgate_call* call) {
  call->services->fail(call, "no luck");
  return 1;
}

TEST(KernelHandlers, MetadataIsAnsweredInBothStages) {
  for (XLA_FFI_Handler* handler : {&xla_ffi::kernel_instantiate, &xla_ffi::kernel_execute}) {
    XLA_FFI_Metadata metadata;
    ASSERT_TRUE(fake::query_metadata(handler, metadata).ok());
    EXPECT_EQ(metadata.api_version.major_version, XLA_FFI_API_MAJOR);
    // Whoever makes a state says of which type it is.
    EXPECT_EQ(metadata.state_type_id.type_id > 0, handler == &xla_ffi::kernel_instantiate);
  }
}

TEST(KernelHandlers, ItsStateIsNotTheGates) {
  XLA_FFI_Metadata gate, kernel;
  ASSERT_TRUE(fake::query_metadata(&xla_ffi::gate_instantiate, gate).ok());
  ASSERT_TRUE(fake::query_metadata(&xla_ffi::kernel_instantiate, kernel).ok());
  EXPECT_NE(gate.state_type_id.type_id, kernel.state_type_id.type_id);
}

TEST(KernelHandlers, AProgramCallsTheKernelOfItsName) {
  auto kernel = define("twice", &fake::twice);
  fake::Loaded<KernelProgram> program("twice", {{"signature", signature(kernel->info())}});
  std::vector<float> x = {1, 2, 3}, z(3);
  ASSERT_TRUE(program.execute({array(x)}, {array(z)}).at_once.ok());
  EXPECT_THAT(z, ElementsAre(2, 4, 6));
}

TEST(KernelHandlers, AProgramKeepsItsKernelAlive) {
  auto kernel = define("kept", &fake::twice);
  std::weak_ptr<KernelCallee> alive = kernel;
  auto program = std::make_unique<KernelProgram>("kept");
  ASSERT_TRUE(program->load().ok());
  kernel.reset();
  EXPECT_FALSE(alive.expired());
  std::vector<float> x = {1}, z(1);
  EXPECT_TRUE(program->execute({array(x)}, {array(z)}).at_once.ok());
  program.reset();
  EXPECT_TRUE(alive.expired());
}

TEST(KernelHandlers, TokensAreNoResults) {
  auto kernel = define("with_token", &fake::twice);
  fake::Loaded<KernelProgram> program("with_token");
  std::vector<float> x = {1, 2}, z(2);
  ASSERT_TRUE(program.execute({fake::token(), array(x)}, {array(z), fake::token()}).at_once.ok());
  EXPECT_THAT(z, ElementsAre(2, 4));
}

TEST(KernelHandlers, MoreArraysThanFitInlineAreAllThere) {
  auto sum = [](const callgate_call* call) {
    float total = 0;
    for (int i = 0; i < call->counts[0]; ++i)
      total += static_cast<float*>(call->operands[call->starts[0] + i].data)[0];
    fake::result(call, 1)[0] = total;
    return std::int32_t{0};
  };
  auto kernel = define("sum", sum, {parameter(CALLGATE_INS), parameter(CALLGATE_OUT)});
  fake::Loaded<KernelProgram> program("sum", {{"groups", fake::Attribute::Integers{40}}});
  std::vector<float> x = {1}, z(1);
  ASSERT_TRUE(program.execute(std::vector<fake::Array>(40, array(x)), {array(z)}).at_once.ok());
  EXPECT_EQ(z[0], 40);
}

// --- Loading -------------------------------------------------------------------------------------

TEST(KernelHandlers, AnUnknownNameIsAnErrorWhenTheProgramIsLoaded) {
  fake::Status status = KernelProgram("nobody").load();
  EXPECT_EQ(status.code, XLA_FFI_Error_Code_NOT_FOUND);
  EXPECT_THAT(status.message, HasSubstr("no gate or kernel named 'nobody'"));
}

TEST(KernelHandlers, AnotherSignatureIsAnErrorWhenTheProgramIsLoaded) {
  auto kernel = define("changed", &fake::twice);
  fake::Status status = KernelProgram("changed", {{"signature", "In<int8,2>"}}).load();
  EXPECT_EQ(status.code, XLA_FFI_Error_Code_INVALID_ARGUMENT);
  EXPECT_THAT(status.message, HasSubstr("In<int8,2>"));
}

TEST(KernelHandlers, DamagedBatchLevelsAreAnErrorWhenTheProgramIsLoaded) {
  auto kernel = define("damaged", &fake::twice);
  EXPECT_THAT(KernelProgram("damaged", {{"batch", fake::levels("3:7")}}).load().message,
              HasSubstr("batch levels"));
}

TEST(KernelHandlers, AGatesNameIsNoKernels) {
  auto gate = std::make_shared<fake::FunctionCallee>("a gate");
  Registry::instance().add(gate);
  EXPECT_THAT(
      KernelProgram("a gate").load().message,
      HasSubstr("the program's call of 'a gate': expected a kernel for the CPU, got a gate, or"));
}

TEST(KernelHandlers, AKernelsNameIsNoGates) {
  auto kernel = define("a kernel", &fake::twice);
  EXPECT_THAT(fake::Program("a kernel").load().message,
              HasSubstr("the program's call of 'a kernel': expected a gate, got a kernel"));
}

TEST(KernelHandlers, TheResolverDefinesWhatAProgramNames) {
  std::shared_ptr<KernelCallee> made;
  Registry::instance().set_resolver([&](const std::string& name, auto&) {
    if (name.starts_with("late[")) made = define(name, &fake::twice);
    return name.starts_with("late[") ? made : nullptr;
  });
  fake::Loaded<KernelProgram> program("late[T=float32]");
  ASSERT_NE(made, nullptr);
  EXPECT_EQ(made->name(), "late[T=float32]");
  EXPECT_FALSE(KernelProgram("other[T=float32]").load().ok());
  Registry::instance().set_resolver(
      [&](const std::string& name, auto&) { return define(name, &fake::twice); });
  EXPECT_TRUE(KernelProgram("owned by the answer").load().ok());
  Registry::instance().set_resolver([](const std::string&, auto&) -> std::shared_ptr<void> {
    throw Error(ErrorCode::kInvalidArgument, "it does not compile");
  });
  EXPECT_THAT(KernelProgram("third").load().message, HasSubstr("it does not compile"));
  Registry::instance().set_resolver(nullptr);
}

// --- Attributes ----------------------------------------------------------------------------------

// The attributes of the last call of `read`: Attr<double>, String, Numbers<int32>, Dict.
std::string got;

std::int32_t read(const callgate_call* call) {
  const callgate_attribute* all = call->attributes;
  got = std::to_string(*static_cast<const double*>(all[call->starts[0]].data));
  const callgate_attribute& text = all[call->starts[1]];
  got += " " + std::string(static_cast<const char*>(text.data), text.count);
  const callgate_attribute& numbers = all[call->starts[2]];
  for (std::uint64_t i = 0; i < numbers.count; ++i)
    got += " " + std::to_string(static_cast<const std::int32_t*>(numbers.data)[i]);
  const callgate_attribute& dictionary = all[call->starts[3]];
  const auto* entries = static_cast<const callgate_attribute*>(dictionary.data);
  for (std::uint64_t i = 0; i < dictionary.count; ++i) {
    got += std::string(" ") + entries[i].name + ":" + std::to_string(entries[i].kind);
    if (entries[i].kind == CALLGATE_DICTIONARY)
      got += std::string("{") + static_cast<const callgate_attribute*>(entries[i].data)->name + "}";
  }
  return 0;
}

Parameters four_attributes() {
  return {parameter(CALLGATE_ATTR_NUMBER, XLA_FFI_DataType_F64, 0),
          parameter(CALLGATE_ATTR_STRING, 0, 0),
          parameter(CALLGATE_ATTR_NUMBERS, XLA_FFI_DataType_S32, 0),
          parameter(CALLGATE_ATTR_DICTIONARY, 0, 0)};
}

AttributeMap values(fake::Attribute number = fake::Attribute::number(XLA_FFI_DataType_F64, 2.5)) {
  AttributeMap inner{{"deep", fake::Attribute::number(XLA_FFI_DataType_PRED, std::uint8_t{1})}};
  AttributeMap dictionary{{"text", "t"}, {"inner", inner}};
  AttributeMap all{
      {"number", std::move(number)},
      {"text", "fast"},
      {"numbers", fake::Attribute::numbers<std::int32_t>(XLA_FFI_DataType_S32, {7, 8})},
      {"more", dictionary}};
  return {{"attributes", all}};
}

const std::vector<std::string> kNames = {"number", "text", "numbers", "more"};

TEST(KernelHandlers, AttributesOfEveryKindReachTheKernel) {
  auto kernel = define("attributes", &read, four_attributes(), kNames);
  fake::Loaded<KernelProgram> program("attributes", values());
  for (int i = 0; i < 2; ++i) {
    got.clear();
    ASSERT_TRUE(program.execute().at_once.ok());
    EXPECT_EQ(got, "2.500000 fast 7 8 inner:3{deep} text:1");
  }
}

TEST(KernelHandlers, AttributesOfOtherTypesAreErrorsWhenTheProgramIsLoaded) {
  auto kernel = define("typed", &read, four_attributes(), kNames);
  auto load = [](AttributeMap map) {
    return KernelProgram("typed", std::move(map)).load().message;
  };
  EXPECT_THAT(load({}), HasSubstr("parameter 'number'"));
  EXPECT_THAT(load(values(fake::Attribute::number(XLA_FFI_DataType_F32, 2.5F))),
              HasSubstr("parameter 'number'"));
  EXPECT_THAT(load(values(fake::Attribute::number(XLA_FFI_DataType_TOKEN, 1.0))),
              HasSubstr("attribute 'number': expected a known element type, got code 17"));
  const AttributeMap torn{
      {"callgate:dtype", fake::Attribute::number(XLA_FFI_DataType_S32, 15)},
      {"callgate:number", fake::Attribute::numbers<std::uint8_t>(XLA_FFI_DataType_U8, {1, 2, 3})}};
  EXPECT_THAT(load(values(torn)),
              HasSubstr("attribute 'number': expected the 8 bytes of a complex64, got 3"));
  const AttributeMap untyped{
      {"callgate:dtype", fake::Attribute::numbers<std::int32_t>(XLA_FFI_DataType_S32, {})},
      {"callgate:number", fake::Attribute::numbers<std::uint8_t>(XLA_FFI_DataType_U8, {1})}};
  EXPECT_THAT(load(values(untyped)), HasSubstr("parameter 'number'"));
  EXPECT_THAT(load({{"attributes", "text"}}), HasSubstr("expected a dictionary"));
  EXPECT_THAT(load({{"site", fake::Attribute::number(XLA_FFI_DataType_F32, 1.0F)}}),
              HasSubstr("attribute 'site': expected a string"));
}

// --- Failures ------------------------------------------------------------------------------------

TEST(KernelHandlers, AFailureIsTheProgramsError) {
  auto kernel = define("fails", &fails);
  fake::Loaded<KernelProgram> program("fails");
  std::vector<float> x(2), z(2);
  fake::Status status = program.execute({array(x)}, {array(z)}).at_once;
  EXPECT_EQ(status.code, XLA_FFI_Error_Code_INTERNAL);
  EXPECT_EQ(status.message, "kernel 'fails': no luck");
}

TEST(KernelHandlers, OnSeveralDevicesAFailurePoisonsTheResultsAndIsKept) {
  auto kernel = define("poisons", &fails);
  std::string kept;
  kernel->set_defer([&](const Error& error) { kept = error.what(); });
  fake::Loaded<KernelProgram> program("poisons", {{"on_error", "poison"}});
  std::vector<float> x(2), z(2);
  EXPECT_TRUE(program.execute({array(x)}, {array(z)}).at_once.ok());
  EXPECT_THAT(z, Each(IsNan()));
  EXPECT_EQ(kept, "kernel 'poisons': no luck");
}

TEST(KernelHandlers, OnSeveralDevicesWhatIsThrownPoisonsTheResultsAndIsKept) {
  auto kernel = define("throws", &fake::twice);
  std::string kept;
  kernel->set_defer([&](const Error& error) { kept = error.what(); });
  fake::Loaded<KernelProgram> program("throws",
                                      {{"on_error", "poison"}, {"batch", fake::levels("3:1")}});
  std::vector<float> x(2), z(2);
  EXPECT_TRUE(program.execute({array(x)}, {array(z)}).at_once.ok());
  EXPECT_THAT(z, Each(IsNan()));
  EXPECT_THAT(kept, HasSubstr("leading axes for the batch levels"));
}

TEST(KernelHandlers, ArraysWithoutTheLanesAxesAreTheProgramsError) {
  auto kernel = define("lanes", &fake::twice);
  fake::Loaded<KernelProgram> program("lanes", {{"batch", fake::levels("3:1")}});
  std::vector<float> x(2), z(2);
  fake::Status status = program.execute({array(x)}, {array(z)}).at_once;
  EXPECT_EQ(status.code, XLA_FFI_Error_Code_INVALID_ARGUMENT);
  EXPECT_THAT(status.message, HasSubstr("leading axes for the batch levels"));
}

TEST(KernelHandlers, AnExceptionOfACallbackIsTheProgramsError) {
  auto kernel = fake::kernel(
      "throws", &fails, in_out(), {},
      [](const std::string&, const std::string&, const std::string&) -> std::string { throw 7; });
  Registry::instance().add(kernel);
  fake::Loaded<KernelProgram> program("throws");
  std::vector<float> x(1), z(1);
  EXPECT_THAT(program.execute({array(x)}, {array(z)}).at_once.message,
              HasSubstr("unknown C++ exception"));
}

TEST(KernelHandlers, ACallBeforeTheProgramIsLoadedIsAnError) {
  auto kernel = define("early", &fake::twice);
  KernelProgram program("early");
  EXPECT_THAT(program.execute().at_once.message, HasSubstr("no state for the call site"));
}

TEST(KernelHandlers, NoErrorIsLeaked) { EXPECT_EQ(fake::Runtime::instance().live_errors, 0); }

// --- Calls that threads remember ---------------------------------------------------------------

std::int32_t thrice(const callgate_call* call) {
  fake::result(call, 1)[0] = 3 * fake::operand(call, 0)[0];
  return 0;
}

constexpr const char* kKey = "0123456789abcdef";

// The result for 1 of the program's call.
float call_with_one(KernelProgram& program) {
  std::vector<float> x = {1}, z = {0};
  EXPECT_TRUE(program.execute({array(x)}, {array(z)}).at_once.ok());
  return z[0];
}

TEST(RememberedKernels, AThreadThatKnowsTheCallDoesNotAskXla) {
  auto kernel = define("known", &fake::twice);
  fake::Loaded<KernelProgram> program("known", {{"_key", kKey}});
  EXPECT_EQ(call_with_one(program), 2);
  void* state = std::exchange(program.context().state, nullptr);  // XLA would have no answer
  EXPECT_EQ(call_with_one(program), 2);
  program.context().state = state;
  std::thread([&] { EXPECT_EQ(call_with_one(program), 2); }).join();
}

TEST(RememberedKernels, WithoutAKeyXlaIsAskedEachTime) {
  auto kernel = define("asked", &fake::twice);
  for (const AttributeMap& attributes : {AttributeMap{}, {{"_key", "short"}}}) {
    fake::Loaded<KernelProgram> program("asked", attributes);
    EXPECT_EQ(call_with_one(program), 2);
    void* state = std::exchange(program.context().state, nullptr);
    EXPECT_FALSE(program.execute().at_once.ok());
    program.context().state = state;
  }
}

TEST(RememberedKernels, ProgramsOfOneCallShareItsSite) {
  auto kernel = define("shared site", &fake::twice);
  auto first = std::make_unique<KernelProgram>("shared site", AttributeMap{{"_key", kKey}});
  KernelProgram second("shared site", {{"_key", kKey}});
  ASSERT_TRUE(first->load().ok());
  ASSERT_TRUE(second.load().ok());
  EXPECT_EQ(call_with_one(*first), 2);
  first.reset();
  EXPECT_EQ(call_with_one(second), 2);
  second.unload();
  EXPECT_EQ(kernel.use_count(), 1);  // nothing holds it any longer
}

TEST(RememberedKernels, AKernelDefinedAnewUnderTheNameIsTheOneThatNewProgramsCall) {
  auto old_kernel = define("anew", &fake::twice);
  fake::Loaded<KernelProgram> old_program("anew", {{"_key", kKey}});
  EXPECT_EQ(call_with_one(old_program), 2);
  Registry::instance().remove(*old_kernel);
  auto new_kernel = define("anew", &thrice);
  auto new_program = std::make_unique<KernelProgram>("anew", AttributeMap{{"_key", kKey}});
  ASSERT_TRUE(new_program->load().ok());
  for (int i = 0; i < 2; ++i) {
    EXPECT_EQ(call_with_one(old_program), 2);
    EXPECT_EQ(call_with_one(*new_program), 3);
  }
  // The key stays one that is not remembered: the older program is still there.
  new_program.reset();
  new_program = std::make_unique<KernelProgram>("anew", AttributeMap{{"_key", kKey}});
  ASSERT_TRUE(new_program->load().ok());
  for (int i = 0; i < 2; ++i) {
    EXPECT_EQ(call_with_one(*new_program), 3);
    EXPECT_EQ(call_with_one(old_program), 2);
  }
}

TEST(RememberedKernels, AKernelOfTheNextProgramIsNotThatOfTheLast) {
  constexpr const char* kNext = "00000000000000aa";
  for (callgate_function function : {&fake::twice, &thrice, &fake::twice}) {
    auto kernel = define("next", function);
    fake::Loaded<KernelProgram> program("next", {{"_key", kNext}});
    EXPECT_EQ(call_with_one(program), function == &thrice ? 3 : 2);
  }
}

TEST(RememberedKernels, OtherContentsUnderOneKeyAreToldApart) {
  constexpr const char* kSame = "00000000000000bb";
  auto kernel = define("lanes or none", &fake::twice);
  KernelProgram plain("lanes or none", {{"_key", kSame}});
  KernelProgram lanes("lanes or none", {{"_key", kSame}, {"batch", fake::levels("2:1")}});
  ASSERT_TRUE(plain.load().ok());
  EXPECT_EQ(call_with_one(plain), 2);
  ASSERT_TRUE(lanes.load().ok());
  std::vector<float> x(1), z(1);
  EXPECT_FALSE(lanes.execute({array(x)}, {array(z)}).at_once.ok());  // no axis of two lanes
  EXPECT_EQ(call_with_one(plain), 2);
}

TEST(RememberedKernels, ManyKernelsInOneProgramAreAllTheirOwn) {
  std::vector<std::shared_ptr<KernelCallee>> kernels;
  std::vector<std::unique_ptr<KernelProgram>> programs;
  for (int i = 0; i < 24; ++i) {
    std::string name = "one of many " + std::to_string(i);
    kernels.push_back(define(name, i % 2 == 0 ? &fake::twice : &thrice));
    std::string key = std::to_string(i) + "-----------------";
    programs.push_back(
        std::make_unique<KernelProgram>(name, AttributeMap{{"_key", key.substr(0, 16)}}));
    ASSERT_TRUE(programs.back()->load().ok());
  }
  for (int round = 0; round < 3; ++round) {
    for (std::size_t i = 0; i < programs.size(); ++i)
      EXPECT_EQ(call_with_one(*programs[i]), i % 2 == 0 ? 2 : 3);
  }
}

TEST(RememberedKernels, ProgramsMayComeAndGoWhileOthersRun) {
  auto kernel = define("comes and goes", &fake::twice);
  std::vector<std::thread> threads;
  for (int i = 0; i < 4; ++i) {
    threads.emplace_back([] {
      for (int round = 0; round < 200; ++round) {
        fake::Loaded<KernelProgram> program("comes and goes", {{"_key", "00000000000000cc"}});
        EXPECT_EQ(call_with_one(program), 2);
        EXPECT_EQ(call_with_one(program), 2);
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
}

// --- XLA's threads -------------------------------------------------------------------------------

std::int32_t ask(const callgate_call* call) {
  fake::result(call, 1)[0] = static_cast<float>(call->services->threads(call));
  fake::result(call, 1)[1] = static_cast<float>(call->services->device(call));
  return 0;
}

TEST(KernelHandlers, AKernelSeesXlasThreadsAndDevice) {
  auto kernel = define("asks", &ask);
  fake::Loaded<KernelProgram> program("asks");
  program.context().threads = 6;
  std::vector<float> x(2), z(2);
  ASSERT_TRUE(program.execute({array(x)}, {array(z)}).at_once.ok());
  EXPECT_THAT(z, ElementsAre(6, 3));
  program.context().threads = -1;
  program.context().device = -1;
  ASSERT_TRUE(program.execute({array(x)}, {array(z)}).at_once.ok());
  EXPECT_THAT(z, ElementsAre(1, -1));
}

std::int32_t twice_in_parts(const callgate_call* call) {
  call->services->parallel_for(
      call, 0, fake::size(call->operands[0]), 8,
      [](void* data, std::int64_t first, std::int64_t last) {
        const auto* mine = static_cast<const callgate_call*>(data);
        for (std::int64_t i = first; i < last; ++i)
          fake::result(mine, 1)[i] = 2 * fake::operand(mine, 0)[i];
      },
      const_cast<callgate_call*>(call));
  return 0;
}

TEST(KernelHandlers, LoopsRunOnXlasPool) {
  auto kernel = define("parts", &twice_in_parts);
  fake::Loaded<KernelProgram> program("parts");
  program.context().threads = 4;
  for (int round = 0; round < 20; ++round) {
    std::vector<float> x(500, 1.5F), z(500);
    ASSERT_TRUE(program.execute({array(x)}, {array(z)}).at_once.ok());
    EXPECT_THAT(z, Each(3));
  }
  EXPECT_EQ(program.context().pool.size(), 60U);
}

TEST(KernelHandlers, LanesOfAThreadSafeKernelRunOnXlasPool) {
  KernelInfo info;
  info.name = "safe";
  info.function = &fake::twice;
  info.parameters = in_out();
  info.thread_safe = true;
  auto kernel = std::make_shared<KernelCallee>(std::move(info), nullptr);
  Registry::instance().add(kernel);
  fake::Loaded<KernelProgram> program("safe", {{"batch", fake::levels("100:1")}});
  program.context().threads = 4;
  std::vector<float> x(300, 2.0F), z(300);
  ASSERT_TRUE(program.execute({array(x, {100, 3})}, {array(z, {100, 3})}).at_once.ok());
  EXPECT_THAT(z, Each(4));
  EXPECT_EQ(program.context().pool.size(), 3U);
}

TEST(KernelHandlers, SeveralThreadsMayRunOneCallSite) {
  auto kernel = define("shared", &twice_in_parts);
  fake::Loaded<KernelProgram> program("shared", {{"batch", fake::levels("4:1")}});
  program.context().threads = 2;
  std::vector<std::thread> callers;
  for (int i = 0; i < 4; ++i) {
    callers.emplace_back([&] {
      for (int round = 0; round < 25; ++round) {
        std::vector<float> x(256, 1.0F), z(256);
        EXPECT_TRUE(program.execute({array(x, {4, 64})}, {array(z, {4, 64})}).at_once.ok());
        EXPECT_THAT(z, Each(2));
      }
    });
  }
  for (std::thread& caller : callers) caller.join();
}

TEST(KernelHandlers, ACheckedCallSaysWhatItFound) {
  auto past = [](const callgate_call* call) {
    fake::twice(call);
    fake::result(call, 1)[2] = 1;
    return std::int32_t{0};
  };
  auto kernel = define("past", past, in_out(), {"x", "z"});
  fake::Loaded<KernelProgram> program("past");
  std::vector<float> x(2), z(4);
  set_kernel_mode(KernelMode::kCheckMemory, true);
  fake::Status status = program.execute({array(x)}, {array(z, {2})}).at_once;
  set_kernel_mode(KernelMode::kCheckMemory, false);
  EXPECT_THAT(status.message, HasSubstr("'z' (result 0, float32[2]) wrote outside it"));
  EXPECT_TRUE(program.execute({array(x)}, {array(z, {2})}).at_once.ok());
}

}  // namespace
}  // namespace callgate
