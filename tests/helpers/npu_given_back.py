"""For tests/vendor/test_npu.py: installs the stand-in for torch_npu and gives all back, twice; then beside a real one."""

import operator
import sys

import torch
import torch.cuda.amp
import torch.testing

import mx_driving
import mx_driving._vendor.npu

NAMES = """fft nested Tensor nn.Module cuda cuda.amp distributed random autocast amp amp.GradScaler UntypedStorage TypedStorage
    nn.parallel nn.parallel.DataParallel nn.parallel.DistributedDataParallel"""
OWNERS = (torch, *(operator.attrgetter(name)(torch) for name in NAMES.split()))


def state():
    owned = [dict(vars(owner)) for owner in OWNERS]
    lists = list(sys.meta_path), list(torch.serialization._package_registry)
    return owned, (*lists, dict(torch.jit._builtins._get_builtin_table()))


def ours():
    return [name for name in sys.modules if name.startswith(("torch_npu", "torch.npu"))]


before = state()
for _ in range(2):
    for _ in range(2):
        assert mx_driving.compat.install("torch_npu") == ("torch_npu",)
    import torch_npu.contrib.transfer_to_npu  # pyright: ignore[reportMissingImports]
    import torch_npu.testing.testcase  # pyright: ignore[reportMissingImports]

    assert torch.zeros(1, device="cuda").npu().is_npu
    assert state() != before
    assert ours()
    mx_driving.compat.uninstall()
    assert state() == before
    assert not ours()
mx_driving.compat.uninstall()
sys.path.insert(0, sys.argv[1])
for _ in range(2):
    try:
        mx_driving.compat.install("torch_npu")
    except RuntimeError as error:
        print(error)
    import torch_npu
assert state() == before
assert not hasattr(torch_npu, "npu")
