"""The report: one page that opens in a browser without anything else, and says what is missing, left out or not comparable."""
import json
import re
import shutil

import pandas as pd
import pytest

from sparse_irm.metrics import RULES
from sparse_irm.report import all_rows, is_numeric, latex, markdown, page, write_report
from sparse_irm.runs import make_run, row_path, write_row
from sparse_irm.sections import sections, settings_told
from sparse_irm.tables import METRICS, read_rows

ORIGIN = {'sparse_irm': '0', 'commit': None, 'torch': '2', 'python': '3', 'device': 'cpu', 'threads': 1, 'seconds': 36.0,
          'finished': '2000-01-01T00:00:00+00:00'}
CHROME, DRIVER = shutil.which('chromium'), shutil.which('chromedriver')


def row(method, width, seed, accuracy=0.6, trained=0.9, **settings):
    "A made-up row: two evaluations under the full penalty, the second `accuracy` on the test set."
    settings = {'source': 'mnist', 'experiment': 'made_up', **settings}
    run = make_run(method, width=width, seed=seed, **settings)
    history = [{'step': step, 'loss': 0.5, 'penalty_weight': 1.0, 'train_accuracy': trained, 'held_out_accuracy': trained,
                'test_accuracy': value, 'held_out_objective': 1 / step} for step, value in ((1, 0.5), (2, accuracy))]
    return {'run': run, 'history': history, 'provenance': ORIGIN}


def save(rows, folder):
    for one in rows:
        write_row(row_path(one['run'], folder), one['run'], one['history'], one['provenance'])


def study():
    "IRMv1 falls with width, SparseIRM rises; one seed of IRMv1 at 640 is missing and SparseIRM at 640 never qualifies as oracle."
    dense = [row('IRMv1', h, seed, a + seed / 100) for h, a in ((160, 0.62), (640, 0.4)) for seed in range(3)]
    sparse = [row('SparseIRM-IRMv1', h, seed, a + seed / 100, trained)
              for h, a, trained in ((160, 0.65, 0.7), (640, 0.68, 0.55)) for seed in range(3)]
    return dense[:-1] + sparse


@pytest.fixture(scope='module')
def parts():
    return sections(study())


def table_of(part, caption):
    return next(table.frame for table in part.tables if table.caption.startswith(caption))


def test_missing_and_unqualified_cells_differ(parts):
    shown = table_of(parts[0], 'Test accuracy').set_index(['selection', 'method'])
    assert shown.loc[('last', 'IRMv1')].tolist() == ['63.0 ± 1.0', '40.5 ± 0.7 (2/3)']
    assert shown.loc[('oracle', 'SparseIRM-IRMv1')].tolist() == ['66.0 ± 1.0', '–']
    only = table_of(sections([one for one in study() if (one['run'].method, one['run'].width) != ('IRMv1', 640)])[0], 'Test')
    assert only.set_index(['selection', 'method']).loc[('last', 'IRMv1'), 'width 640'] == '0/3'


def test_planned_seeds_are_the_readers(parts):
    planned = sections(study(), seeds=10)[0]
    assert planned.index['runs'] == '11/40' and parts[0].index['runs'] == '11/12'
    assert table_of(planned, 'Test accuracy').iloc[0, 2] == '63.0 ± 1.0 (3/10)'


def test_published_numbers_stand_beside_the_same_task_only(parts):
    paper = table_of(parts[0], 'Beside the paper').set_index(['selection', 'method', 'width'])
    assert paper.loc[('last', 'IRMv1', '160'), ['ours', 'published', 'difference', 'inside spread']].tolist() == [
        '63.0 ± 1.0', '62.4', '+0.6', 'yes']
    assert paper.loc[('last', 'IRMv1', '640'), 'difference'] == '+3.7' and ('oracle', 'SparseIRM-IRMv1', '640') not in paper.index
    for change in dict(source='digits'), dict(label_noise=0.1), dict(correlations=(0.9, 0.7)), dict(n_train=1000):
        other = sections([row('IRMv1', 160, 0, **change)])[0]
        assert not any(table.caption.startswith('Beside') for table in other.tables)
        assert 'No published number' in ' '.join(other.sentences)


def test_a_network_without_width_has_a_section_of_its_own():
    small = [row('IRMv1', 160, 0, dataset='CIFARMNIST', model='MLP', source='cifar10')]
    large = [row(method, None, seed, 0.5 + seed / 100, dataset='CIFARMNIST', source='cifar10-jpeg' if method == 'REx' else 'cifar10')
             for method in ('ERM', 'IRMv1', 'REx') for seed in range(3)]
    mlp, resnet, compressed = sections(large + small)
    assert 'ResNet18' in resnet.title and 'ResNet18' not in mlp.title and mlp.index['widths'] == '160'
    assert resnet.index['runs'] == '6/6' and 'width' not in ' '.join(table_of(resnet, 'Claims')['claim'])
    paper = table_of(resnet, 'Beside the paper').set_index('selection').loc['last']
    assert paper[['method', 'width', 'ours', 'published']].tolist() == ['IRMv1', '–', '51.0 ± 1.0', '51.3']
    assert table_of(compressed, 'Beside the paper')['published'].tolist() == ['50.1'] * 3
    assert not any(table.caption.startswith('Beside') for table in mlp.tables)


def test_claims_are_tested_with_intervals(parts):
    claims = table_of(parts[0], 'Claims').set_index(['selection', 'claim'])
    falls = claims.loc[('last', 'IRMv1 is better at width 160 than at 640')]
    assert falls['verdict'] == 'holds' and falls['difference'] == '+22.5' and falls['seeds'] == '2'
    assert re.fullmatch(r'\+[\d.]+ to \+[\d.]+', falls['95 % interval'])
    assert claims.loc[('last', 'SparseIRM-IRMv1 is better at width 640 than at 160'), 'verdict'] == 'holds'
    assert claims.loc[('oracle', 'SparseIRM-IRMv1 is better at width 640 than at 160'), 'verdict'] == 'not run'
    assert len(claims) == 4 * len(RULES)


def test_settings_that_differ_make_two_lines():
    runs = [row('IRMv1', h, seed, lr=lr)['run'] for h in (160, 640) for seed in (0, 1) for lr in (1e-3, 1e-4)[:1 + (h == 640)]]
    told = settings_told(runs)
    assert {(run.width, text) for run, text in told.items()} == {(160, 'lr=0.001'), (640, 'lr=0.001'), (640, 'lr=0.0001')}
    by_width = [row('IRMv1', h, 0, lr=lr)['run'] for h, lr in ((160, 1e-3), (640, 1e-4))]
    assert set(settings_told(by_width).values()) == {''}


def test_sections_are_split_by_experiment_and_images():
    rows = [row('IRMv1', 160, 0), row('IRMv1', 160, 0, source='digits'), row('IRMv1', 160, 0, experiment='other')]
    found = sections(rows)
    assert [(part.index['experiment'], part.index['images']) for part in found] == [
        ('made_up', 'digits'), ('made_up', 'mnist'), ('other', 'mnist')]
    html = page(found)
    assert all(html.count(f'id="block-{i}"') == html.count(f'href="#block-{i}"') == 1 for i in (1, 2, 3))


def test_nothing_points_outside_and_the_page_is_repeatable(parts):
    html = page(parts)
    assert html == page(sections(study()[::-1]))
    assert '<script' not in html and '@import' not in html and 'url(' not in html
    assert all(target.startswith(('#', 'data:')) for target in re.findall(r'(?:src|href)="([^"]*)', html))


def test_text_cannot_become_markup():
    found = sections([row('IRMv1', 160, 0, experiment='<i>|_&')])
    html = page(found, ['left out <b>'])
    assert '<i>' not in html and '<b>' not in html and '&lt;i&gt;|_&amp;' in html
    assert r'\|' not in latex(found) and r'\_' in latex(found)
    lines = [line for line in markdown(found).splitlines() if line.startswith('|')]
    assert lines and all(line.endswith('|') for line in lines)


@pytest.mark.parametrize('text, numeric', [('1.5', True), ('62.1 ± 1.2', True), ('62.1 ± 1.2 (3/10)', True), ('0/10', True), ('–', True),
                                           ('−3.4', True), ('+1', True), ('20,000', True), ('MLP', False), ('', False), ('1 ±', False)])
def test_columns_of_numbers_are_known(text, numeric):
    assert is_numeric(['1', text]) == numeric


def test_all_formats_are_written(tmp_path):
    (tmp_path / 'rows').mkdir()
    save(study(), tmp_path / 'rows')
    written = write_report(tmp_path / 'rows', tmp_path / 'made' / 'report.html')
    assert [path.name for path in written] == ['report.html', 'report.md', 'report.tex', 'report.csv']
    data = pd.read_csv(written[3])
    assert len(data) == len(RULES) * len(study()) and data['hash'].nunique() == len(study())
    last = data[(data.selection == 'last') & (data.method == 'IRMv1') & (data.width == 160)].sort_values('seed')
    assert last.test_accuracy.tolist() == pytest.approx([62, 63, 64]) and set(last.step_chosen) == {2}


def test_parquet_holds_the_same(tmp_path):
    pytest.importorskip('pyarrow', reason='parquet needs pyarrow')
    save(study(), tmp_path)
    path, = write_report(tmp_path, tmp_path / 'report.html', formats=['parquet'])
    assert path.name == 'report.parquet'
    pd.testing.assert_frame_equal(pd.read_parquet(path), all_rows(read_rows(tmp_path)), check_dtype=False)


def test_parquet_without_pyarrow_is_told_before_reading(tmp_path, monkeypatch):
    monkeypatch.setattr('sparse_irm.report.find_spec', lambda name: None)
    with pytest.raises(ValueError, match='formats: parquet needs pyarrow'):
        write_report(tmp_path / 'none such', formats=['html', 'parquet'])


@pytest.mark.parametrize('wrong, told', [(dict(formats=['pdf']), 'formats: got pdf, takes some of html'), (dict(formats=[]), 'formats: got none'),
                                         (dict(seeds=0), 'seeds: got 0, takes')])
def test_wrong_wishes_are_refused(wrong, told, tmp_path):
    with pytest.raises(ValueError, match=told):
        write_report(tmp_path, tmp_path / 'report.html', **wrong)
    assert list(tmp_path.iterdir()) == []


def test_no_folder_and_no_rows_are_told(tmp_path):
    with pytest.raises(FileNotFoundError, match='there is no folder'):
        write_report(tmp_path / 'none such', tmp_path / 'report.html')
    with pytest.raises(ValueError, match='there are no row-files'):
        write_report(tmp_path, tmp_path / 'report.html')


def test_damaged_rows_stop_the_report_or_are_named_in_it(tmp_path):
    save(study(), tmp_path)
    (tmp_path / 'broken.json').write_text(json.dumps({'hash': 'broken'}))
    with pytest.raises(ValueError, match='broken.json is damaged'):
        write_report(tmp_path, tmp_path / 'report.html')
    assert not (tmp_path / 'report.html').exists()
    for path in write_report(tmp_path, tmp_path / 'report.html', skip_damaged=True)[:3]:
        assert 'broken.json is damaged' in path.read_text(encoding='utf-8')


@pytest.mark.skipif(not (CHROME and DRIVER), reason='chromium and chromedriver are not installed')
def test_the_page_opens_in_a_browser(tmp_path):
    "Offline, in headless Chromium: figures are drawn, tables have their lines, details open, the index leads to its section."
    webdriver = pytest.importorskip('selenium.webdriver', reason='selenium is not installed')
    save([*study(), row('ERM', 160, 0, source='digits', n_train=1000)], tmp_path)
    path = write_report(tmp_path, tmp_path / 'report.html', formats=['html'])[0]
    options = webdriver.ChromeOptions()
    options.binary_location = CHROME
    for argument in ('--headless=new', '--no-sandbox', '--disable-dev-shm-usage', '--disable-gpu', '--window-size=1200,900',
                     f'--user-data-dir={tmp_path / "profile"}'):
        options.add_argument(argument)
    options.set_capability('goog:loggingPrefs', {'browser': 'ALL'})
    browser = webdriver.Chrome(options=options, service=webdriver.ChromeService(DRIVER))
    try:
        browser.get(path.as_uri())
        assert browser.title == 'Report of experiments'
        figures = browser.find_elements('css selector', 'figure img')
        assert len(figures) == 2 and all(figure.get_property('naturalWidth') > 300 for figure in figures)
        assert all(figure.size['height'] > 100 for figure in figures)
        lines = browser.find_elements('css selector', '#block-2 table:first-of-type tbody tr')
        assert any('63.0 ± 1.0' in line.text for line in lines)
        folded = browser.find_element('css selector', '#block-2 details')
        assert not folded.find_element('css selector', 'table').is_displayed()
        folded.find_element('css selector', 'summary').click()
        assert folded.find_element('css selector', 'table').is_displayed()
        browser.find_element('css selector', '#index a[href="#block-2"]').click()
        assert browser.current_url.endswith('#block-2')
        fetched = browser.execute_script('return performance.getEntriesByType("resource").map(e => e.name)')
        assert all(name.startswith('data:') for name in fetched) and browser.get_log('browser') == []
        assert browser.execute_script('return document.documentElement.scrollWidth <= window.innerWidth')
    finally:
        browser.quit()
