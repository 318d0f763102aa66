"""What one GPU has to show, in one script of at most eight minutes; JSON out.

    python benchmarks/gpu_check.py [--device auto] [--out gpu_check.json] [--minutes 8] [--tiny]

    smoke            the width experiment's smoke grid on the embedded digits, trained on the device
    losses           the first steps of a run on the processor and on the device in float32: the largest relative difference
    steps a second   ERM, IRMv1 and SparseIRM on the MLP and the ResNet-18 in float32, tf32 and bfloat16, and peak memory
    paper cell       the seconds of one whole run of the paper preset: width, steps and evaluations as published

Random numbers stand in for images where only time and memory are asked for. A part that fails is told by name, and the others
are done. Once `--minutes` are over no further part begins; those left out are told by name. `--tiny` is for a processor: small
sizes and few steps.
"""
import argparse
import json
import platform
import tempfile
import time
from contextlib import contextmanager
from pathlib import Path
from unittest.mock import patch

import torch
from torch import nn

from sparse_irm import training
from sparse_irm.configs import PAPER_TEXT, PUBLISHED_CODE, Training
from sparse_irm.environments import from_arrays
from sparse_irm.masks import noise, sparsify
from sparse_irm.methods import method_settings
from sparse_irm.metrics import select
from sparse_irm.models import MLP
from sparse_irm.resnet import resnet18
from sparse_irm.runs import build, execute_all, make_run
from sparse_irm.training import Batches, choose_device, fit, new_state, train_step

METHODS = ('ERM', 'IRMv1', 'SparseIRM-IRMv1')
FULL = dict(widths=(8, 16), smoke_steps=30, compared=20, n=20_000, width=640, batch=512, side=64, warm=5, timed=30, paper_steps=1500)
TINY = dict(widths=(8,), smoke_steps=4, compared=3, n=64, width=8, batch=4, side=8, warm=1, timed=2, paper_steps=6)


def wait(device):
    """Until the device has done all that was asked of it."""
    if device.type == 'cuda':
        torch.cuda.synchronize(device)


@contextmanager
def precision(name):
    """A context in which float32 products are exact ('float32') or rounded to tf32, convolutions included."""
    matmul, cudnn = torch.backends.cuda.matmul, torch.backends.cudnn
    before = matmul.allow_tf32, cudnn.allow_tf32
    matmul.allow_tf32 = cudnn.allow_tf32 = name == 'tf32'
    try:
        yield
    finally:
        matmul.allow_tf32, cudnn.allow_tf32 = before


def smoke(device, size):
    """Runs of every method on the device, and the test accuracies of their last steps."""
    grid = [make_run(m, source='digits', n_train=1000, n_held_out=300, width=h, steps=size['smoke_steps'], anneal_step=2,
                     evaluate_every=size['smoke_steps'], lr=1e-3) for m in METHODS for h in size['widths']]
    with tempfile.TemporaryDirectory() as folder:
        rows = execute_all(grid, folder, device=str(device), progress=False)
    return {'runs': len(rows), 'test accuracy': {row['run'].name: round(select(row['history'], 'last')['test_accuracy'], 4) for row in rows}}


def first_losses(method, device, size):
    """The losses of the first steps on the device. The mask's noise is drawn on the processor, so that it is the same there."""
    run = make_run(method, mask=PAPER_TEXT, source='digits', n_train=1000, n_held_out=300, width=size['width'], anneal_step=0,
                   steps=size['compared'])
    model, benchmark = build(run)
    benchmark = benchmark.to(device)
    state, batches = new_state(model.to(device), run), Batches(benchmark.train, run)
    with patch.object(training, 'stream', lambda seed, purpose, step, device='cpu', real=training.stream: real(seed, purpose, step)), \
            patch.object(training, 'noise', lambda s, generator: noise(s.cpu(), generator).to(s.device)), precision('float32'):
        return [train_step(state, *batches(i), 'binary').item() for i in range(run.steps)]


def losses(device, size):
    """For every method the largest relative difference between the losses here and on the processor."""
    told = {}
    for method in METHODS:
        here, there = (first_losses(method, d, size) for d in (device, torch.device('cpu')))
        told[method] = max(abs(a - b) / abs(b) for a, b in zip(here, there))
    return {'steps': size['compared'], 'largest relative difference': told}


def job_of(network, method, dtype, device, size):
    """A function that does one training step, its data on the device, half of them from each of two environments."""
    config = Training(dtype=dtype, anneal_step=0, **method_settings(method, PAPER_TEXT))
    if network == 'MLP':
        model, shape, types = MLP(392, size['width']), (size['n'], 392), (nn.Linear,)
    else:
        model, shape, types = resnet18(), (size['batch'], 3, size['side'], size['side']), (nn.Conv2d,)
    state = new_state((sparsify(model, config.keep, types=types) if config.keep else model).to(device), config)
    x = torch.rand(shape, generator=torch.Generator().manual_seed(0)).to(device, getattr(torch, dtype))
    y = torch.arange(len(x), device=device) % 2
    return lambda: train_step(state, x, y, [len(x) // 2, len(x) - len(x) // 2], 'binary')


def speed(network, device, size):
    """Steps a second and peak memory in MB (of a GPU) for every method and precision."""
    told = {}
    for kind in ('float32', 'tf32', 'bfloat16') if device.type == 'cuda' else ('float32', 'bfloat16'):
        for method in METHODS:
            with precision(kind):
                if device.type == 'cuda':
                    torch.cuda.empty_cache()
                    torch.cuda.reset_peak_memory_stats(device)
                job = job_of(network, method, 'bfloat16' if kind == 'bfloat16' else 'float32', device, size)
                for _ in range(size['warm']):
                    job()
                wait(device)
                begin = time.perf_counter()
                for _ in range(size['timed']):
                    job()
                wait(device)
                rate = size['timed'] / (time.perf_counter() - begin)
            peak = round(torch.cuda.max_memory_allocated(device) / 1e6) if device.type == 'cuda' else None
            told[f'{method} {kind}'] = {'steps a second': round(rate, 2), 'peak memory, MB': peak}
    return told


def paper_cell(device, size):
    """Seconds of a whole run as the paper preset has it: 40,000 test images, 10,000 held out, an evaluation every 5 steps."""
    draw, n = torch.Generator().manual_seed(0), size['n']

    def group(*counts):
        return [(torch.rand(k, 392, generator=draw), torch.randint(2, (k,), generator=draw), torch.zeros(k, dtype=torch.int64))
                for k in counts]
    data = from_arrays('random', group(n // 2, n // 2), group(n // 4, n // 4), group(2 * n), 2, source='random')
    config = Training(steps=size['paper_steps'], evaluate_every=5, dtype='bfloat16', **method_settings('SparseIRM-IRMv1', PUBLISHED_CODE))
    begin = time.perf_counter()
    fit(sparsify(MLP(392, size['width']), config.keep), data, config, device=str(device), progress=False)
    wait(device)
    return {'method': 'SparseIRM-IRMv1', 'width': size['width'], 'n': n, 'steps': config.steps, 'seconds': round(time.perf_counter() - begin, 2)}


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('--device', default='auto')
    parser.add_argument('--out', type=Path, default=Path('gpu_check.json'))
    parser.add_argument('--minutes', type=float, default=8.0, help='no part begins after these')
    parser.add_argument('--tiny', action='store_true')
    args = parser.parse_args()
    torch.set_flush_denormal(True)
    device, size = choose_device(args.device), TINY if args.tiny else FULL
    name = torch.cuda.get_device_name(device) if device.type == 'cuda' else platform.machine()
    parts = {'smoke': smoke, 'losses': losses, 'speed MLP': lambda *a: speed('MLP', *a),
             'speed ResNet-18': lambda *a: speed('ResNet-18', *a), 'paper cell': paper_cell}
    told = {'device': f'{device.type} {name}', 'torch': torch.__version__, 'sizes': size, 'failed': {}, 'skipped': [],
            'seconds': {}}
    start = time.perf_counter()
    for part, work in parts.items():
        begin = time.perf_counter()
        if begin - start > 60 * args.minutes:
            told['skipped'].append(part)
            args.out.write_text(json.dumps(told, indent=1) + '\n')
            print(f'{part}: skipped, {args.minutes:g} minutes are over', flush=True)
            continue
        try:
            told[part] = work(device, size)
        except Exception as error:  # the other parts are still worth their time
            told['failed'][part] = f'{type(error).__name__}: {error}'
        told['seconds'][part] = round(time.perf_counter() - begin, 1)
        args.out.write_text(json.dumps(told, indent=1) + '\n')
        print(f'{part}: {told["seconds"][part]} s', told['failed'].get(part, ''), flush=True)
    return bool(told['failed'] or told['skipped'])


if __name__ == '__main__':
    raise SystemExit(main())
