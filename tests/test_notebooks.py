"""The index and every notebook that teaches run from top to bottom, each in a process and a folder of its own."""
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
NOTEBOOKS = [*sorted((ROOT / 'nbs').glob('[0-9]*.ipynb')), ROOT / 'nbs' / 'index.ipynb']
# nbdev's runner replaces __main__, the plotting backend and sys.path of the process it runs in: never this one's.
RUN = """
import sys
from pathlib import Path
from nbdev.config import get_config
from nbdev.test import test_nb
config = get_config()
passed, seconds = test_nb(Path(sys.argv[1]), skip_flags=config.tst_flags.split(), basepath=config.config_path)
sys.exit(not passed)
"""


def run(notebook, folder):
    """Run `notebook` inside `folder`, but for the cells flagged slow or gpu."""
    copy = shutil.copy(notebook, folder)
    return subprocess.run([sys.executable, '-c', RUN, copy], cwd=ROOT, stdin=subprocess.DEVNULL,
                          capture_output=True, text=True, timeout=600)


@pytest.mark.parametrize('notebook', NOTEBOOKS, ids=lambda path: path.stem)
def test_notebook_runs(notebook, tmp_path):
    done = run(notebook, tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr


def test_a_failing_notebook_is_told(tmp_path, write_notebook):
    folder = tmp_path / 'run'
    folder.mkdir()
    done = run(write_notebook('#| slow\nassert False, "skipped"', 'assert 1 + 1 == 3, "told"'), folder)
    assert done.returncode == 1
    assert 'told' in done.stderr and 'skipped' not in done.stderr
