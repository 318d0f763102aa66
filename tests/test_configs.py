"""Every field refuses what it cannot mean, and a configuration keeps its name."""
import dataclasses
import json
import typing
from dataclasses import dataclass

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sparse_irm.configs import HALVES, PAPER_TEXT, PUBLISHED_CODE, Config, Training, choice, config_hash, number

FIELDS = {f.name: f for f in dataclasses.fields(Training)}
HINTS = {name: hint.__name__ if isinstance(hint, type) else str(hint)
         for name, hint in typing.get_type_hints(Training).items()}
PAIRS = {name for name, hint in HINTS.items() if 'tuple' in hint}   # two numbers each
WHOLE = {name for name, hint in HINTS.items() if 'int' in hint}
MAY_BE_NONE = {name for name, hint in HINTS.items() if 'None' in hint}
NAMED = {name: f.metadata['names'] for name, f in FIELDS.items() if 'names' in f.metadata}
SWITCHES = {name for name, hint in HINTS.items() if hint == 'bool'}
NUMBERS = set(FIELDS) - set(NAMED) - SWITCHES
BESIDE = {'halves': dict(penalty='irmv1'), 'sparsity': dict(keep=1.0)}   # fields that are refused alone


def values(name, *wrong):
    "The given values as the field takes them: in a pair with a right one where it is one of the pairs."
    return [(1.0, v) for v in wrong] if name in PAIRS else list(wrong)


WRONG_TYPES = [(name, value) for name in FIELDS for value in [
    ..., {}, b'1', 1j,
    *([] if name in NAMED else ['1', 'fast']),
    *([1, 0.5] if name in NAMED or name in SWITCHES else [True]),
    *([] if name in MAY_BE_NONE else [None]),
    *([0.5, 60.0] if name in WHOLE else []),
    *([1.0, ('1', 1), (None, 1.0), (True, False), ((1.0,), 1.0)] if name in PAIRS else [[1], (1.0, 1.0)]),
]]
WRONG_VALUES = [(name, value) for name in sorted(NUMBERS) for value in values(name, *[
    *([] if name in WHOLE else [float('nan'), float('inf'), -float('inf')]),
    *([] if FIELDS[name].metadata['low'] is None else [FIELDS[name].metadata['low'] - (1 if name in WHOLE else 1e-9)]),
    *([] if FIELDS[name].metadata['high'] is None else [FIELDS[name].metadata['high'] + (1 if name in WHOLE else 1e-9)]),
])] + [(name, value) for name in NAMED for value in ('', 'nonsense', NAMED[name][0].upper())] + [
    ('temperature', ()), ('temperature', (1.0,)), ('temperature', (1.0, 1.0, 1.0)), ('budget', (0.1, 0.2, 0.3)),
    ('budget', (0.6, 0.3)), ('budget', (-0.1, 0.5))]


@pytest.mark.parametrize('name, value', WRONG_TYPES, ids=repr)
def test_wrong_types_are_refused_by_name(name, value):
    with pytest.raises(TypeError) as told:
        Training(**{name: value})
    assert str(told.value).startswith(f'{name}: got {value!r} ({type(value).__name__}), takes ')


@pytest.mark.parametrize('name, value', WRONG_VALUES, ids=repr)
def test_wrong_values_are_refused_by_name(name, value):
    with pytest.raises(ValueError) as told:
        Training(**{name: value})
    assert str(told.value).startswith(f'{name}: got {value!r}' if name not in PAIRS else f'{name}: got ')
    assert '\n' not in str(told.value)


def test_limits_themselves_are_taken():
    for name in NUMBERS:
        for end in {FIELDS[name].metadata['low'], FIELDS[name].metadata['high']} - {None}:
            assert getattr(Training(**{name: (end, end) if name in PAIRS else end}), name) is not None
    for name, names in NAMED.items():
        assert [getattr(Training(**{name: value}, **BESIDE.get(name, {})), name) for value in names] == list(names)


def test_a_whole_number_beyond_floats_is_refused_by_name():
    for value, told in (10 ** 400, 'inf'), (-10 ** 400, '-inf'):
        with pytest.raises(ValueError, match=f'lr: got {told},'):
            Training(lr=value)
    assert Training(lr=1e308).lr == 1e308


@pytest.mark.parametrize('changes, told', [
    *[(dict(halves=h, penalty=p), f"halves: got '{h}' with penalty '{p}', takes none there")
      for h in ('signed', 'absolute') for p in ('none', 'birm-rex')],
    (dict(halves='absolute', penalty='birm'), "halves: got 'absolute' with penalty 'birm', takes none or signed there"),
    (dict(halves='signed', meta_lr=0.1), "halves: got 'signed' with penalty 'none'"),
    (dict(sparsity=1.0), 'sparsity: got 1.0 for a dense network, takes 0 where keep is None'),
])
def test_a_field_without_effect_is_refused(changes, told):
    with pytest.raises(ValueError) as error:
        Training(**changes)
    assert told in str(error.value)


@pytest.mark.parametrize('key, told', [
    ('learning_rate', 'lr'), ('step', 'steps'), ('penalty_wieght', 'penalty_weight'),
    ('evaluateEvery', 'evaluate_every'),
    ('straight-through', 'straight_through'), ('score_learning_rate', 'score_lr'),
])
def test_unknown_keys_are_told_the_nearest(key, told):
    with pytest.raises(ValueError, match=rf'^{key}: unknown parameter, ') as error:
        Training.from_dict({'steps': 3, key: 1})
    assert told in str(error.value)
    with pytest.raises(ValueError, match=key):
        Training().replace(**{key: 1})


def test_a_key_near_nothing_is_told_all():
    with pytest.raises(ValueError) as error:
        Training.from_dict({'qqqqqqqq': 1})
    assert all(name in str(error.value) for name in FIELDS)


def test_numbers_are_kept_as_their_own_type():
    c = Training(lr=1, penalty_weight=10, temperature=[1, 2], budget=[0, 1], keep=1)
    assert [type(v) for v in (c.lr, c.penalty_weight, c.keep, *c.temperature, *c.budget)] == [float] * 7
    assert type(c.temperature) is tuple


def test_frozen():
    c = Training()
    with pytest.raises(dataclasses.FrozenInstanceError):
        c.lr = 1.0
    changed = c.replace(lr=0.5)
    assert c == Training() and changed.lr == 0.5 and changed != c and {c: 1}[Training()] == 1


def test_the_recipes_of_the_mask_are_valid():
    text, code = Training(**PAPER_TEXT), Training(**PUBLISHED_CODE)
    assert text.keep == code.keep == 0.5 and config_hash(text) != config_hash(code)


DEFAULTS = dict(
    steps=1500, batch_size=None, evaluate_every=25, dtype='float32', seed=0, penalty='none', penalty_weight=1e4,
    anneal_step=200, rescale=True, halves='none', l2=1e-3, optimizer='adam', lr=4e-4, momentum=0.9, schedule='constant',
    keep=None, score_lr=6e-3,
    temperature=[1.0, 1.0], budget=[0.0, 0.0], straight_through=False, eval_mask='sampled')


# Results are found by this hash, which leaves defaults out: whoever changes either orphans row-files and checkpoints.
def test_pinned_defaults():
    assert {name: Training().to_dict()[name] for name in DEFAULTS} == DEFAULTS


@pytest.mark.parametrize('config, pinned', [
    (Training(), '44136fa355b3'),
    (Training(steps=600, penalty='irmv1', keep=0.5, temperature=(1.0, 0.03), budget=(0.28, 0.6), lr=1e-3, seed=3),
     '9fb21b7b7924'),
])
def test_pinned_hash(config, pinned):
    assert config_hash(config) == pinned


def test_hash_ignores_the_spelling():
    told = dict(steps=60, lr=0.1, penalty_weight=100.0, keep=1.0, temperature=(1.0, 0.5), rescale=False)
    c = Training(**told)
    backwards = Training.from_dict(dict(reversed(told.items())))
    spelt = Training.from_dict({**told, 'penalty_weight': 100, 'keep': 1, 'temperature': [1, 0.5]})
    with_defaults = Training.from_dict(json.loads(json.dumps(c.to_dict())))
    assert c == backwards == spelt == with_defaults
    assert len({config_hash(v) for v in (c, backwards, spelt, with_defaults)}) == 1


def test_hash_ignores_the_sign_of_zero():
    assert Training(l2=-0.0) == Training(l2=0.0) and config_hash(Training(l2=-0.0)) == config_hash(Training(l2=0.0))


@dataclass(frozen=True)
class Forth(Config):
    a: int = number(1, low=0)
    b: float = number(0.5)
    c: str = choice('x', 'y')


@dataclass(frozen=True)
class Back(Config):
    c: str = choice('x', 'y')
    b: float = number(0.5)
    a: int = number(1, low=0)
    later: int = 7


def test_hash_ignores_the_order_of_fields_and_later_options():
    told = dict(a=2, b=3.5, c='y')
    assert config_hash(Forth(**told)) == config_hash(Back(**told)) != config_hash(Back(**told, later=8))


def another(name):
    "A valid value that is not the default."
    value, high = getattr(Training(), name), FIELDS[name].metadata.get('high')
    if name in NAMED or name in SWITCHES:
        return NAMED[name][1] if name in NAMED else not value
    if name in PAIRS:
        return (value[0], value[1] + 0.5)
    return high or 8 if value is None else value + 1 if high is None or name in WHOLE else value / 2


def test_every_field_counts_in_the_hash():
    hashes = {config_hash(Training(**{name: another(name)}, **BESIDE.get(name, {}))) for name in FIELDS}
    assert len(hashes | {config_hash(Training())}) == len(FIELDS) + 1


positive = st.floats(1e-3, 1e6)
configs = st.builds(
    lambda pair, **rest: Training(penalty=pair[0], halves=pair[1], **rest),
    st.sampled_from([(p, h) for p in NAMED['penalty'] for h in HALVES.get(p, ['none'])]),
    steps=st.integers(1, 10 ** 6), batch_size=st.none() | st.integers(1, 10 ** 6),
    seed=st.integers(0, 2 ** 63 - 1), lr=positive, penalty_weight=positive, keep=st.none() | st.floats(1e-6, 1),
    temperature=st.tuples(positive, positive),
    budget=st.tuples(st.floats(0, 0.5), st.floats(0.5, 1)),
    **{name: st.sampled_from(NAMED[name]) for name in NAMED if name not in ('penalty', 'halves')})


@given(configs, configs)
def test_round_trip_through_json(a, b):
    again = Training.from_dict(json.loads(json.dumps(a.to_dict())))
    assert again == a and config_hash(again) == config_hash(a) and set(a.to_dict()) == set(FIELDS)
    assert (config_hash(a) == config_hash(b)) == (a == b)
