"""A batch loses nothing: killed at any moment, shared by two, on a cluster that loses a worker, it ends with the same rows."""
import multiprocessing
import os
import random
import re
import signal
import subprocess
import sys
import threading
import time
from concurrent.futures import ProcessPoolExecutor
from contextlib import suppress
from pathlib import Path

import pytest
import torch

import sparse_irm.runs as runs
from sparse_irm.configs import config_hash
from sparse_irm.runs import RunsFailed, execute_all, make_run, read_row, row_path, unfinished
from sparse_irm.workers import Workers

TINY = dict(n_train=240, n_held_out=100, width=8, steps=20, anneal_step=5, evaluate_every=5)
GRID = [make_run(method, seed=seed, **TINY) for method in ('ERM', 'IRMv1', 'SparseIRM-IRMv1', 'SparseIRM-REx') for seed in range(10)]
LONG = make_run('ERM', **{**TINY, 'steps': 10 ** 9, 'evaluate_every': 10 ** 8})
forked = pytest.mark.skipif(not hasattr(os, 'fork'), reason='forks, to be quick')


@pytest.fixture(autouse=True)
def one_thread():
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)
    torch.set_flush_denormal(False)


@pytest.fixture(scope='module')
def undisturbed(tmp_path_factory):
    "The histories of the grid, made one run after the other."
    torch.set_num_threads(1)
    return numbers(execute_all(GRID, tmp_path_factory.mktemp('undisturbed'), device='cpu', progress=False))


def numbers(rows):
    return [(row['run'], row['history']) for row in rows]


def log_of(run, folder):
    path = Path(folder) / 'logs' / f'{config_hash(run)}.log'
    return path.read_text() if path.exists() else ''


def none_repeated(folder):
    "No run was begun again after it had finished, and no half-written file is left behind."
    for run in GRID:
        told = log_of(run, folder)
        assert told.count(' finished in ') <= 1 and not told.partition(' finished in ')[2].partition('\n')[2], told
    assert list(Path(folder).rglob('*.tmp')) == []


def wait_until(true, seconds=300):
    begin = time.monotonic()
    while not true():
        assert time.monotonic() - begin < seconds, 'waited in vain'
        time.sleep(0.002)


def batch_process(folder, workers=2):
    "The batch in a process group of its own, forked so that nothing need be imported again; the id of its first process."
    child = os.fork()
    if child:
        with suppress(OSError):     # both do it, so that it is done whoever comes first
            os.setpgid(child, child)
        return child
    os.setpgid(0, 0)
    try:
        with ProcessPoolExecutor(workers, multiprocessing.get_context('fork')) as pool:
            execute_all(GRID, folder, device='cpu', executor=pool, progress=False)
    finally:
        os._exit(0)


def kill_group(child):
    os.killpg(child, signal.SIGKILL)
    os.waitpid(child, 0)


@forked
def test_killed_ten_times_and_finished(tmp_path, undisturbed):
    chance, finished = random.Random(0), lambda: len(GRID) - len(unfinished(GRID, tmp_path))
    for rows in sorted(chance.sample(range(len(GRID) - 4), 10)):
        child = batch_process(tmp_path)
        wait_until(lambda: finished() >= rows and log_of(GRID[rows], tmp_path))
        time.sleep(chance.uniform(0, 0.05))
        kill_group(child)
        for path in tmp_path.glob('*.json'):
            read_row(path)
    assert numbers(execute_all(GRID, tmp_path, device='cpu', progress=False)) == undisturbed
    none_repeated(tmp_path)


@forked
def test_two_batches_at_once_one_of_them_killed(tmp_path, undisturbed):
    first, second = batch_process(tmp_path), batch_process(tmp_path)
    wait_until(lambda: len(unfinished(GRID, tmp_path)) <= 30)
    kill_group(first)
    os.waitpid(second, 0)
    assert unfinished(GRID, tmp_path) == []
    assert numbers(execute_all(GRID, tmp_path, device='cpu', progress=False)) == undisturbed
    none_repeated(tmp_path)


OWNER = """
import os, sys
os.cpu_count = lambda: 2    # one thread a worker, as here
from sparse_irm.runs import Run, execute_all
execute_all([Run.from_dict(eval(text)) for text in sys.argv[2:]], sys.argv[1], device='cpu', workers=2)
"""


def test_workers_die_with_their_owner(tmp_path, undisturbed):
    "Else they would train on, and hold the claim of their run against the next batch."
    texts = [str(run.to_dict()) for run in (LONG, *GRID[:3])]
    owner = subprocess.Popen([sys.executable, '-c', OWNER, str(tmp_path), *texts])
    wait_until(lambda: 'begins' in log_of(LONG, tmp_path) and not unfinished(GRID[:3], tmp_path))
    worker = int(log_of(LONG, tmp_path).split()[-1])
    os.kill(worker, 0)
    owner.kill()
    owner.wait()
    begin = time.monotonic()
    with runs.claim(tmp_path / 'checkpoints' / f'{config_hash(LONG)}.lock') as mine:
        assert mine and time.monotonic() - begin < 30
    assert numbers(execute_all(GRID[:3], tmp_path, device='cpu', progress=False)) == undisturbed[:3]


def test_a_hanging_run_and_a_killed_worker_are_failures_of_their_own(tmp_path, monkeypatch, undisturbed):
    monkeypatch.setattr(os, 'cpu_count', lambda: 2)     # one thread a worker, as here
    hanging, killed = LONG, LONG.replace(seed=1)

    def kill():
        wait_until(lambda: log_of(killed, tmp_path))
        os.kill(int(log_of(killed, tmp_path).split()[-1]), signal.SIGKILL)
    killer = threading.Thread(target=kill)
    killer.start()
    with pytest.raises(RunsFailed) as failed:
        execute_all([hanging, GRID[0], killed, GRID[1]], tmp_path, device='cpu', workers=2, timeout=25, progress=False)
    killer.join()
    assert set(failed.value.failures) == {hanging.name, killed.name}
    assert str(failed.value.failures[hanging.name]) == 'took longer than the time limit of 25 s and was stopped'
    assert 'died with exit status -9' in str(failed.value.failures[killed.name])
    assert numbers(read_row(row_path(run, tmp_path)) for run in GRID[:2]) == undisturbed[:2]


def dask(*words):
    return subprocess.Popen([sys.executable, '-m', 'dask', *words], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
                            env={**os.environ, 'OMP_NUM_THREADS': '1'})


def test_a_dask_cluster_that_loses_a_worker(tmp_path, undisturbed):
    pytest.importorskip('distributed')
    import json

    told, folder = tmp_path / 'scheduler.json', tmp_path / 'rows'
    scheduler = dask('scheduler', '--host', '127.0.0.1', '--port', '0', '--no-dashboard', '--scheduler-file', str(told))
    workers = [dask('worker', '--scheduler-file', str(told), '--host', '127.0.0.1', '--no-nanny', '--no-dashboard',
                    '--nthreads', '1', '--local-directory', str(tmp_path / f'{i}')) for i in range(2)]

    def kill():
        wait_until(lambda: len(unfinished(GRID, folder)) < 36)
        workers[0].kill()
    killer = threading.Thread(target=kill, daemon=True)
    try:
        wait_until(lambda: told.exists() and told.read_text().endswith('}'))    # the file is there before its text is
        killer.start()
        rows = execute_all(GRID, folder, device='cpu', scheduler=json.loads(told.read_text())['address'], progress=False)
        killer.join()
        assert workers[0].wait() == -signal.SIGKILL and workers[1].poll() is None
    finally:
        for process in (*workers, scheduler):
            process.kill()
            process.wait()
    assert numbers(rows) == undisturbed
    none_repeated(folder)


# Failures that leave the rest alone, and arguments that can't work

def test_a_full_disk_and_a_truncated_row_fail_by_name(tmp_path, monkeypatch, undisturbed):
    execute_all(GRID[:2], tmp_path, device='cpu', progress=False)
    path = row_path(GRID[1], tmp_path)
    path.write_bytes(path.read_bytes()[:100])
    real = runs.write_row

    def write_row(path, run, *rest):
        if run == GRID[2]:
            raise OSError(28, 'No space left on device')
        return real(path, run, *rest)
    monkeypatch.setattr(runs, 'write_row', write_row)
    with pytest.raises(RunsFailed) as failed:
        execute_all(GRID[:4], tmp_path, device='cpu', progress=False)
    assert set(failed.value.failures) == {GRID[1].name, GRID[2].name} and '2 runs failed' in str(failed.value)
    assert 'is damaged' in str(failed.value) and 'No space left' in str(failed.value)
    assert 'No space left' in log_of(GRID[2], tmp_path)
    monkeypatch.setattr(runs, 'write_row', real)
    path.unlink()
    assert numbers(execute_all(GRID[:4], tmp_path, device='cpu', progress=False)) == undisturbed[:4]


def test_ctrl_c_tells_what_is_saved(tmp_path, monkeypatch):
    real = runs.fit

    def fit(model, benchmark, run, **rest):
        if run == GRID[2]:
            raise KeyboardInterrupt
        return real(model, benchmark, run, **rest)
    monkeypatch.setattr(runs, 'fit', fit)
    with pytest.raises(KeyboardInterrupt, match=f'2 of 4 runs are saved in {tmp_path}; the same call'):
        execute_all(GRID[:4], tmp_path, device='cpu', progress=False)
    assert unfinished(GRID[:4], tmp_path) == GRID[2:4]


@pytest.mark.parametrize('arguments, told', [
    (dict(workers=0), 'workers: got 0'), (dict(workers=1.5), 'workers: got 1.5'), (dict(workers=True), 'workers: got True'),
    (dict(timeout=0), 'timeout: got 0'), (dict(timeout=-1), 'timeout: got -1'), (dict(timeout='1h'), "timeout: got '1h'"),
    (dict(device='abacus'), "device: got 'abacus'"), (dict(scheduler='nonsense://x'), "scheduler: got 'nonsense://x'"),
])
def test_arguments_that_cannot_work_are_refused(arguments, told, tmp_path):
    with pytest.raises(ValueError, match=told):
        execute_all(GRID[:2], tmp_path, progress=False, **{'device': 'cpu', **arguments})
    assert list(tmp_path.iterdir()) == []


def test_folders_that_cannot_be_written_are_refused(tmp_path, monkeypatch):
    (tmp_path / 'file').touch()
    with pytest.raises(ValueError, match='folder: .*file cannot be made'):
        execute_all(GRID[:2], tmp_path / 'file', device='cpu', progress=False)
    monkeypatch.setattr(os, 'access', lambda *_: False)
    with pytest.raises(ValueError, match='is read-only'):
        execute_all(GRID[:2], tmp_path / 'new', device='cpu', progress=False)


def test_a_claim_is_taken_over_from_the_dead_only(tmp_path):
    lock = tmp_path / 'a' / 'x.lock'
    with runs.claim(lock) as mine:
        with runs.claim(lock, wait=False) as second:
            assert mine and not second
        with pytest.raises(FileNotFoundError, match='of the body'), runs.claim(tmp_path / 'y.lock'):
            raise FileNotFoundError('of the body')
    assert not lock.exists() and not (tmp_path / 'y.lock').exists()
    lock.touch()
    with runs.claim(lock, wait=False) as mine:
        assert mine


def test_each_worker_sees_one_device(monkeypatch):
    monkeypatch.setenv('CUDA_VISIBLE_DEVICES', '4,7')
    assert [w.variables.get('CUDA_VISIBLE_DEVICES') for w in Workers(3).all] == ['4', '7', '4']
    assert [w.variables.get('CUDA_VISIBLE_DEVICES') for w in Workers(2, pin=False).all] == [None, None]


def alive(pid):
    try:
        return Path(f'/proc/{pid}/stat').read_text().rpartition(')')[2].split()[0] != 'Z'
    except FileNotFoundError:
        return False


INTERRUPTED = """
import asyncio, papermill
from sparse_irm.cli import main

def interrupted(*_, **__):
    "As an interrupt inside a cell: its task, kept by nobody, fails when the kernel has died."
    async def cell():
        raise RuntimeError('Kernel died')
    loop = asyncio.new_event_loop()
    interrupted.task = loop.create_task(cell())
    loop.run_until_complete(asyncio.sleep(0.01))
    raise KeyboardInterrupt

papermill.execute_notebook = interrupted
raise SystemExit(main(['reproduce', 'mlp_width', '--preset', 'smoke', '--out', 'out']))
"""


def test_ctrl_c_hides_what_becomes_of_the_cell(tmp_path):
    done = subprocess.run([sys.executable, '-c', INTERRUPTED], cwd=tmp_path, capture_output=True, text=True, timeout=120)
    assert done.returncode == 130 and done.stderr.startswith('interrupted; 0 finished runs') and done.stderr.count('\n') == 1


@pytest.mark.skipif(not Path('/proc/self/stat').exists(), reason='looks for processes in /proc')
def test_ctrl_c_stops_all_processes_and_the_same_command_goes_on(tmp_path):
    command = [sys.executable, '-m', 'sparse_irm.cli', 'reproduce', 'mlp_width', '--preset', 'smoke', '--workers', '2', '--methods', 'ERM,IRMv1',
               '--seeds', '0,1,2', '--out', 'out']
    how = dict(cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
               env={**os.environ, 'OMP_NUM_THREADS': '1', 'MPLBACKEND': 'Agg'})
    rows, logs = tmp_path / 'out' / 'rows', tmp_path / 'out' / 'rows' / 'logs'
    # a shell's background job ignores SIGINT, and so would all that it starts: the command is to have it as in a terminal
    first = subprocess.Popen(command, **how, start_new_session=True, preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL))
    deadline = time.monotonic() + 200
    while not list(rows.glob('*.json')) and first.poll() is None and time.monotonic() < deadline:
        time.sleep(0.02)
    os.killpg(first.pid, signal.SIGINT)  # as a terminal does
    said, complained = first.communicate(timeout=60)
    assert first.returncode == 130, said + complained
    assert 'finished runs are saved in out/rows' in complained and 'the same command continues' in complained
    assert 'Traceback' not in complained
    workers = set(re.findall(r'process (\d+)', ''.join(path.read_text() for path in logs.iterdir())))
    deadline = time.monotonic() + 30
    while any(map(alive, workers)) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert workers and not any(map(alive, workers))

    finished = {path.name: path.read_bytes() for path in rows.glob('*.json')}
    again = subprocess.run(command, **how, timeout=300)
    assert again.returncode == 0, again.stderr
    assert len(finished) < len(list(rows.glob('*.json'))) and not list(rows.rglob('*.pt'))
    assert all((rows / name).read_bytes() == text for name, text in finished.items())
