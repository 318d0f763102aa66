"""The script for a GPU runs on a processor too, smaller, and tells all its parts."""
import json
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
METHODS = {'ERM', 'IRMv1', 'SparseIRM-IRMv1'}


def test_the_gpu_check_runs_on_a_processor(tmp_path):
    out = tmp_path / 'told.json'
    done = subprocess.run([sys.executable, ROOT / 'benchmarks' / 'gpu_check.py', '--tiny', '--device', 'cpu', '--out', out],
                          cwd=tmp_path, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    told = json.loads(out.read_text())
    assert told['failed'] == {} and told['device'].startswith('cpu')
    assert set(told['seconds']) == {'smoke', 'losses', 'speed MLP', 'speed ResNet-18', 'paper cell'} < set(told)
    assert told['smoke']['runs'] == 3
    assert told['losses']['largest relative difference'] == dict.fromkeys(METHODS, 0)
    for network in 'MLP', 'ResNet-18':
        speeds = told[f'speed {network}']
        assert set(speeds) == {f'{method} {kind}' for method in METHODS for kind in ('float32', 'bfloat16')}
        assert all(line['steps a second'] > 0 and line['peak memory, MB'] is None for line in speeds.values())
    assert told['paper cell']['steps'] == 6 and told['paper cell']['seconds'] > 0


def test_no_part_begins_when_the_time_is_over(tmp_path):
    out = tmp_path / 'told.json'
    done = subprocess.run([sys.executable, ROOT / 'benchmarks' / 'gpu_check.py', '--tiny', '--device', 'cpu', '--out', out, '--minutes', '1e-5'],
                          cwd=tmp_path, capture_output=True, text=True, timeout=300)
    told = json.loads(out.read_text())
    assert done.returncode == 1 and set(told['seconds']) == {'smoke'} and told['failed'] == {}
    assert told['skipped'] == ['losses', 'speed MLP', 'speed ResNet-18', 'paper cell']
