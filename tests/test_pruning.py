"""Modular risk minimisation is three trainings: dense, the mask alone, and a subnetwork of a fixed size."""
import pytest
import torch

import sparse_irm.pruning as pruning
from sparse_irm.environments import colored_mnist, from_arrays
from sparse_irm.masks import sparsify
from sparse_irm.metrics import RULES, select
from sparse_irm.models import MLP
from sparse_irm.pruning import moved, prune_after_training, shape_and_colour, stages, subnetwork
from sparse_irm.resnet import resnet18
from sparse_irm.runs import make_run
from sparse_irm.sources import digits
from sparse_irm.training import fit

RUN = dict(source='digits', n_train=240, n_held_out=100, width=6, steps=12, anneal_step=4, evaluate_every=4, mask_steps=8)


@pytest.fixture(scope='module')
def benchmark():
    return colored_mnist(digits(), n_train=240, n_held_out=100)


def run_of(method='MRM-IRMv1', **settings):
    return make_run(method, **{**RUN, **settings})


def train(run, benchmark, **rest):
    model = sparsify(MLP(128, 6), run.keep)
    return model, prune_after_training(model, benchmark, run, 'cpu', progress=False, **rest)


def test_the_history_goes_through_the_stages_and_rules_choose_in_the_last(benchmark):
    _, state = train(run_of(), benchmark)
    assert [(r['stage'], r['step']) for r in state.history] == [
        (1, 4), (1, 8), (1, 12), (2, 16), (2, 20), (3, 24), (3, 28), (3, 32)]
    assert len({tuple(r) for r in state.history}) == 1   # the same columns in every row
    for rule in RULES:
        chosen = select(state.history, rule)
        assert chosen is None or chosen['stage'] == 3
    first = dict(state.history[0], test_accuracy=1.0, train_accuracy=1.0)
    assert select([first, *state.history[1:]], 'oracle') != first


def test_stage_one_is_the_dense_network(benchmark):
    dense = fit(MLP(128, 6), benchmark, make_run('IRMv1', **{k: v for k, v in RUN.items() if k != 'mask_steps'}),
                'cpu', progress=False)
    _, state = train(run_of(), benchmark)
    for ours, theirs in zip(state.history[:3], dense.history, strict=True):
        assert {k: ours[k] for k in theirs} == theirs


@pytest.mark.parametrize('prune', ['learned', 'magnitude'])
@pytest.mark.parametrize('keep, eval_mask', [(0.5, 'sampled'), (0.1243, 'thresholded'), (1.0, 'sampled')])
def test_exactly_the_budget_is_kept(prune, keep, eval_mask, benchmark):
    model, state = train(run_of(prune=prune, keep=keep, eval_mask=eval_mask), benchmark)
    count = int(keep * model.s.numel())
    assert model.s.sum().item() == count and set(model.s.tolist()) <= {0.0, 1.0}
    assert torch.equal(model.mask('thresholded'), model.s)   # also where keep * d would be rounded up
    for stage, kept in (1, 1.0), (3, count / model.s.numel()):
        assert all(r['kept_fraction'] == pytest.approx(kept) for r in state.history if r['stage'] == stage)
    assert (2 in {r['stage'] for r in state.history}) == (prune == 'learned')
    if eval_mask == 'thresholded':   # what would be kept at that moment
        d = model.s.numel()
        assert all(r['kept_fraction'] == pytest.approx(round(keep * d) / d) for r in state.history if r['stage'] == 2)


def test_a_higher_price_leaves_less_of_the_mask(benchmark):
    histories = [train(run_of(sparsity=price, eval_mask='expected'), benchmark)[1].history for price in (0.0, 1e9)]
    free, priced = (next(r['kept_fraction'] for r in reversed(h) if r['stage'] == 2) for h in histories)
    assert priced < free - 0.01   # eight steps of Adam at 6e-3, all of them downwards


def test_the_subnetwork_has_the_largest_probabilities_and_among_equals_the_largest_weights():
    model = sparsify(MLP(5, 4))
    w = torch.cat([p.detach().flatten() for p in model.module.parameters() if p.ndim == 2]).abs()
    with torch.no_grad():
        model.s.copy_(torch.rand(len(w), generator=torch.Generator().manual_seed(3)).round())
    ones = model.s.detach() == 1
    few, many = (subnetwork(model, keep, 'learned').bool() for keep in (0.2, 0.9))
    assert (few <= ones).all() and w[few].min() >= w[ones & ~few].max() and (ones <= many).all()
    assert torch.equal(subnetwork(model, 0.3, 'magnitude').bool(), w >= w.sort().values[-int(0.3 * len(w))])


def test_weights_outside_the_subnetwork_do_not_matter(benchmark):
    model, _ = train(run_of(keep=0.3), benchmark)
    x, plain = benchmark.test[0].x[:20], model.harden()
    assert sum((p == 0).sum() for p in plain.parameters() if p.ndim == 2) == (model.s == 0).sum()
    before, outside = model(x), 1 - model.s.detach()
    with torch.no_grad():
        for name, noise in model.weights(100 * outside).items():
            model.module.get_parameter(name).add_(noise)
    assert torch.equal(model(x), before) and torch.equal(plain(x), before) and not torch.equal(model.module(x), before)


def test_a_resnet_is_pruned_in_its_convolutions_and_rewound_with_its_batch_norms():
    x, y = torch.rand(4, 3, 8, 8, generator=torch.Generator().manual_seed(0)), torch.tensor([0, 1, 0, 1])
    photographs = from_arrays('photographs', [(x, y, y)] * 2, [], [(x, y, 1 - y)], n_classes=2)
    model = sparsify(resnet18(), 0.2, types=(torch.nn.Conv2d,))
    start = [p.clone() for p in model.module.parameters()]
    run = run_of(keep=0.2, steps=1, mask_steps=1, anneal_step=0, lr=0.0)
    state = prune_after_training(model, photographs, run, 'cpu', progress=False)
    assert [r['stage'] for r in state.history] == [1, 2, 3] and model.s.sum() == int(0.2 * model.s.numel())
    assert all(map(torch.equal, start, model.module.parameters()))
    assert {int(v) for k, v in model.module.state_dict().items() if k.endswith('num_batches_tracked')} == {1}


@pytest.mark.parametrize('rewind', [True, False])
def test_the_weights_of_stage_two_are_frozen_and_those_of_stage_three_rewound(rewind, benchmark, monkeypatch):
    seen = []

    def watched(model, *args):
        before = {k: v.clone() for k, v in model.module.state_dict().items()}
        state = fit(model, *args)
        seen.append((before, {k: v.clone() for k, v in model.module.state_dict().items()}))
        return state

    monkeypatch.setattr(pruning, 'fit', watched)
    train(run_of(rewind=rewind), benchmark)
    same = lambda a, b: all(torch.equal(a[k], b[k]) for k in a)
    (start, dense), (frozen, after), (last, _) = seen
    assert same(frozen, dense) and same(after, dense) and not same(start, dense)
    assert same(last, start if rewind else dense)


@pytest.mark.parametrize('stop', [1, 2, 3])
@pytest.mark.parametrize('model_of', [lambda half: half, lambda half: sparsify(MLP(128, 6))], ids=['same model', 'new model'])
def test_an_interruption_in_any_stage_costs_nothing(stop, model_of, benchmark, tmp_path, monkeypatch):
    whole, state = train(run_of(), benchmark)
    calls = []

    class Interrupted(Exception):
        pass

    def cut(model, bench, stage, *args):
        calls.append(stage)
        if len(calls) < stop:
            return fit(model, bench, stage, *args)
        left = iter(range(stage.steps // 2))

        def stop_now(module, _):
            if module.training and next(left, None) is None:
                raise Interrupted

        with (model.module if stage.budget[0] == 1 else model).register_forward_pre_hook(stop_now):
            return fit(model, bench, stage, *args)

    half, where = sparsify(MLP(128, 6)), dict(progress=False, checkpoint=tmp_path / 'a.pt', checkpoint_every=2)
    with monkeypatch.context() as patch:
        patch.setattr(pruning, 'fit', cut)
        with pytest.raises(Interrupted):
            prune_after_training(half, benchmark, run_of(), 'cpu', **where)
    again = prune_after_training(model_of(half), benchmark, run_of(), 'cpu', **where)
    assert again.history == state.history
    assert all(map(torch.equal, again.model.state_dict().values(), whole.state_dict().values()))


def test_what_a_first_layer_learns_of_ink_is_on_the_shape_and_of_a_channel_on_both():
    start, model = MLP(18, 4), sparsify(MLP(18, 4))
    with torch.no_grad():
        model.module[1].weight[0] += 1           # ink in both channels
        model.module[1].weight[1, 9:] += 2       # ink in the green one only
    w = moved(model, start, (2, 3, 3))
    shape, colour = shape_and_colour(w).square().sum((2, 3, 4))    # [h], [h]
    torch.testing.assert_close(shape, torch.tensor([18., 18, 0, 0]))
    torch.testing.assert_close(colour, torch.tensor([0., 18, 0, 0]))
    torch.testing.assert_close(shape_and_colour(w).sum(0), w)
    with pytest.raises(ValueError, match=r'w: got shape \[4, 3, 3\], takes \[h, 2, ...\]'):
        shape_and_colour(w[:, 0])


def test_what_cannot_be_pruned_is_refused(benchmark):
    with pytest.raises(ValueError, match="prune: got 'none'"):
        stages(make_run('SparseIRM-IRMv1'))
    with pytest.raises(ValueError, match='model: got a dense MLP, takes sparsify'):
        prune_after_training(MLP(128, 6), benchmark, run_of(), 'cpu')
    with pytest.raises(ValueError, match='keep: got 1e-06, takes at least one of'):
        train(run_of(keep=1e-6), benchmark)
    with pytest.raises(ValueError, match='prune'):
        fit(sparsify(MLP(128, 6)), benchmark, run_of(), 'cpu')
    with pytest.raises(ValueError, match="prune: got 'learned' with method 'SparseIRM-IRMv1'"):
        make_run('SparseIRM-IRMv1', prune='learned')
