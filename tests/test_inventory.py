"""The list of data tells of every source where it lies, how far it was verified, or what to do."""
import os
import shutil
from pathlib import Path

import pytest
from test_coco_objects import ALL, coco  # noqa: F401 (a fixture)

from sparse_irm import inventory as module
from sparse_irm.cli import main
from sparse_irm.coco_objects import coco_objects
from sparse_irm.inventory import BY_HAND, DOWNLOADED, EMBEDDED, inventory


def lines(names, root):
    "(source, state, what is said) of each line, and whether all is well."
    told, good = inventory(names, root)
    first, *rest = told.splitlines()
    assert first == f'data folder: {root}'
    return [(line[:14].strip(), line[15:25].strip(), line[26:]) for line in rest], good


def test_an_empty_folder_says_what_to_do_for_each(tmp_path):
    told, good = lines([], tmp_path)
    assert good and [name for name, *_ in told] == [*EMBEDDED, *DOWNLOADED, *BY_HAND]
    for name, state, text in told:
        assert state == ('embedded' if name in EMBEDDED else 'missing')
        assert name in EMBEDDED or str(tmp_path) in text
        assert name not in DOWNLOADED or f'sparse-irm data {name} --download --data {tmp_path}' in text
        assert name not in BY_HAND or 'by hand' in text
    for name in (*DOWNLOADED, *BY_HAND):
        assert not inventory([name], tmp_path)[1]


def test_a_folder_with_too_few_pictures_is_damaged(tmp_path):
    (tmp_path / 'cifar10-png' / 'train').mkdir(parents=True)
    told, good = lines([], tmp_path)
    [(_, state, text)] = [line for line in told if line[0] == 'cifar10-png']
    assert not good and state == 'damaged' and 'train/automobile 0 of 5,000' in text


def test_coco_from_its_parts_to_the_built_file(coco, monkeypatch):  # noqa: F811
    pytest.importorskip('pycocotools')
    folder = coco / 'coco'
    told, good = lines(['coco'], coco)
    assert not good and [state for _, state, _ in told] == ['incomplete', 'found', 'not built']
    assert 'truck 3 of 2,300' in told[0][2] and 'cannot be built' in told[2][2]
    monkeypatch.setattr(module, 'COCO_COUNTS', ALL)
    told, good = lines(['coco'], coco)
    assert good and [state for _, state, _ in told] == ['found', 'found', 'not built'] and 'builds it' in told[2][2]
    (folder / 'train2017' / f'{0:012}.jpg').rename(folder / 'away.jpg')
    told, good = lines(['coco'], coco)
    assert not good and told[1][1] == 'incomplete' and f'lacks 1 of 21 photographs, first {0:012}.jpg' in told[1][2]
    (folder / 'away.jpg').rename(folder / 'train2017' / f'{0:012}.jpg')
    coco_objects(coco, ALL)
    shutil.rmtree(folder / 'train2017')
    told, good = lines(['coco'], coco)
    assert good and told == [('coco', 'found', f'21 objects in {folder / "objects-64.npy"}; verified: SHA-256')]
    (folder / 'objects-64.npy').write_bytes(b'cut off')
    told, good = lines([], coco)
    assert not good and told[-1][1] == 'damaged' and 'SHA-256' in told[-1][2]


def test_broken_annotations_are_damaged(coco):  # noqa: F811
    path = coco / 'coco' / 'annotations' / 'instances_train2017.json'
    path.write_text(path.read_text()[:-20])
    told, good = lines([], coco)
    assert not good and told[-1][:2] == ('coco', 'damaged') and str(path) in told[-1][2]


def test_the_command_prints_the_list(tmp_path, capsys):
    assert main(['data', 'digits', 'coco', '--data', str(tmp_path)]) == 1
    assert capsys.readouterr().out == inventory(['digits', 'coco'], tmp_path)[0] + '\n'
    assert main(['data', 'coco', '--download']) == 2
    assert 'coco cannot be downloaded' in capsys.readouterr().err


@pytest.mark.skipif('SPARSE_IRM_DATA' not in os.environ, reason='SPARSE_IRM_DATA is not set')
def test_the_data_that_are_there():
    root = Path(os.environ['SPARSE_IRM_DATA'])
    there = [name for name, place in {'mnist': 'MNIST', 'fashion-mnist': 'FashionMNIST', 'cifar10-jpeg': 'cifar10-jpeg',
                                      'cifar10-png': 'cifar10-png', 'cifar10': 'cifar-10-batches-py'}.items() if (root / place).is_dir()]
    told, good = lines(there or ['digits'], root)
    assert good and {state for _, state, _ in told} <= {'found', 'embedded'}
    assert all('verified: ' in text and str(root) in text for name, _, text in told if name in there)
