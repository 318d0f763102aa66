"""Training repeats itself bit for bit, survives interruption anywhere, keeps its budget, refuses what does not fit."""
import copy
import dataclasses
import itertools
import math
import os
from types import SimpleNamespace

import numpy as np
import pytest
import torch

import sparse_irm.training as training
from sparse_irm.configs import PAPER_TEXT, PUBLISHED_CODE, Training
from sparse_irm.environments import colored_mnist, from_arrays, full_colored_mnist
from sparse_irm.masks import sparsify
from sparse_irm.models import MLP
from sparse_irm.penalties import draw_scales, halves, scale_gradient
from sparse_irm.projection import _clipped, _sections
from sparse_irm.sources import digits
from sparse_irm.training import (Batches, accuracy, batch_rows, budget_fraction, choose_device, dense, fit,
                                 load_checkpoint, mask_is_live, measure, new_state, penalty_weight, predict,
                                 rate_factor, save_checkpoint, stream, train_step)

# Every branch of the loop: name -> what differs from a short run.
KINDS = {
    'dense': dict(),
    'irmv1': dict(penalty='irmv1'),
    'rex': dict(penalty='rex', rescale=False, penalty_weight=10.0),
    'masked': dict(penalty='irmv1', **PUBLISHED_CODE),
    'masked from the start': dict(PAPER_TEXT, penalty='rex', eval_mask='thresholded'),
    'expected mask': dict(PUBLISHED_CODE, eval_mask='expected'),
    'mini-batch': dict(batch_size=50),
    'masked mini-batch': dict(PUBLISHED_CODE, batch_size=50, penalty='irmv1', halves='signed'),
    'sgd': dict(optimizer='sgd', lr=0.1, batch_size=50),
    'cosine': dict(PUBLISHED_CODE, schedule='cosine'),
    'straight-through': dict(PUBLISHED_CODE, straight_through=True),
    'split-half': dict(penalty='irmv1', halves='absolute'),
    'bfloat16': dict(PUBLISHED_CODE, penalty='irmv1', dtype='bfloat16'),
}


@pytest.fixture(autouse=True)
def one_thread():
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope='module')
def images():
    return digits()


@pytest.fixture(scope='module')
def benchmark(images):
    return colored_mnist(images, n_train=240, n_held_out=100)


def config(**changes):
    return Training(**{**dict(steps=24, evaluate_every=5, anneal_step=6, lr=1e-2), **changes})


def model_for(config, benchmark, width=6, seed=0):
    model = MLP(benchmark.train[0].x[0].numel(), width, benchmark.n_classes, seed=seed)
    return model if config.keep is None else sparsify(model, config.keep)


def train(config, benchmark, model=None, **where):
    model = model_for(config, benchmark) if model is None else model
    return fit(model, benchmark, config, device='cpu', progress=False, **where)


def same(a, b):
    "Are two nested states equal bit for bit?"
    if isinstance(a, torch.Tensor):
        return torch.equal(a, b)
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(same(a[k], b[k]) for k in a)
    return len(a) == len(b) and all(map(same, a, b)) if isinstance(a, (list, tuple)) else a == b


def everything(state):
    return [state.step, state.history, state.model.state_dict(), state.weights.state_dict(),
            state.scores.state_dict() if state.scores else None]


# Repetition

@pytest.mark.parametrize('kind', KINDS)
def test_a_seed_repeats_and_leaves_no_trace(kind, benchmark):
    before, c = torch.get_rng_state(), config(**KINDS[kind])
    first, model = train(c, benchmark), model_for(c, benchmark)
    torch.manual_seed(7)
    between = torch.get_rng_state()
    assert same(everything(first), everything(train(c, benchmark, model)))
    assert torch.equal(between, torch.get_rng_state())
    torch.set_rng_state(before)


@pytest.mark.parametrize('kind', ['masked', 'mini-batch', 'split-half', 'straight-through'])
def test_another_seed_is_another_training(kind, benchmark):
    a, b = (train(config(seed=seed, **KINDS[kind]), benchmark).model.state_dict() for seed in (0, 1))
    assert not same(a, b)


@pytest.mark.parametrize('kind', ['masked', 'masked from the start', 'expected mask', 'masked mini-batch', 'bfloat16'])
def test_looking_does_not_change_training(kind, benchmark):
    often, seldom = (train(config(**KINDS[kind], evaluate_every=k), benchmark) for k in (1, 12))
    assert same(often.model.state_dict(), seldom.model.state_dict())
    assert [row['step'] for row in often.history] == list(range(1, 25))
    assert [row for row in often.history if row['step'] in (12, 24)] == seldom.history


@pytest.mark.parametrize('changes', [dict(penalty='irmv1'), KINDS['masked mini-batch'], dict(meta_lr=0.5)], ids=repr)
def test_dropout_follows_the_seed_and_nothing_else(changes, benchmark, tmp_path):
    c, layers = config(**changes), list(MLP(128, 6))
    net = torch.nn.Sequential(*layers[:3], torch.nn.Dropout(0.5), *layers[3:])

    def fresh():
        return copy.deepcopy(net) if c.keep is None else sparsify(copy.deepcopy(net), c.keep)
    with torch.random.fork_rng():
        whole = train(c, benchmark, fresh())
        torch.manual_seed(7)
        before = torch.get_rng_state()
        seldom = train(c.replace(evaluate_every=12), benchmark, fresh())
        assert torch.equal(torch.get_rng_state(), before)
        with pytest.raises(Interrupted):
            train(c, benchmark, interrupt(fresh(), 'evaluation', 7), checkpoint=tmp_path / 'a.pt', checkpoint_every=1)
        assert torch.equal(torch.get_rng_state(), before) and (tmp_path / 'a.pt').exists()
        again = train(c, benchmark, fresh(), checkpoint=tmp_path / 'a.pt')
    assert same(everything(again), everything(whole))
    assert same(seldom.model.state_dict(), whole.model.state_dict()) and seldom.history[-1] == whole.history[-1]
    assert not same(whole.model.state_dict(), train(c.replace(seed=1), benchmark, fresh()).model.state_dict())


@pytest.mark.parametrize('changes', [KINDS['masked mini-batch'], KINDS['masked from the start'], dict(meta_lr=0.5),
                                     dict(penalty='birm', halves='signed'), dict(penalty='birm-rex')], ids=repr)
def test_training_does_without_float64(changes, benchmark, monkeypatch, without_float64):
    "The CPU stands in for MPS, with the projection that is used there."
    monkeypatch.setattr(training, 'project_', lambda s, budget: _clipped(
        s.data, _sections(s.data, torch.full((), budget)), out=s.data))
    c = config(**changes, steps=10, anneal_step=3)
    with without_float64:
        state = train(c, benchmark)
    assert state.history[-1]['train_accuracy'] > 0.4


def test_streams_are_distinct():
    first = {torch.rand(1, generator=stream(*key), dtype=torch.float64).item(): key
             for key in [(s, p, t) for s in range(3) for p in ('mask', 'batch 1', 'batch 11') for t in range(20)]}
    assert len(first) == 180


def test_dense_full_batch_training_has_no_chance_in_it(benchmark):
    a, b = (train(config(seed=seed, penalty='irmv1'), benchmark).model.state_dict() for seed in (0, 1))
    assert same(a, b)


# Interruption

class Interrupted(Exception):
    pass


def interrupt(model, mode, call):
    "Make the model's forward pass fail at its `call`-th use in training or in evaluation."
    left = [call]

    def hook(module, _):
        left[0] -= module.training == (mode == 'training')
        if left[0] == 0:
            raise Interrupted
    dense(model).register_forward_pre_hook(hook)
    return model


@pytest.mark.parametrize('mode, call, done', [('training', 18, 14), ('training', 3, 0), ('evaluation', 7, 7)])
@pytest.mark.parametrize('kind', KINDS)
def test_an_interrupted_training_continues_exactly(kind, mode, call, done, benchmark, tmp_path):
    c, path = config(**KINDS[kind]), tmp_path / 'state.pt'
    where = dict(checkpoint=path, checkpoint_every=7)
    whole = train(c, benchmark)
    with pytest.raises(Interrupted):
        train(c, benchmark, interrupt(model_for(c, benchmark), mode, call), **where)
    reached = torch.load(path, weights_only=True)['step'] if path.exists() else 0
    assert reached == done and [p.name for p in tmp_path.iterdir()] == ['state.pt'] * bool(done)
    # A model of another seed: all that counts is in the checkpoint.
    again = train(c, benchmark, model_for(c, benchmark, seed=5 if done else 0), **where)
    assert same(everything(again), everything(whole))
    finished = path.read_bytes()
    assert same(everything(train(c, benchmark, **where)), everything(whole)) and path.read_bytes() == finished


@pytest.mark.parametrize('seconds, reached', [(61, 17), (25, 15), (0, 0)])
def test_slow_steps_are_saved_each_minute(seconds, reached, benchmark, tmp_path, monkeypatch):
    c, path, clock = config(), tmp_path / 'state.pt', itertools.count(0, seconds)
    monkeypatch.setattr('sparse_irm.training.time', SimpleNamespace(monotonic=lambda: next(clock)))
    with pytest.raises(Interrupted):
        train(c, benchmark, interrupt(model_for(c, benchmark), 'training', 18), checkpoint=path)
    assert (torch.load(path, weights_only=True)['step'] if path.exists() else 0) == reached


@pytest.mark.parametrize('changes, told', [
    (dict(lr=0.5), 'lr 0.01 there and 0.5 here'),
    (dict(steps=25, penalty='rex'), "penalty 'none' there and 'rex' here, steps 24 there and 25 here"),
    (dict(batch_size=40), 'batch_size None there and 40 here'),
])
def test_a_checkpoint_of_another_configuration_is_refused(changes, told, benchmark, tmp_path):
    path = tmp_path / 'state.pt'
    train(config(), benchmark, checkpoint=path)
    model = model_for(config(), benchmark)
    before = copy.deepcopy(model.state_dict())
    with pytest.raises(ValueError) as error:
        train(config(**changes), benchmark, model, checkpoint=path)
    assert told in str(error.value) and str(path) in str(error.value)
    assert same(model.state_dict(), before)


@pytest.mark.parametrize('damage', [lambda b: b[:len(b) // 2], lambda b: b'', lambda b: b'not a checkpoint',
                                    lambda b: b[:200] + bytes(200) + b[400:]])
def test_a_damaged_checkpoint_is_refused(damage, benchmark, tmp_path):
    path = tmp_path / 'state.pt'
    train(config(), benchmark, checkpoint=path)
    path.write_bytes(damage(path.read_bytes()))
    with pytest.raises(ValueError, match='checkpoint: cannot read .*state.pt .*delete it'):
        train(config(), benchmark, checkpoint=path)


@pytest.mark.parametrize('case', ['parts are missing', 'another width'])
def test_a_checkpoint_that_does_not_fit_is_refused(case, benchmark, tmp_path):
    path, c = tmp_path / 'state.pt', config()
    if case == 'another width':
        train(c, benchmark, model_for(c, benchmark, width=7), checkpoint=path)
    else:
        torch.save({'config': c.to_dict()}, path)
    with pytest.raises(ValueError, match='checkpoint: '):
        train(c, benchmark, checkpoint=path)


@pytest.mark.parametrize('broken', ['torch.save', 'os.replace'])
def test_a_failing_write_keeps_the_old_checkpoint(broken, benchmark, tmp_path, monkeypatch):
    path, c = tmp_path / 'state.pt', config()
    state = train(c, benchmark, checkpoint=path)
    old = path.read_bytes()

    def full(parts, to, *rest):
        if broken == 'torch.save':
            to.write(b'half')
        raise OSError(28, 'No space left on device')
    monkeypatch.setattr(*{'torch.save': (torch, 'save'), 'os.replace': (os, 'replace')}[broken], full)
    with pytest.raises(OSError, match='No space'):
        save_checkpoint(state, path)
    assert path.read_bytes() == old and list(tmp_path.iterdir()) == [path]


def test_a_checkpoint_restores_the_optimisers(benchmark, tmp_path):
    c = config(**KINDS['masked'])
    state = train(c, benchmark, checkpoint=tmp_path / 'state.pt')
    fresh = load_checkpoint(new_state(model_for(c, benchmark, seed=3), c), tmp_path / 'state.pt')
    assert same(everything(fresh), everything(state)) and len(fresh.weights.state_dict()['state']) == 6


# Divergence

@pytest.mark.parametrize('checkpoint', [False, True])
def test_divergence_is_told(checkpoint, benchmark, tmp_path):
    path, c = tmp_path / 'state.pt', config(optimizer='sgd', lr=1e30, penalty='irmv1', penalty_weight=123.0)
    where = dict(checkpoint=path, checkpoint_every=1) if checkpoint else {}
    with pytest.raises(FloatingPointError) as error:
        train(c, benchmark, **where)
    told = str(error.value)
    assert 'lr (1e+30)' in told and 'penalty_weight (123)' in told and f'step {2 if checkpoint else 5}:' in told
    assert (str(path) in told) == path.exists() == checkpoint


def test_divergence_in_the_last_step_is_told(benchmark, tmp_path):
    with pytest.raises(FloatingPointError):
        train(config(steps=1, lr=1e30), benchmark, checkpoint=tmp_path / 'state.pt')


# Refusals

@pytest.mark.parametrize('size', [1, 2 * 120 + 2, 10 ** 6])
def test_a_batch_that_does_not_fit_is_refused(size, benchmark):
    model = model_for(config(), benchmark)
    before = copy.deepcopy(model.state_dict())
    with pytest.raises(ValueError, match=rf'batch_size: got {size} over 2 .* of \[120, 120\] .* takes 2 to 240'):
        train(config(batch_size=size), benchmark, model)
    assert same(model.state_dict(), before)


@pytest.mark.parametrize('name', ['gpu', '', 'CPU', 'cpu:0', 'cuda:-1', 'cuda:x', 'cuda:99', 'auto:0', 'mps:1', 'cpu:'])
def test_a_device_that_is_not_there_is_refused(name, benchmark):
    with pytest.raises(ValueError, match=f"device: got '{name}', takes auto or one of cpu"):
        fit(model_for(config(), benchmark), benchmark, config(), device=name)


def test_auto_is_a_device_that_is_there():
    assert choose_device('auto').type in ('cpu', 'cuda', 'mps') and choose_device('cpu') == torch.device('cpu')


def test_model_and_keep_must_agree(benchmark):
    masked = sparsify(MLP(128, 6), 0.5)
    with pytest.raises(ValueError, match='keep: got None for a masked model'):
        train(config(), benchmark, masked)
    with pytest.raises(ValueError, match='keep: got 0.5 for a dense model'):
        train(config(keep=0.5), benchmark, masked.module)


@pytest.mark.parametrize('where, told', [
    (dict(checkpoint_every=0), 'checkpoint_every'), (dict(checkpoint='no/such/folder/state.pt'), 'checkpoint'),
])
def test_a_checkpoint_that_cannot_be_written_is_refused(where, told, benchmark, tmp_path):
    with pytest.raises((ValueError, FileNotFoundError), match=told):
        train(config(), benchmark, **{'checkpoint': tmp_path / 'state.pt', **where})


# Budget, mask and schedules

@pytest.mark.parametrize('kind', ['masked', 'masked from the start', 'straight-through', 'masked mini-batch', 'cosine'])
def test_the_budget_holds_after_every_step(kind, benchmark):
    c = config(**KINDS[kind], score_lr=0.1)
    state, batches = new_state(model_for(c, benchmark), c), Batches(benchmark.train, c)
    d = state.model.s.numel()
    for t in range(c.steps):
        train_step(state, *batches(t), 'binary')
        s = state.model.s.detach().double()
        if mask_is_live(c, t):
            assert s.min() >= 0 and s.max() <= 1 and s.sum() <= budget_fraction(c, t + 1) * d * (1 + 1e-6)
        else:
            assert (s == 1).all() and not state.scores.state
    assert s.sum() <= 0.5 * d * (1 + 1e-6) and s.std() > 0.1


def test_the_budget_told_is_the_budget_kept(benchmark):
    "Also in the step in which the schedule starts, at 0.28 * 24 = 6.72."
    history = train(config(**KINDS['masked'], evaluate_every=1), benchmark).history
    assert [row['step'] for row in history if row['kept_fraction'] > row['budget'] + 0.05] == []


def test_the_thresholded_mask_keeps_the_budget_of_its_step(benchmark):
    history = train(config(**KINDS['masked'], eval_mask='thresholded', evaluate_every=1), benchmark).history
    d = 128 * 6 + 6 * 6 + 6
    assert [row['kept_fraction'] for row in history] == pytest.approx([round(r['budget'] * d) / d for r in history])
    assert len({row['budget'] for row in history}) > 5


def test_before_the_budget_starts_the_network_is_dense(benchmark):
    c = config(**KINDS['masked'])
    masked, plain = (train(config(**kind, steps=24), benchmark) for kind in (KINDS['masked'], KINDS['irmv1']))
    assert [row['kept_fraction'] for row in masked.history[:1]] == [1.0] and masked.history[1]['kept_fraction'] < 1
    common = ('loss', 'train_risk', 'test_accuracy')
    assert [masked.history[0][k] for k in common] == [plain.history[0][k] for k in common]
    assert not mask_is_live(c, 6) and mask_is_live(c, 7)


def test_the_penalty_starts_at_the_anneal_step(benchmark):
    assert [penalty_weight(config(penalty='rex'), t) for t in (0, 5, 6, 23)] == [0, 0, 1e4, 1e4]
    never, erm, at_once = (train(config(**c), benchmark).model.state_dict() for c in (
        dict(penalty='irmv1', anneal_step=24), dict(), dict(penalty='irmv1', anneal_step=0)))
    assert same(never, erm) and not same(at_once, erm)


def test_cosine_reaches_both_optimisers(benchmark):
    c = config(**KINDS['cosine'])
    state = train(c, benchmark)
    last = 0.5 * (1 + math.cos(math.pi * 23 / 24))
    assert rate_factor(c, 0) == 1 and rate_factor(c, 24) == 0 and rate_factor(config(), 20) == 1
    assert state.weights.param_groups[0]['lr'] == pytest.approx(1e-2 * last)
    assert state.scores.param_groups[0]['lr'] == pytest.approx(6e-3 * last)


def test_the_rate_falls_to_a_tenth_at_half_of_the_steps(benchmark):
    c = config(schedule='step')
    assert [rate_factor(c, t) for t in (0, 11, 12, 23)] == [1, 1, 0.1, 0.1]
    assert train(c, benchmark).weights.param_groups[0]['lr'] == pytest.approx(1e-3)


@pytest.mark.parametrize('sizes, size', [([50, 50], 10), ([31, 8, 100], 20), ([5, 5], 10)])
def test_an_epoch_of_batches_shows_each_example_once(sizes, size):
    c = config(batch_size=size)
    share = size // len(sizes)
    for e, n in enumerate(sizes):
        epoch = [i for t in range(n // share) for i in batch_rows(sizes, c, t)[e].tolist()]
        assert len(epoch) == len(set(epoch)) == n // share * share and set(epoch) <= set(range(n))


# Environments of all kinds

def by_hand(state, group, m, c):
    "Accuracy and risk of each binary environment, by other means."
    logits = [predict(state.model, e.x, c, m).squeeze(1).double().numpy() for e in group]
    labels = [e.y.double().numpy() for e in group]
    hits = [float(((z > 0) == y).mean()) for z, y in zip(logits, labels)]
    return hits, [float(np.mean(np.logaddexp(0, z) - y * z)) for z, y in zip(logits, labels)]


def own(sizes, n_classes=2, seed=0):
    "A triple of arrays for each size; the first feature is the label."
    g = torch.Generator().manual_seed(seed)
    for n in sizes:
        y = torch.randint(n_classes, (n,), generator=g)
        x = torch.rand(n, 3, generator=g)
        x[:, 0] = y
        yield x, y, torch.randint(n_classes, (n,), generator=g)


@pytest.mark.parametrize('kind', ['rex', 'masked', 'masked mini-batch'])
def test_unequal_environments_weigh_the_same(kind):
    b = from_arrays('own', list(own([90, 40, 25])), list(own([30, 9, 4], seed=1)), list(own([50, 11], seed=2)),
                    n_classes=2)
    c = config(**{**KINDS[kind], 'eval_mask': 'thresholded'} | ({'batch_size': 12} if 'batch' in kind else {}))
    state = train(c, b)
    row, m = state.history[-1], state.model.mask('thresholded') if c.keep else None
    for role in 'train', 'held_out', 'test':
        group = getattr(b, role)
        hits, risks = by_hand(state, group, m, c)
        assert row[f'{role}_accuracy'] == pytest.approx(sum(hits) / len(hits))
        assert row[f'{role}_risk'] == pytest.approx(sum(risks) / len(risks), rel=1e-5)
        assert [row[f'{e.name} accuracy'] for e in group] == pytest.approx(hits)
        penalty = row[f'{role}_penalty']
        assert row[f'{role}_objective'] == pytest.approx(row[f'{role}_risk'] + c.penalty_weight * penalty)
        if c.penalty == 'rex':
            assert penalty == pytest.approx(np.var(risks), rel=1e-3, abs=1e-9)


def test_the_loss_of_a_step_is_the_mean_over_environments():
    b = from_arrays('own', list(own([90, 7])), [], list(own([5])), n_classes=2)
    c = config(penalty='rex', anneal_step=0, rescale=False, penalty_weight=3.0)
    state = new_state(model_for(c, b), c)
    risks = by_hand(state, b.train, None, c)[1]
    assert train_step(state, *Batches(b.train, c)(0), 'binary').item() == pytest.approx(
        np.mean(risks) + 3 * np.var(risks), rel=1e-5)


def penalty_by_hand(c, t, logits, ys):
    "The IRMv1 penalty in its split-half form, or that of Bayesian IRM, from closed forms and the draws of step t."
    if c.penalty == 'birm':
        scales = draw_scales(c.scale_samples, len(ys), c.scale_std, stream(c.seed, 'scales', t))
        return np.mean([scale_gradient(z, y, scale=w).item() ** 2
                        for row in scales for z, y, w in zip(logits, ys, row)])
    split = stream(c.seed, 'halves', t)
    cuts = [halves(len(y), split) for y in ys]
    products = [np.prod([scale_gradient(z[h], y[h]).item() for h in cut]) for z, y, cut in zip(logits, ys, cuts)]
    return np.mean(np.abs(products) if c.halves == 'absolute' else products)


@pytest.mark.parametrize('t', [0, 5])
@pytest.mark.parametrize('changes', [dict(penalty='irmv1', halves='signed'), dict(penalty='irmv1', halves='absolute'),
                                     dict(penalty='birm', scale_std=0.5, scale_samples=3)], ids=repr)
def test_the_penalty_of_a_step_by_hand(changes, t):
    b = from_arrays('own', list(own([9, 7, 8])), [], list(own([5])), n_classes=2)
    c = config(anneal_step=0, rescale=False, penalty_weight=100.0, **changes)
    state = new_state(model_for(c, b), c)
    state.step = t
    risks, logits = by_hand(state, b.train, None, c)[1], [state.model(e.x).detach() for e in b.train]
    wanted = np.mean(risks) + 100 * penalty_by_hand(c, t, logits, [e.y for e in b.train])
    assert train_step(state, *Batches(b.train, c)(0), 'binary').item() == pytest.approx(wanted, rel=1e-5)


def test_the_price_of_the_mask_is_in_the_loss_and_moves_it(benchmark):
    cheap, dear = config(keep=1.0, lr=0.0), config(keep=1.0, lr=0.0, sparsity=1000.0)
    states = [new_state(model_for(c, benchmark), c) for c in (cheap, dear)]
    for state in states:
        state.model.s.data.fill_(0.5)
    loss, priced = (train_step(s, *Batches(benchmark.train, cheap)(0), 'binary').item() for s in states)
    assert priced - loss == pytest.approx(500, rel=1e-5)
    assert (states[1].model.s < 0.5).all() and not (states[0].model.s < 0.5).all()


def test_the_history_has_its_columns_and_is_finite(images):
    b = colored_mnist(images, n_train=301, n_held_out=50, correlations=(0.9, 0.8, 0.7),
                      test_correlations=(0.1, 0.5, 0.1))
    c = config(**KINDS['masked'], evaluate_every=1)
    history, groups = train(c, b).history, {'train': b.train, 'held_out': b.held_out, 'test': b.test}
    columns = {'step', 'loss', 'penalty_weight', 'kept_fraction', 'budget', 'mask_entropy', 'temperature',
               *(f'{role}_{v}' for role in groups for v in ('accuracy', 'risk', 'penalty', 'objective')),
               *(f'{e.name} {v}' for group in groups.values() for e in group for v in ('accuracy', 'risk'))}
    assert all(set(row) == columns for row in history) and len(columns) == 7 + 12 + 18
    assert all(math.isfinite(v) for row in history for v in row.values())
    assert [row['penalty_weight'] for row in history] == [0.0] * 6 + [1e4] * 18  # the weight of the step just taken
    kept = [budget_fraction(c, t) for t in range(8, 25)]    # the mask is live from step 7 on
    assert [row['budget'] for row in history] == [1.0] * 7 + kept
    assert history[-1]['temperature'] == pytest.approx(0.03) and 0 < history[-1]['mask_entropy'] < 1
    plain = train(config(), dataclasses.replace(b, held_out=())).history[-1]
    assert set(plain) == {k for k in columns if not k.startswith('held') and k not in
                          ('kept_fraction', 'budget', 'mask_entropy', 'temperature')}


@pytest.mark.parametrize('kind', ['irmv1', 'masked mini-batch', 'bfloat16'])
def test_ten_classes(kind, images):
    b = full_colored_mnist(images, n_train=300, n_held_out=100)
    c = config(**{**KINDS[kind], 'steps': 60, 'anneal_step': 50, 'lr': 1e-2})
    state = train(c, b, model_for(c, b, width=32))
    assert predict(state.model, b.test[0].x, c, torch.ones_like(state.model.s) if c.keep else None).shape[1] == 10
    assert state.history[2]['train_accuracy'] > 0.7 and state.history[2]['loss'] < 0.8   # dense still, no penalty yet
    assert math.isfinite(state.history[-1]['test_objective'])


def test_regression_steps_reach_the_line():
    c = config(steps=300, optimizer='sgd', lr=0.01, l2=0.0, penalty='irmv1', penalty_weight=0.1, anneal_step=0)
    x = torch.randn(60, 3, generator=stream(0, 'x', 0))
    y = x @ torch.tensor([1.0, -2.0, 0.5])
    model = torch.nn.Linear(3, 1)
    torch.nn.init.zeros_(model.weight)
    torch.nn.init.zeros_(model.bias)
    state = new_state(model, c)
    losses = [train_step(state, x, y, [40, 20], 'regression').item() for _ in range(c.steps)]
    assert losses[-1] < 1e-6 * losses[0]
    torch.testing.assert_close(model.weight.detach(), torch.tensor([[1.0, -2.0, 0.5]]), rtol=1e-3, atol=1e-3)


def test_double_precision_stays(benchmark):
    state = train(config(penalty='irmv1'), benchmark, MLP(128, 6).double())
    assert {p.dtype for p in state.model.parameters()} == {torch.float64}
    assert predict(state.model, benchmark.test[0].x.double(), state.config).dtype == torch.float64


def test_double_precision_stays_under_a_mask(benchmark):
    train(config(keep=0.5), benchmark, sparsify(MLP(128, 6).double(), 0.5))


def test_predictions_do_not_depend_on_their_blocks(benchmark):
    model = model_for(config(), benchmark).train()
    x = benchmark.test[0].x
    torch.testing.assert_close(predict(model, x, config(), rows=7), predict(model, x, config()))
    assert model.training


def test_accuracy_counts_right_answers():
    assert accuracy(torch.tensor([[1.0], [-1.0], [0.0]]), torch.tensor([1, 1, 0]), 'binary') == 2 / 3
    assert accuracy(torch.eye(4), torch.tensor([0, 1, 2, 2]), 'classes') == 0.75
    with pytest.raises(ValueError, match="task: got 'regression', takes binary or classes"):
        accuracy(torch.rand(3), torch.ones(3), 'regression')
    with pytest.raises(ValueError, match=r'logits: got shape \(3, 1\) for y \(1,\)'):
        accuracy(torch.rand(3, 1), torch.ones(1), 'binary')


def test_nothing_to_predict_is_refused(benchmark):
    with pytest.raises(ValueError, match=r'x: got shape \(0, 2, 8, 8\), takes \[n, ...\] with n >= 1'):
        predict(model_for(config(), benchmark), torch.empty(0, 2, 8, 8), config())


def test_measuring_erm_tells_its_irmv1_penalty(benchmark):
    logits = torch.linspace(-1, 1, 240)
    erm, irm, rex = (measure(logits, benchmark.train, 'binary', p, 'train')['train_penalty']
                     for p in ('none', 'irmv1', 'rex'))
    assert erm == irm > 0 and erm != rex


# The network

def test_mlp_starts_by_xavier_and_ends_in_a_linear_layer():
    model, x = MLP(12, 5, 3), torch.randn(4, 3, 2, 2, generator=stream(0, 'x', 0))
    assert torch.equal(model[-1](model.features(x)), model(x)) and model.features(x).min() == 0
    widest = max(p.abs().max() / (6 / sum(p.shape)) ** 0.5 for p in model.parameters() if p.ndim == 2)
    assert 0.8 < widest <= 1 and all((p == 0).all() for p in model.parameters() if p.ndim == 1)
