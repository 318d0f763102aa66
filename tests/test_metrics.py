"""Selection at its edges, and the statistics against SciPy's."""
import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from sparse_irm.metrics import RULES, Summary, difference, in_budget, select, summary, verdict


def row(step, train, test, objective=None, weight=0.0):
    held_out = {} if objective is None else {'held_out_objective': objective}
    return {'step': step, 'train_accuracy': train, 'test_accuracy': test, 'penalty_weight': weight, **held_out}


def step(history, rule, **floor):
    chosen = select(history, rule, **floor)
    return chosen and chosen['step']


def test_the_oracle_takes_the_best_test_accuracy_above_the_floor():
    history = [row(1, 0.6, 0.9), row(2, 0.61, 0.5), row(3, 0.7, 0.7), row(4, 0.9, 0.2)]
    assert step(history, 'oracle') == 3
    assert step(history, 'oracle', floor=0.59) == 1        # 0.6 itself is not above 0.6
    assert step(history, 'oracle', floor=0.8) == 4 and step(history, 'oracle', floor=0.9) is None
    assert step(history, 'last') == 4


def test_among_equals_the_earliest_is_taken():
    history = [row(1, 0.7, 0.1, 9.0), row(2, 0.7, 0.5, 0.3), row(3, 0.9, 0.5, 0.3), row(4, 0.7, 0.1, 0.4)]
    assert step(history, 'oracle') == step(history, 'train-validation') == 2


def test_validation_compares_only_evaluations_under_the_full_penalty():
    history = [row(1, 0.9, 0.1, 0.01), row(2, 0.9, 0.2, 0.02), row(3, 0.7, 0.6, 5.0, 1e4), row(4, 0.7, 0.6, 4.0, 1e4)]
    assert step(history, 'train-validation') == 4
    assert step(history[:2], 'train-validation') == 1
    assert step(history[:3], 'train-validation') == 3


def test_validation_stays_inside_the_final_budget_and_the_oracle_does_not():
    history = [row(i, 0.7, 0.9 - 0.1 * i, i, 1e4) | {'budget': b} for i, b in enumerate((1.0, 0.6, 0.5, 0.5), 1)]
    assert [r['step'] for r in in_budget(history)] == [3, 4]
    assert step(history, 'train-validation') == 3 and step(history, 'oracle') == 1
    assert step(history[:2], 'train-validation') == 2      # the budget of a run that goes on is the latest one
    assert in_budget([row(1, 0.7, 0.9)]) == [row(1, 0.7, 0.9)] and in_budget([]) == []


def test_validation_does_not_look_at_the_test_set():
    history = [row(i, 0.7, 0.5, (i - 3) ** 2) for i in range(6)]
    assert step(history, 'train-validation') == 3
    assert step([r | {'test_accuracy': r['step']} for r in history], 'train-validation') == 3


def test_without_held_out_images_nothing_is_validated():
    history = [row(1, 0.9, 0.3), row(2, 0.9, 0.4)]
    assert step(history, 'train-validation') is None and step(history, 'oracle') == step(history, 'last') == 2


def test_the_chosen_evaluation_is_given_whole():
    history = [row(1, 0.9, 0.3, 1.0) | {'mask_entropy': 0.25}]
    assert all(select(history, rule) is history[0] for rule in RULES)


@pytest.mark.parametrize('rule', ['', 'Oracle', 'best', None])
def test_unknown_rules_are_refused(rule):
    with pytest.raises(ValueError, match=f'rule: got {rule!r}, takes one of last, oracle, train-validation'):
        select([row(1, 1, 1)], rule)


@pytest.mark.parametrize('rule', RULES)
def test_an_empty_history_is_refused(rule):
    with pytest.raises(ValueError, match='history: got no evaluations'):
        select([], rule)


samples = st.lists(st.integers(-10 ** 5, 10 ** 5).map(lambda v: v / 1000), min_size=2, max_size=12)
levels = st.sampled_from([0.5, 0.9, 0.95, 0.999])


@settings(max_examples=30)
@given(samples, levels)
def test_summary_is_students(values, level):
    ours = summary(values, level)
    assert (ours.mean, ours.std) == pytest.approx((np.mean(values), np.std(values, ddof=1)), abs=1e-9)
    assert ours.n == len(values)
    if len(set(values)) > 1:
        low, high = stats.t.interval(level, len(values) - 1, np.mean(values), stats.sem(values))
        assert (ours.low, ours.high) == pytest.approx((low, high), rel=1e-9, abs=1e-9)


@settings(max_examples=30)
@pytest.mark.filterwarnings('ignore:Precision loss')   # SciPy's, where a group has no spread
@given(samples.filter(lambda v: len(set(v)) > 1), samples, levels)
def test_difference_is_welchs(a, b, level):
    ours = difference(a, b, level)
    theirs = stats.ttest_ind(a, b, equal_var=False).confidence_interval(level)
    assert (ours.low, ours.high) == pytest.approx((theirs.low, theirs.high), rel=1e-9, abs=1e-9)
    assert ours.mean == pytest.approx(np.mean(a) - np.mean(b), abs=1e-9) and ours.n == min(len(a), len(b))
    assert ours.std == pytest.approx(math.hypot(stats.sem(a), stats.sem(b)))


@given(samples, samples)
def test_difference_turns_with_its_groups(a, b):
    one, two = difference(a, b), difference(b, a)
    assert (one.mean, one.low, one.high) == pytest.approx((-two.mean, -two.high, -two.low))
    assert {verdict(one), verdict(two)} in ({'open'}, {'holds', 'fails'})


def test_one_value_has_no_interval():
    one = summary(v for v in [3])
    assert (one.mean, one.n) == (3.0, 1) and all(map(math.isnan, (one.std, one.low, one.high)))
    for a, b in (([1], [2, 3]), ([2, 3], [1]), ([1], [2])):
        gap = difference(a, b)
        assert gap.n == 1 and math.isnan(gap.low) and gap.mean == np.mean(a) - np.mean(b) and verdict(gap) == 'open'


def test_groups_without_spread_differ_surely():
    assert difference([2, 2], [1, 1, 1]) == Summary(1.0, 0.0, 2, 1.0, 1.0)
    assert verdict(difference([2, 2], [1, 1])) == 'holds' and verdict(difference([1, 1], [1, 1])) == 'open'


@pytest.mark.parametrize('low, high, expected', [
    (0.1, 2.0, 'holds'), (0.0, 2.0, 'open'), (-1.0, 1.0, 'open'), (-1.0, 0.0, 'open'), (-2.0, -0.1, 'fails'),
    (math.nan, math.nan, 'open'),
])
def test_verdict(low, high, expected):
    assert verdict(Summary(0.0, 1.0, 3, low, high)) == expected


@pytest.mark.parametrize('values', [[], [1.0, math.nan], [math.inf], [-math.inf, 2.0]])
def test_values_that_are_no_numbers_are_refused(values):
    for call in lambda: summary(values), lambda: difference(values, [1, 2]), lambda: difference([1, 2], values):
        with pytest.raises(ValueError, match='values: got .*takes at least one finite number'):
            call()


def test_a_level_in_percent_is_refused():
    with pytest.raises(ValueError, match='level'):
        summary([1, 2, 3], level=95)
