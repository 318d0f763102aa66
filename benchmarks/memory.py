"""Peak memory of a training run above `import torch`, in a process of its own.

    python benchmarks/memory.py [--n 50000] [--width 640] [--dtype float32] [--method SparseIRM-IRMv1]

Uses real MNIST from $SPARSE_IRM_DATA, 5 steps and one evaluation; the peak is the process's largest resident size.
"""
import argparse
import json
import resource

import torch

BEFORE = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('--n', type=int, default=50_000)
    parser.add_argument('--width', type=int, default=640)
    parser.add_argument('--dtype', default='float32', choices=['float32', 'bfloat16'])
    parser.add_argument('--method', default='SparseIRM-IRMv1')
    args = parser.parse_args()
    from sparse_irm.configs import PAPER_TEXT
    from sparse_irm.runs import build, make_run
    from sparse_irm.training import fit

    run = make_run(args.method, mask=PAPER_TEXT, source='mnist', n_train=args.n, width=args.width, dtype=args.dtype, steps=5,
                   anneal_step=1)
    model, benchmark = build(run)
    fit(model, benchmark, run, device='cpu', progress=False)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    print(json.dumps({**vars(args), 'above import torch, MB': round((peak - BEFORE) / 1024), 'import torch, MB': round(BEFORE / 1024)}))


if __name__ == '__main__':
    main()
