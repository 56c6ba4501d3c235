// Finds the functions of torch's stable C interface in the process.
#include "torch/api.h"

#include "call/check.h"
#include "threads/loaded_library.h"

namespace mxd::torch {
namespace {

// The value of an optional argument is deleted by delete_value, or before torch 2.13 by C++'s operator delete.
typedef Status DeleteValue(Value *);
DeleteValue *delete_value;
void (*delete_of_cpp)(void *);

void free_optional(Value *value) {
    if (delete_value)
        delete_value(value);
    else
        delete_of_cpp(value);
}

std::string no_function(const char *name) {
    return sentence("torch", "be 2.10 or later, with the stable C interface", std::string("one without ") + name);
}

const char *first_missing(Library torch, Api &api) {
#define MXD_FIND(result, name, parameters)                                                                                     \
    if (!find(torch, #name, api.name)) return #name;
    MXD_TORCH_FUNCTIONS(MXD_FIND)
#undef MXD_FIND
    if (!find(torch, "torch_delete_stable_ivalue", delete_value) && !find(torch, "_ZdlPv", delete_of_cpp))
        return "torch_delete_stable_ivalue";
    if (!find(torch, "torch_tag_pt2_compliant_tag", api.torch_tag_pt2_compliant_tag) ||
        !find(torch, "torch_library_def_with_tags", api.torch_library_def_with_tags))
        api.torch_library_def_with_tags = nullptr;
    find(torch, "torch_exception_get_what_without_backtrace", api.torch_exception_get_what);
    api.free_optional = free_optional;
    return nullptr;
}

} // namespace

const Api *find_api(std::string &why) {
    static Api api;
    static bool complete = false;
    if (complete) return &api;
    const Library torch = loaded(TORCH_LIBRARY);
    if (!torch) {
        why = sentence("torch", "be loaded before the operators are registered", std::string("no ") + TORCH_LIBRARY);
        return nullptr;
    }
    const char *missing = first_missing(torch, api);
    if (missing) {
        close(torch);
        why = no_function(missing);
        return nullptr;
    }
    complete = true; // keep the handle, so that nobody can unload torch
    return &api;
}

} // namespace mxd::torch
