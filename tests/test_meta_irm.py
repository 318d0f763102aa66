"""Meta-losses have the gradients their formula has, and the one training loop runs them as it runs everything else."""
import math

import pytest
import torch

from sparse_irm.configs import Training, config_hash
from sparse_irm.environments import colored_mnist
from sparse_irm.meta_irm import adapt, meta_loss, meta_losses, meta_objective
from sparse_irm.methods import METHODS, method_settings
from sparse_irm.metrics import select
from sparse_irm.models import MLP
from sparse_irm.penalties import risk
from sparse_irm.sources import digits
from sparse_irm.training import (Batches, evaluate, fit, join, load_checkpoint, new_state, predict, save_checkpoint,
                                 train_step)

META = [name for name in METHODS if name.startswith('MetaIRM')]


@pytest.fixture(autouse=True)
def one_thread():
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope='module')
def benchmark():
    return colored_mnist(digits(), n_train=240, n_held_out=100)


def config(method='MetaIRM', **changes):
    return Training(**{**dict(steps=12, evaluate_every=3, lr=1e-2, anneal_step=0), **method_settings(method), **changes})


def train(c, benchmark, **where):
    return fit(MLP(128, 6), benchmark, c, device='cpu', progress=False, **where)


def curved(weights, e):
    "A smooth risk with a Hessian that changes from place to place and environment to environment."
    w, b = weights['w'], weights['b']
    return (torch.sin(w * (e + 1)).sum() * b + (w ** 4).mean() + (b - e) ** 2).squeeze()


def start():
    return {'w': torch.tensor([0.3, -0.7, 1.1], dtype=torch.float64, requires_grad=True),
            'b': torch.tensor([0.4], dtype=torch.float64, requires_grad=True)}


# Meta-losses

@pytest.mark.parametrize('steps', [1, 3])
@pytest.mark.parametrize('same_environment', [False, True])
def test_second_order_gradients_are_those_of_finite_differences(steps, same_environment):
    def value(w, b):
        losses = meta_losses(curved, {'w': w, 'b': b}, 3, 0.1, steps, True, same_environment)
        return meta_objective(losses, 2.0)
    assert torch.autograd.gradcheck(value, tuple(start().values()))


def test_first_order_has_the_same_value_and_the_outer_gradient_alone():
    weights = start()
    exact, first = (meta_losses(curved, weights, 2, 0.1, 2, second_order) for second_order in (True, False))
    assert torch.equal(exact, first)
    adapted = {k: v.detach().requires_grad_() for k, v in adapt(lambda w: curved(w, 0), weights, 0.1, 2).items()}
    wanted = torch.autograd.grad(curved(adapted, 1), list(adapted.values()))
    got = torch.autograd.grad(first[0], list(weights.values()), retain_graph=True)
    full = torch.autograd.grad(exact[0], list(weights.values()))
    for a, b, c in zip(wanted, got, full):
        torch.testing.assert_close(a, b)
        assert not torch.allclose(b, c, rtol=1e-2)


def test_three_environments_by_hand():
    weights = start()
    losses = meta_losses(curved, weights, 3, 0.1)
    for i, loss in enumerate(losses):
        slopes = torch.autograd.grad(curved(weights, i), list(weights.values()))
        moved = {k: w - 0.1 * s for (k, w), s in zip(weights.items(), slopes)}
        assert loss.item() == pytest.approx(sum(curved(moved, j).item() for j in range(3) if j != i) / 2, rel=1e-12)


def test_without_an_inner_step_they_are_risks():
    weights = start()
    risks = torch.stack([curved(weights, e) for e in range(3)])
    others = (risks.sum() - risks) / 2
    torch.testing.assert_close(meta_losses(curved, weights, 3, 0.0), others)
    torch.testing.assert_close(meta_losses(curved, weights, 3, 0.0, same_environment=True), risks)


def test_adapting_leaves_the_weights_alone_and_lowers_the_risk():
    weights = start()
    before = {k: v.detach().clone() for k, v in weights.items()}
    values = [curved(adapt(lambda w: curved(w, 1), weights, 0.02, k), 1).item() for k in range(6)]
    assert values == sorted(values, reverse=True) and values[0] > values[-1] + 0.1
    assert all(torch.equal(weights[k], before[k]) and weights[k].grad is None for k in weights)


def test_one_environment_has_no_other():
    with pytest.raises(ValueError, match='environments: got 1, Meta-IRM takes at least 2'):
        meta_losses(curved, start(), 1, 0.1)
    assert meta_losses(curved, start(), 1, 0.1, same_environment=True).shape == (1,)
    with pytest.raises(ValueError, match='environments: got 0, takes at least 1'):
        meta_losses(curved, start(), 0, 0.1, same_environment=True)


@pytest.mark.parametrize('n', [1, 2, 5])
def test_equal_meta_losses_have_a_finite_gradient(n):
    losses = torch.full((n,), 0.3, requires_grad=True)
    meta_objective(losses, 10.0).backward()
    torch.testing.assert_close(losses.grad, torch.full((n,), 1 / n))


# Configuration

@pytest.mark.parametrize('changes', [dict(penalty='irmv1'), dict(keep=0.5), dict(penalty='rex', keep=0.5)])
def test_meta_irm_with_a_penalty_or_a_mask_is_refused(changes):
    with pytest.raises(ValueError, match='meta_lr: got 0.1 with '):
        Training(meta_lr=0.1, **changes)


def test_each_ablation_turns_one_switch():
    full = method_settings('MetaIRM')
    told = {name: {k for k, v in method_settings(name).items() if full.get(k, getattr(Training(), k)) != v}
            for name in META}
    assert told == {'MetaIRM': set(), 'MetaIRM-no-std-loss': {'meta_std_weight'},
                    'MetaIRM-first-order': {'meta_second_order'},
                    'MetaIRM-same-environment': {'meta_same_environment'}}
    assert len({config_hash(config(name)) for name in META}) == 4


# Training

@pytest.mark.parametrize('changes', [dict(), dict(batch_size=60, meta_steps=2), dict(dtype='bfloat16')], ids=repr)
def test_an_interrupted_training_continues_exactly(changes, benchmark, tmp_path):
    c = config(**changes)
    whole = train(c, benchmark)
    data = benchmark.to('cpu', torch.bfloat16 if c.dtype == 'bfloat16' else torch.float32)
    state, batches = new_state(MLP(128, 6), c), Batches(data.train, c)
    for t in range(3):
        train_step(state, *batches(t), 'binary')
    state.history = whole.history[:1]
    save_checkpoint(state, tmp_path / 'state.pt')
    again = train(c, benchmark, checkpoint=tmp_path / 'state.pt')
    assert again.history == whole.history
    assert all(torch.equal(a, b) for a, b in zip(again.model.parameters(), whole.model.parameters()))


def test_a_checkpoint_from_before_these_fields_is_continued(benchmark, tmp_path):
    c = Training(steps=6, evaluate_every=3)
    train(c, benchmark, checkpoint=tmp_path / 'state.pt')
    parts = torch.load(tmp_path / 'state.pt')
    parts['config'] = {k: v for k, v in parts['config'].items() if not k.startswith('meta_')}
    torch.save(parts, tmp_path / 'state.pt')
    assert load_checkpoint(new_state(MLP(128, 6), c), tmp_path / 'state.pt').step == 6


@pytest.mark.parametrize('changes', [dict(), dict(meta_steps=2), dict(meta_second_order=False, meta_steps=2),
                                     dict(meta_same_environment=True)], ids=repr)
def test_the_loss_of_a_batch_has_the_switches_of_the_configuration(changes, benchmark):
    c, model = config(meta_lr=0.5, **changes), MLP(128, 6)
    x, y, sizes = Batches(benchmark.train, c)(0)
    parts, weights = list(zip(x.split(sizes), y.split(sizes))), dict(model.named_parameters())

    def risk_of(weights, e):
        return risk(torch.func.functional_call(model, weights, (parts[e][0],)), parts[e][1])
    losses = meta_losses(risk_of, weights, 2, 0.5, changes.get('meta_steps', 1), changes.get('meta_second_order', True),
                         changes.get('meta_same_environment', False))
    wanted, got = losses.mean() + 2 * (losses[0] - losses[1]).abs() / 2, meta_loss(model, x, y, sizes, 'binary', c, 2.0)
    torch.testing.assert_close(got, wanted)
    for a, b in zip(*(torch.autograd.grad(loss, list(weights.values())) for loss in (got, wanted))):
        torch.testing.assert_close(a, b)


@pytest.mark.parametrize('method', META)
def test_the_held_out_objective_is_the_meta_loss_of_unseen_images(method, benchmark):
    state = train(config(method), benchmark)
    row, group = state.history[-1], benchmark.held_out
    x, y, sizes = join([e.x for e in group]), join([e.y for e in group]), [len(e) for e in group]
    value = meta_loss(state.model, x, y, sizes, 'binary', state.config, state.config.meta_std_weight)
    assert row['held_out_objective'] == pytest.approx(value.item(), rel=1e-6) and value.requires_grad
    assert row['test_objective'] == row['test_risk'] and all(math.isfinite(v) for v in row.values())
    assert select(state.history, 'train-validation') == min(state.history, key=lambda r: r['held_out_objective'])


def test_the_objective_is_that_of_the_network_without_dropout(benchmark):
    first, *rest = MLP(128, 6)
    c, model = config(), torch.nn.Sequential(first, torch.nn.Dropout(0.5), *rest)
    row = evaluate(new_state(model.train(), c), benchmark)
    wanted = meta_loss(model.eval(), *Batches(benchmark.train, c)(0), 'binary', c, 1.0)
    assert row['train_objective'] == pytest.approx(wanted.item(), rel=1e-6)


def test_bfloat16_follows_float32(benchmark):
    exact, rough = (train(config(dtype=dtype), benchmark) for dtype in ('float32', 'bfloat16'))
    assert all(p.dtype == torch.float32 for p in rough.model.parameters())
    assert rough.history[-1]['loss'] == pytest.approx(exact.history[-1]['loss'], rel=0.05)
    assert rough.history[-1]['loss'] != exact.history[-1]['loss']


def test_a_single_training_environment_is_refused():
    data = colored_mnist(digits(), n_train=100, correlations=(0.9,))
    with pytest.raises(ValueError, match='environments: got 1'):
        train(config(), data)


def test_training_lowers_the_meta_loss_and_ends_elsewhere_than_erm(benchmark):
    state = train(config(steps=40), benchmark)
    losses = [row['train_objective'] for row in state.history]
    assert losses[-1] < losses[0] - 0.05
    erm = train(config().replace(meta_lr=None, steps=40), benchmark)
    logits = [predict(s.model, benchmark.test[0].x, s.config) for s in (state, erm)]
    assert (logits[0] - logits[1]).abs().mean() > 0.1
