"""Groups, closed forms, critical points and training of deep linear networks, on problems of their own."""
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from sparse_irm.deep_linear import (Regression, augmented, critical_points, cyclic, descent_direction, factors, flatten,
                                    gradient, hard_wired, hessian, in_basis, invariant_basis, permutations, product,
                                    projector, reduced_rank, reflections, regression, regularization_path, regularized,
                                    rotations, singular_directions, train, whitening)

GROUPS = {'cyclic': cyclic(4), 'permutations': permutations(3), 'rotations': rotations(3),
          'reflections': reflections(2)}


def normal(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def conjugated(group, seed):
    "The same group in a rotated coordinate system: orthogonal matrices that permute nothing."
    turn = torch.linalg.qr(normal(group.shape[1], group.shape[1], seed=seed)).Q
    return turn @ group @ turn.T


def problem_for(group, k=4, n=60, seed=0):
    "A regression without any symmetry, on the inputs of `group`."
    d = group.shape[1]
    x = normal(n, d, seed=seed) @ (torch.eye(d, dtype=torch.float64) + 0.3 * normal(d, d, seed=seed + 1))
    return regression(x, x @ normal(d, k, seed=seed + 2) + normal(n, k, seed=seed + 3))


@pytest.mark.parametrize('name', GROUPS)
@pytest.mark.parametrize('turned', [False, True])
def test_projector_keeps_exactly_what_the_group_fixes(name, turned):
    group = conjugated(GROUPS[name], seed=5) if turned else GROUPS[name]
    p, b = projector(group), invariant_basis(group)
    assert torch.allclose(p @ p, p) and torch.allclose(p, p.T) and torch.allclose(b @ b.T, p)
    assert torch.allclose(group @ b, b.expand(len(group), -1, -1))
    fixed = torch.linalg.eigvalsh(((torch.eye(len(p)) - group).mT @ (torch.eye(len(p)) - group)).sum(0)) < 1e-9
    assert fixed.sum() == b.shape[1]                            # nothing else is fixed by every element


def test_a_group_may_act_through_fewer_matrices_than_elements():
    assert torch.equal(projector(cyclic(3).repeat(2, 1, 1)), projector(cyclic(3)))
    assert torch.equal(projector(torch.eye(3)[None]), torch.eye(3, dtype=torch.float64))


@pytest.mark.parametrize('bad, error', [
    (cyclic(4)[:3], ValueError), (cyclic(4)[1:], ValueError), (2 * cyclic(4), ValueError),
    (torch.cat([cyclic(4), cyclic(4)[:1]]), ValueError),        # one element counted twice: the mean is no projector
    (torch.full((1, 2, 2), math.nan), ValueError), (cyclic(4)[0], TypeError), (torch.zeros(0, 2, 2), TypeError),
    (torch.zeros(2, 2, 3), TypeError), (cyclic(4).tolist(), TypeError)])
def test_projector_refuses_what_is_no_group(bad, error):
    with pytest.raises(error, match='group: got'):
        projector(bad)


@pytest.mark.parametrize('make', [cyclic, permutations, rotations, reflections])
@pytest.mark.parametrize('size, error', [(0, ValueError), (-1, ValueError), (2.0, TypeError), (True, TypeError)])
def test_groups_refuse_sizes(make, size, error):
    with pytest.raises(error, match='got .* takes a positive integer'):
        make(size)


def test_permutations_stop_where_they_explode():
    with pytest.raises(ValueError, match='up to 6'):
        permutations(7)


def test_moments_refuse_and_convert():
    x, y = normal(5, 3), normal(5, 2)
    assert regression(x.float(), y.float()).sigma.dtype == torch.float64
    for bad in ((x[0], y), (x, y[:4]), (x[:0], y[:0]), (x / 0, y)):
        with pytest.raises(ValueError, match='x, y: got .* takes'):
            regression(*bad)
    for sigma, cross in ((torch.eye(2), torch.eye(3)), (torch.tensor(1.), torch.tensor(1.)), (torch.eye(2), torch.ones(2))):
        with pytest.raises(ValueError, match='sigma, cross: got'):
            Regression(sigma, cross, torch.tensor(0.))
    with pytest.raises(TypeError, match='x, y: got list and Tensor, takes tensors'):
        regression(x.tolist(), y)


def test_problems_refuse_other_sizes_and_weights():
    problem, group = problem_for(cyclic(4)), cyclic(4)
    for way in (augmented, hard_wired, lambda p, g: regularized(p, g, 1.)):
        with pytest.raises(ValueError, match='acts on 3 inputs'):
            way(problem, cyclic(3))
    with pytest.raises(ValueError, match='one row per input'):
        in_basis(problem, torch.eye(3))
    for lam in (-1., math.inf, math.nan, 1e18):
        with pytest.raises(ValueError, match='lam: got'):
            regularized(problem, group, lam)
    for rank, error in ((0, ValueError), (5, ValueError), (1.0, TypeError)):
        for function in (reduced_rank, critical_points, train, lambda p, r: regularization_path(p, group, r, [1.])):
            with pytest.raises(error, match='rank: got'):
                function(problem, rank)
    for depth in (0, 1):
        with pytest.raises(ValueError, match=f'depth: got {depth}, takes'):
            train(problem, 2, depth)
    for steps in (0, -1):
        with pytest.raises(ValueError, match=f'steps: got {steps}, takes'):
            train(problem, 2, steps=steps)
    with pytest.raises(ValueError, match='lams: got none'):
        regularization_path(problem, group, 2, [])


@settings(deadline=None, max_examples=30)
@given(st.sampled_from(sorted(GROUPS)), st.integers(0, 1000), st.integers(1, 3), st.integers(3, 40))
def test_no_map_beats_the_closed_form(name, seed, rank, n):
    "Also with fewer samples than inputs, where sigma is singular; under every way, against random maps near and far."
    group = conjugated(GROUPS[name], seed)
    plain = problem_for(group, n=n, seed=seed)
    for problem in (plain, augmented(plain, group), regularized(plain, group, 0.3), hard_wired(plain, group)):
        if rank > min(problem.cross.shape):
            continue
        best = reduced_rank(problem, rank)
        weights = [normal(rank, best.shape[1], seed=seed), normal(best.shape[0], rank, seed=seed + 1)]
        assert torch.linalg.matrix_rank(best) <= rank
        assert problem.loss(best) <= problem.loss(product(weights)) + 1e-9
        u, s, vt = torch.linalg.svd(best + 1e-3 * normal(*best.shape, seed=seed), full_matrices=False)
        assert problem.loss(best) <= problem.loss(u[:, :rank] * s[:rank] @ vt[:rank]) + 1e-9


@settings(deadline=None, max_examples=30)
@given(st.sampled_from(sorted(GROUPS)), st.integers(0, 1000), st.integers(3, 40))
def test_hard_wiring_and_augmentation_have_the_same_critical_points(name, seed, n):
    group = conjugated(GROUPS[name], seed)
    plain, b = problem_for(group, n=n, seed=seed), invariant_basis(group)
    for rank in range(1, b.shape[1] + 1):
        hard, soft = critical_points(hard_wired(plain, group), rank), critical_points(augmented(plain, group), rank)
        for one, other in zip(hard, soft, strict=True):
            assert one.directions == other.directions and one.index == other.index
            scale = other.w.norm()
            assert (one.w @ b.T - other.w).norm() < 1e-6 * scale
            assert (other.w - other.w @ projector(group)).norm() < 1e-6 * scale


@pytest.mark.parametrize('depth', [2, 3, 4])
@pytest.mark.parametrize('rank', [1, 2, 3, 4])
def test_index_counts_negative_eigenvalues(depth, rank):
    problem = regularized(problem_for(GROUPS['reflections'], seed=7), GROUPS['reflections'], 0.5)
    points = list(critical_points(problem, rank))
    assert len(points) == math.comb(4, rank) and points[0].loss == min(p.loss for p in points)
    for p in points:
        weights = factors(problem, p.directions, depth)
        h = hessian(problem, weights)
        eigenvalues = torch.linalg.eigvalsh(h)
        assert gradient(problem, weights).norm() < 1e-10 * h.norm()
        assert (eigenvalues < -1e-9 * eigenvalues[-1]).sum() == p.index
        if p.index:
            tangent, curvature = descent_direction(problem, p.directions, depth)
            t = flatten(tangent)
            assert torch.isclose(t @ h @ t, torch.tensor(curvature, dtype=torch.float64)) and curvature < 0


def test_turning_two_directions_lowers_the_loss_as_the_formula_says():
    problem, kept, theta = problem_for(cyclic(4)), (0, 3), 0.7
    u, s, v = singular_directions(problem)
    turned_u = u[:, 3] * math.cos(theta) + u[:, 1] * math.sin(theta)
    turned_v = v[:, 3] * math.cos(theta) + v[:, 1] * math.sin(theta)
    turned = s[0] * torch.outer(u[:, 0], v[:, 0]) + s[3] * torch.outer(turned_u, turned_v)
    start = problem.loss(product(factors(problem, kept)))
    assert torch.isclose(problem.loss(turned), start - 2 * s[3] * (s[1] - s[3]) * math.sin(theta) ** 2)


def test_equal_singular_values_are_refused_and_missing_ones_give_no_points():
    tied = Regression(torch.eye(2, dtype=torch.float64), torch.eye(2, dtype=torch.float64), torch.tensor(2.))
    with pytest.raises(ValueError, match='takes distinct ones'):
        critical_points(tied, 1)
    ring = augmented(problem_for(cyclic(4)), cyclic(4))         # one invariant direction
    assert len(list(critical_points(ring, 1))) == 1 and list(critical_points(ring, 2)) == []
    assert torch.allclose(reduced_rank(ring, 1), reduced_rank(ring, 3))


def test_directions_are_checked():
    problem = problem_for(cyclic(4))
    for bad in ((), (0, 0), (0, 4), (-1,)):
        with pytest.raises(ValueError, match='directions: got .* takes distinct numbers'):
            factors(problem, bad)
    with pytest.raises(ValueError, match='no way down'):
        descent_direction(problem, (0, 1))


def test_whitening_makes_the_identity_even_of_a_singular_sigma():
    problem = problem_for(GROUPS['rotations'], n=5)
    m = whitening(problem)
    assert m.shape == (9, 5) and torch.allclose(in_basis(problem, m).sigma, torch.eye(5, dtype=torch.float64))


def test_path_starts_plain_ends_invariant_and_tells_the_gap():
    group, rank = GROUPS['rotations'], 2
    problem = problem_for(group)
    maps, gaps = regularization_path(problem, group, rank, [0., 1., 1e3, 1e6])
    s = singular_directions(problem)[1]
    assert torch.allclose(maps[0], reduced_rank(problem, rank)) and torch.isclose(gaps[0], 1 - s[2] / s[1])
    away = (maps - maps @ projector(group)).flatten(1).norm(dim=1)
    assert (away[1:] < away[:-1]).all() and away[-1] < 1e-4
    assert regularization_path(problem, group, 4, [1.])[1] == 1  # every direction kept: nothing to close the gap


def test_data_without_signal_have_the_zero_map_and_no_critical_points():
    silent = regression(normal(9, 4), torch.zeros(9, 3))
    for problem in (silent, regression(torch.zeros(2, 4), normal(2, 3)), regularized(silent, cyclic(4), 1.)):
        assert torch.equal(reduced_rank(problem, 2), torch.zeros(3, 4)) and list(critical_points(problem, 1)) == []
    assert regularization_path(silent, cyclic(4), 2, [0., 1.])[1].tolist() == [1, 1]


@pytest.mark.parametrize('depth', [2, 3, 4])
def test_training_finds_the_closed_form(depth):
    group = GROUPS['rotations']
    plain = problem_for(group, seed=3)
    for problem in (plain, augmented(plain, group), regularized(plain, group, 1.), hard_wired(plain, group)):
        trained, exact = product(train(problem, 2, depth, seed=1)), reduced_rank(problem, 2)
        assert (trained - exact).norm() < 1e-6 * exact.norm()


def test_training_depends_on_its_seed_only():
    problem, before = problem_for(cyclic(4)), torch.get_rng_state()
    first, again, other = (train(problem, 2, 3, seed, steps=3) for seed in (0, 0, 1))
    assert all(torch.equal(a, b) for a, b in zip(first, again)) and not torch.equal(first[0], other[0])
    assert [w.shape for w in first] == [(2, 4), (2, 2), (4, 2)] and not any(w.requires_grad for w in first)
    assert torch.equal(before, torch.get_rng_state())


def test_two_ways_of_posing_a_problem_see_the_same_directions():
    group = reflections(8)
    basis = invariant_basis(group)                                     # [64, 32]: the hard-wired problem is half as large
    second = torch.ones(basis.shape[1], dtype=torch.float64)
    second[-1] = 1e-14                                                 # all but unseen
    sigma = basis * second @ basis.T + torch.eye(64, dtype=torch.float64) - projector(group)
    cross = torch.randn(3, 64, generator=torch.Generator().manual_seed(0), dtype=torch.float64) @ basis @ basis.T
    problem = Regression(sigma, cross, torch.tensor(100., dtype=torch.float64))
    wired, whole = reduced_rank(hard_wired(problem, group), 2) @ basis.T, reduced_rank(augmented(problem, group), 2)
    assert (wired - whole).norm() < 1e-8 * whole.norm()
