// Runs calls on the kernels of the best instruction set that this machine has.
#include "run.h"

#include <atomic>
#include <cstring>

#include "call/make_plan.h"
#include "call/prepare.h"
#include "call/tables.h"
#include "kernels/kernels.h"
#ifdef MXD_HAVE_AVX2
#include "processor.h"
#endif

namespace mxd {
namespace {

struct Isa {
    const char *name;
    bool (*supported)();
    const Kernels *kernels; // by Operator
};

// Best last.
const Isa ISAS[] = {
    {"baseline", [] { return true; }, baseline::kernels},
#ifdef MXD_HAVE_AVX2
    {"avx2", [] { return Processor().avx2(); }, avx2::kernels},
#endif
#ifdef MXD_HAVE_AVX512
    {"avx512", [] { return Processor().avx512(); }, avx512::kernels},
#endif
};

const Isa *best_isa() {
    const Isa *best = &ISAS[0];
    for (const Isa &isa : ISAS)
        if (isa.supported()) best = &isa;
    return best;
}

std::atomic<const Isa *> &chosen_isa() {
    static std::atomic<const Isa *> isa(best_isa());
    return isa;
}

int prepared_run(Call &call) {
    Prepared prepared;
    PlanLists lists;
    const int status = prepare(call, prepared, true);
    if (status != MXD_OK || nothing_to_do(call)) return status;
    const Plan plan = make_plan(call, lists);
    const Kernels &kernels = chosen_isa().load()->kernels[call.op];
    return (call.backward ? kernels.backward : kernels.forward)(call, plan) ? MXD_OK : MXD_OUT_OF_MEMORY;
}

} // namespace

const char *isa_in_use() { return chosen_isa().load()->name; }

bool use_isa(const char *name) {
    for (const Isa &isa : ISAS)
        if (name && std::strcmp(isa.name, name) == 0 && isa.supported()) {
            chosen_isa() = &isa;
            return true;
        }
    return false;
}

int run(Call &call) {
    return out_of_memory_if_thrown([&] { return prepared_run(call); });
}

std::string sentence_of(int status, const Function &function, const Call &call) {
    const auto name = [&](int input) { return function.arguments[function.first_input + input].name; };
    if (status == MXD_BAD_RANK) return fault_of_ranks(call);
    if (status == MXD_BAD_LEVEL) return fault_of_levels(call, name(1), name(2));
    return "the native kernel of " + std::string(function.op) + " was given not enough memory for its scratch buffers";
}

} // namespace mxd
