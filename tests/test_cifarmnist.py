import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from sparse_irm.cifarmnist import (
    IMAGENET_MEAN,
    IMAGENET_STD,
    cifar_mnist,
    deal,
    frame,
    mark,
    shuffle_and_draw,
    split_evenly,
)
from sparse_irm.environments import join
from sparse_irm.sources import Images, digits, load, photographs

SIZES = dict(n_train=300, n_test=60, n_held_out=40)


@pytest.fixture(scope="module")
def patches():
    return photographs()


@pytest.fixture(scope="module")
def numerals():
    return digits()


def groups(benchmark):
    return benchmark.train + benchmark.held_out + benchmark.test


def pixels(environment):
    "The bytes an environment was made from, uint8 [n, 3, 64, 32]."
    mean, std = (torch.tensor(values)[:, None, None] for values in (IMAGENET_MEAN, IMAGENET_STD))
    return ((environment.x * std + mean) * 255).round().to(torch.uint8)


@given(st.lists(st.integers(0, 4), max_size=60), st.floats(0, 1), st.integers(0, 1000))
def test_mark_gives_the_exact_total_and_each_group_its_share(groups, share, seed):
    groups = torch.tensor(groups, dtype=torch.int64)
    marked = mark(groups, share, torch.rand(len(groups), generator=torch.Generator().manual_seed(seed)))
    k = round(share * len(groups))
    assert marked.shape == groups.shape and marked.sum() == k
    for value in groups.unique():
        inside = groups == value
        assert abs(marked[inside].sum() - k * inside.sum() / len(groups)) < 1


def test_mark_leaves_the_choice_within_a_group_to_chance():
    groups, generator = torch.arange(40) % 2, torch.Generator().manual_seed(0)
    times = sum(mark(groups, 0.1, torch.rand(40, generator=generator)).long() for _ in range(1_000))
    assert times.sum() == 4_000 and 60 < times.min() and times.max() < 140  # 100 give or take 9.5 each


@given(st.integers(0, 50), st.integers(1, 7))
def test_split_evenly_adds_up(n, parts):
    sizes = split_evenly(n, parts)
    assert sum(sizes) == n and len(sizes) == parts and max(sizes) - min(sizes) <= 1


@given(st.lists(st.integers(0, 9), min_size=1, max_size=5), st.integers(0, 1000))
def test_deal_is_balanced_and_never_deals_twice(sizes, seed):
    y = torch.arange(60) % 2
    hands = deal(y, sizes, torch.Generator().manual_seed(seed))
    assert [len(hand) for hand in hands] == sizes
    assert len(torch.cat(hands).unique()) == sum(sizes)
    for hand, size in zip(hands, sizes):
        assert y[hand].sum() == size // 2


def test_shuffle_and_draw_keeps_the_rows():
    rows, u = shuffle_and_draw(torch.arange(10, 60), torch.Generator().manual_seed(0))
    assert rows.sort().values.equal(torch.arange(10, 60)) and not rows.equal(rows.sort().values)
    assert u.shape == (2, 50) and 0 <= u.min() and u.max() < 1 and len(u.unique()) == 100


def test_frame_keeps_mnist_pixels_and_enlarges_smaller_digits(numerals):
    grey = torch.randint(0, 256, (3, 28, 28), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    framed = frame(grey)
    assert framed[:, 2:30, 2:30].equal(grey) and framed.long().sum() == grey.long().sum()
    small = frame(numerals.x[:50])
    assert small.shape == (50, 32, 32) and small.dtype == torch.uint8
    means = (small[:, 2:30, 2:30].float().mean((1, 2)), numerals.x[:50].float().mean((1, 2)))
    assert (means[0] - means[1]).abs().max() < 0.06 * 255


def test_published_counts_shapes_and_scaling():
    generator = torch.Generator().manual_seed(0)
    y = torch.arange(12_000) % 2
    objects = Images("noise", torch.randint(0, 256, (12_000, 3, 32, 32), dtype=torch.uint8, generator=generator), y)
    grey = Images("grey", torch.full((14_000, 28, 28), 200, dtype=torch.uint8), torch.arange(14_000) % 2)
    benchmark = cifar_mnist(objects, grey, n_held_out=1_000, dtype=torch.bfloat16)
    assert (benchmark.name, benchmark.source, benchmark.n_classes) == ("CIFARMNIST", "noise+grey", 2)
    assert [len(e) for e in groups(benchmark)] == [5_000, 5_000, 500, 500, 1_000]
    assert [int(e.agrees.sum()) for e in groups(benchmark)] == [4_995, 3_500, 500, 350, 100]
    for environment in groups(benchmark):
        assert environment.y.sum() * 2 == len(environment)  # as many flips from 0 as from 1
        assert environment.x.shape[1:] == (3, 64, 32) and environment.x.dtype == torch.bfloat16
    expected = torch.tensor([(200 / 255 - m) / s for m, s in zip(IMAGENET_MEAN, IMAGENET_STD)])
    assert (benchmark.train[0].x[:, :, 16, 16].float() - expected).abs().max() < 0.02


def test_a_tenth_of_each_class_is_flipped_whatever_the_digit_says(patches, numerals):
    benchmark = cifar_mnist(patches, numerals, n_train=1_600, n_test=200)
    clean_of = {image.numpy().tobytes(): int(label) for image, label in zip(patches.x, patches.y)}
    for environment in groups(benchmark):
        clean = torch.tensor([clean_of[image.numpy().tobytes()] for image in pixels(environment)[:, :, 32:]])
        n = len(environment)
        assert clean.sum() == n // 2
        for value in (0, 1):
            assert (environment.y != clean)[clean == value].sum() == n // 20
        flipped = environment.y != clean
        for value in (False, True):
            rate = environment.agrees[flipped == value].double().mean()
            assert abs(rate - environment.agreement) * (flipped == value).sum() < 2


def test_digits_show_the_spurious_value_and_differ_until_all_were_used(patches, numerals):
    benchmark = cifar_mnist(patches, numerals, **SIZES)
    row_of = {image.numpy().tobytes(): i for i, image in enumerate(frame(numerals.x))}
    rows, values = [], []
    for environment in groups(benchmark):
        upper = pixels(environment)[:, :, :32]
        assert upper[:, 0].equal(upper[:, 1]) and upper[:, 0].equal(upper[:, 2])
        rows += [row_of[image.numpy().tobytes()] for image in upper[:, 0]]
        values += environment.spurious.tolist()
    assert numerals.y[rows].tolist() == values
    for value, available in ((0, 178), (1, 182)):
        drawn = [row for row, v in zip(rows, values) if v == value]
        assert len(set(drawn)) == min(len(drawn), available)


def test_one_block_of_memory_per_group_and_reproducible_by_seed(patches, numerals):
    make = lambda **kw: cifar_mnist(patches, numerals, **{**SIZES, **kw})
    first, again, other = make(seed=3), make(seed=3), make(seed=4)
    for a, b, c in zip(groups(first), groups(again), groups(other)):
        assert a.x.equal(b.x) and a.y.equal(b.y) and a.spurious.equal(b.spurious)
        assert not a.x.equal(c.x)
    assert join([e.x for e in first.train]).data_ptr() == first.train[0].x.data_ptr()
    more = make(seed=3, n_held_out=0)
    assert more.held_out == () and all(a.x.equal(b.x) for a, b in zip(first.train + first.test, more.train + more.test))


def test_test_environments_share_images_and_labels(patches, numerals):
    a, b = cifar_mnist(patches, numerals, **SIZES, test_correlations=(0.1, 0.9)).test
    assert a.x[:, :, 32:].equal(b.x[:, :, 32:]) and a.y.equal(b.y)
    assert (a.agrees.sum(), b.agrees.sum()) == (6, 54)


def test_oracle_has_the_same_draws_and_no_digit(patches, numerals):
    benchmark = cifar_mnist(patches, numerals, **SIZES, seed=2).to(dtype=torch.float64)
    twin = benchmark.oracle()
    assert twin.name == "CIFARMNIST oracle" and twin.train[0].x.dtype == torch.float64
    for a, b in zip(groups(benchmark), groups(twin)):
        assert a.y.equal(b.y) and a.spurious.equal(b.spurious) and a.x[:, :, 32:].equal(b.x[:, :, 32:])
        assert len(b.x[:, :, :32].flatten(1).unique(dim=0)) == 1
    assert cifar_mnist(patches, numerals, **SIZES, seed=2, oracle=True).test[0].x.double().equal(twin.test[0].x)


@pytest.mark.parametrize(
    "change, error, told",
    [
        (dict(n_train=2_000, n_test=100), ValueError, "need 1,070 images of class 0 .* 1, found 1,040 and 1,040"),
        (dict(n_test=0), ValueError, "n_test must be at least 1, got 0"),
        (dict(n_train=1), ValueError, "n_train must be at least 2"),
        (dict(n_held_out=1), ValueError, "n_held_out must be 0 or at least 2"),
        (dict(label_noise=1.5), ValueError, r"label_noise must be in \[0, 1\], got 1.5"),
        (dict(correlations=(0.9, -0.1)), ValueError, r"correlations\[1\] must be in \[0, 1\]"),
        (dict(dtype=torch.int32), TypeError, "dtype must be one of"),
        (dict(seed=0.5), TypeError, "seed must be a whole number"),
        (dict(objects="cifar10"), TypeError, "objects must be an Images.*got str"),
        (dict(digits=None), TypeError, "digits must be an Images.*got NoneType"),
    ],
)
def test_bad_arguments_are_named(patches, numerals, change, error, told):
    with pytest.raises(error, match=told):
        cifar_mnist(**{"objects": patches, "digits": numerals, **SIZES, **change})


def test_images_that_do_not_fit_are_named(patches, numerals):
    with pytest.raises(ValueError, match=r"objects must be colour images \[n, 3, 32, 32\], got Images\('digits'"):
        cifar_mnist(numerals, numerals)
    ten = Images("ten", patches.x[:100], torch.arange(100) % 10)
    with pytest.raises(ValueError, match=r"objects must have labels 0 and 1, got \[0, 1, 2, 3"):
        cifar_mnist(ten, numerals)
    with pytest.raises(ValueError, match=r"digits must be grey \[n, h, w\], got Images\('photographs'"):
        cifar_mnist(patches, patches)
    eights = Images("eights", numerals.x[numerals.y == 8], numerals.y[numerals.y == 8])
    with pytest.raises(ValueError, match="digits must hold zeros and ones, found no 0"):
        cifar_mnist(patches, eights, **SIZES)


def test_real_sources_where_they_lie():
    try:
        vehicles, numerals = load("cifar10-jpeg"), load("mnist")
    except FileNotFoundError as error:
        pytest.skip(f"needs the real images: {error}")
    benchmark = cifar_mnist(vehicles, numerals, dtype=torch.bfloat16)
    assert benchmark.source == "cifar10-jpeg+mnist"
    assert [int(e.agrees.sum()) for e in groups(benchmark)] == [4_995, 3_500, 100]
