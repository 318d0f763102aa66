"""The results that are committed: complete, readable, and the source of the numbers in the README."""
import json
from pathlib import Path

import pandas as pd
import pytest

from sparse_irm.cli import main
from sparse_irm.configs import config_hash
from sparse_irm.metrics import RULES, difference
from sparse_irm.reproduce import budget_at_oracle
from sparse_irm.rows import Run, read_row
from sparse_irm.tables import aggregate, cells, read_rows, reported, tidy

ROOT = Path(__file__).resolve().parent.parent
METHODS = ['ERM', 'IRMv1', 'REx', 'SparseIRM-IRMv1', 'SparseIRM-IRMv1 (text)', 'SparseIRM-REx']
WIDTHS = [160, 640]


@pytest.fixture(scope='module')
def width_rows():
    return read_rows(ROOT / 'results' / 'mlp_width')


def headline(rows):
    """The README's table, from rows and published numbers alone."""
    table = aggregate(rows)
    table['method'] += (table['experiment'] == 'mlp_width_text').map({True: ' (text)', False: ''})
    ours = cells(table[table['metric'] == 'test_accuracy'], ['method'], ['selection', 'width'], 3)
    paper = reported()
    paper = paper[(paper['experiment'] == 'mlp_width') & (paper['dataset'] == 'ColoredMNIST') & (paper['n_train'] == 20_000)]
    published = {(line['method'], line['width']): f'{line["mean"]:.1f}' for _, line in paper.iterrows()}
    head = ['method', *(f'{rule}, {h}' for rule in RULES for h in WIDTHS), *(f'published, {h}' for h in WIDTHS)]
    lines = [head, ['---'] * len(head)]
    for method in METHODS:
        lines.append([method, *(ours.loc[method, (rule, h)] for rule in RULES for h in WIDTHS),
                      *(published.get((method, h), '') for h in WIDTHS)])
    return '\n'.join('| ' + ' | '.join(line) + ' |' for line in lines)


def test_the_width_experiment_is_complete(width_rows):
    runs = [row['run'] for row in width_rows]
    found = {(run.method + ' (text)' * (run.experiment == 'mlp_width_text'), run.width, run.seed) for run in runs}
    assert found == {(method, width, seed) for method in METHODS for width in WIDTHS for seed in range(3)}
    assert len(runs) == len(found)
    assert {(run.source, run.n_train, run.steps, run.evaluate_every, run.dtype) for run in runs} == {
        ('mnist', 20_000, 1500, 5, 'bfloat16')}
    assert all(row['provenance']['commit'] and row['provenance']['device'] for row in width_rows)


def test_the_meta_irm_experiment_is_complete_and_beats_its_bar():
    rows = read_rows(ROOT / 'results' / 'meta_irm')
    parts = {}
    for row in rows:
        parts.setdefault(row['run'].experiment, []).append(row)
    assert {name: len(part) for name, part in parts.items()} == {
        'meta_irm_search': 9, 'meta_irm': 24, 'meta_irm_grid': 9, 'meta_irm_long': 12, 'meta_irm_grid_long': 6,
        'meta_irm_scarce': 36, 'meta_irm_grid_together': 12, 'meta_irm_grid_search': 9}
    chosen = {(row['run'].meta_lr, row['run'].meta_std_weight) for row in parts['meta_irm'] if row['run'].method == 'MetaIRM'}
    assert chosen == {(0.1, 30.0)} and {row['run'].seed for row in parts['meta_irm_search']} == {100}
    lines = tidy([row for row in parts['meta_irm'] if row['run'].method == 'MetaIRM'])
    test = lines[(lines['metric'] == 'test_accuracy') & (lines['selection'] == 'train-validation')]
    assert len(test) == 3 and test['value'].mean() >= 66
    readme = (ROOT / 'README.md').read_text(encoding='utf-8')
    assert f'{test["value"].mean():.1f} ± {test["value"].std():.1f} by `train-validation` at width 160' in readme


BASELINES = ['ERM', 'IRMv1', 'MRM-IRMv1', 'BayesianIRM', 'SparseIRM-IRMv1', 'Oracle']


@pytest.fixture(scope='module')
def baseline_rows():
    return read_rows(ROOT / 'results' / 'baselines')


def test_the_baselines_are_complete_and_beat_their_bars(baseline_rows):
    runs = [row['run'] for row in baseline_rows]
    assert sorted((run.method, run.seed) for run in runs) == sorted((m, seed) for m in BASELINES for seed in range(3))
    assert {(run.source, run.n_train, run.width, run.steps, run.evaluate_every, run.dtype) for run in runs} == {
        ('mnist', 20_000, 390, 1500, 5, 'float32')}
    table = aggregate(baseline_rows)
    best = table[(table['metric'] == 'test_accuracy') & (table['selection'] == 'oracle')].set_index('method')['mean']
    assert best['BayesianIRM'] >= 65 and best['Oracle'] >= 70 and best['IRMv1'] - 2 <= best['MRM-IRMv1'] <= 66


def test_the_readme_tells_of_the_baselines(baseline_rows):
    table = aggregate(baseline_rows)
    ours = cells(table[table['metric'] == 'test_accuracy'], ['method'], ['selection'], 3)
    lines = [['method', *RULES], ['---'] * 4, *([m, *ours.loc[m, list(RULES)]] for m in BASELINES)]
    readme = ' '.join((ROOT / 'README.md').read_text(encoding='utf-8').split())
    assert ' '.join(' '.join('| ' + ' | '.join(line) + ' |' for line in lines).split()) in readme
    told = tidy(baseline_rows)
    told = told[told['metric'] == 'test_accuracy'].groupby(['selection', 'method'])['value']
    gaps = {rule: difference(*(told.get_group((rule, m)) for m in ('SparseIRM-IRMv1', 'IRMv1'))) for rule in RULES}
    gap = gaps.pop('train-validation')
    inside = budget_at_oracle(baseline_rows)['oracle, inside the budget'].item()
    assert f'inside the budget SparseIRM-IRMv1 comes to {inside:.1f}.' in readme
    assert f'(by {gap.mean:.1f} points, 95 % interval {gap.low:.1f} to {gap.high:.1f})' in readme
    assert all(gap.low < 0 < gap.high for gap in gaps.values())


def test_the_colour_is_read_from_every_probed_network(baseline_rows):
    told = [json.loads(path.read_text()) for path in (ROOT / 'results' / 'probe').glob('*.jsonl')]
    labels = ['untrained', 'ERM', 'IRMv1', 'MRM-IRMv1', 'SparseIRM-IRMv1']
    moved = [f'SparseIRM-IRMv1 ({what})' for what in ('text', 'keep 0.2', 'keep 0.8', 'half width', 'half steps')]
    ways = [(layer, standardize) for layer in ('1', 'last') for standardize in (True, False)]
    assert sorted((line['label'], line['config']['seed'], line['layer'], line['probe']['standardize']) for line in told) == sorted(
        [(m, s, *way) for m in labels for s in range(3) for way in ways] + [(m, 0, *way) for m in moved for way in ways])
    least = min(line['accuracy']['spurious test'] for line in told)
    assert f'with {100 * least:.2f} to 100 %' in (ROOT / 'README.md').read_text(encoding='utf-8')
    assert min(line['accuracy']['spurious test'] for line in told if line['label'] != 'ERM') > 0.9995
    probed = {config_hash(Run.from_dict(line['config'])) for line in told if line['label'] in labels[1:]}
    assert probed == {config_hash(row['run']) for row in baseline_rows if row['run'].method in labels}


def test_the_readme_tells_what_a_flip_of_the_colour_moves(baseline_rows):
    told = [json.loads(path.read_text()) for path in (ROOT / 'results' / 'flip').glob('*.jsonl')]
    labels = ['untrained', 'ERM', 'IRMv1', 'MRM-IRMv1', 'SparseIRM-IRMv1']
    assert sorted((line['label'], line['config']['seed']) for line in told) == sorted((m, s) for m in labels for s in range(3))
    flipped = {config_hash(Run.from_dict(line['config'])) for line in told if line['label'] in labels[1:]}
    assert flipped == {config_hash(row['run']) for row in baseline_rows if row['run'].method in labels}
    seen = pd.DataFrame(told).groupby('label')[['flip', 'ratio']].agg(['mean', 'std'])
    moved = {m: f'{seen.loc[m, ("flip", "mean")]:.3f}' for m in labels}
    ratio = {m: f'{seen.loc[m, ("ratio", "mean")]:.2f} ± {seen.loc[m, ("ratio", "std")]:.2f} for {m}' for m in labels}
    readme = ' '.join((ROOT / 'README.md').read_text(encoding='utf-8').split())
    assert f"layer by {moved['SparseIRM-IRMv1']} on average and one of IRMv1's by {moved['IRMv1']}," in readme
    assert f"it is {ratio['SparseIRM-IRMv1']}, {ratio['IRMv1']} and {ratio['MRM-IRMv1']} (last step" in readme


@pytest.mark.parametrize('notebook', ['probe', 'flip'])
def test_the_notebooks_on_networks_find_their_results(notebook, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    status = main(['reproduce', notebook, '--preset', 'paper', '--dry-run', '--methods',
                   'untrained,ERM,IRMv1,MRM-IRMv1,SparseIRM-IRMv1', '-p', f'results_in={ROOT / "results" / notebook}'])
    assert status == 0 and capsys.readouterr().out == f'{notebook}: no runs to do, all results exist\n'


def test_the_theory_notebook_quotes_its_tables():
    told = (ROOT / 'nbs' / 'reproduce' / 'linear_theory.ipynb').read_text(encoding='utf-8')
    theorem, methods = (pd.read_csv(ROOT / 'results' / 'linear_theory' / f'{name}.csv') for name in ('theorem', 'methods'))
    whole = theorem[theorem['broken'] == 'none']
    assert len(whole) == 1000 and (whole['sample'] <= 0).sum() == 1 and whole['population'].min() > 0 and 'one among 1,000' in told
    share = (100 * methods.set_index(['d', 'method'])['share']).round().astype(int)
    slow = 'SparseIRM, λ = 1, start in budget, slow scores'
    assert f'in `paper`: {share[96, slow]} % against {share[96, "dense IRM + prune"]} %' in told
    assert f'(`paper`) it is {share[256, slow]} % against {share[256, "dense IRM + prune"]} %' in told
    assert f'is right in {share[256, "exhaustive"]} %' in told and f'and {share[96, "exhaustive"]} %)' in told


def test_all_claims_of_deep_linear_networks_hold_but_the_one_that_should_not():
    claims = pd.read_csv(ROOT / 'results' / 'deep_linear' / 'claims.csv').set_index('statement')['holds']
    assert claims[~claims].index.tolist() == ['regularization has additional critical points: digits, turns'] and len(claims) == 11
    samples = pd.read_csv(ROOT / 'results' / 'deep_linear' / 'samples.csv')
    test = samples.groupby(['n', 'way'])['test'].mean().unstack()
    missing = (test['regularized'] - test['hard-wired']) / (test['plain'] - test['hard-wired'])
    assert missing.abs().max() < 0.1 and samples.groupby(['n', 'way'])['seed'].nunique().eq(10).all()


def test_every_row_is_named_by_its_configuration():
    paths = sorted((ROOT / 'results').rglob('*.json'))
    assert len(paths) > 0 and len({read_row(path)['run'] for path in paths}) == len(paths)


def test_the_readme_tells_what_the_rows_say(width_rows):
    readme = ' '.join((ROOT / 'README.md').read_text(encoding='utf-8').split())
    assert ' '.join(headline(width_rows).split()) in readme
    lines = tidy(width_rows)
    last = lines[(lines['method'] == 'IRMv1') & (lines['selection'] == 'last') & (lines['metric'] == 'test_accuracy')]
    gap = difference(*(last[last['width'] == h]['value'] for h in WIDTHS))
    assert f'(by {gap.mean:.1f} points, 95 % interval {gap.low:.1f} to {gap.high:.1f})' in readme
    inside = budget_at_oracle(width_rows).loc['mlp_width', 'ColoredMNIST']
    assert f'{inside["weights allowed"].min():.0f} to {inside["weights allowed"].max():.0f} % of the weights' in readme
    irm, irm_wide, rex, rex_wide = inside['oracle, inside the budget'].map('{:.1f}'.format)
    assert f'SparseIRM-IRMv1 {irm} (160, in 2 of 3 seeds) and {irm_wide} (640), SparseIRM-REx {rex} and {rex_wide}.' in readme
    assert inside['seeds inside'].tolist() == [2, 3, 3, 3]
    sparse = lines[lines['method'].str.startswith('SparseIRM') & (lines['metric'] == 'test_accuracy')]
    for _, part in sparse.groupby(['experiment', 'method', 'selection']):
        rise = difference(*(part[part['width'] == h]['value'].dropna() for h in reversed(WIDTHS)))
        assert rise.low < 0 < rise.high
