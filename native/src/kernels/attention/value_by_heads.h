// The gradient of value, by heads or by parts of heads. A worker owns the rows that it adds to. They lie in grad_value;
// only those of packed levels lie in memory of the worker, and go to grad_value when the head is done.
#pragma once

#include "kernels/attention/worker.h"

namespace mxd::MXD_ISA {
namespace {

// Items: (batch, head, part). Value is not read, so its type is that of the gradient. All of grad_value has been set to
// zero.
template <class T, template <class> class Rule> class ValueByHeads : QueryWorker<T, T, Rule> {
    typedef QueryWorker<T, T, Rule> Base;

  public:
    static int64_t parts(const Plan &plan) { return plan.parts > 1 ? plan.parts : 1; }
    static int64_t items(const Job &job) { return job.call.sizes.batch * job.call.sizes.heads * parts(job.plan); }
    ValueByHeads(const Job &j, Arena &arena)
        : Base(j, arena), plan(j.plan), packed(arena.take<char>(plan.packed_gradient.bytes)) {}

    void operator()(int64_t item) {
        const Call &call = this->call;
        const int64_t part = item % parts(plan), h = item / parts(plan) % this->n.heads, b = item / parts(plan) / this->n.heads;
        const OutputGradient<T> grad_output(call, b, h, this->row);
        open(b, h, call.sizes.levels * part / parts(plan), call.sizes.levels * (part + 1) / parts(plan));
        this->template queries<true>(0, this->n.queries,
                                     [&](int64_t q, const PreparedQuery<T> &prepared, const PreparedQuery<T> &next) {
                                         scatter_add<T>(prepared.address, prepared.coefficient, next.address, this->num_rows,
                                                        this->n.channels, grad_output.of(q));
                                     });
        unpack_as<T>(call, plan.packed_gradient, packed, b, h);
    }

  private:
    const Plan &plan;
    char *packed; // levels of plan.packed_gradient

    void open(int64_t b, int64_t h, int64_t first_level, int64_t last_level) {
        memset(packed, 0, size_t(plan.packed_gradient.bytes));
        this->use_levels(first_level, last_level);
        this->reader.open(b, h);
        find_levels(this->call, this->n, first_level, {this->call.grad_value, b, h}, plan.packed_gradient,
                    plan.packed_gradient.bytes > 0 ? packed : nullptr, this->rows);
    }
};

} // namespace
} // namespace mxd::MXD_ISA
