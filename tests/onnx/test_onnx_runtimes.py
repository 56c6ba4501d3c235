"""Runtimes of `mx-driving verify`: programs, packages of Python, and plugins of onnxruntime."""

import sys
from unittest import mock

import cases
import onnxruntime
import pytest
import test_onnxruntime as nodes
from onnx_writings import feeds
from test_verify import reasons, save_node

from mx_driving._operator.rules import Problem
from mx_driving.onnx import _runtimes
from mx_driving.onnx._check import check

NO_NPZ = "what the program writes must be an .npz file; got "
BAD_PROGRAMS = {
    "raise SystemExit('no licence')": "the program ends with status 1: no licence",
    "pass": NO_NPZ,
    "open(sys.argv[3], 'w').write('words')": NO_NPZ,
    "open(sys.argv[3], 'wb').write(b'PK' + bytes([3, 4]) + bytes(30))": NO_NPZ,
    "np.savez(sys.argv[3], out=1)": "the runtime must give the output 'output'; got out",
    "np.savez(sys.argv[3], output=np.ones((2, 3)))": "it gives (2, 3); the operator gives (2, 7, 32)",
    "": "the program does not start: ",
}


@pytest.mark.parametrize("program", BAD_PROGRAMS)
def test_a_program_that_gives_nothing_is_reported(program, stacked, tmp_path):
    script = tmp_path / "runtime.py"
    script.write_text(f"import sys\nimport numpy as np\n{program}\n" if program else "\0")
    script.chmod(0o755)
    report = check(stacked, _runtimes.find_runtime(f"{sys.executable} {script}" if program else str(script)), feeds())
    assert not report.right
    assert not any(one.right for one in (*report.comparisons, *report.outputs))
    assert all(BAD_PROGRAMS[program] in why for why in reasons(report))


@pytest.mark.needs("An ONNX file of opset 20")
def test_a_runtime_s_own_error_is_reported(tmp_path):
    pytest.importorskip("openvino")
    arrays = save_node(nodes.one_node(cases.MULTI_SCALE), cases.MULTI_SCALE, tmp_path / "node.onnx")
    report = check(tmp_path / "node.onnx", _runtimes.find_runtime("openvino"), arrays)
    assert all("mx_driving.multi_scale_deformable_attn" in why for why in reasons(report))


@pytest.fixture
def plugin(monkeypatch, tmp_path):
    """Make a package with a provider of its own, OurExecutionProvider."""
    if not hasattr(onnxruntime, "get_ep_devices"):
        pytest.skip("onnxruntime takes plugins from 1.23 on")
    (tmp_path / "onnxruntime_ep_ours").mkdir()
    lines = ["get_ep_names = lambda: ['OurExecutionProvider']", "get_library_path = lambda: '/nowhere/libours.so'"]
    (tmp_path / "onnxruntime_ep_ours" / "__init__.py").write_text("\n".join(lines))
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(_runtimes, "_REGISTERED", set())
    yield
    sys.modules.pop("onnxruntime_ep_ours", None)


def test_a_plugin_provider_is_registered_by_its_path(plugin, monkeypatch, stacked):
    """The CPU's device stands in for the plugin's and runs the file."""
    (cpu, *_) = onnxruntime.get_ep_devices()
    ours, registered, used = mock.Mock(ep_name="OurExecutionProvider"), [], []
    add = onnxruntime.SessionOptions.add_provider_for_devices

    def add_cpu(options, devices, settings):
        used.append(devices)
        add(options, [cpu], settings)

    monkeypatch.setattr(onnxruntime, "register_execution_provider_library", lambda *args: registered.append(args))
    monkeypatch.setattr(onnxruntime, "get_ep_devices", lambda: [cpu, ours])
    monkeypatch.setattr(onnxruntime.SessionOptions, "add_provider_for_devices", add_cpu)
    for _ in range(2):
        assert check(stacked, _runtimes.find_runtime("onnxruntime:OurExecutionProvider"), feeds()).right
    assert registered == [("OurExecutionProvider", "/nowhere/libours.so")]
    assert [ours] in used


def test_a_plugin_provider_that_does_not_load_is_one_sentence(plugin, mx, monkeypatch, stacked):
    rule = "--runtime onnxruntime:OurExecutionProvider must have a library and a device here; got "
    status, _, problem = mx("verify", stacked, "--runtime", "onnxruntime:OurExecutionProvider")
    assert (status, problem.count("\n"), rule in problem, "libours.so" in problem) == (2, 1, True, True)
    monkeypatch.setattr(onnxruntime, "register_execution_provider_library", lambda *args: None)
    status, _, problem = mx("verify", stacked, "--runtime", "onnxruntime:OurExecutionProvider")
    assert (status, problem) == (2, f"mx-driving: {rule}no device for /nowhere/libours.so\n")
    _, _, problem = mx("verify", stacked, "--runtime", "onnxruntime:NoExecutionProvider")
    assert "OurExecutionProvider (others are packages such as onnxruntime-ep-webgpu); got 'NoExecutionProvider'" in problem


def test_a_package_that_is_missing(monkeypatch):
    monkeypatch.setitem(sys.modules, "tensorrt", None)
    with pytest.raises(Problem, match=r"must have tensorrt installed \(pip install tensorrt\)"):
        _runtimes.find_runtime("tensorrt")
