"""What masking its convolutions adds to a training step of the ResNet-18, as a ratio measured in one run.

    python benchmarks/resnet_step.py [--batch 512] [--side 64] [--dtype bfloat16] [--rounds 9] [--device auto]

Both steps are `training.train_step` with the IRMv1 penalty switched on; the masked one draws a mask at temperature 1 and
projects after the step. Every round times both, so that a slow moment of the machine hits both; the ratio is the median over
rounds of the ratios within a round. Random numbers stand in for images.
"""
import argparse
import json
import statistics

import torch
from torch import nn
from training_step import seconds

from sparse_irm.configs import PAPER_TEXT, Training
from sparse_irm.masks import sparsify
from sparse_irm.methods import method_settings
from sparse_irm.resnet import resnet18
from sparse_irm.training import choose_device, new_state, train_step


def step_of(method, x, y, dtype):
    """A function that does one training step of `method` on the batch, half of it from each of two environments."""
    config = Training(dtype=dtype, anneal_step=0, **method_settings(method, PAPER_TEXT))
    net = resnet18()
    model = sparsify(net, config.keep, types=(nn.Conv2d,)) if config.keep else net
    state = new_state(model.to(x.device), config)
    return lambda: train_step(state, x, y, [len(x) // 2, len(x) - len(x) // 2], 'binary')


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('--batch', type=int, default=512)
    parser.add_argument('--side', type=int, default=64)
    parser.add_argument('--dtype', default='bfloat16', choices=['float32', 'bfloat16'])
    parser.add_argument('--rounds', type=int, default=9)
    parser.add_argument('--device', default='auto')
    args = parser.parse_args()
    device = choose_device(args.device)
    x = torch.rand(args.batch, 3, args.side, args.side).to(device, getattr(torch, args.dtype))
    y = torch.randint(2, (args.batch,), device=device)
    work = {name: step_of(method, x, y, args.dtype) for name, method in (('dense', 'IRMv1'), ('masked', 'SparseIRM-IRMv1'))}
    for job in work.values():
        job()
        job()
    times = [{name: seconds(job, device) for name, job in work.items()} for _ in range(args.rounds)]
    print(json.dumps({**vars(args), 'device': str(device), 'threads': torch.get_num_threads(),
                      'milliseconds': {k: round(1e3 * statistics.median(t[k] for t in times), 1) for k in work},
                      'masked / dense': round(statistics.median(t['masked'] / t['dense'] for t in times), 3)}))


if __name__ == '__main__':
    main()
