// How the CANN-style interface fails: a status and a sentence, thrown inside, returned at the border.
#pragma once

#include "acl/acl.h"

#include <new>
#include <string>
#include <system_error>

namespace acl {

struct Outcome {
    aclError status = ACL_SUCCESS;
    std::string sentence;
};

// Thrown by checks: *name* must *rule*; got *fact*.
struct Refusal : Outcome {
    Refusal(aclError why, const std::string &name, const std::string &rule, const std::string &fact)
        : Outcome{why, name + " must " + rule + "; got " + fact} {}
};

// Leaves the sentence for aclGetRecentErrMsg on this thread and returns the status.
aclError report(const Outcome &outcome) noexcept;

// What fn() ended with; no exception leaves it.
template <class Fn> Outcome outcome_of(Fn &&fn) noexcept {
    try {
        fn();
        return {};
    } catch (const Refusal &refusal) {
        return refusal;
    } catch (const std::bad_alloc &) {
        return {ACL_ERROR_BAD_ALLOC, {}}; // report() words it: a sentence would need memory
    } catch (const std::system_error &error) {
        return {ACL_ERROR_INTERNAL_ERROR, error.what()};
    }
}

// The body of every function of the interface.
template <class Fn> aclError guarded(Fn &&fn) noexcept { return report(outcome_of(fn)); }

} // namespace acl
