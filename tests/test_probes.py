"""Reading representations, the probe's honesty on made ones, and what a flip does."""
import math

import pytest
import torch
from hypothesis import given, strategies as st
from torch import nn

from sparse_irm.environments import Environment
from sparse_irm.masks import sparsify
from sparse_irm.models import MLP
from sparse_irm.probes import (Probe, change_between, features, flip_ratio, probe, probe_model, remembered, show_flips,
                               standardized)

QUICK = Probe(hidden=16, steps=60, lr=2e-2)


def draws(n=400, k=6, values=2, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(n, k, generator=generator), torch.randint(values, (n,), generator=generator)


@pytest.fixture
def net():
    return MLP(6, 10)


# features

@pytest.mark.parametrize('rows', [1, 7, 400, 1000])
def test_chunks_do_not_change_the_representation(net, rows):
    x, _ = draws()
    torch.testing.assert_close(features(net, x, rows=rows), net.features(x).detach())


def test_a_layer_is_copied_before_a_relu_overwrites_it(net):
    x, _ = draws()
    torch.testing.assert_close(features(net, x, layer='1'), (x @ net[1].weight.T + net[1].bias).detach())


def test_modes_hooks_and_gradients_are_left_as_they_were(net):
    net.train()[2].eval()
    z = features(net, draws()[0])
    assert net.training and not net[2].training and not z.requires_grad
    assert not any(part._forward_hooks or part._forward_pre_hooks for part in net.modules())
    with pytest.raises(RuntimeError):
        features(net, torch.randn(5, 7))
    assert not any(part._forward_hooks or part._forward_pre_hooks for part in net.modules())


def test_a_masked_network_is_read_under_the_named_mask(net):
    x, masked = draws()[0], sparsify(net, keep=0.4)
    with torch.no_grad():
        masked.s.copy_(torch.rand(masked.s.shape, generator=torch.Generator().manual_seed(1)))
    for kind in 'sampled', 'thresholded', 'expected':
        m = masked.mask(kind, torch.Generator().manual_seed(2))
        torch.testing.assert_close(features(masked, x, m=m), features(masked.harden(m), x))
    torch.testing.assert_close(features(masked, x), features(masked, x, m=masked.mask('thresholded')))
    assert features(masked, x, layer='3').shape == (400, 10)


def test_the_model_decides_the_dtype(net):
    x, _ = draws()
    z = features(net.double(), x.bfloat16())
    assert z.dtype == torch.float32 and z.shape == (400, 10)


def test_images_and_statistics():
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.Flatten(), nn.Linear(16, 1))
    x = torch.rand(12, 3, 4, 4)
    assert features(model, x, layer='0').shape == (12, 16)
    by_batch = features(model, x, statistics='batch')
    torch.testing.assert_close(by_batch.mean(), torch.tensor(0.0), atol=1e-5, rtol=0)
    assert not torch.allclose(by_batch, features(model, x))


@pytest.mark.parametrize('model, layer, told', [
    (MLP(6, 4), '33', "layer: got '33', did you mean 3"),
    (nn.Sequential(nn.Conv1d(1, 1, 1)), None, 'layer: got None for a model without a Linear'),
    (nn.Sequential(*[nn.Linear(6, 6)] * 2), '0', "layer: '0' does not run exactly once"),
])
def test_a_wrong_layer_is_told(model, layer, told):
    with pytest.raises(ValueError, match=told):
        features(model, draws()[0], layer)


def test_other_wrong_input_is_told(net):
    x, _ = draws()
    with pytest.raises(TypeError, match="layer: '0' gives a tuple"):
        features(nn.Sequential(nn.LSTM(6, 3)), x, layer='0')
    with pytest.raises(ValueError, match='m: got a mask for a MLP'):
        features(net, x, m=torch.ones(3))
    for rows in 0, -1:
        with pytest.raises(ValueError, match=f'rows: got {rows}, takes 1 or more'):
            features(net, x, rows=rows)
    with pytest.raises(ValueError, match=r'x: got \[0, 6\], takes \[n, ...\] with n >= 1'):
        features(net, x[:0])


# probe

def test_standardized_is_blind_to_units_and_to_rounding_noise():
    z, _ = draws()
    for scale in 1e-8, 1e6:
        for a, b in zip(standardized(z * scale, z * scale), standardized(z, z)):
            torch.testing.assert_close(a, b, atol=1e-4, rtol=1e-4)
    noise = 1000 + 1e-4 * z
    assert standardized(noise, noise)[0].abs().max() < 0.1
    assert torch.equal(standardized(torch.zeros(4, 2), torch.zeros(3, 2))[1], torch.zeros(3, 2))


@pytest.mark.parametrize('values', [2, 5])
def test_the_probe_finds_what_is_there_and_only_that(values):
    z, target = draws(values=values)
    test_z, test_target = draws(values=values, seed=1)
    chance = 1 / values
    assert abs(probe(z, target, test_z, test_target, QUICK)[1] - chance) < 0.1
    told = [torch.cat([a, 3 * nn.functional.one_hot(b, values)], 1) for a, b in ((z, target), (test_z, test_target))]
    assert probe(told[0], target, told[1], test_target, QUICK)[1] > 0.95


def test_a_seed_names_the_probe_and_nothing_else_changes():
    z, target = draws()
    torch.manual_seed(5)
    before = torch.get_rng_state()
    with torch.no_grad():
        one, two, three = (probe(z, target, z, target, Probe(hidden=3, steps=5), seed) for seed in (0, 0, 1))
    assert one == two != three and torch.equal(torch.get_rng_state(), before)


def test_an_empty_representation_gives_the_majority():
    target = (torch.arange(100) < 60).long()
    assert probe(torch.zeros(100, 3), target, torch.zeros(100, 3), target, QUICK) == (0.6, 0.6)


@pytest.mark.parametrize('change, told', [
    (dict(z=torch.zeros(400)), r'z: got \[400\]'),
    (dict(z=torch.full((400, 6), math.nan)), r'z: got \[400, 6\], not finite'),
    (dict(target=torch.zeros(3, dtype=torch.int64)), r'target: got torch.int64 \[3\], takes int64 \[400\]'),
    (dict(test_target=torch.zeros(400)), r'test_target: got torch.float32'),
    (dict(test_target=torch.full((400,), -1)), 'values from 0'),
    (dict(test_z=torch.zeros(400, 5)), r'test_z: got \[400, 5\], takes \[n, 6\]'),
])
def test_wrong_tensors_are_told(change, told):
    z, target = draws()
    with pytest.raises(ValueError, match=told):
        probe(**{**dict(z=z, target=target, test_z=z, test_target=target, config=QUICK), **change})


@pytest.mark.parametrize('field, error', [(dict(hidden=0), ValueError), (dict(steps=1.5), TypeError), (dict(lr=-1), ValueError)])
def test_wrong_settings_are_told(field, error):
    with pytest.raises(error, match=next(iter(field))):
        Probe(**field)


def test_probe_model_probes_colour_or_label_over_seeds(net):
    x, colour = draws()
    x[:, 0] += 8 * colour
    label = draws(seed=3)[1]
    train, test = (Environment(name, x[rows], label[rows], colour[rows])
                   for name, rows in (('train', slice(0, 200)), ('test', slice(200, 400))))
    found = probe_model(net, train, test, config=QUICK, seeds=range(4))
    assert found['test'].n == 4 and found['test'].mean > 0.9 and found['test'].std >= 0
    assert abs(probe_model(net, train, test, 'y', config=QUICK, seeds=[0])['test'].mean - 0.5) < 0.15
    with pytest.raises(ValueError, match="target: got 'colour'"):
        probe_model(net, train, test, 'colour')
    with pytest.raises(ValueError, match='seeds: got none'):
        probe_model(net, train, test, seeds=())


def test_probe_model_reads_by_the_named_statistics():
    "The colour is a shift of all numbers, which the statistics of a batch of one colour take out."
    x, label = draws(200)
    model = nn.Sequential(nn.BatchNorm1d(6), nn.Linear(6, 1))
    train, test = (Environment('e', x + 8 * c, label, torch.full((200,), c)) for c in (0, 1))
    for statistics in 'running', 'batch':
        by_hand = [probe(features(model, train.x, statistics=statistics), label, features(model, test.x, statistics=statistics),
                         label, QUICK)]
        found = probe_model(model, train, test, 'y', config=QUICK, seeds=[0], statistics=statistics)
        assert [(found['train'].mean, found['test'].mean)] == by_hand
        assert (found['test'].mean == found['train'].mean) == (statistics == 'batch')


def test_probes_work_on_a_device_without_float64(net, without_float64):
    x, colour = draws()
    e = Environment('e', x, draws(seed=3)[1], colour)
    asked = lambda: (probe_model(net, e, e, config=QUICK, seeds=[0]), change_between(x), flip_ratio(x, x.flip(1)))
    expected = asked()
    with without_float64:
        assert asked() == expected
        with pytest.raises(TypeError, match='float64 made by'):
            x.double()


# flip

@given(st.floats(1e-6, 1e6), st.integers(2, 30))
def test_the_ratio_has_no_units(scale, n):
    z, other = draws(n)[0], draws(n, seed=1)[0]
    assert flip_ratio(scale * z, scale * other) == pytest.approx(flip_ratio(z, other), rel=1e-4)
    assert flip_ratio(z, z) == 0


def test_the_ratio_of_a_constant_is_undefined_and_shapes_are_told():
    assert math.isnan(flip_ratio(torch.ones(4, 2), torch.ones(4, 2)))
    for z, other in ((torch.ones(4, 2), torch.ones(4, 3)), (torch.ones(1, 2), torch.ones(1, 2)), (torch.ones(4), torch.ones(4))):
        with pytest.raises(ValueError, match='flipped: got'):
            flip_ratio(z, other)


def test_the_figure_has_two_panels_a_network_also_for_a_constant_one():
    import matplotlib.pyplot as plt

    z = draws(20)[0]
    figure = show_flips({'a': (z - z.flip(1)).abs()[:5], 'constant': torch.zeros(5, 3)}, {'a': 1.0, 'constant': 0.0})
    panels = [axis for axis in figure.axes if axis.get_images() and axis.get_label() != '<colorbar>']
    assert len(panels) == 4 and panels[0].get_images()[0].get_array().shape == (5, 6)
    plt.close(figure)


# files

def test_remembered_computes_once_and_leaves_no_trace_of_a_failure(tmp_path):
    path = tmp_path / 'deep' / 'a.json'
    with pytest.raises(ZeroDivisionError):
        remembered(path, lambda: 1 / 0)
    assert not path.exists()
    assert remembered(path, lambda: {'a': (1, 2)}) == {'a': [1, 2]} == remembered(path, lambda: 1 / 0)
    assert [p.name for p in path.parent.iterdir()] == ['a.json']
    path.write_text('{"a":')
    with pytest.raises(ValueError, match=f'result file {path} is damaged'):
        remembered(path, dict)
    with pytest.raises(ValueError):
        remembered(tmp_path / 'b.json', lambda: {'a': math.nan})
    assert not (tmp_path / 'b.json').exists()
