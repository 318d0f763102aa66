"""The project's own rules: nothing drifts from the notebooks, the notebooks keep their style, the package stays light."""
import json
import os
import re
import shutil
import subprocess
import sys
from importlib import metadata
from pathlib import Path

import pytest
from nbconvert import MarkdownExporter

import sparse_irm

ROOT = Path(__file__).resolve().parent.parent
DEVELOP = sorted((ROOT / 'nbs').glob('*.ipynb'))
REPRODUCE = sorted((ROOT / 'nbs' / 'reproduce').glob('*.ipynb'))
CELL_LINES, WORDS_A_LINE, MODULE_LINES = 40, 2, 400
# Written in pieces, so that this file does not name what it forbids.
HERE_ONLY = re.compile(r'(^|[^.\w])/(%s)/|%s' % ('|'.join(['work', 'root', 'farm', 'tmp', 'home']),
                                               '|'.join([r'pypi\.' + 'org', 'python' + 'hosted', r'npm' + r'js\.'])))
NOT_AT_IMPORT = {'nbdev', 'fastcore', 'execnb', 'papermill', 'jupyter', 'jupyter_core', 'nbformat', 'nbconvert', 'IPython',
                 'pandas', 'sklearn', 'scipy', 'matplotlib', 'seaborn', 'torchvision', 'dask', 'distributed'}


def command(*words, cwd=ROOT):
    """The output of a command, run as a user would run it; its errors on failure."""
    env = {name: value for name, value in os.environ.items() if name != 'IN_TEST'}   # set, nbdev exports less
    done = subprocess.run(words, cwd=cwd, env=env, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def tracked():
    """The files git tracks, as paths; links are left out, as what they point to is listed itself."""
    names = command('git', '-c', 'safe.directory=*', 'ls-files', '-z').split('\0')
    paths = [ROOT / name for name in names if name]
    return [path for path in paths if path.is_file() and not path.is_symlink()]


def code_lines(source):
    return [line for line in source.splitlines() if line.strip() and not line.strip().startswith('#')]


def complaints(path, reproduce=False):
    """What in the notebook at `path` breaks the style, one line each."""
    cells = json.loads(path.read_text(encoding='utf-8'))['cells']
    text = [''.join(cell['source']) for cell in cells if cell['cell_type'] == 'markdown']
    code = [cell for cell in cells if cell['cell_type'] == 'code']
    lines = [code_lines(''.join(cell['source'])) for cell in code]
    words, total = sum(len(part.split()) for part in text), sum(map(len, lines))
    found = []
    if cells[0]['cell_type'] != 'markdown' or not re.match(r'# \S.*\n\s*> \S', ''.join(cells[0]['source'])):
        found.append('the first cell is not a title and a one-line summary')
    found += [f'a cell of {len(cell)} lines: {cell[0]}' for cell in lines if len(cell) > CELL_LINES]
    if words < WORDS_A_LINE * total:
        found.append(f'{words} words of prose for {total} lines of code')
    for cell in lines:
        imports = [line for line in cell if re.match(r'(import|from) ', line)]
        logic = [line for line in cell if re.match(r'(def|class|for|with|@|\w+\s*=)', line)]
        if imports and logic:
            found.append(f'a cell mixes imports with logic: {logic[0]}')
    if any(cell['outputs'] or cell['execution_count'] for cell in code):
        found.append('outputs are stored')
    tagged = sum('parameters' in cell['metadata'].get('tags', []) for cell in cells)
    if reproduce and tagged != 1:
        found.append(f'{tagged} cells tagged parameters, not 1')
    return found


@pytest.mark.parametrize('path', DEVELOP + REPRODUCE, ids=lambda path: path.stem)
def test_notebook_style(path):
    assert complaints(path, reproduce=path in REPRODUCE) == []


@pytest.mark.parametrize('cells, told', [
    (['# A title alone', 'x'], 'first cell'),
    (['# T\n> S\n' + 'word ' * 100, '\n'.join(f'f({i})' for i in range(CELL_LINES + 1))], 'a cell of 41 lines'),
    (['# T\n> S', 'x\n' * 10], '4 words of prose for 10 lines'),
    (['# T\n> S, in enough words', 'import os\nx = 1'], 'mixes imports'),
    (['# T\n> S, in enough words', 'x = 1'], '0 cells tagged parameters'),
])
def test_style_is_told(write_notebook, cells, told):
    found = complaints(write_notebook(*cells), reproduce='tagged' in told)
    assert len(found) == 1 and told in found[0]


def test_stored_outputs_are_told(write_notebook):
    path = write_notebook('# T\n> S, in enough words', 'x = 1', tags=['parameters'])
    assert complaints(path, reproduce=True) == []
    path.write_text(path.read_text().replace('"outputs": []', '"outputs": [{"output_type": "stream", "text": "1"}]'))
    assert complaints(path, reproduce=True) == ['outputs are stored']


def test_package_and_notebooks_agree(tmp_path):
    """Exporting and cleaning afresh changes nothing: no edit by hand, no forgotten export, no module left over."""
    def files(root):
        found = [*(root / 'sparse_irm').glob('*.py'), *(root / 'nbs').rglob('*.ipynb')]
        return {path.relative_to(root): path.read_text(encoding='utf-8') for path in found
                if '.ipynb_checkpoints' not in path.parts}
    shutil.copy(ROOT / 'settings.ini', tmp_path)
    shutil.copytree(ROOT / 'nbs', tmp_path / 'nbs')
    (tmp_path / 'sparse_irm').mkdir()
    shutil.copy(ROOT / 'sparse_irm' / '__init__.py', tmp_path / 'sparse_irm')
    for tool in 'doclinks import nbdev_export as tool', 'clean import nbdev_clean as tool':
        command(sys.executable, '-c', f'from nbdev.{tool}; tool()', cwd=tmp_path)
    kept, fresh = files(ROOT), files(tmp_path)
    assert sorted(kept) == sorted(fresh)
    assert [path for path in kept if kept[path] != fresh[path]] == [], 'run `make export` and commit what it writes'


def test_readme_is_the_index():
    text, _ = MarkdownExporter().from_filename(str(ROOT / 'nbs' / 'index.ipynb'))
    assert (ROOT / 'README.md').read_text(encoding='utf-8').strip() == text.strip(), 'run `make export`'


def test_index_lists_every_notebook():
    listed = re.findall(r'^\| `(\d\d_\w+)` \|', (ROOT / 'README.md').read_text(encoding='utf-8'), flags=re.MULTILINE)
    assert listed == [path.stem for path in DEVELOP if path.stem != 'index']


def test_no_module_is_two_ideas():
    lengths = {path.name: len(path.read_text(encoding='utf-8').splitlines())
               for path in (ROOT / 'sparse_irm').glob('*.py') if not path.name.startswith('_')}
    assert {name: length for name, length in lengths.items() if length > MODULE_LINES} == {}


def test_nothing_names_a_machine_or_a_registry():
    texts = {path.relative_to(ROOT): path.read_text(encoding='utf-8', errors='replace') for path in tracked()}
    named = [f'{path}: {line[:100]}' for path, text in texts.items() for line in text.splitlines() if HERE_ONLY.search(line)]
    assert named == []


def test_import_is_light():
    """Importing every module loads no notebook tool and no library that only some functions need."""
    script = '\n'.join(['import importlib, json, pkgutil, sys, sparse_irm',
                        'names = [m.name for m in pkgutil.iter_modules(sparse_irm.__path__) if m.name != "__main__"]',
                        'for name in names: importlib.import_module(f"sparse_irm.{name}")',
                        'print(json.dumps([names, sorted({name.split(".")[0] for name in sys.modules})]))'])
    names, loaded = json.loads(command(sys.executable, '-c', script))
    assert len(names) > 1 and NOT_AT_IMPORT & set(loaded) == set()


def test_installed_as_the_settings_say():
    about, needs = metadata.metadata('sparse_irm'), metadata.requires('sparse_irm')
    assert about['Version'] == sparse_irm.__version__
    assert sorted(about.get_all('Provides-Extra')) == ['cluster', 'dev', 'notebooks']
    always = {re.match(r'[\w-]+', need)[0] for need in needs if 'extra ==' not in need}
    assert 'torch' in always and not {'nbdev', 'papermill', 'jupyter', 'pytest'} & always
    assert [script.value for script in metadata.entry_points(name='sparse-irm')] == ['sparse_irm.cli:main']


def test_a_wheel_holds_modules_notebooks_and_reported_numbers(tmp_path):
    for name in 'settings.ini', 'setup.py', 'pyproject.toml', 'README.md':
        shutil.copy(ROOT / name, tmp_path)
    shutil.copytree(ROOT / 'nbs', tmp_path / 'nbs')
    shutil.copytree(ROOT / 'sparse_irm', tmp_path / 'sparse_irm', symlinks=True, ignore=shutil.ignore_patterns('__pycache__'))
    command(sys.executable, 'setup.py', '-q', 'build', '--build-lib', 'built', cwd=tmp_path)
    built = {str(path.relative_to(tmp_path / 'built')) for path in (tmp_path / 'built').rglob('*') if path.is_file()}
    modules = {f'sparse_irm/{path.name}' for path in (ROOT / 'sparse_irm').glob('*.py')}
    notebooks = {f'sparse_irm/notebooks/{path.name}' for path in REPRODUCE}
    assert 'sparse_irm/notebooks/mlp_width.ipynb' in notebooks
    assert built == modules | notebooks | {'sparse_irm/reported.csv'}


def test_a_module_imports_only_from_those_above_it():
    order = [path.stem[3:] for path in DEVELOP if path.stem != 'index']
    for place, name in enumerate(order):
        text = (ROOT / 'sparse_irm' / f'{name}.py').read_text(encoding='utf-8')
        used = set(re.findall(r'^\s*from (?:\.|sparse_irm\.)(\w+) import', text, flags=re.MULTILINE))
        assert used <= set(order[:place]), f'{name} imports {sorted(used - set(order[:place]))}'
