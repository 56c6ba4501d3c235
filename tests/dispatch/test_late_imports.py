"""What depends on a module of torch that a program imports before us, after us, meanwhile, or at its second try."""

import pytest
from programs import python

CALL = """
import importlib, importlib.util, sys, threading, types
import torch

def count_flops():
    from torch.utils.flop_counter import FlopCounterMode
    import mx_driving
    shapes, start = torch.tensor([[2, 2]]), torch.tensor([0])
    value, location, weight = torch.rand(1, 4, 1, 1), torch.rand(1, 1, 1, 1, 1, 2), torch.rand(1, 1, 1, 1, 1)
    with torch.inference_mode(), FlopCounterMode(display=False) as counter:
        mx_driving.multi_scale_deformable_attn(value, shapes, start, location, weight)
    return counter.get_total_flops()
"""
COUNTER = "torch.utils.flop_counter"
FAILS_ONCE = f"""
import mx_driving
sys.modules["torch.utils.module_tracker"] = None
try:
    import {COUNTER}
except ImportError:
    del sys.modules["torch.utils.module_tracker"]
assert "{COUNTER}" not in sys.modules
"""
MEANWHILE = f"""
from torch.utils import module_tracker
begun, go_on = threading.Event(), threading.Event()

def __getattr__(name):
    begun.set()
    assert go_on.wait(60)
    return getattr(module_tracker, name)

stub = sys.modules["torch.utils.module_tracker"] = types.ModuleType("torch.utils.module_tracker")
stub.__getattr__ = __getattr__
other = threading.Thread(target=importlib.import_module, args=("{COUNTER}",))
other.start()
assert begun.wait(60)  # the other thread has executed the imports of the counter's module, and no formula
threading.Timer(0.5, go_on.set).start()
import mx_driving
other.join()
"""


@pytest.mark.parametrize(
    "before",
    [
        "",
        "import mx_driving",
        f"import mx_driving; assert importlib.util.find_spec('{COUNTER}')",
        f"import mx_driving, {COUNTER}; importlib.reload({COUNTER})",
        f"import {COUNTER}, mx_driving; importlib.reload({COUNTER})",
        FAILS_ONCE,
        MEANWHILE,
    ],
    ids=["the counter first", "we first", "looked for", "reloaded", "reloaded, the counter first", "failed once", "meanwhile"],
)
def test_flops_are_counted(before):
    done = python("-c", f"{CALL}\n{before}\nassert count_flops() == 8")
    assert done.stderr == ""


def test_the_counter_has_its_own_loader_and_we_have_one_finder():
    code = f"""
import inspect, sys, torch, mx_driving
finders = [f for f in sys.meta_path if type(f).__module__.startswith("mx_driving")]
assert len(finders) == 1, finders
import {COUNTER} as counter
assert type(counter.__loader__) is type(counter.__spec__.loader) is type(torch.__loader__)
assert "class FlopCounterMode" in inspect.getsource(counter)
assert len([packet for packet in counter.flop_registry if "mx_driving" in str(packet)]) == 21
"""
    assert python("-c", code).stderr == ""


DTENSORS = """
import contextlib, os, tempfile
import torch.distributed as dist
dist.init_process_group("gloo", init_method="file://" + os.path.join(tempfile.mkdtemp(), "store"), rank=0, world_size=1)
from torch.distributed.tensor import Replicate, Shard, distribute_tensor, init_device_mesh
import mx_driving
mesh = init_device_mesh("cpu", (1,))
shapes, starts = torch.tensor([[2, 2]]), torch.tensor([0])
inputs = torch.rand(2, 4, 2, 8), torch.rand(2, 3, 2, 1, 4, 2), torch.rand(2, 3, 2, 1, 4)
whole = mx_driving.multi_scale_deformable_attn(inputs[0], shapes, starts, *inputs[1:])
for context in (contextlib.nullcontext, torch.inference_mode):
    with context():
        value, locations, weights = (distribute_tensor(t, mesh, [Shard(0)]) for t in inputs)
        tables = [(t, distribute_tensor(t, mesh, [Replicate()])) for t in (shapes, starts)]
        for a in tables[0]:
            for b in tables[1]:  # plain tensors and DTensors, also mixed
                output = mx_driving.multi_scale_deformable_attn(value, a, b, locations, weights)
                assert torch.equal(output.full_tensor(), whole)
dist.destroy_process_group()
"""
WHILE_IMPORTING = """
other = threading.Thread(target=importlib.import_module, args=("torch.distributed.tensor",))
other.start()
while "torch.distributed.tensor" not in sys.modules:
    pass
import mx_driving
other.join()
"""


LOOKED_FOR = "import mx_driving; importlib.util.find_spec('torch.distributed.tensor')"


@pytest.mark.parametrize("before", [LOOKED_FOR, WHILE_IMPORTING], ids=["looked for", "meanwhile"])
def test_plain_tables_beside_dtensors(before):
    python("-c", f"import importlib, importlib.util, sys, threading, torch\n{before}\n{DTENSORS}")
