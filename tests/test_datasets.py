"""Names of benchmarks and sources stand for the published data and numbers, and for nothing else."""
import pytest
import torch

from sparse_irm.datasets import DATASETS, SOURCES, make_benchmark, penalty_settings
from sparse_irm.runs import build, make_run

FEW = dict(n_train=80, n_test=20, n_held_out=20)
EMBEDDED = {name: next(s for s in sources if s in ('digits', 'photographs')) for name, sources in SOURCES.items()}


@pytest.mark.parametrize('dataset', DATASETS)
def test_every_benchmark_is_made_from_what_is_embedded(dataset):
    b = make_benchmark(dataset, EMBEDDED[dataset], **FEW)
    assert b.name == dataset and [len(e) for e in b.train] == [40, 40] and sum(map(len, b.held_out)) == 20
    assert dataset not in ('CIFARMNIST', 'ColoredObject') or len(b.test[0]) == 20
    again, other = (make_benchmark(dataset, EMBEDDED[dataset], **FEW, seed=seed) for seed in (0, 1))
    assert torch.equal(b.train[0].x, again.train[0].x) and not torch.equal(b.train[0].y, other.train[0].y)


@pytest.mark.parametrize('dataset, source', [('ColoredMNIST', 'photographs'), ('CIFARMNIST', 'digits'),
                                             ('ColoredObject', 'cifar10')])
def test_a_source_that_does_not_fit_is_refused(dataset, source):
    told = f"source: got '{source}' for {dataset}, takes "
    with pytest.raises(ValueError, match=told):
        make_benchmark(dataset, source, **FEW)
    with pytest.raises(ValueError, match=told):
        make_run('ERM', dataset, source=source)


@pytest.mark.parametrize('dataset', ['CIFARMNIST', 'ColoredObject'])
def test_missing_images_are_an_error_and_nothing_else_is_taken(dataset, tmp_path):
    for source in SOURCES[dataset]:
        if source != 'photographs':
            with pytest.raises(FileNotFoundError):
                make_benchmark(dataset, source, tmp_path, **FEW)


@pytest.mark.parametrize('dataset, published', [
    ('CIFARMNIST', dict(n_train=10_000, n_test=1_000, batch_size=1024, steps=500, anneal_step=40, label_noise=0.1)),
    ('ColoredObject', dict(n_train=12_000, n_test=1_800, batch_size=1000, steps=900, anneal_step=80, label_noise=0.05)),
])
def test_photographs_have_the_published_settings(dataset, published):
    run = make_run('SparseIRM-IRMv1', dataset)
    assert {k: getattr(run, k) for k in published} == published
    assert (run.optimizer, run.lr, run.momentum, run.correlations) == ('sgd', 0.01, 0.9, (0.999, 0.7))
    assert (run.model, run.width, run.halves, run.statistics) == ('ResNet18', None, 'absolute', 'running')
    assert 'h=' not in run.name and 'ResNet18' in run.name


@pytest.mark.parametrize('dataset, n, expected', [
    ('ColoredMNIST', 20_000, dict(penalty='birm', halves='none', scale_std=0.06)),
    ('ColoredMNIST', 5_000, dict(penalty='birm', halves='none', scale_std=0.27)),
    ('ColoredMNIST', 500, dict(penalty='birm', halves='none', scale_std=0.27)),
    ('CIFARMNIST', 10_000, dict(penalty='birm', halves='signed', scale_std=0.15)),
    ('ColoredObject', 12_000, dict(penalty='birm-rex', halves='none', scale_std=1 / 12)),
])
def test_bayesian_irm_has_its_published_estimators(dataset, n, expected):
    run = make_run('BayesianIRM', dataset, n_train=n)
    assert {k: getattr(run, k) for k in expected} == pytest.approx(expected)
    assert make_run('BayesianIRM', dataset, n_train=n, scale_std=0.5).scale_std == 0.5
    own = make_run('BayesianIRM', dataset, n_train=n, steps=800, schedule='step')      # as its own code on ColoredObject
    assert (own.steps, own.schedule, own.penalty) == (800, 'step', run.penalty)
    assert penalty_settings('none', dataset, n) == penalty_settings('rex', dataset, n) == {}


@pytest.mark.parametrize('settings, told', [
    (dict(model='ResNet18'), 'width: got 160 for ResNet18, takes a number for MLP, None for other models'),
    (dict(width=None), 'width: got None for MLP'),
    (dict(prune='magnitude'), "prune: got 'magnitude' with method 'ERM', takes a value like 'none' there"),
    (dict(n_test=0), 'n_test: got 0'),
])
def test_networks_and_pruning_agree_with_the_rest(settings, told):
    with pytest.raises(ValueError, match=told):
        make_run('ERM', source='digits', **settings)


def test_the_mask_lies_over_the_convolutions_of_the_resnet_alone():
    few = dict(source='photographs', n_train=8, n_test=2, n_held_out=0, batch_size=4)
    model, _ = build(make_run('SparseIRM-IRMv1', 'ColoredObject', **few))
    dense, _ = build(make_run('ERM', 'ColoredObject', **few))
    convolutions = [f'{name}.weight' for name, part in dense.named_modules() if isinstance(part, torch.nn.Conv2d)]
    assert list(model.names) == convolutions and len(convolutions) == 20
    assert all(torch.equal(a, b) for a, b in zip(model.module.parameters(), dense.parameters()))
