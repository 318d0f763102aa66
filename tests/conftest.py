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


@pytest.fixture
def without_float64():
    "A context that refuses what a device without float64, as MPS, cannot do."
    import torch
    from torch.overrides import TorchFunctionMode

    class _WithoutFloat64(TorchFunctionMode):
        "Makes the CPU a device without float64: only what .cpu() gives, which then lies elsewhere, may become float64."

        def __torch_function__(self, function, types, args=(), kwargs=None):
            out = function(*args, **(kwargs or {}))
            if function is torch.Tensor.cpu:
                out = out.clone()
                out.elsewhere = True
            elif isinstance(out, torch.Tensor) and out.dtype == torch.float64:
                given = [a for a in args if isinstance(a, torch.Tensor)]
                if not any(a.dtype == torch.float64 or hasattr(a, 'elsewhere') for a in given):
                    raise TypeError(f'float64 made by {function}')
            return out

    return _WithoutFloat64()
