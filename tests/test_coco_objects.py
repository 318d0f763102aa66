import builtins
import json
import tracemalloc

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from sparse_irm import coco_objects as module
from sparse_irm.coco_objects import coco_objects, draw, find_objects, json_records
from sparse_irm.colored_object import COCO_LABELS, GROUNDS, colored_object

KINDS = list(COCO_LABELS)
HEIGHT, WIDTH = 120, 160
BIG = [20, 10, 140, 10, 140, 110, 20, 110]  # 120 x 100
ALL = {kind: (2, 1) for kind in KINDS}


def record(number, image, kind, area=12_000, crowd=0, outline=None):
    category = 100 + KINDS.index(kind) if kind in KINDS else 1
    outline = [BIG] if outline is None else outline
    return dict(id=number, image_id=image, category_id=category, area=area, iscrowd=crowd, segmentation=outline)


def write_annotations(folder, numbers, annotations, **changes):
    "A file in COCO's layout, categories last, for photographs of these `numbers`."
    kinds = [dict(id=1, name="person"), *(dict(id=100 + i, name=kind) for i, kind in enumerate(KINDS))]
    records = [dict(id=i, file_name=f"{i:012}.jpg", height=HEIGHT, width=WIDTH) for i in numbers]
    content = {"info": {"year": 2017}, "licenses": [], "images": records, "annotations": annotations}
    content["categories"] = kinds
    path = folder / "coco" / "annotations" / "instances_train2017.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps({**content, **changes}))
    return path


@pytest.fixture
def coco(tmp_path):
    "A data folder with 21 small photographs, three of each kind, the number of the photograph being its grey value."
    folder = tmp_path / "data"
    (folder / "coco" / "train2017").mkdir(parents=True)
    for i in range(21):
        Image.new("L" if i % 2 else "RGB", (WIDTH, HEIGHT), 10 * i if i % 2 else (10 * i,) * 3).save(
            folder / "coco" / "train2017" / f"{i:012}.jpg"
        )
    write_annotations(folder, range(21), [record(50 + i, i, KINDS[i % 7]) for i in range(21)])
    return folder


@pytest.fixture
def counted(monkeypatch):
    "Blocks of four, and the list of photographs that were cut."
    pytest.importorskip("pycocotools")
    cut, original = [], module.cut_out

    def count(photographs, o, size):
        cut.append(o.image)
        return original(photographs, o, size)

    monkeypatch.setattr(module, "cut_out", count)
    monkeypatch.setattr(module, "BLOCK", 4)
    return cut


# ---- reading


FLAG = st.booleans()
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=8,
)


@settings(max_examples=60)
@given(st.dictionaries(st.text(max_size=4), VALUES, max_size=4), st.integers(1, 9), st.sampled_from([None, 1]), FLAG)
def test_records_are_those_of_the_json_module(tmp_path_factory, content, window, indent, ascii_only):
    path = tmp_path_factory.getbasetemp() / "content.json"
    path.write_text(json.dumps(content, indent=indent, ensure_ascii=ascii_only), encoding="utf-8")
    expected = [(name, item) for name, value in content.items() if isinstance(value, list) for item in value]
    assert list(json_records(path, window)) == expected


def test_only_a_window_of_the_file_is_in_memory(tmp_path):
    path = tmp_path / "long.json"
    path.write_text(json.dumps({"annotations": [record(i, i, "bus") for i in range(10_000)]}))
    tracemalloc.start()
    assert sum(1 for _ in json_records(path, 1 << 14)) == 10_000
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert path.stat().st_size > 1_300_000 and peak < 300_000


@pytest.mark.parametrize(
    "text", ["", "[]", "{", '{"a"', '{"a": [1, 2', '{"a": [{"b": 1}, {"c": ', '{"a": 1 "b"', '{"a": tru}']
)
def test_a_damaged_file_is_named(tmp_path, text):
    path = tmp_path / "broken.json"
    path.write_text(text)
    with pytest.raises(ValueError, match="broken.json is damaged"):
        list(json_records(path))


# ---- choosing


def test_the_largest_object_of_a_wanted_kind_is_chosen(tmp_path):
    annotations = [
        record(9, 3, "dog", area=20_000), record(8, 3, "bus", area=20_001), record(7, 3, "person", area=99_999),
        record(6, 1, "cat", area=10_000), record(5, 2, "cat", area=9_999.9),
        record(4, 4, "zebra", area=50_000, crowd=1), record(3, 5, "truck", area=15_000),
        record(2, 5, "horse", area=15_000), record(1, 4, "zebra", area=11_000),
    ]
    chosen = find_objects(write_annotations(tmp_path, range(7), annotations))
    assert [(o.image, o.annotation, KINDS[o.kind]) for o in chosen] == [
        (1, 6, "cat"), (3, 8, "bus"), (4, 1, "zebra"), (5, 2, "horse")
    ]
    assert chosen[0][3:] == (10_000, f"{1:012}.jpg", HEIGHT, WIDTH, [BIG])


def test_annotations_that_are_not_coco_are_refused(tmp_path):
    one = record(1, 0, "bus")
    with pytest.raises(ValueError, match="has no category truck, airplane, bus, zebra, dog, horse, cat"):
        find_objects(write_annotations(tmp_path, [0], [one], categories=[]))
    with pytest.raises(ValueError, match="not in COCO's format: in its annotations KeyError.'iscrowd'"):
        find_objects(write_annotations(tmp_path, [0], [{k: v for k, v in one.items() if k != "iscrowd"}]))
    with pytest.raises(ValueError, match="not in COCO's format: in its annotations KeyError.0"):
        find_objects(write_annotations(tmp_path, [], [one]))
    with pytest.raises(ValueError, match="not in COCO's format: in its images"):
        find_objects(write_annotations(tmp_path, [], [one], images=["a.jpg"]))


def test_outlines_are_drawn_from_polygons_and_both_kinds_of_run_lengths():
    tool = pytest.importorskip("pycocotools.mask")
    expected = np.zeros((12, 16), dtype=np.uint8)
    expected[2:10, 3:11] = 1
    expected[0:2, 12:16] = 1
    polygons = [[3, 2, 11, 2, 11, 10, 3, 10], [12, 0, 16, 0, 16, 2, 12, 2]]
    changes = np.flatnonzero(np.diff(np.concatenate([[0], expected.ravel("F"), [0]]))).tolist()
    counts = np.diff([0, *changes, expected.size]).tolist()
    assert np.array_equal(draw(polygons, 12, 16), expected)
    assert np.array_equal(draw({"counts": counts, "size": [12, 16]}, 12, 16), expected)
    compressed = tool.encode(np.asfortranarray(expected))
    assert np.array_equal(draw({**compressed, "counts": compressed["counts"].decode()}, 12, 16), expected)


# ---- building


def test_a_build_has_the_photographs_and_masks_in_order(coco, counted):
    objects = coco_objects(coco, ALL, size=32)
    assert objects.name == "coco" and objects.x.shape == (21, 3, 32, 32) and set(objects.counts().values()) == {3}
    assert counted == list(range(21))
    for i in range(21):
        assert objects.kind[i] == i % 7 and (objects.x[i].long() - 10 * i).abs().max() <= 2
    # the object covers rows 10..110 of 120 and columns 20..140 of 160: in thirty-seconds 2.7..29.3 and 4..28
    assert (objects.mask[:, 4:28, 5:27] == 255).all()
    assert objects.mask[:, [0, 31]].max() == 0 and objects.mask[:, :, [0, 1, 2, 29, 30, 31]].max() == 0
    assert abs((objects.mask / 255).mean() - 0.625) < 0.005


def test_it_is_built_once_and_opens_without_coco_or_pycocotools(coco, counted, monkeypatch, tmp_path):
    cache = tmp_path / "cache"
    objects = coco_objects(coco, ALL, cache=cache)
    assert sorted(path.name for path in cache.iterdir()) == ["objects-64.json", "objects-64.npy"]
    monkeypatch.setattr(builtins, "__import__", no_pycocotools(builtins.__import__))
    again = coco_objects(tmp_path / "nothing here", ALL, cache=cache)
    assert again.x.equal(objects.x) and again.mask.equal(objects.mask) and len(counted) == 21
    with pytest.raises(ImportError, match="pip install pycocotools"):
        coco_objects(coco, ALL, size=16, cache=cache)


def no_pycocotools(original):
    def fail(name, *args, **kwargs):
        if name.startswith("pycocotools"):
            raise ImportError(f"No module named {name!r}")
        return original(name, *args, **kwargs)

    return fail


@pytest.mark.parametrize("stop", [1, 10, 21])
def test_an_interrupted_build_goes_on_after_its_last_block(coco, counted, monkeypatch, stop):
    counting = module.cut_out

    def interrupted(photographs, o, size):
        if len(counted) == stop:
            raise KeyboardInterrupt
        return counting(photographs, o, size)

    if stop < 21:
        monkeypatch.setattr(module, "cut_out", interrupted)
    else:  # all blocks are there, and the joined file is not yet
        monkeypatch.setattr(module, "_checksum", lambda file: (_ for _ in ()).throw(KeyboardInterrupt()))
    with pytest.raises(KeyboardInterrupt):
        coco_objects(coco, ALL)
    assert not (coco / "coco" / "objects-64.json").exists()
    monkeypatch.undo()
    monkeypatch.setattr(module, "BLOCK", 4)
    monkeypatch.setattr(module, "cut_out", counting)
    resumed = coco_objects(coco, ALL)
    assert counted == [*range(stop), *range(stop // 4 * 4 if stop < 21 else 21, 21)]
    whole = coco_objects(coco, ALL, cache=coco / "afresh")
    assert resumed.x.equal(whole.x) and resumed.mask.equal(whole.mask)
    assert not list((coco / "coco").glob("*.part")) and not list(coco.rglob("*.tmp"))


def test_blocks_of_another_plan_are_not_used(coco, counted, monkeypatch):
    monkeypatch.setattr(module, "_checksum", lambda file: (_ for _ in ()).throw(KeyboardInterrupt()))
    with pytest.raises(KeyboardInterrupt):
        coco_objects(coco, ALL)
    (coco / "coco" / "objects-64.npy").unlink()
    monkeypatch.undo()
    write_annotations(coco, range(21), [record(50 + i, i, KINDS[-1 - i % 7]) for i in range(21)])
    assert coco_objects(coco, ALL).kind.tolist() == [6 - i % 7 for i in range(21)]
    assert len(counted) == 21  # undo took the counter away: the second build did not count


def test_damage_and_changed_annotations_are_refused_until_the_file_is_deleted(coco, counted):
    objects, file = coco_objects(coco, ALL), coco / "coco" / "objects-64.npy"
    content, about = file.read_bytes(), file.with_suffix(".json").read_bytes()
    for broken in (content[:-1], content + b"\0", content[:200] + bytes([content[200] ^ 1]) + content[201:]):
        file.write_bytes(broken)
        with pytest.raises(ValueError, match="objects-64.npy is damaged: its SHA-256 .* Delete objects-64.npy"):
            coco_objects(coco, ALL)
    file.write_bytes(content)
    for broken in (about[:-9], b"{}", b"[]", b""):
        file.with_suffix(".json").write_bytes(broken)
        with pytest.raises(ValueError, match="objects-64.json is damaged.* Delete objects-64.npy"):
            coco_objects(coco, ALL)
    file.with_suffix(".json").write_bytes(about)
    write_annotations(coco, range(21), [record(50 + i, i, KINDS[i % 7]) for i in range(20)])
    with pytest.raises(ValueError, match=r"was built from annotations of .* bytes, .* has .* Delete objects-64.npy"):
        coco_objects(coco, {"dog": (2, 1)})
    file.unlink()
    assert len(coco_objects(coco, {"dog": (2, 1)})) == 20 and len(objects) == 21


def test_shortages_are_listed_before_any_photograph_is_opened(coco, counted):
    with pytest.raises(ValueError, match="'coco' has: bus 4 needed, 3 found; cat 30 needed, 3 found$"):
        coco_objects(coco, {**ALL, "bus": (3, 1), "cat": (20, 10)})
    for i in (0, 7, 5):
        (coco / "coco" / "train2017" / f"{i:012}.jpg").unlink()
    with pytest.raises(FileNotFoundError, match=r"lacks 3 of the 21 .*\(truck 2, horse 1\), first 0{12}.jpg"):
        coco_objects(coco, ALL)
    assert counted == []
    with pytest.raises(FileNotFoundError, match="instances_train2017.json is not in .*SPARSE_IRM_DATA"):
        coco_objects(coco / "elsewhere", ALL)


def test_photographs_that_do_not_open_or_fit_are_named(coco, counted):
    path = coco / "coco" / "train2017" / f"{3:012}.jpg"
    path.write_bytes(path.read_bytes()[:300])
    with pytest.raises(ValueError, match="000003.jpg is damaged"):
        coco_objects(coco, ALL)
    Image.new("RGB", (WIDTH + 1, HEIGHT)).save(path)
    with pytest.raises(ValueError, match="000003.jpg must be 120x160 pixels, got 120x161"):
        coco_objects(coco, ALL)


@pytest.mark.parametrize(
    "change, error, told",
    [
        (dict(size=4), ValueError, "size must be at least 8"),
        (dict(size=64.0), TypeError, "size must be a whole number"),
        (dict(counts={"cow": (1, 1)}), ValueError, "counts must name kinds of 'coco': truck, .*; got 'cow'"),
        (dict(counts={"cat": 3}), TypeError, "counts must map each kind to"),
    ],
)
def test_bad_arguments_are_named_before_anything_is_read(tmp_path, change, error, told):
    with pytest.raises(error, match=told):
        coco_objects(tmp_path, **change)


# ---- the sample of the real COCO


def test_the_real_sample_where_it_lies(tmp_path):
    pytest.importorskip("pycocotools")
    folder = module.data_root() / "coco"
    counts = {"truck": (4, 1), "airplane": (4, 1), "bus": (2, 1), "zebra": (4, 1), "dog": (4, 1), "cat": (2, 1)}
    if not (folder / "annotations" / "instances_train2017.json").is_file() or len(list(folder.rglob("*.jpg"))) != 37:
        pytest.skip("needs the 37-image sample of COCO in $SPARSE_IRM_DATA/coco")
    objects = coco_objects(counts=counts, cache=tmp_path)
    assert objects.counts() == dict(truck=5, airplane=6, bus=5, zebra=5, dog=5, horse=2, cat=5)
    chosen = find_objects(folder / "annotations" / "instances_train2017.json")
    refused = {int(path.stem) for path in folder.rglob("*.jpg")} - {o.image for o in chosen}
    assert refused == {472, 404484, 536, 425989}
    for o, mask in zip(chosen, objects.mask):
        assert abs((mask / 255).mean() / (o.area / (o.height * o.width)) - 1) < 0.01

    benchmark = colored_object(objects, counts, n_held_out=4)
    assert [len(e) for e in benchmark.train + benchmark.held_out + benchmark.test] == [10, 10, 2, 2, 6]
    for environment in benchmark.train + benchmark.test:
        for x, ground in zip(environment.x, environment.spurious):
            flat = (x == torch.tensor(GROUNDS[ground])[:, None, None]).all(0)
            other = (x == torch.tensor(GROUNDS[1 - ground])[:, None, None]).all(0)
            assert flat.double().mean() > 0.1 and other.double().mean() < 0.01
