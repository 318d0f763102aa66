"""Every reproduce notebook runs at its smallest preset, refuses what it does not know, and fails aloud."""
import json
import math

import papermill
import pandas as pd
import pytest

from sparse_irm.cli import main, settle
from sparse_irm.reproduce import check_claim, choose, notebooks, parameters_of, provenance_table

NOTEBOOKS = notebooks()


@pytest.fixture
def empty_place(tmp_path, monkeypatch):
    "An empty working directory without data."
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv('SPARSE_IRM_DATA', str(tmp_path / 'no data'))
    return tmp_path


def outputs(path):
    return [output for cell in json.loads(path.read_text(encoding='utf-8'))['cells']
            for output in cell.get('outputs', [])]


@pytest.mark.parametrize('name', NOTEBOOKS)
def test_smoke(name, empty_place, capsys):
    status = main(['reproduce', name, '--preset', 'smoke', '--out', 'there'])
    assert status == 0, capsys.readouterr().err
    told = outputs(empty_place / 'there' / f'{name}.ipynb')
    assert told and not any(output['output_type'] == 'error' for output in told)
    pictures = list((empty_place / 'there').rglob('*.png'))
    assert pictures and all(path.read_bytes().startswith(b'\x89PNG') and path.stat().st_size > 5000
                            for path in pictures)
    assert [path.name for path in empty_place.iterdir()] == ['there']


@pytest.mark.parametrize('name', NOTEBOOKS)
def test_a_misspelt_parameter_is_refused_by_the_notebook_itself(name, empty_place):
    with pytest.raises(ValueError, match="^parameter: got 'sedes'"):
        settle(NOTEBOOKS[name], dict(preset='smoke', sedes=[0]))
    assert list(empty_place.iterdir()) == []


def test_a_misspelt_parameter_is_refused_under_papermill(empty_place):
    "Papermill alone adds a cell with any name it is given."
    with pytest.raises(papermill.PapermillExecutionError, match="ValueError: parameter: got 'sedes', did you mean"):
        papermill.execute_notebook(str(NOTEBOOKS['mlp_width']), 'executed.ipynb', dict(preset='smoke', sedes=[0]),
                                   kernel_name='python3', progress_bar=False)
    assert [path.name for path in empty_place.iterdir()] == ['executed.ipynb']


def test_a_cell_that_fails_while_running_is_status_1(empty_place, capsys):
    (empty_place / 'there' / 'rows').mkdir(parents=True)
    (empty_place / 'there' / 'figure.png').mkdir()      # where the figure ought to go
    status = main(['reproduce', 'mlp_width', '--preset', 'smoke', '-p', 'widths=4,8', '-p', 'seeds=0',
                   '-p', 'methods=ERM,IRMv1', '-p', 'steps=4', '--out', 'there'])
    said, complained = capsys.readouterr()
    assert status == 1 and said == '' and 'figure.png' in complained and 'mlp_width.ipynb' in complained
    assert [output['ename'] for output in outputs(empty_place / 'there' / 'mlp_width.ipynb')
            if output['output_type'] == 'error'] == ['IsADirectoryError']
    assert len(list((empty_place / 'there' / 'rows').glob('*.json'))) == 4      # what was done is kept


# What the notebooks share

PRESETS = {'smoke': dict(steps=30, lr=0.1, widths=[8], name='a', flag=True, other=None),
           'quick': dict(steps=60, lr=0.2, widths=[8, 16], name='b', flag=False, other=None)}


def test_a_preset_is_overridden_by_what_is_not_none():
    given = dict(preset='quick', steps=None, lr=1, widths=4, name='c', out='there')
    assert choose(PRESETS, given, ['out']) == PRESETS['quick'] | dict(lr=1, widths=[4], name='c')
    assert choose(PRESETS, dict(preset='smoke', widths=(1, 2), other='x', flag=False)) == PRESETS['smoke'] | dict(
        widths=[1, 2], other='x', flag=False)
    assert PRESETS['quick']['widths'] == [8, 16]


@pytest.mark.parametrize('given, error, told', [
    (dict(preset='smok'), ValueError, "preset: got 'smok'"), (dict(), ValueError, 'preset: got None'),
    (dict(step=3), ValueError, "parameter: got 'step', did you mean steps"),
    (dict(out='x'), ValueError, "parameter: got 'out'"),
    (dict(steps='3'), TypeError, r"steps: got '3' \(str\), takes int"), (dict(steps=3.5), TypeError, 'steps: got 3.5'),
    (dict(steps=True), TypeError, 'steps: got True'), (dict(lr='fast'), TypeError, "lr: got 'fast'"),
    (dict(lr=True), TypeError, 'lr: got True'), (dict(name=3), TypeError, 'name: got 3'),
    (dict(flag=1), TypeError, 'flag: got 1'),
    (dict(widths='8'), TypeError, "widths: got '8'"), (dict(widths=[8, 1.5]), TypeError, 'widths: got 1.5'),
    (dict(widths=[[8]]), TypeError, r'widths: got \[8\]'), (dict(steps=(1, 2)), TypeError, r'steps: got \(1, 2\)'),
    (dict(steps=[1, 2]), TypeError, 'steps: got'), (dict(widths=[]), ValueError, 'widths: got'),
])
def test_wrong_settings_are_refused_by_name(given, error, told):
    with pytest.raises(error, match=told):
        choose(PRESETS, dict(preset='smoke') | given if 'preset' not in given and given else given)


def test_parameters_are_the_plain_data_of_a_notebook():
    names = dict(steps=3, out='x', widths=[1], none=None, _i=3, PRESETS={}, ALL=['ERM'], In=[''], Out={}, exit=1, pd=pd,
                 f=len)
    assert parameters_of(names) == dict(steps=3, out='x', widths=[1], none=None)


def frame(**accuracies):
    "A tidy frame: values of some methods at width 8, of two rules."
    return pd.DataFrame([dict(method=method, variant=method, width=8, seed=seed, selection=rule, metric='test_accuracy',
                              value=value) for method, values in accuracies.items() for rule in ('last', 'oracle')
                         for seed, value in enumerate(values)])


@pytest.mark.parametrize('a, b, told', [
    ([60, 61, 62], [50, 50, 51], 'holds'), ([50, 50, 51], [60, 61, 62], 'fails'), ([50, 60, 70], [51, 58, 66], 'open'),
    ([60], [50], 'not run'), ([], [50, 51], 'not run'), ([60, math.nan], [50, 51], 'not run'),
])
def test_claims(a, b, told):
    line = check_claim(frame(A=a, B=b), 'A beats B', dict(method='A', width=8), dict(method='B', width=8), 'oracle')
    assert line['verdict'] == told and line['claim'] == 'A beats B' and line['selection'] == 'oracle'
    assert (line['difference'] is None) == (told == 'not run')
    if told != 'not run':
        assert line['seeds'] == 3 and line['difference'] == pytest.approx(sum(a) / 3 - sum(b) / 3)
        assert line['low'] < line['difference'] < line['high']


def test_a_claim_does_not_mix_settings():
    mixed = frame(A=[60, 61], B=[50, 51])
    with pytest.raises(ValueError, match="claim 'all': .* picks runs of 2 different settings"):
        check_claim(mixed, 'all', dict(width=8), dict(method='B'), 'last')


def test_provenance_is_counted():
    origin = dict(sparse_irm='0.1', commit=None, torch='2', python='3', device='cpu x', threads=1)
    rows = [dict(provenance=origin | dict(seconds=30.0 * k, finished=f'2026-01-0{k}', threads=1 + k // 3))
            for k in (1, 2, 3)]
    table = provenance_table(rows).sort_values('threads')
    assert table.runs.tolist() == [2, 1] and table.minutes.tolist() == [1.5, 1.5]
    assert table['first'].tolist() == ['2026-01-01', '2026-01-03']
    assert table['last'].tolist() == ['2026-01-02', '2026-01-03']
