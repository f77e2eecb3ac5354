"""Data that grows: old examples and their order stay, and new ones follow."""

import numpy as np
from test_tables import LABEL, X, firsts, refused

from meshloom.trainer import data
from meshloom.trainer.data.growth import GrownOrder, Part, growing
from meshloom.trainer.data.orders import order_from
from meshloom.trainer.program import digest
from meshloom.trainer.record import ledger_audit

PARTS = (Part(0, 0, 20), Part(20, 20, 27), Part(40, 27, 30))


def test_the_order_of_what_was_there_stays_and_new_examples_follow():
    order = GrownOrder(PARTS, seed=5)
    ids = order.index(np.arange(43))[1]
    assert (ids[:20] == data.Order(20, 5).index(np.arange(20))[1]).all()
    assert sorted(ids[20:27]) == list(range(20, 27))
    # Nothing new had come, so the part was repeated in another order.
    assert sorted(ids[27:34]) == list(range(20, 27))
    assert (ids[27:34] != ids[20:27]).any()
    assert sorted(ids[40:43]) == [27, 28, 29]
    shorter = GrownOrder(PARTS[:2], seed=5).index(np.arange(40))
    assert (np.array(shorter) == np.array(order.index(np.arange(40)))).all()
    assert [order.index(k) for k in range(43)] == list(
        zip(*(x.tolist() for x in order.index(np.arange(43))), strict=True)
    )
    assert order_from(30, 5, order.facts()) == order


def write(folder, name: str, number: int) -> None:
    np.savez(folder / name, x=X + 1000 * number, label=LABEL)


def test_files_at_the_end_add_examples_at_the_end(tmp_path):
    for number, name in enumerate("bd"):
        write(tmp_path, f"{name}.npz", number)
    source = data.ArrayFiles(path=str(tmp_path), holdout=0.2)
    known = source.documents("train")
    before = firsts(source.open("train"))
    write(tmp_path, "a.npz", 7)
    new = [x for x in source.documents("train") if x not in known]
    after = firsts(source.open_documents("train", [*known, *new]))
    assert [x.name for x in new] == ["a.npz"]
    assert after[: len(before)] == before and min(after[len(before) :]) >= 7000


def test_text_that_is_added_continues_the_stream(tmp_path):
    for name in ("b.txt", "c.txt"):
        (tmp_path / name).write_text(f"{name} is here. " * 5)
    source = data.Text(path=str(tmp_path), length=16, holdout=0)
    known = source.documents("train")
    before = source.open("train")
    (tmp_path / "a.txt").write_text("and another one. " * 5)
    new = [x for x in source.documents("train") if x not in known]
    after = source.open_documents("train", [*known, *new])
    assert len(after) > len(before)
    for i in range(len(before)):
        assert after[i]["targets"].tolist() == before[i]["targets"].tolist()


def test_what_cannot_grow_is_refused_in_one_line(tmp_path):
    write(tmp_path, "a.npz", 0)
    refused(lambda: growing(data.Digits()), "data Digits cannot grow. Use files that")
    one = data.ArrayFiles(path=str(tmp_path / "a.npz"))
    refused(lambda: growing(one), "is one file. Name its folder")
    assert growing(data.ArrayFiles(path=str(tmp_path))).documents("train")
    images = data.ImageFolder(path=str(tmp_path), size=4)
    refused(lambda: growing(images), "Name all classes in classes")
    saved = data.HuggingFace(path=str(tmp_path))
    refused(lambda: growing(saved), "a saved dataset does not grow")
    text = data.Text(path=str(tmp_path), length=4)
    refused(lambda: growing(text), "has one document, whose end is held out")


START = {"event": "start", "batch_size": 5, "seed": 5, "data": "aaaa"}


def grown_history() -> list[dict]:
    """Five steps before the data grew, three after, and a restart that repeats one."""
    order = GrownOrder(PARTS[:2], seed=5)

    def step(number):
        ids = order.index(np.arange(5 * number - 5, 5 * number))[1].astype(np.uint32)
        samples = digest.tree_digests({"x": ids})["x"]
        return {
            "event": "step",
            "step": number,
            "batch": number - 1,
            "samples": samples,
        }

    first = START | {"num_examples": 20, "parts": [[0, 0, 20]]}
    again = START | {"num_examples": 27, "parts": [[0, 0, 20], [20, 20, 27]]}
    return [
        first,
        *map(step, (1, 2, 3, 4)),
        {"event": "grown", "part": [20, 20, 27]},
        step(5),
        again,
        {"event": "restore", "step": 4},
        step(5),
    ]


def test_the_audit_counts_samples_of_data_that_grew():
    found = ledger_audit.examine(grown_history())
    assert found.faults == [] and len(found.history) == 5 and len(found.parts) == 1


def test_the_audit_finds_parts_that_are_not_what_they_were():
    rows = grown_history()
    rows[5]["part"] = [20, 20, 26]
    (fault, *_) = ledger_audit.examine(rows).faults
    assert fault == "the data had parts of 20, 6 examples, and later of 20, 7"
    rows = grown_history()
    rows[5]["part"] = rows[7]["parts"][1] = [15, 20, 27]
    faults = ledger_audit.examine(rows).faults
    assert any("step 5: its samples have digest" in fault for fault in faults)
    rows = grown_history()
    del rows[5]
    assert ledger_audit.examine(rows).faults == []  # the restart has the parts too
