"""The projection against references found in other ways, its properties, its edges; the schedule of the budget."""
import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from sparse_irm.projection import _clipped, _sections, _threshold, kept_fraction, project, project_

ORDINARY = st.floats(-3, 3, width=32)
WIDE = st.one_of(ORDINARY, st.sampled_from([0.0, 1.0, 0.5, 2.0]), st.floats(-1e6, 1e6, width=32))


@st.composite
def problems(draw, elements=WIDE, most=40):
    """A vector, float64, and a budget between 0 and its length."""
    s = draw(arrays(np.float64, st.integers(1, most), elements=elements))
    share = draw(st.one_of(st.floats(0, 1), st.sampled_from([0.0, 0.5, 1.0])))
    return torch.from_numpy(s), share * len(s)


def reference(s, budget):
    """The projection by sorting all bends of the piecewise-linear function and solving on the right piece."""
    s = s.double().numpy()

    def total(v):
        return np.clip(s - v, 0, 1).sum()
    if total(0) <= budget:
        return torch.from_numpy(np.clip(s, 0, 1))
    bends = np.unique(np.concatenate([s, s - 1, [0]]))
    bends = bends[bends >= 0]
    at = np.array([total(v) for v in bends])
    i = np.nonzero(at > budget)[0][-1]
    low, high = bends[i], bends[i + 1]
    v = low + (high - low) * (at[i] - budget) / (at[i] - at[i + 1])
    return torch.from_numpy(np.clip(s - v, 0, 1))


@given(problems())
def test_equals_the_reference(problem):
    s, budget = problem
    torch.testing.assert_close(project(s, budget), reference(s, budget), rtol=0, atol=1e-8)


@pytest.mark.parametrize('seed', range(8))
def test_equals_a_general_solver(seed):
    from scipy.optimize import minimize
    s = np.random.default_rng(seed).normal(0.6, 0.8, 6)
    budget = [0.5, 1.5, 3.0, 6.0][seed % 4]
    solved = minimize(lambda x: 0.5 * ((x - s) ** 2).sum(), np.full(6, budget / 12), jac=lambda x: x - s,
                      bounds=[(0, 1)] * 6, constraints={'type': 'ineq', 'fun': lambda x: budget - x.sum()},
                      method='SLSQP', options={'ftol': 1e-15, 'maxiter': 200})
    assert solved.success
    torch.testing.assert_close(project(torch.from_numpy(s), budget), torch.from_numpy(solved.x), rtol=0, atol=1e-6)


@given(problems(), st.randoms(use_true_random=False))
def test_no_feasible_point_lies_on_the_side_of_s(problem, random):
    s, budget = problem
    p = project(s, budget)
    x = torch.tensor([random.random() for _ in s], dtype=torch.float64)
    x = x * min(1, budget / max(x.sum().item(), 1e-9))
    assert (s - p) @ (x - p) <= 1e-8 * (1 + s.abs().max()) * len(s)


@given(problems())
def test_feasible_and_idempotent(problem):
    s, budget = problem
    for kind, tolerance in ((torch.float64, 1e-9), (torch.float32, 1e-5)):
        p = project(s.to(kind), budget)
        assert p.dtype == kind and p.min() >= 0 and p.max() <= 1
        assert p.double().sum() <= budget + tolerance * len(s)
        torch.testing.assert_close(project(p, budget), p, rtol=0, atol=tolerance)


@given(problems(), st.data())
def test_never_drives_points_apart(problem, data):
    s, budget = problem
    t = torch.from_numpy(data.draw(arrays(np.float64, len(s), elements=WIDE)))
    assert (project(s, budget) - project(t, budget)).norm() <= (s - t).norm() * (1 + 1e-9) + 1e-9


@given(problems(elements=ORDINARY, most=200))
def test_inside_nothing_changes(problem):
    s, _ = problem
    s = s.clamp(0, 1).float()
    assert torch.equal(project(s, len(s)), s)
    assert torch.equal(project(s, math.nextafter(s.double().sum().item(), math.inf) if s.sum() < len(s) else len(s)), s)


@given(problems())
def test_the_search_for_accelerators_agrees(problem):
    s, budget = problem
    v = _sections(s, torch.tensor(budget, dtype=torch.float64))
    w = torch.tensor(_threshold(s, budget), dtype=torch.float64)
    torch.testing.assert_close(_clipped(s, v), _clipped(s, w), rtol=0, atol=1e-8)
    v = _sections(s.float(), torch.tensor(budget, dtype=torch.float64))
    assert _clipped(s.float(), v).double().sum() <= budget + 1e-5 * len(s)


EDGES = [
    ('first step of training', lambda d, g: 1 + 0.006 * torch.rand(d, generator=g)),
    ('all one', lambda d, g: torch.ones(d)),
    ('all zero', lambda d, g: torch.zeros(d)),
    ('all below zero', lambda d, g: -torch.rand(d, generator=g)),
    ('all equal, far out', lambda d, g: torch.full((d,), 1e6)),
    ('all far above one', lambda d, g: 1000 + torch.rand(d, generator=g)),
    ('one far above the rest', lambda d, g: torch.rand(d, generator=g).index_fill(0, torch.tensor([d // 2]), 1e6)),
    ('two groups far apart', lambda d, g: torch.rand(d, generator=g) + 1000 * (torch.arange(d) % 2)),
    ('heavy tail', lambda d, g: (3 * torch.randn(d, generator=g)).exp()),
    ('ties', lambda d, g: torch.randint(-3, 4, (d,), generator=g) / 2),
    ('sorted, so that a regular sample is fair but extremes come last', lambda d, g: torch.linspace(-2, 2, d)),
    ('period of the sample', lambda d, g: (torch.arange(d) % 64 == 0).float() * 5 + torch.rand(d, generator=g)),
]


@pytest.mark.parametrize('make', [make for _, make in EDGES], ids=[name for name, _ in EDGES])
@pytest.mark.parametrize('d', [1, 7, 100_000])
def test_edges_in_float32(make, d):
    s = make(d, torch.Generator().manual_seed(0))
    before = s.clone()
    reached = s.clamp(0, 1).double().sum()
    for share in (0.0, 1e-3, 0.25, 0.5, 0.999, 1.0):
        p = project(s, share * d)
        assert p.min() >= 0 and p.max() <= 1
        total = p.double().sum()
        assert abs(total - min(share * d, reached)) <= 1e-6 * d
        assert torch.equal(s, before), 'the argument was changed'
        kept = s.double() - (s.double() - p)[(p > 0) & (p < 1)].mean().nan_to_num(0)   # one and the same v everywhere
        inner = (p > 0) & (p < 1)
        torch.testing.assert_close(p[inner].double(), kept[inner], rtol=0, atol=1e-6 * max(1, s.abs().max()))


def test_ten_million_in_float32():
    s = torch.rand(10_000_000, generator=torch.Generator().manual_seed(0)).mul_(1.2)
    budget = 3_000_000.0
    assert abs(project_(s, budget).sum(dtype=torch.float64) - budget) <= 1e-6 * budget


def test_small_remainders_are_not_rounded_away():
    s = torch.full((1000,), 1e6)   # the next float32 numbers lie 1/16 away, the threshold is 1e6 - 0.3
    torch.testing.assert_close(project(s, 300.0), torch.full((1000,), 0.3), rtol=0, atol=1e-6)


@pytest.mark.parametrize('budget', [-1e-9, 3.0001, math.nan, math.inf])
def test_refuses_a_budget(budget):
    with pytest.raises(ValueError, match='budget: got .*takes 0 <= budget <= 3'):
        project(torch.rand(3), budget)


@pytest.mark.parametrize('s', [torch.tensor([0.5, math.nan]), torch.tensor([math.inf, 0.0]), torch.tensor([0.0, -1e30]),
                               torch.rand(2, 2), torch.rand(0), torch.ones(3).long(), torch.rand(3).half()],
                         ids=['nan', 'infinite', 'huge', 'two dimensions', 'empty', 'whole numbers', 'half'])
def test_refuses_a_vector(s):
    with pytest.raises(ValueError, match='^s: got .*takes'):
        project(s, 0.5)


@pytest.mark.parametrize('d', [3, 100_000])
def test_nan_spreads_in_the_unchecked_form(d):
    s = torch.rand(d).index_fill(0, torch.tensor([1]), math.nan)
    assert _clipped(s, _sections(s, torch.tensor(1.0, dtype=torch.float64))).isnan().all()
    assert project_(s, 1.0).isnan().all()


def test_in_place_on_a_parameter_without_gradient():
    s = torch.nn.Parameter(torch.full((10,), 2.0))
    s.grad = torch.ones(10)
    place = s.data_ptr()
    assert project_(s, torch.tensor(4.0)) is s and s.data_ptr() == place and s.requires_grad and s.is_leaf
    torch.testing.assert_close(s.detach(), torch.full((10,), 0.4))
    assert not project(s, 2.0).requires_grad


def test_asks_an_accelerator_nothing():
    s = torch.empty(100_000, device='meta')   # meta tensors hold no numbers: reading one raises
    with pytest.raises(RuntimeError):
        s.sum().item()
    assert project_(s, 5.0).shape == s.shape
    assert project_(s, torch.empty((), device='meta')).shape == s.shape


@given(st.integers(1, 2000), st.floats(0.01, 1), st.floats(0, 1), st.floats(0, 1))
def test_schedule_falls_from_one_to_keep(steps, keep, a, b):
    start, end = min(a, b), max(a, b)
    ks = [kept_fraction(t, steps, keep, start, end) for t in range(steps + 1)]
    assert all(a >= b for a, b in zip(ks, ks[1:])) and ks[-1] == keep and max(ks) <= 1
    assert all(k == 1 for t, k in enumerate(ks) if t / steps <= start and t / steps < end)
    assert all(k == keep for t, k in enumerate(ks) if t / steps >= end)


def test_schedule_of_the_published_code():
    for t in range(420, 900):
        expected = 0.5 + 0.5 * (1 - (t / 1500 - 0.28) / (0.60 - 0.28)) ** 3
        assert math.isclose(kept_fraction(t, 1500, 0.5, 0.28, 0.60), expected, rel_tol=1e-12)
    assert {kept_fraction(t, 1500, 0.3) for t in range(1501)} == {0.3}


@pytest.mark.parametrize('wrong, name', [
    (dict(step=-1), 'step'), (dict(step=11), 'step'), (dict(steps=0, step=0), 'step'), (dict(keep=0.0), 'keep'),
    (dict(keep=1.1), 'keep'), (dict(keep=math.nan), 'keep'), (dict(start=0.7), 'start'), (dict(end=1.2), 'start'),
    (dict(start=-0.1), 'start')])
def test_schedule_refuses(wrong, name):
    with pytest.raises(ValueError, match=f'^{name}.*got .*takes'):
        kept_fraction(**{**dict(step=1, steps=10, keep=0.5, start=0.28, end=0.6), **wrong})
