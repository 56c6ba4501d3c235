"""Wrong uses of `fuse` and `verify` end in one sentence that names the fault."""

import errno
import io
import re
import tempfile
import zipfile
from pathlib import Path

import numpy as np
import onnx
import onnx_ir as ir
import onnx_writings as writings
import pytest


@pytest.mark.parametrize(
    ("command", "who"),
    [
        (("fuse", "LOOP", "after.onnx"), "path_in must be a file that can be read"),
        (("verify", "LOOP", "--runtime", "onnxruntime"), "path_in must be a file that can be read"),
        (("verify", "STACKED", "--runtime", "onnxruntime", "--inputs", "LOOP"), "--inputs must be an .npz file"),
    ],
)
def test_a_link_to_itself_is_one_sentence(command, who, mx, stacked, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    Path("LOOP").symlink_to("LOOP")
    status, _, problem = mx(*(stacked if word == "STACKED" else word for word in command))
    assert (status, problem) == (2, f"mx-driving: {who}; got LOOP: Too many levels of symbolic links\n")


def test_numbers_in_the_other_order_of_bytes_are_read(mx, stacked, tmp_path):
    swapped = {name: array.astype(array.dtype.newbyteorder()) for name, array in writings.feeds().items()}
    assert not swapped["v"].dtype.isnative
    np.savez(tmp_path / "inputs.npz", **swapped)
    assert mx("verify", stacked, "--runtime", "onnxruntime", "--inputs", tmp_path / "inputs.npz")[::2] == (0, "")


@pytest.mark.parametrize("option", ["--inputs", "--seconds"])
def test_options_that_fuse_would_not_use(option, mx, stacked, after, tmp_path):
    np.savez(tmp_path / "inputs.npz", wrong=np.ones(2))
    number_or_file = "1" if option == "--seconds" else tmp_path / "inputs.npz"
    status, _, problem = mx("fuse", stacked, after, option, number_or_file)
    assert (status, problem) == (2, f"mx-driving: {option} must come with --time, which runs both files; got {option} alone\n")
    assert not after.exists()


def test_a_full_temporary_folder_is_named(mx, stacked, monkeypatch):
    """A full temporary folder is told from a full standard output."""

    def fill(*args, **options):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(ir, "save", fill)
    status, _, problem = mx("verify", stacked, "--runtime", "onnxruntime")
    rule = f"the temporary folder {tempfile.gettempdir()} must have room"
    assert (status, problem) == (2, f"mx-driving: {rule}; got No space left on device\n")


def archive(**members):
    """Return a zip archive of these members, compressed."""
    stream = io.BytesIO()
    with zipfile.ZipFile(stream, "w", zipfile.ZIP_DEFLATED) as file:
        for name, content in members.items():
            file.writestr(name.replace("__", "."), content)
    return stream.getvalue()


def header(shape):
    text = f"{{'descr':'<f4','fortran_order':False,'shape':{shape}}}\n".encode()
    return b"\x93NUMPY\x01\x00" + len(text).to_bytes(2, "little") + text


def saved(save=np.savez):
    stream = io.BytesIO()
    save(stream, v=np.arange(1000.0))
    return stream.getvalue()


def overwrite(content, *changes):
    """Write bytes behind the first occurrence of a mark: (mark, distance from its begin, new bytes)."""
    content = bytearray(content)
    for mark, distance, new in changes:
        start = content.find(mark) + distance
        content[start : start + len(new)] = new
    return bytes(content)


LOCAL, CENTRAL = b"PK\x03\x04", b"PK\x01\x02"  # headers of a member, at its begin and in the archive's list
ARCHIVES = {
    "damaged": (overwrite(saved(np.savez_compressed), (LOCAL, 200, b"\xff" * 8)), "Error -3 while decompressing data"),
    "encrypted": (overwrite(saved(), (LOCAL, 6, b"\x01"), (CENTRAL, 8, b"\x01")), "is encrypted"),
    "an unknown compression": (overwrite(saved(), (LOCAL, 8, b"\x63"), (CENTRAL, 10, b"\x63")), "compression method"),
    "a huge shape": (archive(v__npy=header("(1000000000000,)")), "Unable to allocate 3.64 TiB"),
    "a long header": (archive(v__npy=header("(" * 3000 + ")" * 3000)), "Cannot parse header"),
    "a text beside arrays": (archive(README=b"hello"), "whose member README is no array"),
    "a text as an array": (archive(v__npy=b"hello"), "whose member v is no array|EOF"),
    "empty": (b"", "No data left in file" if np.lib.NumpyVersion(np.__version__) >= "1.25.0" else "pickled data"),
    "pickles": (archive(v__npy=header("(2,)").replace(b"<f4", b"|O ")), "Object arrays|descr"),
}


@pytest.mark.parametrize("program", ["fuse", "verify"])
@pytest.mark.parametrize("name", ARCHIVES)
def test_a_broken_archive_of_inputs(name, program, mx, stacked, after, tmp_path):
    content, reason = ARCHIVES[name]
    path = tmp_path / "inputs.npz"
    path.write_bytes(content)
    more = ("fuse", stacked, after, "--time") if program == "fuse" else ("verify", stacked, "--runtime", "onnxruntime")
    status, _, problem = mx(*more, "--inputs", path)
    assert (status, problem.count("\n")) == (2, 1)
    assert re.match(f"mx-driving: --inputs must be an .npz file.*; got {path}.*({reason})", problem)
    assert len(problem) < len(str(path)) + 300
    assert not after.exists()


def set_place(key, text):
    """Return a function that changes where the first weights of a file lie."""

    def change(model):
        places = [place for tensor in model.graph.initializer for place in tensor.external_data]
        next(place for place in places if place.key == key).value = text

    return change


def repeat_an_output(model):
    model.graph.node[1].output[0] = model.graph.node[0].output[0]


def in_circles(model):
    """Take the weights from one of two Identity nodes that read each other."""
    product = next(node for node in model.graph.node if node.op_type == "ReduceSum").input[0]
    (product,) = (node for node in model.graph.node if product in node.output)
    product.input[1] = "one"
    model.graph.node.extend(onnx.helper.make_node("Identity", names, names[::-1]) for names in (["one"], ["two"]))
    model.graph.node[-1].output[0], model.graph.node[-2].output[0] = "one", "two"
    model.graph.node[-1].input[0], model.graph.node[-2].input[0] = "two", "one"


def of_one_input(model):
    next(node for node in model.graph.node if node.op_type == "GridSample").input.pop()


def of_another_version(model, version=7):
    node = onnx.helper.make_node("multi_scale_deformable_attn", [""] * 5, ["ours"], domain="mx_driving")
    model.graph.node.append(node)
    model.opset_import.append(onnx.helper.make_opsetid("mx_driving", version))


def read_nowhere(model):
    model.graph.node[-1].input[0] = "nowhere"


INVALID = "path_in must be an ONNX file; got .*"
BROKEN = {
    "a cycle": (in_circles, f"{INVALID}: its nodes have a cycle, two, one"),
    "one input": (of_one_input, f"{INVALID}GridSample.* has input size 1"),
    "an opset": (lambda model: setattr(model.opset_import[0], "version", -3), f"{INVALID} domain_version of -3"),
    "no opset": (lambda model: model.opset_import.pop(), f"{INVALID} must specify opset_import"),
    "our version": (of_another_version, "path_in must hold nodes of version 1 of mx_driving; got .*, of version 7"),
    "no such tensor": (read_nowhere, rf"{INVALID}: no node or input gives nowhere, which \w+ \(.+\) reads"),
    "no type": (lambda model: model.graph.input[1].ClearField("type"), f"{INVALID}: the input l has no type"),
    "no dtype": (lambda model: model.graph.input[1].type.tensor_type.ClearField("elem_type"), f"{INVALID}: l has no dtype"),
    "two nodes with one output": (repeat_an_output, f"{INVALID}: Output '.*' is redeclared"),
    **{
        f"{key} {text}": (set_place(key, text), f"path_in must have its weights beside it; got .*, where the {key} of .* is ")
        for key in ("offset", "length")
        for text in ("-16", "abc", "1.5", "")
    },
    "NUL": (set_place("location", "w\0x"), r"path_in must have its weights beside it; got .*, and 'w\\x00x', which no file is"),
}


def save_broken(name, path):
    """Write a broken file, and return what is refused in it."""
    change, sentence = BROKEN[name]
    writings.export(writings.Projected(), path, "older")
    onnx.save(onnx.load(path), path, save_as_external_data=True, location="weights", size_threshold=0)
    model = onnx.load(path, load_external_data=False)
    change(model)
    path.write_bytes(model.SerializeToString())
    return sentence


@pytest.mark.parametrize("name", BROKEN)
def test_a_broken_file_is_refused_with_its_innermost_reason(name, mx, before, after):
    sentence = save_broken(name, before)
    for command in (("fuse", before, after), ("verify", before, "--runtime", "onnxruntime")):
        status, _, problem = mx(*command)
        assert (status, problem.count("\n")) == (2, 1)
        assert re.match(f"mx-driving: {sentence}", problem), problem


@pytest.mark.parametrize("name", BROKEN)
def test_no_library_prints_something_about_a_broken_file(name, before, capfd):
    sentence = save_broken(name, before)
    capfd.readouterr()
    writings.assert_refused(before, f"^{sentence}[^\n]*$")
    assert capfd.readouterr() == ("", "")
