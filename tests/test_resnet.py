"""The small-image ResNet-18, its masks, and the statistics by which it is evaluated."""
import pickle
from copy import deepcopy

import pytest
import torch
from torch import nn

from sparse_irm.configs import PAPER_TEXT, Training
from sparse_irm.masks import sparsify
from sparse_irm.resnet import evaluating, resnet18
from sparse_irm.training import new_state, predict, train_step

X = torch.rand(8, 3, 8, 8, generator=torch.Generator().manual_seed(0))


def running(model):
    return {k: v.clone() for k, v in model.state_dict().items() if 'running' in k or 'tracked' in k}


def same(a, b):
    return a.keys() == b.keys() and all(torch.equal(a[k], b[k]) for k in a)


@pytest.fixture(scope='module')
def net():
    return resnet18(seed=3)


@pytest.mark.parametrize('n_classes, k', [(2, 1), (3, 3), (10, 10)])
def test_one_logit_for_two_classes(n_classes, k):
    assert resnet18(n_classes)(X[:2]).shape == (2, k)


@pytest.mark.parametrize('n_classes', [1, 0, 2.0, '2', None])
def test_wrong_number_of_classes_is_told(n_classes):
    with pytest.raises(ValueError, match='n_classes: got .* takes a whole number of at least 2'):
        resnet18(n_classes)


def test_a_seed_names_the_network_and_nothing_else_changes(net):
    torch.manual_seed(11)
    before = torch.get_rng_state()
    assert same(resnet18(seed=3).state_dict(), net.state_dict())
    assert torch.equal(torch.get_rng_state(), before)
    assert not torch.equal(resnet18(seed=4).conv1.weight, net.conv1.weight)


def test_only_convolutions_are_masked(net):
    masked = sparsify(deepcopy(net), keep=0.3, types=(nn.Conv2d,))
    convolutions = {f'{name}.weight' for name, part in net.named_modules() if isinstance(part, nn.Conv2d)}
    assert set(masked.names) == convolutions and {n for n in convolutions if 'downsample' in n}
    hard = masked.eval().harden()
    changed = {k for k, v in hard.state_dict().items() if not torch.equal(v, net.state_dict()[k])}
    assert changed <= convolutions and changed
    torch.testing.assert_close(hard.eval()(X), masked(X))
    again = pickle.loads(pickle.dumps(masked))
    assert same(again.state_dict(), masked.state_dict()) and torch.equal(again(X), masked(X))


@pytest.mark.parametrize('dtype', ['float32', 'bfloat16'])
def test_a_masked_step_trains_weights_scores_and_averages(net, dtype):
    config = Training(dtype=dtype, penalty='irmv1', anneal_step=0, **PAPER_TEXT)
    state = new_state(sparsify(deepcopy(net), keep=0.5, types=(nn.Conv2d,)), config)
    x = X.to(getattr(torch, dtype))
    loss = train_step(state, x, torch.arange(8) % 2, [4, 4], 'binary')
    inner = state.model.module
    assert loss.isfinite() and inner.bn1.num_batches_tracked == 1 and inner.conv1.weight.dtype == torch.float32
    assert not torch.equal(inner.conv1.weight, net.conv1.weight) and not torch.equal(inner.fc.weight, net.fc.weight)
    assert state.model.s.sum() <= 0.5 * state.model.s.numel() * (1 + 1e-5)


def test_batch_statistics_are_those_of_training_mode_without_its_traces(net):
    reference, model = deepcopy(net).train(), deepcopy(net)
    before = running(model)
    with torch.no_grad(), evaluating(model, 'batch'):
        logits = model(X)
    torch.testing.assert_close(logits, reference(X).detach())
    assert same(running(model), before) and not same(running(reference), before)


@pytest.mark.parametrize('statistics', ['running', 'batch'])
def test_a_prediction_uses_the_statistics_of_its_configuration(net, statistics):
    with torch.no_grad(), evaluating(net, statistics):
        expected, other = net(X), net(X[:4])
    got = predict(net, X, Training(statistics=statistics))
    assert torch.equal(got, expected)
    assert torch.allclose(got[:4], other) == (statistics == 'running')


def test_running_statistics_do_not_depend_on_the_company(net):
    with torch.no_grad(), evaluating(net, 'running'):
        torch.testing.assert_close(net(X)[:3], net(X[:3]))
    with torch.no_grad(), evaluating(net, 'batch'):
        assert (net(X)[:3] - net(X[:3])).abs().max() > 1e-3


def test_dropout_is_off_with_either_statistics():
    model = nn.Sequential(nn.Dropout(0.5), nn.BatchNorm1d(4))
    for statistics in 'running', 'batch':
        with evaluating(model, statistics):
            assert torch.equal(model(torch.ones(6, 4) + torch.eye(6, 4)), model(torch.ones(6, 4) + torch.eye(6, 4)))


@pytest.mark.parametrize('statistics', ['running', 'batch'])
def test_every_mode_is_put_back_even_after_an_error(statistics):
    model = nn.Sequential(nn.BatchNorm1d(4), nn.Sequential(nn.BatchNorm1d(4, track_running_stats=False)), nn.Dropout())
    model[0].eval()                                      # frozen on purpose
    modes = [(part.training, getattr(part, 'track_running_stats', None)) for part in model.modules()]
    with pytest.raises(RuntimeError, match='inside'):
        with evaluating(model, statistics):
            raise RuntimeError('inside')
    assert modes == [(part.training, getattr(part, 'track_running_stats', None)) for part in model.modules()]


def test_unknown_statistics_are_told_before_anything_changes(net):
    net.train()
    with pytest.raises(ValueError, match="statistics: got 'test', takes one of running, batch"):
        with evaluating(net, 'test'):
            pass
    assert net.training
