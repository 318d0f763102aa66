import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from sparse_irm.colored_object import (
    COCO_COUNTS,
    COCO_LABELS,
    FASHION_KINDS,
    GROUNDS,
    Objects,
    blobs,
    colored_object,
    cut_from_black,
    even_counts,
    fashion_objects,
    paste,
    photograph_blobs,
)
from sparse_irm.environments import join
from sparse_irm.sources import Images


def numbered(counts, side=4):
    "Objects of the COCO kinds whose red and green values number them and whose mask is the left half."
    kind = torch.tensor([k for k, n in enumerate(counts) for _ in range(n)])
    x = torch.zeros(len(kind), 3, side, side, dtype=torch.uint8)
    x[:, 0], x[:, 1] = (torch.arange(len(kind)) // 256)[:, None, None], (torch.arange(len(kind)) % 256)[:, None, None]
    mask = torch.zeros(len(kind), side, side, dtype=torch.uint8)
    mask[:, :, : side // 2] = 255
    return Objects("numbered", x, mask, kind, COCO_LABELS)


def groups(benchmark):
    return benchmark.train + benchmark.held_out + benchmark.test


def rows(environment):
    "Which of the numbered objects an environment holds."
    value = (environment.x[:, :2, 0, 0].double() * 255).round().long()
    return value[:, 0] * 256 + value[:, 1]


@pytest.fixture(scope="module")
def pool():
    return numbered([2_400, 2_150, 2_650, 1_400, 2_200, 1_800, 1_900])


@pytest.fixture(scope="module")
def published(pool):
    return colored_object(pool, n_held_out=600)


def test_published_counts(published):
    assert (published.name, published.source, published.n_classes) == ("ColoredObject", "numbered", 2)
    assert [len(e) for e in groups(published)] == [6_000, 6_000, 300, 300, 1_800]
    assert [int(e.agrees.sum()) for e in groups(published)] == [5_994, 4_200, 300, 210, 180]
    for part, total in enumerate((12_000, 1_800)):
        assert sum(counts[part] for counts in COCO_COUNTS.values()) == total


def test_half_of_each_kind_in_each_environment_and_no_object_twice(pool, published):
    numbers = [rows(e) for e in groups(published)]
    assert len(torch.cat(numbers).unique()) == 12_000 + 600 + 1_800
    kinds = [pool.kind[r].bincount(minlength=7).tolist() for r in numbers]
    assert kinds[0] == kinds[1] == [n // 2 for n, _ in COCO_COUNTS.values()]
    assert kinds[4] == [n for _, n in COCO_COUNTS.values()]
    for held_out in kinds[2:4]:
        assert sum(held_out[:3]) == sum(held_out[3:]) == 150


def test_noise_is_five_per_cent_of_each_kind_but_not_at_test_time(pool, published):
    labels = torch.tensor(list(COCO_LABELS.values()))
    for environment in published.train:
        kind = pool.kind[rows(environment)]
        wrong = environment.y != labels[kind]
        assert wrong.sum() == 300
        for k in range(7):
            assert abs(wrong[kind == k].sum() - 0.05 * (kind == k).sum()) < 1
    (test,) = published.test
    assert test.y.equal(labels[pool.kind[rows(test)]])


def test_ground_and_object_pixels(published):
    for environment in groups(published):
        assert environment.x[:, :, 0, 3].equal(torch.tensor(GROUNDS)[environment.spurious])
        assert environment.x[:, 2, 0, 0].max() == 0  # the numbered objects have no blue
    grey, green = (torch.tensor(g) * 255 for g in GROUNDS)
    assert grey.round().tolist() == [96, 96, 96] and green.round().tolist() == [0, 96, 0]


def test_paste_mixes_by_the_mask():
    x = torch.full((1, 3, 1, 3), 200, dtype=torch.uint8)
    mask = torch.tensor([[[0, 51, 255]]], dtype=torch.uint8)
    objects = Objects("grey", x, mask, torch.tensor([0]), {"bus": 0, "dog": 1})
    out = paste(objects, torch.tensor([0, 0]), torch.tensor([[0.0, 0.5, 1.0]] * 2), torch.float64)
    v = 200 / 255
    expected = [[0.0, 0.2 * v, v], [0.5, 0.2 * v + 0.4, v], [1.0, 0.2 * v + 0.8, v]]
    assert (out - torch.tensor(expected, dtype=torch.float64)[None, :, None]).abs().max() < 1e-6


def test_oracle_has_the_same_draws_on_one_ground(pool, published):
    twin = published.oracle()
    assert twin.name == "ColoredObject oracle"
    for a, b in zip(groups(published), groups(twin)):
        assert a.y.equal(b.y) and a.spurious.equal(b.spurious) and rows(a).equal(rows(b))
        assert (b.x[:, :, 0, 3] == torch.tensor(GROUNDS[0])).all()


def test_reproducible_by_seed_one_block_and_unmoved_by_held_out(pool, published):
    again, other, without = (colored_object(pool, **kw) for kw in (dict(n_held_out=600), dict(seed=1), {}))
    shown = [made.train + made.test for made in (published, again, other, without)]
    for a, b, c, d in zip(*shown):
        assert a.x.equal(b.x) and a.y.equal(b.y) and a.x.equal(d.x) and a.y.equal(d.y)
        assert not rows(a).equal(rows(c))
    assert without.held_out == () and join([e.x for e in published.train]).data_ptr() == published.train[0].x.data_ptr()


def test_test_environments_share_objects_and_labels():
    objects = numbered([20] * 7)
    counts = even_counts(COCO_LABELS, 60, 40)
    a, b = colored_object(objects, counts, test_correlations=(0.1, 0.9)).test
    assert rows(a).equal(rows(b)) and a.y.equal(b.y) and (int(a.agrees.sum()), int(b.agrees.sum())) == (4, 36)


def test_kinds_not_counted_are_not_used():
    objects = numbered([20] * 7)
    benchmark = colored_object(objects, {"bus": (10, 2), "cat": (10, 2)}, n_held_out=8, dtype=torch.bfloat16)
    used = torch.cat([rows(e) for e in groups(benchmark)])
    assert set(objects.kind[used].tolist()) == {2, 6} and benchmark.train[0].x.dtype == torch.bfloat16


@given(st.integers(0, 60), st.integers(0, 60), st.integers(1, 4), st.integers(1, 4))
def test_even_counts_add_up(n_train, n_test, zeros, ones):
    labels = {**{f"a{i}": 0 for i in range(zeros)}, **{f"b{i}": 1 for i in range(ones)}}
    counts = even_counts(labels, n_train, n_test)
    assert set(counts) == set(labels)
    for part, n in enumerate((n_train, n_test)):
        per_class = [sum(counts[k][part] for k in labels if labels[k] == c) for c in (0, 1)]
        assert per_class == [(n + 1) // 2, n // 2]


@pytest.mark.parametrize(
    "change, error, told",
    [
        (dict(counts=COCO_COUNTS), ValueError, "'numbered' has: truck 2,300 needed, 9 found; .*; cat 1,825 needed, 9 found$"),
        (dict(counts={"cow": (1, 1)}), ValueError, "counts must name kinds of 'numbered': truck, .*; got 'cow'"),
        (dict(counts={"cat": (4, 2), "dog": (4, 2)}), ValueError, "both classes of 'numbered', got cat, dog"),
        (dict(counts={}), ValueError, "both classes of 'numbered', got none"),
        (dict(counts={"cat": 4}), TypeError, "counts must map each kind to"),
        (dict(counts={"cat": (4.0, 2)}), TypeError, r"counts\['cat'\] training must be a whole number"),
        (dict(counts={"cat": (4, 0)}), ValueError, r"counts\['cat'\] test must be at least 1"),
        (dict(counts={"cat": (1, 1), "bus": (4, 1)}), ValueError, "counts must have 2 training objects of a kind.*got 1"),
        (dict(n_held_out=7), ValueError, "needs 4 more objects of class 0 and 3 of class 1, 'numbered' has 3 and 3 left"),
        (dict(n_held_out=1), ValueError, "n_held_out must be 0 or at least 2"),
        (dict(label_noise=-1), ValueError, r"label_noise must be in \[0, 1\]"),
        (dict(objects="coco"), TypeError, "objects must be an Objects, got str"),
    ],
)
def test_bad_arguments_are_named(change, error, told):
    good = dict(objects=numbered([9] * 7), counts={"truck": (4, 2), "cat": (4, 2)})
    with pytest.raises(error, match=told):
        colored_object(**{**good, **change})


def test_objects_refuse_what_does_not_fit():
    good = numbered([1] * 7)
    parts = dict(name="bad", x=good.x, mask=good.mask, kind=good.kind, labels=good.labels)
    for change, error, told in (
        (dict(x=good.x.float()), TypeError, "x must be a torch.uint8 tensor, got torch.float32"),
        (dict(mask=None), TypeError, "mask must be a torch.uint8 tensor, got NoneType"),
        (dict(x=good.x[:, :2]), ValueError, r"got \[7, 2, 4, 4\], \[7, 4, 4\], \[7\]"),
        (dict(x=good.mask), ValueError, r"got \[7, 4, 4\], \[7, 4, 4\], \[7\]"),
        (dict(mask=good.mask[:, 1:]), ValueError, r"\[7, 3, 4\]"),
        (dict(kind=good.kind[1:]), ValueError, r"\[6\]"),
        (dict(kind=good.kind + 1), ValueError, r"kind must be in 0..6, got 1..7"),
        (dict(labels={"a": 0, "b": 2}), ValueError, "labels must map kinds to 0 and 1"),
    ):
        with pytest.raises(error, match=told):
            Objects(**{**parts, **change})


def test_blobs_are_smooth_single_and_seeded():
    mask = blobs(200, 32, torch.Generator().manual_seed(0))
    assert mask.shape == (200, 32, 32) and mask.equal(blobs(200, 32, torch.Generator().manual_seed(0)))
    assert (mask[:, 16, 16] == 255).all() and mask[:, ::31, ::31].max() == 0
    soft = ((mask > 0) & (mask < 255)).float().mean((1, 2))
    assert 0.02 < soft.min() and soft.max() < 0.2
    changes = (mask > 127).byte().diff(dim=2).ne(0).sum(2)  # outline crossings of each row: 0, 2, rarely 4
    assert (changes <= 2).double().mean() > 0.97


def test_embedded_objects_build_a_benchmark():
    objects = photograph_blobs()
    assert objects.name == "photograph-blobs" and objects.counts() == {"china": 1_040, "flower": 1_040}
    benchmark = colored_object(objects, even_counts(objects.labels, 200, 40), n_held_out=20)
    assert benchmark.source == "photograph-blobs" and benchmark.train[0].x.shape == (100, 3, 32, 32)
    assert not objects.mask.equal(photograph_blobs(seed=1).mask)


def test_cut_from_black_keeps_eight_kinds_and_what_is_not_black():
    x = torch.zeros(20, 5, 5, dtype=torch.uint8)
    x[:, 1:4, 2] = torch.arange(1, 21, dtype=torch.uint8)[:, None]
    objects = cut_from_black(Images("garments", x, torch.arange(20) % 10))
    assert objects.name == "garments" and set(objects.counts().values()) == {2}
    names = [list(FASHION_KINDS)[k] for k in objects.kind]
    assert [FASHION_KINDS[name][0] for name in names] == [i % 10 for i in range(20) if i % 10 not in (3, 4)]
    assert objects.mask.eq(255).sum() == 16 * 3 and objects.mask.ne(0).sum() == 16 * 3
    assert objects.x[0, :, 1, 2].tolist() == [1, 1, 1]


def test_real_fashion_mnist_where_it_lies():
    try:
        objects = fashion_objects()
    except FileNotFoundError as error:
        pytest.skip(f"needs the real Fashion-MNIST: {error}")
    assert set(objects.counts().values()) == {7_000}
    share = (objects.mask > 0).double().mean((1, 2))
    by_kind = {kind: share[objects.kind == k].mean().item() for k, kind in enumerate(objects.labels)}
    assert by_kind["trouser"] < by_kind["pullover"] and by_kind["sandal"] < by_kind["bag"]
    benchmark = colored_object(objects, even_counts(objects.labels, 12_000, 1_800), dtype=torch.bfloat16)
    assert [int(e.agrees.sum()) for e in groups(benchmark)] == [5_994, 4_200, 180]
