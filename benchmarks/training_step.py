"""What a training step costs, as ratios measured in one run.

    python benchmarks/training_step.py [--width 640] [--n 20000] [--dtype float32 bfloat16] [--rounds 15] [--device cpu]

Every round times each kind of step once, so that a slow moment of the machine hits all of them; a ratio is the median over
rounds of the ratios within a round. Random numbers stand in for images: the values do not change the time.

    matrix products   the products of one forward and backward pass and nothing else, at the same shapes
    ERM, IRMv1, ...   `training.train_step`, penalty switched on, mask drawn at temperature 1 and projected
    projection        `projection.project_` of the mask probabilities alone
    whole run         `training.fit` with an evaluation every 25 steps, against as many single steps
"""
import argparse
import json
import statistics
import time

import torch

from sparse_irm.environments import from_arrays
from sparse_irm.masks import sparsify
from sparse_irm.methods import method_settings
from sparse_irm.configs import PAPER_TEXT, Training
from sparse_irm.models import MLP
from sparse_irm.projection import project_
from sparse_irm.training import Batches, choose_device, fit, new_state, train_step


def seconds(work, device):
    """Time of one call, the device's queue emptied before and after."""
    def wait():
        if device.type == 'cuda':
            torch.cuda.synchronize()
    wait()
    begin = time.perf_counter()
    work()
    wait()
    return time.perf_counter() - begin


def random_benchmark(n, n_test, generator):
    def group(sizes):
        return [(torch.rand(k, 392, generator=generator), torch.randint(2, (k,), generator=generator),
                 torch.zeros(k, dtype=torch.int64)) for k in sizes]
    return from_arrays('random', group([n // 2, n - n // 2]), group([n_test // 2] * 2), group([2 * n]), 2, source='random')


def products(x, width):
    """A function that does the matrix products of a step: three layers forward, gradients by weights and activations."""
    n, d = x.shape
    h = torch.rand(n, width, device=x.device).to(x.dtype)
    w1, w2, w3 = (torch.rand(*k, device=x.device).to(x.dtype) for k in ((width, d), (width, width), (1, width)))
    z = torch.rand(n, 1, device=x.device).to(x.dtype)

    def work():
        x @ w1.T, h @ w2.T, h @ w3.T                   # forward
        z @ w3, z.T @ h, h @ w2, h.T @ h, h.T @ x      # backward: activations and weights of layers 3, 2, 1
    return work


def step_of(method, benchmark, width, dtype, device):
    config = Training(dtype=dtype, anneal_step=0, **method_settings(method, PAPER_TEXT))
    model = MLP(392, width)
    model = (sparsify(model, config.keep) if config.keep else model).to(device)
    state, batches = new_state(model, config), Batches(benchmark.train, config)
    return lambda: train_step(state, *batches(0), 'binary')


def measure(n, width, dtype, rounds, device):
    data = random_benchmark(n, n // 2, torch.Generator().manual_seed(0)).to(device, getattr(torch, dtype))
    s = torch.rand(392 * width + width * width + width, device=device)
    work = {'matrix products': products(Batches(data.train, Training()).x, width)}
    work |= {m: step_of(m, data, width, dtype, device) for m in ('ERM', 'IRMv1', 'REx', 'SparseIRM-IRMv1')}
    work['projection'] = lambda: project_(s.add_(torch.rand_like(s), alpha=.006), 0.5 * s.numel())
    for job in work.values():
        job()
    times = [{name: seconds(job, device) for name, job in work.items()} for _ in range(rounds)]

    def ratio(a, b):
        return round(statistics.median(t[a] / t[b] for t in times), 3)
    steps, run = 100, Training(dtype=dtype, anneal_step=0, steps=100, evaluate_every=25, penalty='irmv1')
    whole = seconds(lambda: fit(MLP(392, width), data, run, device=str(device), progress=False), device)
    return {'n': n, 'width': width, 'dtype': dtype, 'device': str(device), 'threads': torch.get_num_threads(), 'rounds': rounds,
            'milliseconds': {k: round(1e3 * statistics.median(t[k] for t in times), 1) for k in work},
            'ERM / matrix products': ratio('ERM', 'matrix products'), 'IRMv1 / ERM': ratio('IRMv1', 'ERM'),
            'REx / ERM': ratio('REx', 'ERM'), 'SparseIRM-IRMv1 / ERM': ratio('SparseIRM-IRMv1', 'ERM'),
            'projection / SparseIRM-IRMv1': ratio('projection', 'SparseIRM-IRMv1'),
            'whole run / its steps': round(whole / (steps * statistics.median(t['IRMv1'] for t in times)), 3)}


if __name__ == '__main__':
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('--n', type=int, default=20_000)
    parser.add_argument('--width', type=int, default=640)
    parser.add_argument('--dtype', nargs='+', default=['float32', 'bfloat16'], choices=['float32', 'bfloat16'])
    parser.add_argument('--rounds', type=int, default=15)
    parser.add_argument('--device', default='auto')
    args = parser.parse_args()
    torch.set_flush_denormal(True)
    for dtype in args.dtype:
        print(json.dumps(measure(args.n, args.width, dtype, args.rounds, choose_device(args.device)), indent=1), flush=True)
