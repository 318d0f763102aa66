"""Closed forms against double backward, estimators against exact enumeration, and what is refused."""
import math
from itertools import combinations, product

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st

from sparse_irm.penalties import (TASKS, birm, birm_rex, birm_split, draw_scales, halves, irmv1, objective, rex, risk,
                                  risks_and_penalty, scale_gradient, split_half, task_of)

LOSSES = {'binary': lambda z, y: F.binary_cross_entropy_with_logits(z, y.double()), 'classes': F.cross_entropy,
          'regression': lambda z, y: ((z - y) ** 2).mean()}


def generator(seed=0):
    return torch.Generator().manual_seed(seed)


def environments(task, sizes, spread=1.0, seed=0):
    "Random logits and labels of the given sizes, in float64."
    g, shape = generator(seed), (10,) if task == 'classes' else ()
    logits = [spread * torch.randn(n, *shape, generator=g, dtype=torch.float64) for n in sizes]
    if task == 'regression':
        return logits, [torch.randn(n, generator=g, dtype=torch.float64) for n in sizes]
    return logits, [torch.randint(10 if task == 'classes' else 2, (n,), generator=g) for n in sizes]


def by_double_backward(logits, ys, task):
    "The definition of the penalty: the squared derivative of each environment's risk by a scale w, at w = 1."
    w = torch.ones((), dtype=torch.float64, requires_grad=True)
    slopes = [torch.autograd.grad(LOSSES[task](w * z, y), w, create_graph=True)[0] for z, y in zip(logits, ys)]
    return sum(g ** 2 for g in slopes) / len(slopes)


@pytest.mark.parametrize('task', TASKS)
@given(st.lists(st.integers(1, 7), min_size=1, max_size=40), st.sampled_from([1e-3, 1.0, 30.0]), st.integers(0, 9))
def test_closed_form_is_the_double_backward(task, sizes, spread, seed):
    logits, ys = environments(task, sizes, spread, seed)
    logits = [z.requires_grad_() for z in logits]
    ours, theirs = irmv1(logits, ys, task), by_double_backward(logits, ys, task)
    torch.testing.assert_close(ours, theirs, rtol=1e-6, atol=1e-12)
    for a, b in zip(torch.autograd.grad(ours, logits), torch.autograd.grad(theirs, logits)):
        torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-12)


@pytest.mark.parametrize('task', TASKS)
def test_every_environment_weighs_the_same(task):
    "Environments of unequal size are averaged, not pooled."
    logits, ys = environments(task, [1, 3, 50])
    each = [LOSSES[task](z, y) for z, y in zip(logits, ys)]
    risks, penalty = risks_and_penalty(logits, ys, task, 'irmv1')
    torch.testing.assert_close(risks, torch.stack(each))
    torch.testing.assert_close(penalty, sum(irmv1([z], [y], task) for z, y in zip(logits, ys)) / 3)
    assert not torch.isclose(penalty, irmv1([torch.cat(logits)], [torch.cat(ys)], task))


@pytest.mark.parametrize('task', ['binary', 'regression'])
def test_a_column_of_logits_is_a_row_of_logits(task):
    [z], [y] = environments(task, [9])
    assert risk(z[:, None], y, task) == risk(z, y, task)
    assert scale_gradient(z[:, None], y, task) == scale_gradient(z, y, task)


@pytest.mark.parametrize('task', TASKS)
@pytest.mark.parametrize('dtype', [torch.bfloat16, torch.float16])
def test_half_precision_logits_are_computed_in_float32(task, dtype):
    [z], [y] = environments(task, [200], spread=3)
    low = z.to(dtype).requires_grad_()
    for value in risk, scale_gradient:
        got, wide = value(low, y, task), low.detach().float().requires_grad_()
        expected = value(wide, y, task)
        assert got.dtype == torch.float32 and got == expected
        a, b = torch.autograd.grad(got, low)[0], torch.autograd.grad(expected, wide)[0]
        assert a.dtype == dtype and torch.equal(a, b.to(dtype))


@pytest.mark.parametrize('task', ['binary', 'classes'])
@pytest.mark.parametrize('size', [1e2, 1e4, 1e20])
def test_saturated_logits_stay_finite(task, size):
    [z], [y] = environments(task, [20])
    z = (size * z.sign()).float().requires_grad_()
    values = risk(z, y, task), scale_gradient(z, y, task)
    assert all(v.isfinite() and torch.autograd.grad(v, z)[0].isfinite().all() for v in values)


def test_the_penalty_is_zero_where_the_risk_is_flat_in_the_scale():
    y = torch.tensor([0, 0, 1, 1])
    assert irmv1([torch.zeros(4)], [y]) == 0
    best = torch.tensor(3.0).log() * torch.tensor([1, 1, 1, 1])  # the log odds of 3 in 4
    y = torch.tensor([1, 1, 1, 0])
    assert abs(scale_gradient(best, y)) < 1e-6 < scale_gradient(2 * best, y)


@given(st.lists(st.floats(0, 10), min_size=1, max_size=30))
def test_rex_is_the_population_variance(values):
    r = torch.tensor(values, dtype=torch.float64, requires_grad=True)
    assert rex(r).item() == pytest.approx(np.var(values), abs=1e-12)
    slope = torch.autograd.grad(rex(r), r)[0]
    torch.testing.assert_close(slope, (2 * (r - r.mean()) / len(values)).detach(), rtol=1e-9, atol=1e-12)


def test_rex_of_environments_is_that_of_their_risks():
    logits, ys = environments('binary', [2, 9, 30])
    risks, penalty = risks_and_penalty(logits, ys, 'binary', 'rex')
    assert penalty.item() == pytest.approx(np.var(risks.tolist())) and penalty > 0


@given(st.integers(2, 99), st.integers(0, 5))
def test_halves_are_a_partition(n, seed):
    a, b = halves(n, generator(seed))
    assert (len(a), len(b)) == (n // 2, n - n // 2)
    assert sorted([*a.tolist(), *b.tolist()]) == list(range(n))
    again = halves(n, generator(seed))
    assert torch.equal(a, again[0]) and torch.equal(b, again[1])


def splits(n):
    "All ways to cut range(n) into two halves, as index tensors."
    for a in combinations(range(n), n // 2):
        yield torch.tensor(a), torch.tensor([i for i in range(n) if i not in a])


def pair_mean(v):
    "The mean of v_i v_j over i != j, the unbiased estimate of the squared mean."
    n = len(v)
    return (v.sum() ** 2 - (v ** 2).sum()) / (n * (n - 1))


@pytest.mark.parametrize('n', [2, 5, 6])
def test_split_irmv1_averages_to_the_unbiased_estimate(n):
    [z], [y] = environments('binary', [n])
    each = torch.stack([scale_gradient(z[i:i + 1], y[i:i + 1]) for i in range(n)])
    cuts = [split_half([tuple(scale_gradient(z[h], y[h]) for h in cut)], 'irmv1') for cut in splits(n)]
    torch.testing.assert_close(torch.stack(cuts).mean(), pair_mean(each))
    bias = irmv1([z], [y]) - torch.stack(cuts).mean()   # of the whole-batch form: the variance of the mean
    torch.testing.assert_close(bias, each.var() / n)


def test_split_rex_averages_to_the_unbiased_estimate():
    logits, ys = environments('binary', [4, 4])
    each = [F.binary_cross_entropy_with_logits(z, y.double(), reduction='none') for z, y in zip(logits, ys)]
    cuts = [split_half([tuple(l[h].mean() for h in cut) for l, cut in zip(each, pair)], 'rex')
            for pair in product(splits(4), splits(4))]
    a, b = each
    torch.testing.assert_close(torch.stack(cuts).mean(), (pair_mean(a) + pair_mean(b) - 2 * a.mean() * b.mean()) / 4)


@pytest.mark.parametrize('penalty', ['irmv1', 'rex'])
def test_split_form_by_hand(penalty):
    logits, ys = environments('classes', [5, 8])
    value = risk if penalty == 'rex' else scale_gradient
    g = generator(3)
    cuts = [halves(5, g), halves(8, g)]
    a, b = (torch.stack([value(z[cut[i]], y[cut[i]], 'classes') for z, y, cut in zip(logits, ys, cuts)])
            for i in (0, 1))
    if penalty == 'rex':
        a, b = a - a.mean(), b - b.mean()
    risks, signed = risks_and_penalty(logits, ys, 'classes', penalty, generator(3))
    _, absolute = risks_and_penalty(logits, ys, 'classes', penalty, generator(3), absolute=True)
    torch.testing.assert_close(signed, (a * b).mean())
    torch.testing.assert_close(absolute, (a * b).abs().mean())
    assert torch.equal(risks, risks_and_penalty(logits, ys, 'classes')[0])   # the risks see all examples
    assert signed != risks_and_penalty(logits, ys, 'classes', penalty, generator(4))[1]


def test_the_signed_split_form_can_be_negative():
    logits, ys = environments('binary', [10, 10])
    values = [[risks_and_penalty(logits, ys, 'binary', 'irmv1', generator(seed), absolute)[1] for seed in range(40)]
              for absolute in (False, True)]
    assert min(values[0]) < 0 <= min(values[1])


# Bayesian IRM, from single examples: with label 0 the risk of z at scale w is log(1 + exp(wz)), its slope z / (1 + exp(-wz))
ONE, TWO = [torch.tensor([1.0]), torch.tensor([-2.0])], [torch.tensor([3.0]), torch.tensor([0.5])]
ZERO, SCALES = [torch.tensor([0]), torch.tensor([0])], torch.tensor([[0.5, 2.0], [1.5, -1.0], [0.0, 1.0]])


def slope(z, w):
    return z / (1 + math.exp(-w * z))


def test_bayesian_penalties_by_hand():
    pairs = [[(w.item(), one.item(), two.item()) for w, one, two in zip(row, ONE, TWO)] for row in SCALES]
    squares = [slope(one, w) ** 2 for row in pairs for w, one, _ in row]
    products = [slope(one, w) * slope(two, w) for row in pairs for w, one, two in row]
    variances = [np.var([math.log1p(math.exp(w * one)) for w, one, _ in row]) for row in pairs]
    assert birm(ONE, ZERO, SCALES).item() == pytest.approx(np.mean(squares))
    assert birm_split(list(zip(ONE, ZERO, TWO, ZERO)), SCALES).item() == pytest.approx(np.mean(products))
    assert birm_rex(ONE, ZERO, SCALES).item() == pytest.approx(np.mean(variances))


def test_the_trainer_gets_the_named_bayesian_penalty():
    logits, ys = environments('binary', [5, 8])
    given = dict(penalty='birm', scales=SCALES)
    for name, penalty in (('birm', birm), ('birm-rex', birm_rex)):
        assert torch.equal(risks_and_penalty(logits, ys, **given | dict(penalty=name))[1], penalty(logits, ys, SCALES))
    g = generator(3)
    cuts = [halves(5, g), halves(8, g)]
    parts = [(z[a], y[a], z[b], y[b]) for z, y, (a, b) in zip(logits, ys, cuts)]
    assert torch.equal(risks_and_penalty(logits, ys, generator=generator(3), **given)[1], birm_split(parts, SCALES))


def test_scales_are_normal_around_one():
    w = draw_scales(20_000, 2, 0.2, generator())
    inside = ((w - 1).abs() < 0.2).float().mean().item()
    assert w.shape == (20_000, 2) and w.mean().item() == pytest.approx(1, abs=0.005)
    assert inside == pytest.approx(0.683, abs=0.01)            # of a uniform distribution 0.577
    assert torch.equal(w, draw_scales(20_000, 2, 0.2, generator())) and (draw_scales(3, 2, 0.0, generator()) == 1).all()


@pytest.mark.parametrize('weight, rescale, expected', [
    (0, True, 2.0), (0.5, True, 3.5), (1, True, 5.0), (4, True, 14 / 5), (4, False, 14.0), (1e4, True, 30_002 / 10_001),
])
def test_objective(weight, rescale, expected):
    assert objective(torch.tensor([1.0, 3.0]), torch.tensor(3.0), weight, rescale).item() == pytest.approx(expected)


def test_no_penalty_draws_nothing():
    logits, ys = environments('binary', [1, 1])   # too small for halves
    g = generator()
    before = g.get_state()
    assert risks_and_penalty(logits, ys, 'binary', 'none', g)[1] == 0 and torch.equal(g.get_state(), before)


def test_the_task_by_the_number_of_classes():
    assert [task_of(n) for n in (2, 3, 10)] == ['binary', 'classes', 'classes']


z3, y3 = torch.zeros(3), torch.tensor([0, 1, 1])


@pytest.mark.parametrize('call, told', [
    (lambda: risk(z3, y3, 'bianry'), "task: got 'bianry', takes one of binary, classes, regression"),
    (lambda: scale_gradient(z3, y3, None), 'task: got None'),
    (lambda: risk(torch.zeros(4), y3), r'logits: got shape \(4,\) for 3 labels'),
    (lambda: risk(torch.zeros(3, 2), y3), r'logits: got shape \(3, 2\) for 3 labels'),
    (lambda: scale_gradient(z3, y3, 'classes'),
     r"logits: got shape \(3,\) for 3 labels, task 'classes' takes \[n, k\]"),
    (lambda: risk(torch.zeros(3, 2, 2), y3, 'classes'), r'logits: got shape \(3, 2, 2\)'),
    (lambda: risk(torch.zeros(0), torch.zeros(0)), r'logits: got shape \(0,\) for 0 labels'),
    (lambda: risks_and_penalty([z3], [y3], penalty='IRMv1'), "penalty: got 'IRMv1', takes one of none, irmv1, rex"),
    *[(lambda f=f, given=given: f([z3], [y3, y3], *given), 'logits, ys: got 1 and 2 environments')
      for f, given in ((risks_and_penalty, ()), (irmv1, ()), (birm, (SCALES,)), (birm_rex, (SCALES,)))],
    *[(lambda f=f: f([], []), 'logits, ys: got 0 and 0 environments') for f in (risks_and_penalty, irmv1)],
    *[(lambda f=f: f([z3, z3], [y3, y3], SCALES[:, :1]), r'scales: got \(3, 1\), takes \[S, 2\]') for f in (birm, birm_rex)],
    (lambda: birm_split([(z3, y3, z3, y3)] * 2, SCALES[:, :1]), r'scales: got \(3, 1\), takes \[S, 2\]'),
    (lambda: birm([z3, z3], [y3, y3], SCALES[:0]), r'scales: got \(0, 2\)'),
    (lambda: risks_and_penalty([z3], [y3], penalty='birm'), r'scales: got None, takes \[S, 1\]'),
    (lambda: split_half([], 'irmv1'), 'values: got no environment'),
    (lambda: split_half([(z3[0], z3[1])], 'bogus'), "penalty: got 'bogus', takes one of irmv1, rex"),
    (lambda: rex(torch.zeros(0)), r'risks: got shape \(0,\)'),
    (lambda: draw_scales(-1, 2, 0.1, generator()), 'samples, environments, std: got -1, 2, 0.1'),
    (lambda: draw_scales(1, 2, -0.1, generator()), 'samples, environments, std: got 1, 2, -0.1'),
    (lambda: objective(z3, z3[0], -1.0), 'weight: got -1.0'),
    (lambda: task_of(1), 'n_classes: got 1, takes 2 or more'),
    (lambda: halves(1), 'n: got 1'),
    (lambda: halves(0), 'n: got 0'),
    (lambda: risks_and_penalty([torch.zeros(1)], [y3[:1]], 'binary', 'irmv1', generator()), 'n: got 1.*at least 2'),
    (lambda: scale_gradient(z3 + 1, y3[:, None]), r'\(3, 1\)'),
])
def test_refused_by_name(call, told):
    with pytest.raises(ValueError, match=told):
        call()
