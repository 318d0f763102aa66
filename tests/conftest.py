"""What holds for every test: one thread a process (pytest-xdist uses the other cores), no screen, no chance."""
import json
import os

import pytest
from hypothesis import settings

os.environ.setdefault('OMP_NUM_THREADS', '1')   # read by torch at its import, here and in the processes tests start
os.environ['MPLBACKEND'] = 'Agg'
settings.register_profile('repeatable', derandomize=True, deadline=None)
settings.load_profile('repeatable')


@pytest.fixture
def write_notebook(tmp_path):
    """A function that writes a notebook of the given code cells, with markdown cells where a text starts with '# '."""
    def write(*texts, tags=()):
        cells = [dict(cell_type='markdown', id=f'c{i}', metadata={}, source=text) if text.startswith('# ') else
                 dict(cell_type='code', id=f'c{i}', metadata=dict(tags=list(tags)), source=text, outputs=[],
                      execution_count=None)
                 for i, text in enumerate(texts)]
        path = tmp_path / 'example.ipynb'
        path.write_text(json.dumps(dict(cells=cells, metadata={}, nbformat=4, nbformat_minor=5)))
        return path
    return write
