"""What a batch costs beyond its runs: 100 runs of one second on two workers, against the ideal 50 seconds after start-up.

    python benchmarks/batch_overhead.py [--runs 100] [--seconds 1]

A run here sleeps where a real one trains, so that the number is about the batch (claims, logs, rows, pipes) and not about
the machine's cores; everything else is the real thing. The workers import PyTorch before the clock starts.
"""
import argparse
import tempfile
import time
from pathlib import Path

import sparse_irm.runs as runs
from sparse_irm.runs import execute_all, make_run, row_path
from sparse_irm.training import State
from sparse_irm.workers import Workers


def sleeping_attempt(run, folder, root, device, seconds):
    """`runs._attempt` with a training that sleeps; runs in a worker process."""
    def fit(model, benchmark, config, checkpoint, **_):
        time.sleep(seconds)
        Path(checkpoint).touch()
        return State(model, config, None, None, history=[{'step': 1, 'loss': 0.0}])
    runs.fit = fit
    return runs.execute(run, folder, root, device, wait=False) is not None


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument('--runs', type=int, default=100)
    parser.add_argument('--seconds', type=float, default=1.0)
    args = parser.parse_args()
    import batch_overhead  # this file under the name by which the workers know it

    grid = [make_run('ERM', n_train=240, n_held_out=100, width=8, seed=seed) for seed in range(args.runs)]
    with tempfile.TemporaryDirectory() as folder, Workers(2) as pool:
        list(pool.map(time.sleep, [0.5] * 4))  # both processes are up
        submit = pool.submit
        pool.submit = lambda attempt, *rest: submit(batch_overhead.sleeping_attempt, *rest, args.seconds)
        begin = time.monotonic()
        execute_all(grid, folder, device='cpu', executor=pool, progress=False)
        took = time.monotonic() - begin
        assert all(row_path(run, folder).exists() for run in grid)
    ideal = args.runs * args.seconds / 2
    print(f'{args.runs} runs of {args.seconds:g} s on 2 workers: {took:.1f} s, {took / ideal:.3f} x the ideal {ideal:.0f} s')


if __name__ == '__main__':
    main()
