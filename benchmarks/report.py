"""How long the report of 5,000 rows takes: reading, all tables, claims and figures, written in four formats.

    python benchmarks/report.py [--rows 5000] [--evaluations 60]

The rows are made up, in a temporary folder: ten seeds, five methods, and widths and experiments as needed. Two times are told: of the
report itself, and of a fresh process, imports included; each also in processor seconds, for a machine that has other work.
"""
import argparse
import itertools
import json
import random
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from sparse_irm.report import write_report
from sparse_irm.runs import make_run, row_path, write_row

METHODS = ('ERM', 'IRMv1', 'REx', 'SparseIRM-IRMv1', 'SparseIRM-REx')
ORIGIN = {'sparse_irm': '0', 'commit': None, 'torch': '2', 'python': '3', 'device': 'made up', 'threads': 1, 'seconds': 60.0,
          'finished': '2000-01-01T00:00:00+00:00'}
MEASURED = ('loss', 'risk', 'penalty', 'train_accuracy', 'test_accuracy', 'held_out_accuracy', 'held_out_objective')


def make_rows(n, evaluations, folder):
    """Write n row-files, ten experiments at most."""
    chance = random.Random(0)
    grid = itertools.product(range(10), (40, 80, 160, 320, 640, 1280, 2560, 5120, 10_240, 20_480), METHODS, range(10))
    for experiment, width, method, seed in itertools.islice(grid, n):
        run = make_run(method, source='mnist', width=width, seed=seed, experiment=f'made_up_{experiment}')
        history = [{'step': 25 * (i + 1), 'penalty_weight': 1.0} | {name: chance.random() for name in MEASURED}
                   for i in range(evaluations)]
        write_row(row_path(run, folder), run, history, ORIGIN)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('--rows', type=int, default=5000)
    parser.add_argument('--evaluations', type=int, default=60)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        rows, out = Path(folder) / 'rows', Path(folder) / 'report.html'
        rows.mkdir()
        make_rows(args.rows, args.evaluations, rows)
        begin, used = time.perf_counter(), time.process_time()
        write_report(rows, out)
        used, inside = time.process_time() - used, time.perf_counter() - begin
        begin = time.perf_counter()
        script = 'import sys; from sparse_irm.report import write_report; write_report(*sys.argv[1:])'
        subprocess.run([sys.executable, '-c', script, str(rows), str(out)], check=True)
        outside, children = time.perf_counter() - begin, resource.getrusage(resource.RUSAGE_CHILDREN)
        print(json.dumps({**vars(args), 'megabytes read': round(sum(p.stat().st_size for p in rows.iterdir()) / 1e6, 1),
                          'megabytes of page': round(out.stat().st_size / 1e6, 2), 'seconds of the report': round(inside, 2),
                          'processor seconds of the report': round(used, 2), 'seconds of a fresh process': round(outside, 2),
                          'processor seconds of a fresh process': round(children.ru_utime + children.ru_stime, 2)}))


if __name__ == '__main__':
    main()
