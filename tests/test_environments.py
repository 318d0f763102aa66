import copy
import pickle
from functools import partial

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from sparse_irm.environments import (
    TEN_COLOURS,
    Environment,
    colored_mnist,
    from_arrays,
    full_colored_mnist,
    join,
    keep_or_move,
    paint,
    show_environments,
    subsample,
)
from sparse_irm.sources import Images, digits, mnist

MAKERS = [colored_mnist, full_colored_mnist]


@pytest.fixture(scope="module")
def small():
    return digits()


@pytest.fixture(scope="module")
def real():
    try:
        return mnist()
    except FileNotFoundError as error:
        pytest.skip(f"needs the real MNIST: {error}")


def groups(benchmark):
    return benchmark.train + benchmark.held_out + benchmark.test


def close(hits, p, sigmas=4):
    "Is the rate of `hits` within `sigmas` binomial standard deviations of p?"
    return abs(hits.double().mean().item() - p) <= sigmas * (p * (1 - p) / len(hits)) ** 0.5


def same(a, b):
    pairs = zip(groups(a), groups(b), strict=True)
    return all(p.x.equal(q.x) and p.y.equal(q.y) and p.spurious.equal(q.spurious) for p, q in pairs)


# ---- the published facts, on the real images


@pytest.mark.parametrize(
    "make, label_noise, correlations", [(colored_mnist, 0.25, (0.9, 0.8)), (full_colored_mnist, 0.2, (0.999, 0.7))]
)
@pytest.mark.parametrize("n_train", [20_000, 50_000])
def test_published_sizes_and_rates(real, make, label_noise, correlations, n_train):
    b, clean = (make(real, n_train, 10_000, label_noise=noise) for noise in (label_noise, 0.0))
    assert [len(e) for e in b.train] == [n_train // 2] * 2
    assert [len(e) for e in b.held_out] == [5_000] * 2
    assert [len(e) for e in b.test] == [60_000 - n_train]
    for e, truth, p in zip(groups(b), groups(clean), (*correlations, *correlations, 0.1), strict=True):
        assert close(e.agrees, p), e
        assert close(e.y == truth.y, 1 - label_noise), e


@pytest.mark.parametrize("make", MAKERS)
def test_every_published_pixel(real, make):
    "Test images are in the order of the source: grey 14x14 by every second pixel, /255, times the colour of the index."
    b = make(real, 20_000, 10_000)
    e, grey = b.test[0], real.x[20_000:60_000, ::2, ::2].float() / 255
    for colour in range(b.n_classes):
        rows = e.spurious == colour
        tint = [1.0 - colour, float(colour)] if make is colored_mnist else TEN_COLOURS[colour]
        for channel, strength in enumerate(tint):
            torch.testing.assert_close(e.x[rows, channel], grey[rows] * strength, rtol=1e-6, atol=0)


@pytest.mark.parametrize("make", MAKERS)
def test_train_and_held_out_images_are_the_first_and_the_last(real, make):
    b = make(real, 20_000, 10_000, oracle=True)
    for group, rows in ((b.train, slice(0, 20_000)), (b.held_out, slice(60_000, 70_000))):
        ours = join([e.x for e in group])[:, 0].flatten(1).double().mul(255).round().sum(1).sort().values
        theirs = real.x[rows, ::2, ::2].flatten(1).double().sum(1).sort().values
        assert ours.equal(theirs)


def test_binary_label_is_one_below_five(real):
    b = colored_mnist(real, 20_000, 10_000, label_noise=0.0)
    assert b.test[0].y.equal((real.y[20_000:60_000] < 5).long())
    assert full_colored_mnist(real, 20_000, 10_000, label_noise=0.0).test[0].y.equal(real.y[20_000:60_000])


def test_wrong_labels_and_wrong_colours_are_uniform_over_the_others(real):
    draw = partial(full_colored_mnist, real, 50_000, correlations=(0.7,))
    noisy, clean = (draw(label_noise=noise).train[0] for noise in (0.2, 0.0))
    for wrong, right in ((noisy.y, clean.y), (noisy.spurious, noisy.y)):
        moved = wrong != right
        shift = (wrong - right)[moved] % 10
        for step in range(1, 10):
            assert close(shift == step, 1 / 9)


def test_colour_is_drawn_after_the_noise_and_independent_of_it(real):
    draw = partial(colored_mnist, real, 50_000, correlations=(0.9,))
    noisy, clean = (draw(label_noise=noise).train[0] for noise in (0.25, 0.0))
    flipped = noisy.y != clean.y
    assert close(noisy.agrees[flipped], 0.9) and close(noisy.agrees[~flipped], 0.9)


# ---- properties, on the digits


@pytest.mark.parametrize("make", MAKERS)
def test_deterministic_given_the_seed(small, make):
    draw = partial(make, small, 1000, 200)
    assert same(draw(seed=3), draw(seed=3))
    for a, b in zip(groups(draw(seed=3)), groups(draw(seed=4)), strict=True):
        assert not a.y.equal(b.y) and not a.spurious.equal(b.spurious)


@pytest.mark.parametrize("make", MAKERS)
def test_drawing_leaves_the_global_random_state_alone(small, make):
    before = torch.get_rng_state()
    make(small, 1000)
    assert torch.get_rng_state().equal(before)


@pytest.mark.parametrize("make", MAKERS)
def test_oracle_has_the_same_draws_and_nothing_of_the_colour(small, make):
    b = make(small, 1000, 200, seed=5)
    twin = b.oracle()
    assert twin.name == f"{b.name} oracle" == twin.oracle().name and same(twin, twin.oracle())
    assert same(twin, make(small, 1000, 200, seed=5, oracle=True))
    other = make(small, 1000, 200, seed=5, correlations=(0.2, 0.1), test_correlations=(0.9,)).oracle()
    for e, t, o in zip(groups(b), groups(twin), groups(other), strict=True):
        assert e.y.equal(t.y) and e.spurious.equal(t.spurious)
        assert t.x.equal(o.x), "the inputs of the twin must not depend on the colours"
        assert (t.x == t.x[:, :1]).all()
    assert not groups(twin)[0].spurious.equal(groups(other)[0].spurious)


@settings(deadline=None, max_examples=30)
@given(
    n_train=st.integers(7, 1000), n_held_out=st.sampled_from([0, 7, 100, 301]),
    correlations=st.lists(st.floats(0, 1), min_size=1, max_size=7),
    tests=st.lists(st.floats(0, 1), min_size=1, max_size=3),
    make=st.sampled_from(MAKERS), dtype=st.sampled_from([torch.float32, torch.bfloat16]),
)
def test_any_split_has_the_right_sizes_and_one_block_per_group(n_train, n_held_out, correlations, tests, make, dtype):
    b = make(digits(), n_train, n_held_out, correlations, tests, dtype=dtype)
    for group, total in ((b.train, n_train), (b.held_out, n_held_out)):
        sizes = [len(e) for e in group]
        assert sum(sizes) == total and (not sizes or max(sizes) - min(sizes) <= 1)
    assert [len(e) for e in b.test] == [1797 - n_train - n_held_out] * len(tests)
    assert len({e.name for e in groups(b)}) == len(groups(b)), "names must tell environments apart"
    for group in filter(None, (b.train, b.held_out, b.test)):
        for key in ("x", "y", "spurious"):
            parts = [getattr(e, key) for e in group]
            assert join(parts).data_ptr() == parts[0].data_ptr()
    assert all(e.x.dtype == dtype and e.y.dtype == e.spurious.dtype == torch.int64 for e in groups(b))


def test_environments_take_every_second_shuffled_image(small):
    "The same shuffled images, dealt to one, two or three environments."
    deck = colored_mnist(small, 1000, correlations=(0.5,), oracle=True).train[0].x
    for hands in (2, 3):
        b = colored_mnist(small, 1000, correlations=(0.5,) * hands, oracle=True)
        for e, environment in enumerate(b.train):
            assert environment.x.equal(deck[e::hands])


@pytest.mark.parametrize("make", MAKERS)
def test_certain_and_impossible_agreement_are_exact(small, make):
    b = make(small, 1000, correlations=(1.0, 0.0), test_correlations=(0, 1))
    assert [e.agreement for e in groups(b)] == [1.0, 0.0, 0.0, 1.0]


def test_test_correlations_recolour_the_same_images_and_no_more_than_needed(small):
    b = full_colored_mnist(small, 1000, test_correlations=(0.2, 0.6, 0.2))
    low, high, again = b.test
    assert low.y.equal(high.y) and low.spurious.equal(again.spurious) and low.x.equal(again.x)
    assert (high.agrees | ~low.agrees).all(), "what agrees at 0.2 also agrees at 0.6"
    alone = full_colored_mnist(small, 1000, test_correlations=(0.6,)).test[0]
    assert alone.x.equal(high.x) and alone.spurious.equal(high.spurious)


@pytest.mark.parametrize("make", MAKERS)
def test_bfloat16_is_float32_rounded_once(small, make):
    assert same(make(small, 1000, 100, dtype=torch.bfloat16), make(small, 1000, 100).to(dtype=torch.bfloat16))


def test_moving_keeps_layout_draws_and_oracle(small):
    b = colored_mnist(small, 1001, 100)
    moved = b.to("cpu", torch.float64)
    assert same(moved, b.to(dtype=torch.float64)) and moved.name == b.name
    assert join([e.x for e in moved.train]).data_ptr() == moved.train[0].x.data_ptr()
    assert moved.oracle().train[0].x.dtype == torch.float64
    with pytest.raises(TypeError, match="dtype must be one of"):
        b.to(dtype=torch.int64)


def test_benchmarks_pickle_and_deepcopy_with_their_oracle(small):
    b = full_colored_mnist(small, 500, 50)
    for clone in (pickle.loads(pickle.dumps(b)), copy.deepcopy(b)):
        assert same(clone, b) and same(clone.oracle(), b.oracle())


@given(sizes=st.lists(st.integers(0, 4), min_size=1, max_size=5), width=st.integers(0, 3), data=st.data())
def test_join_is_concatenation(sizes, width, data):
    base = torch.arange(float(sum(sizes) * width)).view(sum(sizes), width)
    parts = list(base.split(sizes))
    order = data.draw(st.permutations(range(len(parts))))
    strided = [[p[::2] for p in parts], [p[:, :1] for p in parts]]
    for pieces in (parts, [parts[i] for i in order], *strided, [p.clone() for p in parts]):
        assert join(pieces).equal(torch.cat(pieces))


def test_join_keeps_gradients():
    base = torch.ones(4, 2, requires_grad=True)
    join((base * 2).split([1, 3])).sum().backward()
    assert base.grad.equal(torch.full((4, 2), 2.0))
    with pytest.raises(ValueError, match="at least one tensor"):
        join([])


@given(k=st.integers(2, 12), keep=st.floats(0, 1), seed=st.integers(0, 99))
def test_keep_or_move_stays_in_range_and_moves_exactly_the_rest(k, keep, seed):
    g = torch.Generator().manual_seed(seed)
    values, u = torch.randint(0, k, (50,), generator=g), torch.rand(50, generator=g)
    moved = keep_or_move(values, keep, u, torch.randint(1, k, (50,), generator=g), k)
    assert ((moved >= 0) & (moved < k)).all() and (moved == values).equal(u < keep)


@pytest.mark.parametrize("side, left", [(8, 8), (27, 27), (28, 14), (29, 15), (32, 16)])
def test_subsample_halves_from_28_on(side, left):
    x = torch.arange(side * side).view(1, side, side)
    assert subsample(x).shape == (1, left, left) and subsample(x)[0, 0, 1] == (1 if side < 28 else 2)


def test_paint_crosses_its_blocks_seamlessly():
    grey = torch.arange(256, dtype=torch.uint8).view(256, 1, 1)
    rows = torch.arange(3000) % 256
    x = paint(grey, rows, torch.tensor([[1.0, 0.5]]).expand(3000, 2), torch.float64)
    torch.testing.assert_close(x[:, :, 0, 0], rows[:, None] / 255 * torch.tensor([1.0, 0.5]), check_dtype=False)


# ---- bad input

RGB = Images("rgb", torch.zeros(2000, 3, 8, 8, dtype=torch.uint8), torch.zeros(2000).long())
LETTERS = Images("letters", torch.zeros(2000, 8, 8, dtype=torch.uint8), torch.arange(2000) % 26)


@pytest.mark.parametrize("make", MAKERS)
@pytest.mark.parametrize(
    "wrong, error, message",
    [
        (dict(correlations=(0.9, 1.1)), ValueError, r"correlations\[1\] must be in \[0, 1\], got 1.1"),
        (dict(correlations=(-0.1,)), ValueError, r"correlations\[0\] must be in \[0, 1\], got -0.1"),
        (dict(test_correlations=(float("nan"),)), ValueError, r"test_correlations\[0\] must be in \[0, 1\], got nan"),
        (dict(correlations=0.9), TypeError, "correlations must be a sequence of numbers"),
        (dict(correlations="0.9"), TypeError, "correlations must be a sequence of numbers"),
        (dict(correlations=("0.9",)), TypeError, r"correlations\[0\] must be a number"),
        (dict(correlations=()), ValueError, "correlations must hold at least one number"),
        (dict(test_correlations=[]), ValueError, "test_correlations must hold at least one number"),
        (dict(label_noise=25), ValueError, r"label_noise must be in \[0, 1\], got 25"),
        (dict(label_noise=None), TypeError, "label_noise must be a number"),
        (dict(n_train=1), ValueError, "n_train must be at least 2, got 1"),
        (dict(n_train=1000.0), TypeError, "n_train must be a whole number, got 1000.0"),
        (dict(n_train=1797), ValueError, r"must leave test images, got 1797 \+ 0 of the 1797 images of 'digits'"),
        (dict(n_train=1700, n_held_out=97), ValueError, r"must leave test images, got 1700 \+ 97 of the 1797"),
        (dict(n_held_out=-1), ValueError, "n_held_out must be at least 0, got -1"),
        (dict(n_held_out=1), ValueError, "n_held_out must be 0 or at least 2, one per environment, got 1"),
        (dict(seed=1.5), TypeError, "seed must be a whole number, got 1.5"),
        (dict(seed=True), TypeError, "seed must be a whole number, got True"),
        (dict(dtype=torch.int64), TypeError, "dtype must be one of torch.float32, .* got torch.int64"),
        (dict(dtype="float32"), TypeError, "dtype must be one of .* got 'float32'"),
        (dict(images="mnist"), TypeError, "images must be an Images, see sparse_irm.sources, got str"),
        (dict(images=RGB), ValueError, "images must be grey"),
        (dict(images=LETTERS), ValueError, "labels 0..9, got 0..25"),
    ],
)
def test_bad_settings_are_refused_by_name(small, make, wrong, error, message):
    with pytest.raises(error, match=message):
        make(**{"images": small, "n_train": 1000} | wrong)


def test_numpy_integers_are_numbers(small):
    assert same(colored_mnist(small, np.int64(1000), seed=np.int64(2)), colored_mnist(small, 1000, seed=2))


def test_settings_do_not_change_with_the_callers_list(small):
    correlations = [0.9, 0.8]
    b = colored_mnist(small, 1000, correlations=correlations)
    correlations[0] = 0.1
    assert b.oracle().train[0].spurious.equal(b.train[0].spurious)


# ---- own arrays


def arrays(n=4, d=3, k=2, dtype=np.float32):
    return np.ones((n, d), dtype), np.arange(n) % k, np.zeros(n, int)


def test_own_arrays_of_unequal_sizes_lie_in_one_block():
    x, y, s = arrays(5)
    b = from_arrays("mine", [arrays(4), (x, y.astype(np.uint8), s)], [arrays(1)], [arrays(2), arrays(3)], n_classes=2)
    assert [len(e) for e in groups(b)] == [4, 5, 1, 2, 3]
    assert [e.name for e in groups(b)] == ["train 0", "train 1", "held-out 0", "test 0", "test 1"]
    assert (b.source, b.n_classes) == ("own", 2)
    assert join([e.x for e in b.train]).data_ptr() == b.train[0].x.data_ptr()
    assert b.train[1].y.tolist() == [0, 1, 0, 1, 0] and b.train[1].y.dtype == torch.int64
    x[:] = 7
    assert (b.train[1].x == 1).all(), "the arrays are copied"
    with pytest.raises(ValueError, match="'mine' has no oracle"):
        b.oracle()


@pytest.mark.parametrize(
    "wrong, error, message",
    [
        (dict(train=[]), ValueError, "train must hold at least one environment"),
        (dict(test=[]), ValueError, "test must hold at least one environment"),
        (dict(train=[arrays(), arrays()[:2]]), ValueError, r"train\[1\] must be a triple"),
        (dict(test=[arrays(dtype=np.int64)]), TypeError, r"test\[0\]: x must be one of .* got torch.int64"),
        (dict(test=[(np.ones(4, np.float32), *arrays()[1:])]), ValueError, r"test\[0\]: x must be \[n, ...\]"),
        (dict(held_out=[arrays(0)]), ValueError, r"held_out\[0\]: x must be .* n >= 1, got \[0, 3\]"),
        (dict(held_out=[(arrays()[0], *arrays(3)[1:])]), ValueError, r"held_out\[0\]: y must be \[4\], .* got \[3\]"),
        (dict(train=[(*arrays()[:2], np.zeros((4, 1), int))]), ValueError, r"train\[0\]: spurious must be \[4\]"),
        (dict(train=[(arrays()[0], np.zeros(4), np.zeros(4, int))]), TypeError, r"y must be integers, .*float64"),
        (dict(train=[(*arrays()[:2], np.zeros(4, bool))]), TypeError, r"train\[0\]: spurious must be integers, .*bool"),
        (dict(train=[arrays(k=3)]), ValueError, r"train\[0\]: y must be in 0..1 \(n_classes=2\), got 0..2"),
        (dict(test=[arrays(d=5)]), ValueError, r"test\[0\]: rows of x must be .* \[3\] as in train\[0\], got .* \[5\]"),
        (dict(test=[arrays(dtype=np.float64)]), ValueError, r"test\[0\]: rows of x must be .* got torch.float64"),
        (dict(n_classes=1), ValueError, "n_classes must be at least 2, got 1"),
    ],
)
def test_bad_arrays_are_refused_by_place(wrong, error, message):
    with pytest.raises(error, match=message):
        from_arrays(**dict(name="mine", train=[arrays()], held_out=[], test=[arrays()], n_classes=2) | wrong)


# ---- pictures


def test_show_environments_draws_every_environment_with_its_labels_and_rate(small):
    import matplotlib

    matplotlib.use("Agg")
    b = colored_mnist(small, 1000, 100)
    figure = show_environments(b, n=5)
    axes = figure.axes
    assert len(axes) == len(groups(b))
    for axis, e in zip(axes, groups(b)):
        assert [tick.get_text() for tick in axis.get_xticklabels()] == [str(y) for y in e.y[:5].tolist()]
        assert f"{100 * e.agreement:.1f} %" in axis.get_title()
        assert axis.images[0].get_array().shape == (10, 50, 3)
    matplotlib.pyplot.close(figure)


def test_show_environments_refuses_what_is_no_picture(small):
    with pytest.raises(ValueError, match="got x"):
        show_environments(from_arrays("mine", [arrays()], [], [arrays()], n_classes=2))
    with pytest.raises(ValueError, match="n must be at least 1, got 0"):
        show_environments(colored_mnist(small, 1000), n=0)


def test_repr_is_short():
    e = Environment("tiny", torch.zeros(100, 2), torch.zeros(100).long(), torch.ones(100).long())
    assert repr(e) == "Environment('tiny', x=[100, 2] torch.float32, agreement=0.000)"
