"""The command: what it refuses in one line before anything starts, and what it prints and leaves when it works."""
import contextlib
import csv
import io
import subprocess
import sys

import pytest
import torch

from sparse_irm import cli
from sparse_irm.cli import main, parse_pairs, parse_value
from sparse_irm.metrics import RULES
from sparse_irm.reproduce import notebooks
from sparse_irm.runs import make_run, read_row, row_path
from sparse_irm.tables import COLUMNS

TINY = dict(source='digits', n_train=240, n_held_out=100, width=6, steps=20, anneal_step=5, evaluate_every=5)
PAIRS = [part for key, value in TINY.items() for part in ('-p', f'{key}={value}')]


@pytest.fixture(autouse=True)
def empty_place(tmp_path, monkeypatch):
    "An empty working directory without data, one thread."
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv('SPARSE_IRM_DATA', str(tmp_path / 'no data'))
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)
    torch.set_flush_denormal(False)


def call(*argv):
    "Exit status, standard output, lines of standard error."
    said, complained = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(said), contextlib.redirect_stderr(complained):
        try:
            status = main(argv)
        except SystemExit as stop:
            status = stop.code
    return status, said.getvalue(), complained.getvalue().splitlines()


def left(folder):
    "The files below a folder but for the logs."
    return sorted(str(path.relative_to(folder)) for path in folder.rglob('*')
                  if path.is_file() and path.suffix != '.log')


@pytest.mark.parametrize('text, value', [
    ('3', 3), ('-3', -3), ('0.5', 0.5), ('1e4', 10_000), ('1e-3', 1e-3), ('2.0', 2), ('1_000', 1000), ('', ''),
    ('none', None),
    ('None', None), ('TRUE', True), ('false', False), ('abc', 'abc'), ("'7'", '7'), ('MNIST', 'MNIST'), ('a-b', 'a-b'),
    ('a b', 'a b'), ('1,2', [1, 2]), ('16, 64,', [16, 64]), ('3,', [3]), ('[1, 2.5]', [1, 2.5]), ('(1, 2)', (1, 2)),
    ('[1', '[1'),
    ('ERM,IRMv1', ['ERM', 'IRMv1']), ('0.9,none,x', [0.9, None, 'x']), ('runs/a.b', 'runs/a.b'), ('nan', 'nan'),
    ('1+1', '1+1'),
    ('__import__("os")', '__import__("os")'), ('cuda:1', 'cuda:1'), ('~/data', '~/data'), ('5%', '5%'),
])
def test_parse_value(text, value):
    got = parse_value(text)
    assert got == value and type(got) is type(value)
    assert not isinstance(value, list) or [type(v) for v in got] == [type(v) for v in value]


def test_parse_pairs():
    assert parse_pairs([]) == {}
    assert parse_pairs(['a=', 'b==', 'c=x=1', 'd=1,2']) == {'a': '', 'b': '=', 'c': 'x=1', 'd': [1, 2]}


ERM = ['train', 'ERM', *PAIRS]


@pytest.mark.parametrize('argv, told', [
    (['train', ''], "method: got ''"),
    (['train', 'sparseirm'], "method: got 'sparseirm'"),
    (['train', 'ERM', '-p', 'steps'], "-p: got 'steps', takes key=value"),
    (['train', 'ERM', '-p', '=3'], "-p: got '=3', takes key=value"),
    (['train', 'ERM', '-p', 'steps=3', '-p', 'steps=4'], '-p: steps is given twice'),
    (['train', 'ERM', '-p', 'widht=3'], 'widht: unknown parameter, did you mean width'),
    (['train', 'ERM', '-p', 'steps=soon'], "steps: got 'soon' (str), takes int"),
    (['train', 'ERM', '-p', 'steps=1.5'], 'steps: got 1.5 (float), takes int'),
    (['train', 'ERM', '-p', 'steps=10,20'], 'steps: got [10, 20]'),
    (['train', 'ERM', '-p', 'steps='], "steps: got ''"),
    (['train', 'ERM', '-p', 'lr=true'], 'lr: got True (bool), takes float'),
    (['train', 'ERM', '-p', 'lr=nan'], "lr: got 'nan'"),
    (['train', 'ERM', '-p', f'lr=1{"0" * 400}'], 'lr: got 1000'),
    (['train', 'ERM', '-p', 'optimizer=rmsprop'], "optimizer: got 'rmsprop', takes one of adam, sgd"),
    (['train', 'ERM', '-p', 'penalty=irmv1'], "method: got 'ERM' with penalty 'irmv1'"),
    (['train', 'ERM', '-p', 'keep=0.5'], "method: got 'ERM' with penalty 'none' and keep 0.5"),
    (['train', 'SparseIRM-IRMv1', '-p', 'keep=0'], 'keep: got 0.0'),
    (['train', 'SparseIRM-IRMv1', '-p', 'keep=none'], "method: got 'SparseIRM-IRMv1'"),
    (['train', 'SparseIRM-IRMv1', '-p', 'budget=0.6,0.3'], 'budget: got (0.6, 0.3)'),
    (['train', 'SparseIRM-IRMv1', '-p', 'temperature=1'], 'temperature: got 1 (int)'),
    (['train', 'ERM', '-p', 'correlations=0.9,1.2'], 'correlations: got (0.9, 1.2)'),
    ([*ERM, '-p', 'test_correlations=,'], 'test_correlations must hold at least one number'),
    ([*ERM, '-p', 'batch_size=1'], 'batch_size: got 1 over 2 environments'),
    ([*ERM, '-p', 'n_train=5'], '-p: n_train is given twice'),
    (['train', 'ERM', '-p', 'source=mnist', '--data', 'elsewhere'], 'not in elsewhere'),
    (['rows', 'nowhere'], 'folder: there is no folder nowhere'),
    (['rows'], 'folder: there is no folder results'),
    (['reproduce', 'mlp_width', '--preset', 'smoke', '-p', 'stpes=1'], "parameter: got 'stpes', did you mean steps"),
], ids=lambda value: ' '.join(value)[:70] if isinstance(value, list) else '')
def test_bad_input_is_refused_in_one_line(argv, told, tmp_path):
    status, said, complained = call(*argv)
    assert status == 2 and said == '' and len(complained) == 1 and left(tmp_path) == []
    assert complained[0].startswith('sparse-irm: ') and told in complained[0]


@pytest.mark.parametrize('argv, told', [
    ([], 'COMMAND'), (['trian'], "invalid choice: 'trian'"), (['train'], 'method'), (['train', 'ERM', '-p'], '-p'),
    (['train', 'ERM', '--step', '3'], '--step'), (['rows', 'a', 'b'], 'unrecognized arguments: b'), (['--version'], ''),
    (['reproduce', 'mlp_width', '--preset'], '--preset'), (['rows', '--csv=yes'], '--csv'),
])
def test_a_wrong_command_line_shows_its_usage(argv, told, tmp_path):
    status, said, complained = call(*argv)
    assert status == 2 and said == '' and left(tmp_path) == [] and 'Traceback' not in '\n'.join(complained)
    assert complained[0].startswith('usage: sparse-irm') and ': error: ' in complained[-1] and told in complained[-1]


@pytest.mark.parametrize('command', ['', 'reproduce', 'train', 'rows'])
def test_help(command):
    status, said, complained = call(*command.split(), '--help')
    assert status == 0 and complained == [] and said.startswith(f'usage: sparse-irm {command}'.rstrip())
    assert 'Example: ' in said or command not in ('reproduce', 'train')


def test_the_listing_names_every_parameter():
    status, said, complained = call('reproduce', '--list')
    assert status == 0 and complained == []
    lines = said.splitlines()
    listed = {line.split(': ')[0]: keys.strip().split(', ') for line, keys in zip(lines[::2], lines[1::2], strict=True)}
    assert set(listed) == set(notebooks()) and 'does invariance survive a wide network?' in said
    assert {'preset', 'out', 'widths', 'seeds', 'workers'} <= set(listed['mlp_width'])


def test_a_dry_run_of_all_says_something_of_each(tmp_path):
    status, said, complained = call('reproduce', 'all', '--preset', 'smoke', '--workers', '2', '--device', 'cpu', '--dry-run')
    told = dict(line.split(': ', 1) for line in said.splitlines())
    assert status == 0 and set(told) == set(notebooks()) and left(tmp_path) == []
    assert told['mlp_width'].startswith('24 runs, 0 exist in runs/mlp_width/rows, 24 to do on cpu by 2 workers')
    assert told['linear_theory'] == 'no runs, everything is computed anew'
    assert complained == [f'{name}: device, workers not taken, left out' for name in ('deep_linear', 'linear_theory')]


def test_without_papermill_one_is_told_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, 'papermill', None)
    status, _, complained = call('reproduce', 'mlp_width', '--preset', 'smoke')
    assert status == 2 and len(complained) == 1 and "pip install 'sparse_irm[notebooks]'" in complained[0]
    assert call('reproduce', '--list')[0] == 0


def test_train_writes_the_row_it_tells(tmp_path):
    argv = ['train', 'SparseIRM-IRMv1', *PAIRS, '-p', 'correlations=1,0.8', '--out', 'there', '--device', 'cpu']
    status, said, _ = call(*argv)
    run = make_run('SparseIRM-IRMv1', **TINY, correlations=(1.0, 0.8))
    path = row_path(run, 'there')
    assert status == 0 and left(tmp_path) == [str(path)]
    row, lines = read_row(path), said.splitlines()
    assert lines[0] == run.name and lines[-1] == f'row-file: {path}' and len(lines) == 2 + len(RULES)
    last = row['history'][-1]
    train, test = (f'{100 * last[f"{role}_accuracy"]:.1f} %' for role in ('train', 'test'))
    assert row['run'] == run and lines[1] == f'  last              step 20, train {train}, test {test}'
    before = path.read_bytes()
    assert call(*argv)[:2] == (0, said) and path.read_bytes() == before


def test_rows_as_csv_and_as_a_table(tmp_path):
    for seed in 0, 1:
        assert call(*ERM, '-p', f'seed={seed}', '--out', 'there')[0] == 0
    status, said, complained = call('rows', 'there', '--csv')
    lines = list(csv.DictReader(io.StringIO(said)))
    assert status == 0 and complained == [] and tuple(lines[0]) == COLUMNS and len(lines) == 9
    assert {line['seeds'] for line in lines if line['selection'] == 'last'} == {'2'}
    last = [read_row(path)['history'][-1]['test_accuracy'] for path in (tmp_path / 'there').glob('*.json')]
    [line] = [x for x in lines if (x['selection'], x['metric']) == ('last', 'test_accuracy')]
    assert line['mean'] == f'{50 * sum(last):.4f}' and line['method'] == 'ERM' and line['width'] == '6'
    status, table, _ = call('rows', 'there')
    assert status == 0 and table.split('\n')[0].split() == list(COLUMNS) and len(table.splitlines()) == 10


def test_rows_of_an_empty_or_damaged_folder(tmp_path):
    (tmp_path / 'results').mkdir()
    assert call('rows') == (2, '', ['sparse-irm: folder: there are no row-files below results'])
    (tmp_path / 'results' / 'notes.json').write_text('{"a": 1}')
    status, said, complained = call('rows')
    assert status == 2 and said == '' and len(complained) == 1 and 'results/notes.json is damaged' in complained[0]


def test_the_module_is_the_command(tmp_path):
    done = subprocess.run([sys.executable, '-m', 'sparse_irm.cli', 'rows', 'nowhere'], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 2 and done.stdout == ''
    assert done.stderr == 'sparse-irm: folder: there is no folder nowhere\n'


@pytest.mark.parametrize('error, status, told', [
    (KeyboardInterrupt(), 130, 'interrupted; finished runs and checkpoints are kept'),
    (FloatingPointError('the loss is nan'), 1, 'sparse-irm: failed: FloatingPointError: the loss is nan'),
    (OSError(28, 'No space left on device'), 1, 'sparse-irm: failed: OSError'),
    (ValueError('x: got 1'), 2, 'sparse-irm: x: got 1'), (FileNotFoundError('none'), 2, 'sparse-irm: none'),
])
def test_exit_status(error, status, told, monkeypatch):
    def fail(_):
        raise error
    monkeypatch.setattr(cli, '_run', fail)
    got, said, complained = call('rows')
    assert got == status and said == '' and len(complained) == 1 and complained[0].startswith(told)


def test_divergence_fails_with_status_1(tmp_path):
    status, said, complained = call('train', 'ERM', *PAIRS, '-p', 'lr=1e15')
    assert status == 1 and said == '' and len(complained) == 1 and 'the loss is nan at step 5' in complained[0]
    assert left(tmp_path) == []
