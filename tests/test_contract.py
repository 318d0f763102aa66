"""Every method trains on every benchmark: logits in shape, a complete finite history, interruptions without a trace."""
import copy
import functools
import math

import pytest
import torch
from torch import nn

import sparse_irm.runs as runs
import sparse_irm.training as training
from sparse_irm.datasets import DATASETS, SOURCES
from sparse_irm.methods import METHODS
from sparse_irm.resnet import resnet18
from sparse_irm.runs import build, execute, make_run

STEPS = 4   # of every stage; a checkpoint after the third, the first that draws a mask and trains its probabilities
make_benchmark = functools.cache(runs.make_benchmark)


class Interrupted(Exception):
    pass


@functools.cache
def narrow(n_classes, seed):
    "ResNet-18 with an eighth of its channels: all of its layers, trained in an instant."
    net = resnet18(n_classes, seed)
    for part in net.modules():
        for name, value in [*part.named_parameters(recurse=False), *part.named_buffers(recurse=False)]:
            fewer = value.detach()[tuple(slice(n if n % 64 else n // 8) for n in value.shape)].clone()
            setattr(part, name, nn.Parameter(fewer) if isinstance(value, nn.Parameter) else fewer)
    return net


@pytest.fixture
def states(monkeypatch):
    "The final states of the runs executed. Benchmarks are made once for all tests, and ResNets are narrow."
    found = []
    for name in 'fit', 'prune_after_training':
        def train(*args, real=getattr(runs, name), **rest):
            found.append(real(*args, checkpoint_every=3, **rest))
            return found[-1]
        monkeypatch.setattr(runs, name, train)
    monkeypatch.setattr(runs, 'make_benchmark', make_benchmark)
    monkeypatch.setattr(runs, 'resnet18', lambda *args: copy.deepcopy(narrow(*args)))
    yield found
    torch.set_flush_denormal(False)


def tiny(method, dataset):
    "A run of a few steps on a few embedded images."
    source = next(name for name in SOURCES[dataset] if name in ('digits', 'photographs'))
    images = dict(batch_size=8, n_test=2) if source == 'photographs' else dict(width=6)
    pruning = dict(mask_steps=STEPS) if 'prune' in METHODS[method] else {}
    return make_run(method, dataset, source=source, n_train=16, n_held_out=4, steps=STEPS, anneal_step=1,
                    evaluate_every=1, **images, **pruning)


def columns(run, benchmark):
    "The names of all columns of a run's history."
    groups = {'train': benchmark.train, 'held_out': benchmark.held_out, 'test': benchmark.test}
    return {'step', 'loss', 'penalty_weight',
            *(f'{role}_{v}' for role in groups for v in ('accuracy', 'risk', 'penalty', 'objective')),
            *(f'{e.name} {v}' for group in groups.values() for e in group for v in ('accuracy', 'risk')),
            *(('kept_fraction', 'budget', 'mask_entropy', 'temperature') if run.keep else ()),
            *(('stage',) if run.prune != 'none' else ())}


def execute_again_and_again(run, folder, monkeypatch):
    "The row of a run whose every attempt is interrupted in its fourth step, and how often that happened."
    real = training.train_step
    for interruptions in range(9):
        left = iter(range(3))

        def step(*args):
            if next(left, None) is None:
                raise Interrupted
            return real(*args)
        with monkeypatch.context() as patch:
            patch.setattr(training, 'train_step', step)
            try:
                return execute(run, folder, device='cpu'), interruptions
            except Interrupted:
                pass
    raise AssertionError('the attempts get nowhere')


def same(a, b):
    "Are two state dictionaries equal bit for bit?"
    return a.keys() == b.keys() and all(torch.equal(a[k], b[k]) for k in a)


@pytest.mark.parametrize('method', METHODS)
@pytest.mark.parametrize('dataset', DATASETS)
def test_a_method_on_a_benchmark(dataset, method, states, tmp_path, monkeypatch):
    run = tiny(method, dataset)
    if run.meta_lr is not None and run.model == 'ResNet18':
        with pytest.raises(ValueError, match='meta_lr: got .* for a network with batch norm'):
            execute(run, tmp_path, device='cpu')
        return
    model, benchmark = build(run)
    start, k = copy.deepcopy(model.state_dict()), benchmark.n_classes
    with torch.no_grad():
        assert model.eval()(benchmark.train[0].x).shape == (8, k if k > 2 else 1)

    row = execute(run, tmp_path / 'whole', device='cpu')
    again, interruptions = execute_again_and_again(run, tmp_path / 'interrupted', monkeypatch)
    whole, resumed = states
    stages = [None] if run.prune == 'none' else [1, 2, 3]
    assert [r['step'] for r in whole.history] == list(range(1, len(stages) * STEPS + 1))
    assert [r.get('stage') for r in whole.history] == [stage for stage in stages for _ in range(STEPS)]
    assert all(set(r) == columns(run, benchmark) for r in whole.history)
    assert all(math.isfinite(value) for r in whole.history for value in r.values())
    assert not same(start, whole.model.state_dict())
    assert interruptions == 2 * len(stages) - 1     # at the end of each stage, and soon after the start of the next
    assert resumed.history == whole.history and same(resumed.model.state_dict(), whole.model.state_dict())
    assert again['history'] == row['history'] and not (tmp_path / 'interrupted' / 'checkpoints').exists()
