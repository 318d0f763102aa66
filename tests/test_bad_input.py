"""Bad input to the command is refused by one line that names it and what is accepted, and leaves nothing behind."""
import contextlib
import io

import pytest
import torch

from sparse_irm.cli import main

REPRODUCE = [
    # names
    ('mlp_widht', "notebook: got 'mlp_widht', did you mean mlp_width"),
    ('', "notebook: got none; sparse-irm reproduce --list shows them"),
    ('al', "notebook: got 'al', did you mean"),
    ('MLP_WIDTH', "notebook: got 'MLP_WIDTH'"),
    ('mlp_width.ipynb', "notebook: got 'mlp_width.ipynb', did you mean mlp_width"),
    ('mlp_width --preset quikc', "preset: got 'quikc', did you mean quick"),
    ('mlp_width --preset Paper', "preset: got 'Paper', did you mean paper"),
    ('all --preset papre', "preset: got 'papre', did you mean paper"),
    ('all --only mlp_widht', "--only: got 'mlp_widht', did you mean mlp_width"),
    ('all --only mlp_width,', "--only: got ''"),
    ('mlp_width --only mlp_width', '--only: got mlp_width with the notebook mlp_width, takes the notebook all'),
    ('mlp_width -p widht=3', "parameter: got 'widht', did you mean"),
    ('mlp_width -p stpes=3', "parameter: got 'stpes', did you mean steps"),
    ('all -p stpes=3', "parameter: got 'stpes', did you mean steps"),
    ('deep_linear --methods ERM', "parameter: got 'methods'"),
    ('linear_theory --workers 2', "parameter: got 'workers'"),
    ('mlp_width --methods IRMv2', "method: got 'IRMv2', did you mean"),
    ('mlp_width --methods ERM,SparseIRM', "method: got 'SparseIRM', did you mean"),
    ('mlp_width -p dataset=ColorMNIST', "dataset: got 'ColorMNIST'"),
    ('mlp_width -p source=MNIST', "source: got 'MNIST'"),
    ('mlp_width -p dtype=float16', "dtype: got 'float16', takes one of float32, bfloat16"),
    # pairs
    ('mlp_width -p steps', "-p: got 'steps', takes key=value"),
    ('mlp_width -p =3', "-p: got '=3', takes key=value"),
    ('mlp_width -p steps=3 -p steps=4', '-p: steps is given twice'),
    ('mlp_width --seeds 0 -p seeds=1', '-p: seeds is given twice'),
    ('mlp_width --preset quick -p preset=paper', '-p: preset is given twice'),
    ('mlp_width -p out=there', '-p out=...: takes --out'),
    # values
    ('mlp_width -p steps=1e-4', 'steps: got 0.0001 (float), takes int'),
    ('mlp_width -p steps=1.5', 'steps: got 1.5 (float), takes int'),
    ('mlp_width -p steps=1e400', 'steps: got inf (float), takes int'),
    ('mlp_width -p steps=many', "steps: got 'many' (str), takes int"),
    ('mlp_width -p steps=true', 'steps: got True (bool), takes int'),
    ('mlp_width -p steps=0', 'steps: got 0, takes a finite number at least 1'),
    ('mlp_width -p steps=-1e4', 'steps: got -10000, takes a finite number at least 1'),
    ('mlp_width -p widths=16,x', "widths: got 'x' (str), takes int"),
    ('mlp_width -p widths=16,-4', 'width: got -4, takes a finite number at least 1'),
    ('mlp_width -p widths=0.5', 'widths: got 0.5 (float), takes int'),
    ('mlp_width --seeds x', "seeds: got 'x' (str), takes int"),
    ('mlp_width --seeds 0,1.5', 'seeds: got 1.5 (float), takes int'),
    ('mlp_width --seeds -1', 'expected one argument|seed: got -1'),
    ('mlp_width -p lr=fast', "lr: got 'fast' (str), takes float"),
    ('mlp_width -p lr=-1', 'lr: got -1.0, takes a finite number at least 0'),
    ('mlp_width -p n_train=1', 'n_train: got 1, takes a finite number at least 2'),
    ('mlp_width -p n_held_out=-5', 'n_held_out: got -5'),
    ('mlp_width -p evaluate_every=0', 'evaluate_every: got 0'),
    ('deep_linear -p rank=9', 'rank: got 9, takes 1 to 8'),
    ('deep_linear -p lam=-1', 'lam: got -1, takes a positive number'),
    ('linear_theory -p draws=1', 'draws: got 1, takes 2 or more'),
    # around the runs
    ('mlp_width --device abacus', "device: got 'abacus', takes auto or one of cpu"),
    ('mlp_width --device cuda:99', "device: got 'cuda:99', takes auto or one of cpu"),
    ('mlp_width --device 3', "device: got '3', takes auto or one of cpu"),
    ('mlp_width --workers 0', 'workers: got 0, takes a whole number of at least 1'),
    ('mlp_width --workers two', "workers: got 'two', takes a whole number of at least 1"),
    ('mlp_width --workers 1.5', 'workers: got 1.5, takes a whole number of at least 1'),
    ('mlp_width --timeout 0', 'timeout: got 0, takes a number of seconds above 0'),
    ('mlp_width --timeout 1h', "timeout: got '1h', takes a number of seconds above 0"),
    ('mlp_width --scheduler nonsense://x', "scheduler: got 'nonsense://x', no Dask scheduler answers there|Dask is missing"),
    ('mlp_width --data nowhere', 'data: there is no folder nowhere'),
    ('mlp_width -p source=mnist', 'train-images-idx3-ubyte is not in'),
    ('mlp_width --out file', '--out: got file, but .*file is no folder'),
    ('mlp_width --out file/below', '--out: got file/below, but .*file is no folder'),
    ('all --out file', '--out: got .*file.*is no folder'),
]
OTHERS = [
    ('train IRM', "method: got 'IRM', did you mean"),
    ('train ERM -p seed=1e30', 'seed: got 1e30, takes numbers below 1e18'),
    ('train ERM -p mask=code', 'mask: unknown parameter'),
    ('train ERM -p method=IRMv1', 'method: unknown parameter'),
    ('train ERM --out file', '--out: got file, but .*file is no folder'),
    ('train ERM --device abacus', "device: got 'abacus', takes auto or one of cpu"),
    ('train ERM -p source=mnist', 'train-images-idx3-ubyte is not in'),
    ('train ERM', 'n_train + n_held_out must leave test images'),
    ('data mnits', "source: got 'mnits', did you mean mnist"),
    ('data digits --download', 'source: digits cannot be downloaded, --download takes mnist'),
    ('data --download', 'source: got none to download, takes mnist'),
    ('rows file', 'folder: there is no folder file'),
]
TABLE = [(f'reproduce {words}'.strip(), told) for words, told in REPRODUCE] + OTHERS


@pytest.fixture(autouse=True)
def empty_place(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv('SPARSE_IRM_DATA', str(tmp_path / 'no data'))
    (tmp_path / 'file').touch()
    yield
    torch.set_default_dtype(torch.float32)


@pytest.mark.parametrize('words, told', TABLE, ids=[words for words, _ in TABLE])
def test_bad_input_is_refused(words, told, tmp_path):
    said, complained = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(said), contextlib.redirect_stderr(complained):
        try:
            status = main(words.split())
        except SystemExit as stop:
            status = stop.code
    line = complained.getvalue().rstrip('\n').split('\n')[-1]
    assert status == 2 and said.getvalue() == '' and 'Traceback' not in complained.getvalue()
    assert any(all(piece in line for piece in part.split('.*')) for part in told.split('|')), line
    assert line.startswith('sparse-irm') and [path.name for path in tmp_path.iterdir()] == ['file']


def test_the_table_is_long_enough():
    assert len({words for words, _ in TABLE}) >= 60
