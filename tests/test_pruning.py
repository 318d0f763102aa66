"""Modular risk minimisation is three trainings: dense, the mask alone, and a subnetwork of a fixed size."""
import pytest
import torch

import sparse_irm.pruning as pruning
from sparse_irm.environments import colored_mnist
from sparse_irm.masks import sparsify
from sparse_irm.metrics import RULES, select
from sparse_irm.models import MLP
from sparse_irm.pruning import prune_after_training, stages, subnetwork
from sparse_irm.runs import execute, make_run
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
@pytest.mark.parametrize('keep', [0.5, 0.123, 1.0])
def test_exactly_the_budget_is_kept(prune, keep, benchmark):
    model, state = train(run_of(prune=prune, keep=keep), benchmark)
    count = int(keep * model.s.numel())
    assert model.s.sum().item() == count and set(model.s.tolist()) <= {0.0, 1.0}
    assert all(r['kept_fraction'] == pytest.approx(count / model.s.numel()) for r in state.history if r['stage'] == 3)
    assert (2 in {r['stage'] for r in state.history}) == (prune == 'learned')


def test_the_subnetwork_has_the_largest_probabilities_and_among_equals_the_largest_weights():
    model = sparsify(MLP(5, 4))
    w = torch.cat([p.detach().flatten() for p in model.module.parameters() if p.ndim == 2]).abs()
    with torch.no_grad():
        model.s.copy_(torch.rand(len(w), generator=torch.Generator().manual_seed(3)).round())
    ones = model.s.detach() == 1
    few, many = (subnetwork(model, keep, 'learned').bool() for keep in (0.2, 0.9))
    assert (few <= ones).all() and w[few].min() >= w[ones & ~few].max() and (ones <= many).all()
    assert torch.equal(subnetwork(model, 0.3, 'magnitude').bool(), w >= w.sort().values[-int(0.3 * len(w))])


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
def test_an_interruption_in_any_stage_costs_nothing(stop, benchmark, tmp_path, monkeypatch):
    whole, state = train(run_of(), benchmark)
    calls = []

    class Interrupted(Exception):
        pass

    def cut(model, bench, stage, *args):
        calls.append(stage)
        if len(calls) == stop:
            left = iter(range(stage.steps // 2))

            def stop_now(module, _):
                if module.training and next(left, None) is None:
                    raise Interrupted

            (model.module if stage.budget[0] == 1 else model).register_forward_pre_hook(stop_now)
        return fit(model, bench, stage, *args)

    where = dict(checkpoint=tmp_path / 'a.pt', checkpoint_every=2)
    with monkeypatch.context() as patch:
        patch.setattr(pruning, 'fit', cut)
        with pytest.raises(Interrupted):
            train(run_of(), benchmark, **where)
    model, again = train(run_of(), benchmark, **where)
    assert again.history == state.history
    assert all(torch.equal(a, b) for a, b in zip(model.state_dict().values(), whole.state_dict().values(), strict=True))


@pytest.mark.parametrize('method', ['MRM-ERM', 'MRM-IRMv1', 'MRM-REx'])
def test_a_run_prunes_and_leaves_no_checkpoint(method, tmp_path):
    row = execute(run_of(method), tmp_path, device='cpu')
    assert row['history'][-1]['stage'] == 3 and not (tmp_path / 'checkpoints').exists()
    assert execute(run_of(method), tmp_path, device='cpu') == row


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
