"""What a finished classifier takes for what: counted, kept and shown."""

import dataclasses
import json
import struct
import zlib

import jax
import numpy as np
import pytest
from rich.console import Console

from meshloom.models import convnet
from meshloom.sharding import MeshSpec
from meshloom.trainer import data
from meshloom.trainer.commands.forecast_observer import ForecastObserver
from meshloom.trainer.program.optimizers import AdamW
from meshloom.trainer.program.schedules import Constant
from meshloom.trainer.report.mistakes import png
from meshloom.trainer.report.writing import write_report
from meshloom.trainer.run.train import Config, train

CONFIG = Config(
    model=convnet.Config(num_classes=10, size=8, widths=(4, 4), d_hidden=8),
    data=data.Digits(),
    optimizer=AdamW(),
    schedule=Constant(value=1e-2),
    mesh=MeshSpec(data=2, fsdp=2, tensor=2),
    batch_size=120,
    num_steps=40,
    eval_every=40,
    eval_batches=None,
    test_batches=None,
    save_every=40,
)


def run(workdir, **changes):
    with open(workdir.parent / "screen.txt", "a") as screen:
        return train(
            dataclasses.replace(CONFIG, **changes),
            workdir=workdir,
            console=Console(file=screen, width=200),
            observer=ForecastObserver(),
        )


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    workdir = tmp_path_factory.mktemp("mistakes") / "run"
    return workdir, run(workdir)


def test_they_are_those_of_the_model(finished):
    workdir, state = finished
    found = json.loads((workdir / "mistakes.json").read_text())
    split = CONFIG.data.open("test")
    rows = [split[i] for i in range(len(split))]
    images = np.stack([row["image"] for row in rows])
    labels = np.array([row["label"] for row in rows])
    logits = CONFIG.model.logits(
        jax.device_get(state.params), images, convnet.Sharder()
    )
    shares, classes = np.asarray(jax.nn.softmax(logits)), np.argmax(logits, axis=-1)
    counts = np.zeros((10, 10), int)
    np.add.at(counts, (labels, classes), 1)
    assert found["confusion"] == counts.tolist()
    assert (found["split"], found["step"], found["examples"]) == ("test", 40, 299)
    assert found["mistakes"] == (labels != classes).sum() > 5
    tested = json.loads((workdir / "test.jsonl").read_text().splitlines()[-1])
    right = 1 - found["mistakes"] / 299
    assert tested["accuracy"] == pytest.approx(right, abs=1e-6)
    wrong = np.flatnonzero(labels != classes)
    worst = wrong[np.argsort(-shares.max(-1)[wrong], kind="stable")][0]
    first = found["worst"][0]
    assert (first["example"], first["label"]) == (worst, labels[worst])
    assert first["probability"] == pytest.approx(shares[worst].max(), abs=1e-4)
    assert np.array_equal(np.argmax(first["image"]), np.argmax(images[worst]))


def test_the_report_shows_them(finished):
    workdir, _ = finished
    found = json.loads((workdir / "mistakes.json").read_text())
    html = (workdir / "report.html").read_text()
    assert f"{found['mistakes']} of 299 test examples are predicted wrong" in html
    assert html.count("data:image/png;base64,") == min(found["mistakes"], 24)
    assert "img-src data:" in html  # or browsers show none of them
    assert html.count('<td class="right"') == 10
    assert html.count('<td class="wrong"') == 90


def test_a_run_without_them_has_no_such_section(finished, tmp_path):
    workdir, _ = finished
    (tmp_path / "copy").mkdir()
    for name in ("metrics.jsonl", "mistakes.json"):
        (tmp_path / "copy" / name).write_text((workdir / name).read_text())
    html = write_report(tmp_path / "copy").read_text()
    assert "<h2>Mistakes</h2>" in html
    (tmp_path / "copy" / "mistakes.json").write_text('{"split": "test"}')
    with pytest.raises(ValueError, match="mistakes.json: missing examples, mistakes"):
        write_report(tmp_path / "copy")
    (tmp_path / "copy" / "mistakes.json").unlink()
    assert "<h2>Mistakes</h2>" not in write_report(tmp_path / "copy").read_text()


def test_pixels_become_a_png():
    image = np.arange(24, dtype=np.uint8).reshape(2, 4, 3)
    content = png(image)
    assert content[:8] == b"\x89PNG\r\n\x1a\n"
    assert struct.unpack(">IIBB", content[16:26]) == (4, 2, 8, 2)
    start = content.index(b"IDAT") + 4
    (size,) = struct.unpack(">I", content[start - 8 : start - 4])
    lines = zlib.decompress(content[start : start + size])
    assert lines == b"\0" + image[0].tobytes() + b"\0" + image[1].tobytes()
