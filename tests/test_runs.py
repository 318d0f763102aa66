"""Runs are done once, survive a kill at any moment, and fail alone; rows and tables hold all that was measured."""
import csv
import dataclasses
import json
import math
import os
import signal
import statistics
import subprocess
import sys
from importlib.resources import files

import pandas as pd
import pytest
import torch

import sparse_irm.runs as runs
from sparse_irm.configs import PAPER_TEXT, config_hash
from sparse_irm.methods import METHODS, method_settings
from sparse_irm.metrics import RULES, select
from sparse_irm.datasets import DATASETS
from sparse_irm.runs import (Run, RunsFailed, build, execute, execute_all, make_run, model_path, read_row, row_path,
                             trained, unfinished, write_row)
from sparse_irm.tables import COLUMNS, aggregate, beside_paper, read_rows, reported, tidy
from sparse_irm.training import accuracy, predict, stream
from sparse_irm.workers import Workers

TINY = dict(n_train=240, n_held_out=100, width=6, steps=20, anneal_step=5, evaluate_every=5)


@pytest.fixture(autouse=True)
def one_thread(monkeypatch):
    monkeypatch.delenv('SPARSE_IRM_DATA', raising=False)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)
    torch.set_flush_denormal(False)


def tiny(method='ERM', **settings):
    return make_run(method, **{**TINY, **settings})


def do(run, folder):
    return execute(run, folder, device='cpu')


def numbers(row):
    return row['run'], row['history']


def lie(folder):
    "All files and folders below a folder but for the logs, as text."
    return sorted(str(path.relative_to(folder)) for path in folder.rglob('*') if 'logs' not in path.parts)


def never(*_, **__):
    raise AssertionError('trained again')


# What a run is

@pytest.mark.parametrize('method', METHODS)
@pytest.mark.parametrize('dataset', DATASETS)
def test_a_method_by_name(method, dataset):
    run = make_run(method, dataset)
    assert (run.method, run.dataset, run.anneal_step) == (method, dataset, DATASETS[dataset]['anneal_step'])
    assert (run.keep is not None, run.penalty.split('-')[0]) == (METHODS[method]['masked'], METHODS[method]['penalty'])
    assert make_run(method, dataset, PAPER_TEXT) == run or METHODS[method]['masked']
    assert make_run(method, dataset, steps=3, label_noise=0) == run.replace(steps=3, label_noise=0.0)


@pytest.mark.parametrize('settings, told', [
    (dict(method='ERM', penalty='irmv1'), "method: got 'ERM' with penalty 'irmv1' and keep None, takes penalty 'none'"),
    (dict(method='IRMv1', penalty='irmv1', keep=0.5), "method: got 'IRMv1' .* keep 0.5, takes .* keep None"),
    (dict(method='SparseIRM-REx', penalty='rex'), 'method: .* keep a number'),
    (dict(method='SparseIRM-REx', penalty='irmv1', keep=0.5), "takes penalty 'rex'"),
    (dict(method='irm'), "method: got 'irm', takes one of ERM"),
    (dict(dataset='MNIST'), "dataset: got 'MNIST'"), (dict(source='MNIST'), "source: got 'MNIST'"),
    (dict(n_train=1), 'n_train: got 1'), (dict(correlations=(0.9, 1.2)), 'correlations: got'),
    (dict(label_noise=-0.1), 'label_noise: got'), (dict(width=0), 'width: got 0'),
    (dict(model='CNN'), "model: got 'CNN'"),
])
def test_a_run_that_contradicts_itself_is_refused(settings, told):
    with pytest.raises(ValueError, match=told):
        Run.from_dict(settings)


@pytest.mark.parametrize('call, told', [
    (lambda: make_run('SparseIRM'), 'method: got .SparseIRM., did you mean .*SparseIRM-IRMv1'),
    (lambda: make_run('ERM', 'ColorMNIST'), 'dataset: got .ColorMNIST., did you mean ColoredMNIST or '),
    (lambda: make_run('ERM', widht=3), 'widht: unknown parameter, did you mean width'),
    (lambda: make_run('IRMv1', penalty='rex'), "method: got 'IRMv1'"),
    (lambda: make_run('SparseERM', keep=None), 'keep a number'),
    (lambda: method_settings('erm'), "method: got 'erm'"),
])
def test_names_are_refused_by_make_run(call, told):
    with pytest.raises(ValueError, match=told):
        call()


def test_pinned_hash():
    "Of a published setting: a change orphans all its row-files."
    run = make_run('SparseIRM-IRMv1', experiment='mlp_width', source='mnist', width=640, seed=1, evaluate_every=5,
                   dtype='bfloat16')
    assert config_hash(run) == '4d9fe366a86c' and row_path(run, 'folder').name == '4d9fe366a86c.json'


def test_the_oracle_sees_no_colour_and_starts_as_the_others():
    (erm, coloured), (oracle, grey) = (build(tiny(method)) for method in ('ERM', 'Oracle'))
    assert torch.equal(coloured.train[0].y, grey.train[0].y)
    assert not torch.equal(*coloured.train[0].x.unbind(1)) and torch.equal(*grey.train[0].x.unbind(1))
    assert all(torch.equal(a, b) for a, b in zip(erm.parameters(), oracle.parameters()))


# Done once

def test_a_finished_run_is_never_trained_again(tmp_path, monkeypatch):
    grid = [tiny(method, seed=seed) for method in ('ERM', 'SparseIRM-REx') for seed in (0, 1)]
    rows = execute_all(grid, tmp_path, device='cpu', progress=False)
    assert lie(tmp_path) == sorted(f'{config_hash(run)}.json' for run in grid)
    monkeypatch.setattr(runs, 'fit', never)
    again = execute_all([*grid[::-1], grid[0]], tmp_path, device='cpu', workers=2, progress=False)
    assert rows == again[:4][::-1] and do(grid[2], tmp_path) == rows[2] and [row['run'] for row in rows] == grid
    assert unfinished([*grid, tiny(seed=9), tiny(seed=9)], tmp_path) == [tiny(seed=9)]


def test_a_row_repeats_elsewhere(tmp_path):
    run = tiny('SparseIRM-IRMv1')
    a, b = do(run, tmp_path / 'a'), do(run, tmp_path / 'b')
    assert numbers(a) == numbers(b) and a['provenance']['threads'] == 1 and a['provenance']['device'].startswith('cpu')
    assert set(a['provenance']) == {'sparse_irm', 'commit', 'torch', 'python', 'device', 'threads', 'seconds',
                                    'finished'}


def test_a_row_holds_the_history_to_six_digits(tmp_path):
    run, history = tiny(), [{'step': 5, 'loss': 1.23456789, 'big': 123456789.0},
                            {'step': 10, 'loss': 1e-12, 'big': 2.0}]
    write_row(row_path(run, tmp_path), run, history, {'threads': 1})
    kept = read_row(row_path(run, tmp_path))
    assert kept == {'run': run, 'provenance': {'threads': 1}, 'history': [
        {'step': 5, 'loss': 1.23457, 'big': 123457000.0}, {'step': 10, 'loss': 1e-12, 'big': 2.0}]}
    assert type(kept['history'][0]['step']) is int


# Many at once

def test_a_pool_gives_the_rows_of_one_process(tmp_path, monkeypatch):
    grid = [tiny('SparseIRM-IRMv1'), tiny('IRMv1', dtype='bfloat16'), tiny('REx', batch_size=50), tiny(n_train=5000)]
    serial, pooled = tmp_path / 'serial', tmp_path / 'pooled'
    monkeypatch.setattr(os, 'cpu_count', lambda: 2)     # so that each of the two takes one thread, as here
    for folder, workers in ((serial, 1), (pooled, 2)):
        with pytest.raises(RunsFailed) as failed:
            execute_all(grid, folder, device='cpu', workers=workers, progress=False)
        assert list(failed.value.failures) == [grid[3].name] and 'must leave test images' in str(failed.value)
        assert unfinished(grid, folder) == [grid[3]]
    for run in grid[:3]:
        a, b = (read_row(row_path(run, folder)) for folder in (serial, pooled))
        assert numbers(a) == numbers(b) and a['provenance']['threads'] == b['provenance']['threads'] == 1


def test_failures_are_told_and_the_rest_is_done(tmp_path, monkeypatch):
    grid = [tiny(seed=seed) for seed in range(4)]
    real = runs.fit

    def fit(model, benchmark, run, **rest):
        if run.seed in (0, 2):
            raise FloatingPointError(f'broken by seed {run.seed}')
        return real(model, benchmark, run, **rest)
    monkeypatch.setattr(runs, 'fit', fit)
    with pytest.raises(RunsFailed) as failed:
        execute_all(grid, tmp_path, device='cpu', progress=False)
    assert {name: str(e) for name, e in failed.value.failures.items()} == {
        grid[0].name: 'broken by seed 0', grid[2].name: 'broken by seed 2'}
    assert '2 runs failed' in str(failed.value) and 'FloatingPointError: broken by seed 2' in str(failed.value)
    assert unfinished(grid, tmp_path) == [grid[0], grid[2]]
    monkeypatch.setattr(runs, 'fit', real)
    assert [row['run'] for row in execute_all(grid, tmp_path, device='cpu', progress=False)] == grid


def test_failures_of_runs_with_one_name_are_all_told(tmp_path):
    with pytest.raises(RunsFailed) as failed:
        execute_all([tiny(n_train=5000), tiny(n_train=5000, lr=0.1)], tmp_path, device='cpu', progress=False)
    assert '2 runs failed' in str(failed.value)


def test_a_run_that_finishes_does_not_disturb_another(tmp_path, monkeypatch):
    "Two processes, in the order that hurts: while the first trains, the second does all of its run."
    real = runs.fit

    def fit(*args, **rest):
        monkeypatch.setattr(runs, 'fit', real)
        do(tiny('IRMv1'), tmp_path)
        return real(*args, **rest)
    monkeypatch.setattr(runs, 'fit', fit)
    do(tiny('ERM'), tmp_path)


def test_a_run_that_is_being_trained_is_left_alone(tmp_path, monkeypatch):
    real, answers = runs.fit, []

    def fit(*args, **rest):
        answers.append(execute(tiny(), tmp_path, device='cpu', wait=False))
        return real(*args, **rest)
    monkeypatch.setattr(runs, 'fit', fit)
    assert do(tiny(), tmp_path)['run'] == tiny() and answers == [None]


@pytest.mark.parametrize('workers', [0, -1])
def test_too_few_workers_are_refused(workers, tmp_path):
    with pytest.raises(ValueError, match='workers'):
        execute_all([tiny()], tmp_path, device='cpu', workers=workers, progress=False)


def test_workers_share_the_threads(monkeypatch):
    monkeypatch.setattr(os, 'cpu_count', lambda: 8)
    assert [Workers(n, pin=False).all[0].variables['OMP_NUM_THREADS'] for n in (1, 3, 8, 20)] == ['8', '2', '1', '1']


# Killed, full, damaged

KILLED = """
import os, signal, sys
import torch
import sparse_irm.training as training
from sparse_irm.runs import execute, make_run

def die(*_, **__):
    os.kill(os.getpid(), signal.SIGKILL)

def step(state, *rest, real=training.train_step):
    return die() if state.step == 150 else real(state, *rest)

def replace(source, target, real=os.replace):
    return die() if str(target).endswith('.json') else real(source, target)

torch.set_num_threads(1)
folder, moment, settings = sys.argv[1], sys.argv[2], eval(sys.argv[3])
if moment == 'a step':
    training.train_step = step
else:
    os.replace = replace
execute(make_run('SparseIRM-IRMv1', **settings), folder, device='cpu')
"""


@pytest.mark.parametrize('moment, trained', [('a step', 100), ('the writing of the row', 200)])
def test_a_killed_run_continues_to_the_same_row(moment, trained, tmp_path, monkeypatch):
    settings = {**TINY, 'steps': 200, 'batch_size': 60}
    run = make_run('SparseIRM-IRMv1', **settings)
    killed = subprocess.run([sys.executable, '-c', KILLED, str(tmp_path / 'killed'), moment, repr(settings)],
                            env={**os.environ, 'OMP_NUM_THREADS': '1'}, capture_output=True, text=True, timeout=300)
    assert killed.returncode == -signal.SIGKILL, killed.stderr
    [checkpoint] = (tmp_path / 'killed' / 'checkpoints').glob('*.pt')
    assert checkpoint.name == f'{config_hash(run)}.pt' and unfinished([run], tmp_path / 'killed') == [run]
    assert torch.load(checkpoint, weights_only=True)['step'] == trained
    again, whole = do(run, tmp_path / 'killed'), do(run, tmp_path / 'whole')
    assert numbers(again) == numbers(whole)
    assert [name for name in lie(tmp_path / 'killed') if not name.endswith('.tmp')] == lie(tmp_path / 'whole')


@pytest.mark.parametrize('broken', ['fsync', 'replace'])
def test_a_full_disk_leaves_no_row_and_no_temporary_file(broken, tmp_path, monkeypatch):
    def full(*_):
        raise OSError(28, 'No space left on device')
    with monkeypatch.context() as patch:
        patch.setattr(os, broken, full)
        with pytest.raises(OSError, match='No space left'):
            write_row(row_path(tiny(), tmp_path), tiny(), [{'step': 1}], {})
    assert lie(tmp_path) == []
    write_row(row_path(tiny(), tmp_path), tiny(), [{'step': 1}], {})
    assert lie(tmp_path) == [f'{config_hash(tiny())}.json']


def test_a_network_is_kept_and_built_again(tmp_path):
    grid, models = [tiny('SparseIRM-IRMv1'), tiny('MRM-ERM', mask_steps=10)], tmp_path / 'models'
    rows = execute_all(grid, tmp_path, device='cpu', models=models)
    assert unfinished(grid, tmp_path, models) == []
    for run, row in zip(grid, rows):
        model, benchmark = trained(run, models)
        mask = model.mask('thresholded' if run.prune != 'none' else run.eval_mask, stream(run.seed, 'evaluation', run.steps))
        logits = predict(model, benchmark.test[0].x, run, mask)
        assert accuracy(logits, benchmark.test[0].y, 'binary') == pytest.approx(row['history'][-1]['test_accuracy'], abs=1e-5)
        assert mask.mean().item() == pytest.approx(row['history'][-1]['kept_fraction'], abs=1e-5)


def test_a_row_without_its_network_is_not_finished(tmp_path):
    run, models = tiny(), tmp_path / 'models'
    row = do(run, tmp_path)
    assert unfinished([run], tmp_path) == [] and unfinished([run], tmp_path, models) == [run]
    with pytest.raises(FileNotFoundError, match='models: .* has no network of ERM'):
        trained(run, models)
    assert numbers(execute(run, tmp_path, device='cpu', models=models)) == numbers(row)
    assert unfinished([run], tmp_path, models) == []
    model_path(run, models).write_bytes(b'half')
    with pytest.raises(ValueError, match='models: .* is damaged'):
        trained(run, models)


def test_divergence_in_the_last_step_is_a_failure_of_the_run(tmp_path):
    with pytest.raises(FloatingPointError, match='diverged'):
        do(tiny(steps=1, lr=1e30), tmp_path)


@pytest.fixture(scope='module')
def finished(tmp_path_factory):
    "The row-file of a finished run."
    folder = tmp_path_factory.mktemp('finished')
    do(tiny('IRMv1'), folder)
    return row_path(tiny('IRMv1'), folder)


def edited(**changes):
    return lambda row: json.dumps(row | changes)


@pytest.mark.parametrize('damage, told', [
    (lambda row: '', 'is damaged'), (lambda row: json.dumps(row)[:300], 'is damaged'), (lambda row: '[]', 'is damaged'),
    (lambda row: 'null', 'is damaged'), (lambda row: '{}', "is damaged .'config'"),
    (lambda row: json.dumps({k: v for k, v in row.items() if k != 'provenance'}), "is damaged .'provenance'"),
    (edited(config={'steps': 'many'}), 'is damaged .steps: got'),
    (edited(config={'stesp': 3}), 'is damaged .stesp: unknown'),
    (edited(config=None), 'is damaged'), (edited(history=[]), 'is damaged'),
    (edited(history={'step': 3}), 'is damaged'),
    (lambda row: json.dumps(row | {'history': row['history'] | {'loss': [1.0]}}), 'is damaged'),
    (lambda row: json.dumps(row | {'history': row['history'] | {'loss': []}}), 'is damaged'),
    (edited(hash='0' * 12), 'does not belong'),
    (lambda row: json.dumps(row | {'config': row['config'] | {'lr': 0.5}}), 'does not'),
    (lambda row: json.dumps({k: v for k, v in row.items() if k != 'hash'}), 'does not belong'),
    (edited(history={}), 'does not belong'), (edited(history={'step': []}), 'does not belong'),
])
def test_a_damaged_row_is_named(damage, told, finished, tmp_path, monkeypatch):
    path = row_path(tiny('IRMv1'), tmp_path)
    path.write_text(damage(json.loads(finished.read_text())))
    monkeypatch.setattr(runs, 'fit', never)
    for call in lambda: do(tiny('IRMv1'), tmp_path), lambda: read_rows(tmp_path):
        with pytest.raises(ValueError, match=told) as error:
            call()
        assert str(path) in str(error.value) and 'delete it' in str(error.value) and '\n' not in str(error.value)


def test_a_row_of_bytes_is_named(tmp_path):
    row_path(tiny(), tmp_path).write_bytes(b'\xff\xfe\x00')
    with pytest.raises(ValueError, match='is damaged'):
        do(tiny(), tmp_path)


def test_the_row_of_another_run_under_the_name_of_this_is_refused(finished, tmp_path):
    row_path(tiny('ERM'), tmp_path).write_bytes(finished.read_bytes())
    with pytest.raises(ValueError, match='does not belong'):
        do(tiny('ERM'), tmp_path)


def test_a_row_found_twice_is_one_seed(finished, tmp_path):
    for name in 'a', 'b':
        (tmp_path / name).mkdir()
        (tmp_path / name / finished.name).write_bytes(finished.read_bytes())
    assert aggregate(read_rows(tmp_path)).seeds.max() == 1


# Tables

def line(step, train, test, held_out=None):
    chosen = {} if held_out is None else {'held_out_objective': held_out, 'held_out_accuracy': train - 0.01}
    return {'step': step, 'penalty_weight': 0.0, 'train_accuracy': train, 'test_accuracy': test, **chosen}


def rows_of(**settings):
    "Three seeds of one made-up setting."
    return [{'run': tiny(seed=seed, **settings), 'provenance': {},
             'history': [line(5, 0.62 + seed / 100, 0.7, 2.5), line(10, 0.8, 0.3 + seed / 10, 1.0 + seed)]}
             for seed in range(3)]


def test_aggregate_by_hand():
    rows = rows_of()
    table = aggregate(rows)
    assert tuple(table.columns) == COLUMNS and len(table) == 9 and (table.seeds == 3).all()
    table = table.set_index(['selection', 'metric'])
    # last: step 10; oracle: the best test accuracy; train-validation: the least objective, for seed 2 that of step 5.
    expected = {('last', 'test_accuracy'): [30, 40, 50], ('oracle', 'test_accuracy'): [70, 70, 70],
                ('oracle', 'train_accuracy'): [62, 63, 64], ('train-validation', 'test_accuracy'): [30, 40, 70],
                ('train-validation', 'held_out_accuracy'): [79, 79, 63]}
    for key, values in expected.items():
        assert table.loc[key, 'mean'] == pytest.approx(statistics.mean(values))
        assert table.loc[key, 'std'] == pytest.approx(statistics.stdev(values), abs=1e-9)
    frame = tidy(rows)
    assert sorted(frame[frame.selection == 'train-validation'].step.unique()) == [5, 10]
    for _, told in frame.iterrows():
        assert told.value == 100 * select(rows[told.seed]['history'], told.selection)[told.metric]


@pytest.mark.parametrize('change', [
    dict(lr=0.3), dict(n_train=241), dict(evaluate_every=6), dict(label_noise=0.1), dict(dataset='FullColoredMNIST'),
    dict(experiment='other'), dict(width=7), dict(method='Oracle'), dict(source='mnist'),
    dict(correlations=(0.9, 0.7))])
def test_different_settings_are_never_averaged(change):
    table = aggregate(rows_of() + rows_of(**change))
    assert len(table) == 2 * 9 and (table.seeds == 3).all()


def test_what_did_not_qualify_is_seen():
    rows = [r | {'history': [line(5, 0.6 if r['run'].seed else 0.61, 0.4)]} for r in rows_of()]
    table = aggregate(rows).set_index(['selection', 'metric'])
    assert table.seeds.to_dict() == {(rule, metric): {'last': 3, 'oracle': 1, 'train-validation': 0}[rule]
                                     for rule in RULES for metric in ('test_accuracy', 'train_accuracy')}
    assert math.isnan(table.loc[('train-validation', 'test_accuracy'), 'mean'])
    assert table.loc[('oracle', 'test_accuracy'), 'mean'] == pytest.approx(40)
    assert math.isnan(table.loc[('oracle', 'test_accuracy'), 'std'])


def test_nothing_makes_an_empty_table():
    assert tuple(aggregate([]).columns) == COLUMNS and len(aggregate([])) == len(tidy([])) == 0


def test_rows_are_read_by_experiment(tmp_path):
    for run in (tiny(), tiny(seed=1, experiment='other')):
        write_row(row_path(run, tmp_path), run, [line(1, 0.5, 0.5)], {})
    (tmp_path / 'below').mkdir()
    run = tiny('IRMv1', experiment='other')
    write_row(row_path(run, tmp_path / 'below'), run, [line(1, 0.5, 0.5)], {})
    assert len(read_rows(tmp_path)) == 3 and read_rows(tmp_path, 'none such') == []
    assert {row['run'] for row in read_rows(tmp_path, 'other')} == {run, tiny(seed=1, experiment='other')}
    with pytest.raises(FileNotFoundError, match='there is no folder'):
        read_rows(tmp_path / 'elsewhere')


def test_every_published_number_is_there():
    "Each line of the file once, under our name of its method, its numbers unchanged."
    with (files('sparse_irm') / 'reported.csv').open(encoding='utf-8') as file:
        lines = list(csv.DictReader(file))
    paper = reported()
    assert len(paper) == len(lines) == 49
    for ours, theirs in zip(paper.itertuples(), lines):
        base, penalty = theirs['method'], theirs['penalty']
        names = {'IRM': penalty, 'MRM': f'MRM-{penalty}', 'SparseIRM': f'SparseIRM-{penalty}'}
        assert ours.method == names.get(base, base)
        assert (ours.dataset, ours.metric, ours.paper) == (theirs['dataset'], theirs['metric'], theirs['source'])
        assert ours.mean == float(theirs['mean'])
        for value, text in ((ours.std, theirs['std']), (ours.width, theirs['width']),
                            (ours.n_train, theirs['n_train'])):
            assert value == float(text) if text else pd.isna(value)
    assert {'IRMv1', 'REx', 'SparseIRM-IRMv1', 'SparseIRM-REx'} <= set(paper.method) & set(METHODS)


def ours(mean, std, **settings):
    run = make_run('SparseIRM-IRMv1', experiment='mlp_width', source='mnist', **settings)
    keys = {k: getattr(run, k) for k in COLUMNS if k in {f.name for f in dataclasses.fields(run)}}
    return keys | {'selection': 'last', 'metric': 'test_accuracy', 'mean': mean, 'std': std, 'seeds': 3}


def test_beside_the_paper():
    table = pd.DataFrame([ours(68.0, 0.6, width=640), ours(68.0, 0.5, width=640), ours(68.0, math.nan, width=640),
                          ours(66.0, 1.0, width=160), ours(66.0, 1.0, width=100),
                          ours(66.0, 1.0, width=160, n_train=1000)])
    side = beside_paper(table)
    assert side.published.tolist() == [68.54] * 3 + [65.91] and side.inside_spread.tolist() == [True, False, None, True]
    assert side.difference.tolist() == pytest.approx([-0.54] * 3 + [0.09])
    assert len(beside_paper(table.assign(metric='train_accuracy'))) == 0


def test_only_the_published_images_are_beside_the_paper():
    assert len(beside_paper(pd.DataFrame([ours(68.0, 0.6, width=640) | {'source': 'fashion-mnist'}]))) == 0
