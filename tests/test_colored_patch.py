"""ColoredPatchMNIST is ColoredMNIST with a patch, at the rates it says, in every cell of its grid."""
import pytest
import torch

from sparse_irm.colored_patch import colored_patch_mnist, patch_of, stamp
from sparse_irm.environments import colored_mnist
from sparse_irm.sources import Images, digits


@pytest.fixture(scope='module')
def images():
    "Twenty thousand dim images: rates can be measured, and only a patch is as bright as 255."
    generator = torch.Generator().manual_seed(0)
    return Images('noise', torch.randint(0, 200, (20_000, 8, 8), generator=generator, dtype=torch.uint8),
                  torch.randint(0, 10, (20_000,), generator=generator))


def rate(values):
    return values.double().mean().item()


def near(share, p, n):
    return abs(share - p) <= 4.5 * (p * (1 - p) / n) ** 0.5


@pytest.mark.parametrize('seed', [0, 1])
def test_rates_are_as_told_and_independent_given_the_label(images, seed):
    b = colored_patch_mnist(images, n_train=8000, n_held_out=4000, seed=seed, test_correlations=(0.1, 0.6))
    pairs = [(0.9, 0.8), (0.8, 0.9)] * 2 + [(0.1, 0.1), (0.1, 0.6), (0.6, 0.1), (0.6, 0.6)]
    for e, (p, q) in zip([*b.train, *b.held_out, *b.test], pairs, strict=True):
        follows, n = patch_of(e.x) == e.y, len(e)
        assert near(rate(e.agrees), p, n) and near(rate(follows), q, n) and near(rate(e.agrees & follows), p * q, n)
        for label in (0, 1):
            assert near(rate(follows[e.y == label]), q, (e.y == label).sum().item())
        assert e.name.endswith(f'({p:g}, {q:g})')


def test_ends_of_the_rates(images):
    b = colored_patch_mnist(images, n_train=1000, correlations=(1, 0.5), patch_correlations=(0, 1),
                            test_correlations=(0.0, 1.0))
    wanted = [0, 1, 0, 1, 0, 1]
    assert [rate(patch_of(e.x) == e.y) for e in (*b.train, *b.test)] == wanted


def test_all_but_the_patch_is_colored_mnist():
    cells = (0.2, 0.2, 0.7, 0.7)
    ours = colored_patch_mnist(digits(), n_train=900, n_held_out=300, test_correlations=(0.2, 0.7), seed=3)
    plain = colored_mnist(digits(), n_train=900, n_held_out=300, test_correlations=cells, seed=3)
    for role in ('train', 'held_out', 'test'):
        for a, b in zip(getattr(ours, role), getattr(plain, role), strict=True):
            again = b.x.clone()
            stamp(again, patch_of(a.x))
            assert torch.equal(a.x, again) and torch.equal(a.y, b.y) and torch.equal(a.spurious, b.spurious)


def test_cells_share_their_random_numbers(images):
    "More correlation moves patches towards the label and none away from it."
    b = colored_patch_mnist(images, n_train=1000, test_correlations=(0.1, 0.5, 0.9))
    low, middle, high = (patch_of(e.x) == e.y for e in b.test[:3])
    assert (low <= middle).all() and (middle <= high).all()
    assert all(torch.equal(patch_of(b.test[i].x), patch_of(b.test[i + 3].x)) for i in range(6))


@pytest.mark.parametrize('h, w, side', [(3, 5, 1), (8, 8, 2), (14, 14, 3), (8, 20, 2)])
@pytest.mark.parametrize('dtype', [torch.float32, torch.bfloat16])
def test_a_stamp_changes_its_corner_and_nothing_else(h, w, side, dtype):
    x = torch.zeros(6, 2, h, w, dtype=dtype)
    patch = torch.tensor([0, 1, 1, 0, 1, 0])
    stamp(x, patch)
    assert torch.equal(patch_of(x), patch)
    assert (x.sum((1, 2, 3)) == 2 * side ** 2).all()
    assert (x[patch == 0, :, :side, :side] == 1).all() and (x[patch == 1, :, h - side:, w - side:] == 1).all()


def test_seeds_repeat_and_differ():
    a, b, c = (colored_patch_mnist(digits(), n_train=900, seed=s) for s in (0, 0, 1))
    assert torch.equal(a.train[0].x, b.train[0].x) and not torch.equal(a.train[0].x, c.train[0].x)


def test_patches_do_not_follow_the_other_draws(images):
    "What the colour does, what the patch does, and the label go together in no pair."
    b = colored_patch_mnist(images, n_train=10_000, correlations=(0.5, 0.5), patch_correlations=(0.5, 0.5))
    flips = torch.stack([torch.cat([v(e) for e in b.train]).double()
                         for v in (lambda e: e.agrees, lambda e: patch_of(e.x) == e.y, lambda e: e.y == 1)])
    off = torch.corrcoef(flips) - torch.eye(3)
    assert off.abs().max() < 4.5 / 10_000 ** 0.5


def test_the_oracle_sees_neither_feature_and_the_layout_stays():
    b = colored_patch_mnist(digits(), n_train=900, n_held_out=300)
    plain, oracle = colored_mnist(digits(), n_train=900, n_held_out=300).oracle(), b.oracle()
    assert torch.equal(oracle.train[1].x, plain.train[1].x) and torch.equal(oracle.train[1].y, b.train[1].y)
    assert torch.equal(oracle.test[5].x, plain.test[0].x) and len(oracle.test) == 9
    assert oracle.name == 'ColoredPatchMNIST oracle' and oracle.n_classes == 2
    for group in (b.train, b.held_out, b.test):
        assert len({e.x.untyped_storage().data_ptr() for e in group}) == 1


@pytest.mark.parametrize('changes, told', [
    (dict(patch_correlations=(0.8,)), 'patch_correlations must hold 2 numbers'),
    (dict(patch_correlations=(0.8, 1.2)), r'patch_correlations\[1\]'),
    (dict(test_correlations=(-0.1,)), r'test_correlations\[0\]'),
    (dict(test_correlations=()), 'test_correlations must hold'),
    (dict(correlations=(0.9, 2)), r'correlations\[1\]'), (dict(n_train=5000), 'n_train'),
])
def test_wrong_values_are_refused_by_name(changes, told):
    with pytest.raises(ValueError, match=told):
        colored_patch_mnist(digits(), **{'n_train': 900, **changes})


@pytest.mark.parametrize('changes, told', [(dict(patch_correlations=0.8), 'patch_correlations'),
                                           (dict(test_correlations=0.1), 'test_correlations')])
def test_wrong_types_are_refused_by_name(changes, told):
    with pytest.raises(TypeError, match=told):
        colored_patch_mnist(digits(), **{'n_train': 900, **changes})
