"""examples/detect.py on a checkpoint of one's own and on random weights: the same boxes before and after, and a picture."""

import functools
import re
import sys

import pytest
from pages import written
from programs import example

import mx_driving

transformers = pytest.importorskip("transformers")


@pytest.fixture(scope="module")
def detect():
    """Return the example as a module."""
    return example("detect")


@pytest.fixture
def refused(refusal, detect, tmp_path):
    return functools.partial(refusal, detect, "--out", tmp_path / "seen.png")


@pytest.fixture
def photo(tmp_path):
    from PIL import Image

    Image.radial_gradient("L").resize((96, 64)).save(tmp_path / "photo.png")
    return str(tmp_path / "photo.png")


@pytest.fixture
def run(detect, monkeypatch, capsys):
    """Return what the example prints. Undo its patches, which the example leaves for the rest of its process."""
    patches, patch = [], mx_driving.patch
    monkeypatch.setattr(mx_driving, "patch", lambda *args: patches.append(patch(*args)) or patches[-1])

    def run(*options: object) -> str:
        monkeypatch.setattr(sys, "argv", ["detect.py", "--rounds", "1", *map(str, options)])
        detect.main()
        return capsys.readouterr().out

    yield run
    for done in patches:
        done.restore()


@pytest.mark.long
@pytest.mark.filterwarnings("ignore")
def test_checkpoint_and_photo_of_ones_own(run, tmp_path):
    import detectors
    from PIL import Image

    detectors.saved(tmp_path / "detector", tmp_path / "photo.png", 160, 224)
    out = tmp_path / "seen.png"
    said = run("--checkpoint", tmp_path / "detector", "--photo", tmp_path / "photo.png", "--out", out)
    assert "replaced transformers.models.deformable_detr.modeling_deformable_detr.MultiScaleDeformableAttention" in said
    assert "DeformableDetrForObjectDetection, 160 x 224" in said
    match = re.search(r"largest difference of logits and boxes: (\S+); 3 layers", said)
    assert match
    assert float(match[1]) < 1e-4
    assert Image.open(out).size[0] > 900


@pytest.mark.long
@pytest.mark.filterwarnings("ignore")
def test_random_weights(run, tmp_path, photo):
    from PIL import Image

    page = tmp_path / "looks.html"
    said = run("--model", "deformable_detr", "--photo", photo, "--count", 2, "--out", tmp_path / "seen.png", "--page", page)
    assert f"the page is in {page}" in said
    facts = written(page)[1]
    assert [look["name"] for look in facts["looks"]] == [f"decoder layer {i}" for i in range(1, 7)]
    assert (facts["queries"]["total"], facts["queries"]["boxes"], len(facts["queries"]["labels"])) == (300, True, 300)
    assert "12 layers sample deformably" in said
    assert Image.open(tmp_path / "seen.png").size[0] > 900


def test_a_wrong_photo_or_place_is_refused_first(refused, detect, monkeypatch, tmp_path):
    monkeypatch.setattr(detect, "at_random", None)
    (tmp_path / "text.png").write_text("no picture")
    assert "nowhere.png" in refused("--photo", "nowhere.png")
    assert "cannot identify image file" in refused("--photo", str(tmp_path / "text.png"))
    assert "the folder of --out must exist; got nowhere" in refused("--out", "nowhere/x.png")
    assert "the folder of --page must exist; got nowhere" in refused("--page", "nowhere/x.html")


OTHER = '{"model_type": "bert"}', '{"image_processor_type": "RTDetrImageProcessor"}'


@pytest.mark.parametrize("texts", [None, (), ("{",), ('{"model_type": "yolo"}', "{}"), OTHER])
def test_a_wrong_checkpoint_is_refused(refused, tmp_path, photo, texts):
    if texts is not None:
        (tmp_path / "saved").mkdir()
    for name, text in zip(("config.json", "preprocessor_config.json"), texts or (), strict=False):
        (tmp_path / "saved" / name).write_text(text)
    said = refused("--checkpoint", str(tmp_path / "saved"), "--photo", photo)
    assert f"--checkpoint={tmp_path / 'saved'} must be the folder of a saved detector; got" in said


@pytest.mark.parametrize("name", ["yolo", "bert"])
def test_a_wrong_model_is_refused(refused, photo, name):
    said = refused("--model", name, "--photo", photo)
    assert re.search(rf"--model must be one of .*rt_detr_v2.*; got {name}\n", said)
