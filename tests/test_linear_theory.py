"""Linear theory: the closed forms against definitions, the propositions on any instance, refusals."""
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from sparse_irm.linear_theory import (
    PENALTIES, LinearData, LinearModel, Moments, all_subsets, best_selector, fit, log_fit, margin, moments, objective,
    objectives, population_moments, random_model, recover_dense, recover_lasso, recover_sparse, recoveries, reference_model,
    residual_variances, risks, sample, sample_size, sample_size_interval, subsets, success)

seeds = st.integers(0, 10_000)
few = settings(max_examples=25, deadline=None)


def selector_of(subset, d):
    return np.isin(np.arange(d), subset)


def mixed(data, matrix):
    """The data with features x @ matrix."""
    return LinearData(tuple(x @ matrix for x in data.x), data.y, data.kinds)


@few
@given(seeds, st.floats(0, 1e4), st.sampled_from(PENALTIES))
def test_interpolation_costs_nothing(seed, weight, penalty):
    n = np.random.default_rng(seed).integers(3, 12, len(random_model(seed).alpha))
    data = sample(random_model(seed, d=2 * int(n.sum()) + 4), n, seed)
    for selector in (np.ones(data.dim, bool), data.kinds != 'invariant'):
        assert selector.sum() > n.sum()
        assert 0 <= objective(data, selector, weight, penalty) < 1e-9


@few
@given(seeds, st.floats(0, 100), st.sampled_from(PENALTIES))
def test_fit_is_the_minimum(seed, weight, penalty):
    data = sample(random_model(seed), 30, seed)
    selector = np.random.default_rng(seed).random(data.dim) < 0.5
    v, b = fit(data, selector, weight, penalty)
    assert not v[~selector].any()

    def value(v, b):
        grads = [2 / len(y) * np.append(x[:, selector].T @ (x @ v + b - y), np.sum(x @ v + b - y)) for x, y in zip(data.x, data.y)]
        if penalty == 'gap':        # a quarter of g' A^-1 g
            designs = [np.column_stack([x[:, selector], np.ones(len(x))]) for x in data.x]
            penalties = [g @ np.linalg.solve(z.T @ z / len(z), g) / 4 for z, g in zip(designs, grads)]
        else:
            penalties = [g @ g for g in grads]
        return risks(data, v, b).sum() + weight * sum(penalties)

    best = value(v, b)
    assert best == pytest.approx(objective(data, selector, weight, penalty), rel=1e-8, abs=1e-9)
    rng = np.random.default_rng(seed + 1)
    assert all(value(v + 0.1 * selector * rng.standard_normal(data.dim), b + 0.1 * rng.standard_normal()) >= best - 1e-9
               for _ in range(5))


@few
@given(seeds, st.floats(0, 1000))
def test_moments_give_the_gap_objective(seed, weight):
    model = random_model(seed)
    data = sample(model, np.random.default_rng(seed).integers(8, 40, len(model.alpha)), seed)
    for group in all_subsets(data.dim, 3):
        picked = group[:, ::7]
        naive = [objective(data, selector_of(s, data.dim), weight) for s in picked.T]
        assert objectives(moments(data), picked, weight) == pytest.approx(naive, rel=1e-6, abs=1e-7)


def test_gap_knows_only_the_span():
    data = sample(random_model(3), 50, seed=3)
    everything, mixing = np.ones(data.dim, bool), np.random.default_rng(0).standard_normal((data.dim, data.dim))
    assert objective(mixed(data, mixing), everything, 9.0) == pytest.approx(objective(data, everything, 9.0))
    assert objective(mixed(data, mixing), everything, 9.0, 'gradient') != pytest.approx(objective(data, everything, 9.0, 'gradient'))


def test_a_repeated_feature_adds_nothing():
    data = sample(reference_model(8), 50, seed=0)
    twice = np.eye(8)
    twice[:, 1] = twice[:, 0]                                  # feature 1 becomes a copy of feature 0
    cov = moments(mixed(data, twice)).pooled
    one, both, constant = (residual_variances(cov, np.array(s).reshape(-1, 1))[0] for s in ([0], [0, 1], []))
    assert both == pytest.approx(one) and one < constant == pytest.approx(cov[-1, -1])


def test_more_features_than_samples_leave_no_residual():
    data = sample(reference_model(30), 6, seed=0)
    values = objectives(moments(data), np.arange(28).reshape(-1, 1), 5.0)
    assert 0 <= values[0] < 1e-8


@few
@given(seeds)
def test_search_is_exhaustive_and_knows_no_order(seed):
    data = sample(random_model(seed), 25, seed)
    found = best_selector(moments(data), 2, 5.0)
    naive = min((s for group in all_subsets(data.dim, 2) for s in group.T),
                key=lambda s: objective(data, selector_of(s, data.dim), 5.0))
    assert np.array_equal(found, selector_of(naive, data.dim))
    order = np.random.default_rng(seed).permutation(data.dim)
    assert np.array_equal(best_selector(moments(mixed(data, np.eye(data.dim)[:, order])), 2, 5.0), found[order])


@few
@given(seeds)
def test_margin_is_positive_exactly_at_the_optimum(seed):
    m = moments(sample(random_model(seed), 25, seed))
    groups, best = all_subsets(m.dim, 2), best_selector(m, 2, 5.0)
    assert margin(m, best, groups, 5.0) > 0
    other = selector_of([0, 1] if not best[:2].all() else [1, 2], m.dim)
    assert margin(m, other, groups, 5.0) < 0


def test_at_most_the_budget_includes_nothing():
    rng = np.random.default_rng(0)
    noise = LinearData(tuple(rng.standard_normal((2, 40, 5))), tuple(rng.standard_normal((2, 40))), np.repeat('random', 5))
    assert best_selector(moments(noise), 2, 1e6).sum() < 2


@few
@given(seeds)
def test_theorem_on_new_instances(seed):
    """Seeds far from those the notebook shows; populations, so without luck."""
    model = random_model(20_000 + seed)
    inv = model.kinds == 'invariant'
    assert margin(population_moments(model), inv, all_subsets(model.dim, inv.sum()), 30.0) > 0


@pytest.mark.parametrize('family', ['normal', 'uniform', 'sign'])
def test_population_is_the_limit(family):
    model = LinearModel([1.0, -0.5], [[0.5, 2.0], [1.0, 1.0], [2.0, 0.5]], n_random=2, noise=0.7, family=family)
    near, limit = moments(sample(model, 100_000, seed=0)), population_moments(model)
    assert near.within.shape == (3, 7, 7)
    assert np.abs(near.within - limit.within).max() < 0.1 and np.abs(near.pooled - limit.pooled).max() < 0.2


def test_subsets():
    for d, k in ((6, 0), (6, 1), (6, 2), (6, 3), (3, 3)):
        columns = {tuple(s) for s in subsets(d, k).T}
        assert len(columns) == subsets(d, k).shape[1] and all(len(set(s)) == k for s in columns)
    assert [g.shape for g in all_subsets(5, 2)] == [(0, 1), (1, 5), (2, 10)]


def test_draws_are_seeded_and_independent():
    a, b, c = (sample(reference_model(8), 5, s) for s in ([1, 2], [1, 2], [1, 3]))
    assert np.array_equal(a.x[0], b.x[0]) and not np.array_equal(a.x[0], c.x[0]) and a.x[0].dtype == np.float64
    assert np.array_equal(*(success(reference_model(8), 60, 30.0, 10, seed=0) for _ in range(2)))


def test_sample_size_reads_the_monotone_fit():
    assert sample_size([10, 20, 40, 80], [0.5, 0.97, 0.85, 1.0]) == pytest.approx(                # 0.97, 0.85 become 0.91
        np.exp(np.interp(0.95, [0.91, 1.0], np.log([40, 80]))))
    won = np.arange(200) < np.array([100, 160, 190, 200])[:, None]
    low, high = sample_size_interval([10, 20, 40, 80], won)
    assert 20 < low < sample_size([10, 20, 40, 80], won.mean(1)) + 1e-9 and low < high < 80


def test_log_fit_finds_the_line():
    dims = [8, 32, 128, 512]
    line = log_fit(dims, [5 + 3 * np.log(d) for d in dims])
    assert (line.a, line.b, line.r2) == pytest.approx((5, 3, 1)) and line.low <= line.b <= line.high


@pytest.fixture(scope='module')
def easy():
    "Strong signal, weak spurious features, plenty of samples: no method may fail."
    model = LinearModel([2.0, -2.0], np.full((2, 2), 30.0) * [[1], [2]], n_random=2, noise=0.5)
    return [sample(model, 80, seed) for seed in range(3)]


def test_every_method_solves_the_easy_case(easy):
    solved = recoveries(easy, 2, 1.0, {'SparseIRM': dict(penalty_weight=0.1, start='budget', steps=600)})
    assert set(solved) == {'exhaustive', 'lasso', 'dense IRM + prune', 'SparseIRM'}
    assert all(hits.shape == (3,) and hits.all() for hits in solved.values())


def test_sparse_is_seeded_and_within_budget(easy):
    runs = [recover_sparse(easy, 3, 1.0, steps=20, seed=s) for s in (0, 0)]
    assert np.array_equal(*runs) and (runs[0].sum(1) == 3).all() and runs[0].dtype == bool
    state = torch.get_rng_state()
    recover_sparse(easy, 3, 1.0, steps=2)
    assert torch.equal(state, torch.get_rng_state())


def test_lasso_path_shorter_than_the_budget():
    x = np.tile(np.arange(4.0)[:, None], (1, 3))               # three copies of one feature
    data = LinearData((x, x), (np.arange(4.0), np.arange(4.0)), np.repeat('invariant', 3))
    assert recover_lasso(data, 2).sum() <= 2


@pytest.mark.parametrize('call, told', [
    (lambda d: objective(d, np.ones(3, bool), 1.0), 'selector'),
    (lambda d: objective(d, np.ones(8), 1.0), 'selector'),
    (lambda d: objective(d, np.ones(8, bool), -1.0), 'penalty_weight'),
    (lambda d: fit(d, np.ones(8, bool), float('nan')), 'penalty_weight'),
    (lambda d: objective(d, np.ones(8, bool), 1.0, 'irmv1'), 'penalty'),
    (lambda d: best_selector(moments(d), 9, 1.0), 'budget'),
    (lambda d: margin(moments(d), np.ones(8, bool), all_subsets(8, 2), 1.0), 'selector'),
    (lambda d: recover_lasso(d, 0), 'budget'),
    (lambda d: recover_dense(d, 9, 1.0), 'budget'),
    (lambda d: recover_sparse([], 2, 1.0), 'datasets'),
    (lambda d: recover_sparse([d, sample(reference_model(8), 11, 0)], 2, 1.0), 'datasets'),
    (lambda d: recover_sparse([sample(reference_model(8), [10, 12], 0)], 2, 1.0), 'datasets'),
    (lambda d: recover_sparse([d], 9, 1.0), 'budget'),
    (lambda d: recover_sparse([d], 2, -1.0), 'penalty_weight'),
    (lambda d: recover_sparse([d], 2, 1.0, steps=-1), "start, steps: got 'ones', -1"),
    (lambda d: objectives(moments(d), subsets(8, 1), -1.0), 'penalty_weight'),
    (lambda d: best_selector(moments(d), 2, -1.0), 'penalty_weight'),
    (lambda d: success(reference_model(8), 10, 1.0, -1, 0), 'draws: got -1'),
    (lambda d: LinearModel([1.0], [[1.0], [2.0]], n_random=1.5), 'n_random, noise: got 1.5'),
    (lambda d: LinearModel([1.0], [[1.0], [2.0]], n_random=-1), 'n_random, noise: got -1'),
    (lambda d: recover_sparse([d], 2, 1.0, start='dense'), 'start'),
    (lambda d: sample(reference_model(8), [10, 12, 14], 0), 'n: '),
    (lambda d: sample(reference_model(8), 0, 0), 'n: '),
    (lambda d: reference_model(4), 'd_inv'),
    (lambda d: random_model(0, d=6), 'd: '),
    (lambda d: sample_size([10, 10], [0.1, 1.0]), 'sizes'),
    (lambda d: sample_size([10, 20], [0.1]), 'sizes'),
    (lambda d: log_fit([8, 16, 32], [1.0, 2.0, float('nan')]), 'sizes'),
])
def test_refusals(call, told):
    with pytest.raises(ValueError, match=f'^{told}'):
        call(sample(reference_model(8), 10, 0))


def test_moments_is_plain_data():
    m = Moments(np.eye(3)[None], np.eye(3))
    assert m.dim == 2 and objectives(m, np.array([[0], [1]]), 1.0) == pytest.approx([1.0])
