import hashlib
import pickle
import struct
from pathlib import Path
from urllib.error import URLError

import numpy as np
import pytest
import torch
import torchvision
from PIL import Image

from sparse_irm import sources
from sparse_irm.sources import (
    CIFAR10_PAIR,
    IDX_FILES,
    Images,
    check_idx,
    cifar10,
    cifar10_folder,
    data_root,
    digits,
    load,
    mnist,
)


def write_idx(path: Path, shape: tuple[int, ...], value: int) -> None:
    "A healthy IDX file whose every byte is `value`."
    path.parent.mkdir(parents=True, exist_ok=True)
    header = struct.pack(f">4B{len(shape)}I", 0, 0, 8, len(shape), *shape)
    path.write_bytes(header + bytes([value]) * int(np.prod(shape)))


@pytest.fixture
def blank_mnist(tmp_path):
    "A data folder with MNIST-sized files: training pixels 1, training labels 2, test pixels 3, test labels 4."
    for value, (file, shape) in enumerate(IDX_FILES.items(), start=1):
        write_idx(tmp_path / "MNIST" / "raw" / file, shape, value)
    return tmp_path


def test_images_refuse_wrong_dtypes_and_shapes():
    x, y = torch.zeros(3, 4, 4, dtype=torch.uint8), torch.zeros(3, dtype=torch.int64)
    Images("colour", x[:, None].expand(3, 3, 4, 4), y)
    with pytest.raises(TypeError, match="x must be a torch.uint8 tensor, got torch.float32"):
        Images("bad", x.float(), y)
    with pytest.raises(TypeError, match="y must be a torch.int64 tensor, got list"):
        Images("bad", x, [0, 1, 2])
    with pytest.raises(ValueError, match=r"x must be \[n, h, w\] or \[n, 3, h, w\], got \[3, 2, 4, 4\]"):
        Images("bad", torch.zeros(3, 2, 4, 4, dtype=torch.uint8), y)
    with pytest.raises(ValueError, match=r"y must be \[3\] as x, got \[2\]"):
        Images("bad", x, y[:2])


def test_digits_are_scikit_learns():
    from sklearn.datasets import load_digits

    images, original = digits(), load_digits()
    assert images.name == "digits" and len(images) == 1797
    assert images.y.tolist() == original.target.tolist()
    back = (images.x.double() * 16 / 255).round()
    assert back.equal(torch.from_numpy(original.images))


def test_data_root_prefers_argument_then_variable_then_cache(monkeypatch, tmp_path):
    monkeypatch.setenv("SPARSE_IRM_DATA", str(tmp_path / "variable"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    assert data_root("argument") == Path("argument")
    assert data_root() == tmp_path / "variable"
    monkeypatch.delenv("SPARSE_IRM_DATA")
    assert data_root() == tmp_path / "cache" / "sparse_irm"
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert data_root() == Path.home() / ".cache" / "sparse_irm"
    assert not list(tmp_path.iterdir()), "asking for the folder must not create it"


def test_check_idx_refuses_every_changed_header_byte_and_size(tmp_path):
    path = tmp_path / "labels"
    write_idx(path, (5,), 7)
    check_idx(path, (5,))
    whole = path.read_bytes()
    for i in range(8):
        path.write_bytes(whole[:i] + bytes([whole[i] ^ 1]) + whole[i + 1 :])
        with pytest.raises(ValueError, match="labels is damaged"):
            check_idx(path, (5,))
    for wrong_size in (whole[:-1], whole + b"\0", whole[:6], b""):
        path.write_bytes(wrong_size)
        with pytest.raises(ValueError, match=f"{len(wrong_size)} bytes .* expected 13 bytes"):
            check_idx(path, (5,))


def test_mnist_is_the_training_images_then_the_test_images(blank_mnist):
    images = mnist(blank_mnist)
    assert images.name == "mnist" and images.x.shape == (70_000, 28, 28)
    assert (images.x[:60_000] == 1).all() and (images.x[60_000:] == 3).all()
    assert (images.y[:60_000] == 2).all() and (images.y[60_000:] == 4).all()


@pytest.mark.parametrize("file", IDX_FILES)
def test_a_missing_file_is_named_with_its_folder_and_a_way_out(blank_mnist, file):
    (blank_mnist / "MNIST" / "raw" / file).unlink()
    with pytest.raises(FileNotFoundError) as error:
        mnist(blank_mnist)
    for part in (file, str(blank_mnist / "MNIST" / "raw"), "SPARSE_IRM_DATA", "download=True"):
        assert part in str(error.value)


@pytest.mark.parametrize("file", IDX_FILES)
@pytest.mark.parametrize("download", [False, True])
def test_a_truncated_file_is_named_and_left_alone(blank_mnist, file, download):
    path = blank_mnist / "MNIST" / "raw" / file
    with path.open("r+b") as handle:
        handle.truncate(1000)
    with pytest.raises(ValueError, match=f"{file} is damaged: 1,000 bytes"):
        mnist(blank_mnist, download=download)
    assert path.stat().st_size == 1000


def test_fashion_mnist_never_answers_for_mnist_nor_the_reverse(blank_mnist):
    with pytest.raises(FileNotFoundError, match="FashionMNIST/raw/train-images-idx3-ubyte"):
        load("fashion-mnist", blank_mnist)
    (blank_mnist / "MNIST").rename(blank_mnist / "FashionMNIST")
    assert load("fashion-mnist", blank_mnist).name == "fashion-mnist"
    with pytest.raises(FileNotFoundError):
        load("mnist", blank_mnist)


def test_download_fetches_only_missing_files_and_only_when_asked(monkeypatch, blank_mnist):
    raw, file = blank_mnist / "MNIST" / "raw", "t10k-labels-idx1-ubyte"
    (raw / file).rename(blank_mnist / "elsewhere")
    fetched = []

    def fake(url, download_root, filename, md5):
        fetched.append(filename)
        source = blank_mnist / "elsewhere" if filename == f"{file}.gz" else raw / filename.removesuffix(".gz")
        (Path(download_root) / filename.removesuffix(".gz")).write_bytes(source.read_bytes())

    monkeypatch.setattr(torchvision.datasets.mnist, "download_and_extract_archive", fake)
    with pytest.raises(FileNotFoundError):
        mnist(blank_mnist)
    assert fetched == []
    assert (mnist(blank_mnist, download=True).y[-1] == 4).all()
    assert f"{file}.gz" in fetched


def test_a_failed_download_says_why_and_gives_no_other_data(monkeypatch, tmp_path):
    def offline(*args, **kwargs):
        raise URLError("no route to host")

    monkeypatch.setattr(torchvision.datasets.mnist, "download_and_extract_archive", offline)
    with pytest.raises(RuntimeError, match="(?s)mnist could not be downloaded to .*MNIST/raw.*no route to host"):
        sources.load("mnist", tmp_path, download=True)


@pytest.mark.parametrize("name", ["MNIST", "", None, "cifar"])
def test_unknown_names_are_refused_with_the_known_ones(name):
    with pytest.raises(ValueError, match="name must be one of mnist, fashion-mnist, cifar10, cifar10-jpeg, cifar10-png, digits, photographs, got"):
        load(name)


def test_published_files_where_they_lie():
    try:
        images = mnist()
    except FileNotFoundError as error:
        pytest.skip(f"needs the real MNIST: {error}")
    assert images.y[:10].tolist() == [5, 0, 4, 1, 9, 2, 1, 3, 1, 4]
    assert images.y[60_000:60_005].tolist() == [7, 2, 1, 0, 4]
    assert images.y[:60_000].bincount().tolist() == [5923, 6742, 5958, 6131, 5842, 5421, 5918, 6265, 5851, 5949]
    assert abs(images.x[:60_000].double().mean() / 255 - 0.1307) < 1e-4


def test_photographs_are_distinct_patches_of_the_two_pictures():
    from sklearn.datasets import load_sample_image

    images = load("photographs")
    assert images.name == "photographs" and images.y.bincount().tolist() == [1040, 1040]
    assert len(images.x.flatten(1).unique(dim=0)) > 2000
    for label, file in enumerate(("china.jpg", "flower.jpg")):
        block = torch.from_numpy(load_sample_image(file)[32:48, 80:96].copy())  # row 2, column 5 of the blocks
        patch = images.x[1040 * label + 2 * 40 + 5]
        assert (patch.float().mean((1, 2)) - block.float().mean((0, 1))).abs().max() < 1


@pytest.fixture
def own_cifar10(monkeypatch, tmp_path):
    "A data folder with CIFAR-10's files but two training images and one test image of each of the ten classes."
    cls, folder = torchvision.datasets.CIFAR10, tmp_path / "cifar-10-batches-py"
    folder.mkdir()

    def write(name, content):
        (folder / name).write_bytes(pickle.dumps(content))
        return [name, hashlib.md5((folder / name).read_bytes()).hexdigest()]

    for key, file, n in (("train_list", "data_batch_1", 20), ("test_list", "test_batch", 10)):
        labels = [i % 10 for i in range(n)]
        data = np.repeat(np.arange(n, dtype=np.uint8)[:, None], 3072, axis=1)
        data[:, 1024:2048] += 100  # the green plane
        monkeypatch.setattr(cls, key, [write(file, {"data": data, "labels": labels})])
    name, md5 = write("batches.meta", {"label_names": [str(i) for i in range(10)]})
    monkeypatch.setattr(cls, "meta", {"filename": name, "key": "label_names", "md5": md5})
    return tmp_path


def test_cifar10_is_its_automobiles_and_trucks_training_first(own_cifar10):
    images = load("cifar10", own_cifar10)
    assert images.name == "cifar10" and images.x.shape == (6, 3, 32, 32) and images.x.is_contiguous()
    assert images.x[:, 0, 0, 0].tolist() == [1, 9, 11, 19, 1, 9]
    assert images.x[:, 1, 5, 7].tolist() == [101, 109, 111, 119, 101, 109]
    assert images.y.tolist() == [0, 1, 0, 1, 0, 1] and CIFAR10_PAIR == {"automobile": 1, "truck": 9}


@pytest.mark.parametrize("download", [False, True])
def test_damaged_cifar10_is_named_and_left_alone(own_cifar10, download):
    path = own_cifar10 / "cifar-10-batches-py" / "data_batch_1"
    path.write_bytes(path.read_bytes()[:-1] + b"x")
    before = path.read_bytes()
    with pytest.raises(ValueError, match="cifar-10-batches-py is damaged.*Delete it"):
        cifar10(own_cifar10, download=download)
    assert path.read_bytes() == before


def test_missing_cifar10_is_downloaded_only_when_asked(monkeypatch, tmp_path):
    def offline(*args, **kwargs):
        raise URLError("no route to host")

    monkeypatch.setattr(torchvision.datasets.cifar, "download_and_extract_archive", offline)
    with pytest.raises(FileNotFoundError, match="cifar-10-batches-py is not in .*SPARSE_IRM_DATA.*download=True"):
        cifar10(tmp_path)
    with pytest.raises(RuntimeError, match="cifar10 could not be downloaded.*no route to host"):
        cifar10(tmp_path, download=True)


@pytest.fixture
def pictures(monkeypatch, tmp_path):
    "A function that writes a small `name` folder: two training pictures and one test picture of each class."
    monkeypatch.setattr(sources, "CIFAR10_COUNTS", {"train": 2, "test": 1})

    def write(name, ending):
        grey = 0
        for part, n in (("train", 2), ("test", 1)):
            for kind in ("automobile", "truck", "frog"):
                (tmp_path / name / part / kind).mkdir(parents=True)
                for i in range(n):
                    grey += 10
                    picture = Image.new("L", (32, 32), grey)
                    picture.save(tmp_path / name / part / kind / f"{i:04}{ending}")
        return tmp_path

    return write


@pytest.mark.parametrize("name, ending", [("cifar10-jpeg", ".jpg"), ("cifar10-jpeg", ".JPEG"), ("cifar10-png", ".png")])
def test_a_folder_gives_its_pictures_in_order(pictures, name, ending):
    images = load(name, pictures(name, ending))
    assert images.name == name and images.y.tolist() == [0, 0, 1, 1, 0, 1]
    assert images.x.float().mean((1, 2, 3)).round().tolist() == [10, 20, 30, 40, 70, 80]


def test_a_folder_of_another_kind_or_count_is_refused_with_counts(pictures):
    root = pictures("cifar10-jpeg", ".png")
    with pytest.raises(ValueError, match=r"\.jpg or \.jpeg.*got train/automobile 0 of 2, .*test/truck 0 of 1"):
        load("cifar10-jpeg", root)
    (root / "cifar10-jpeg").rename(root / "cifar10-png")
    (root / "cifar10-png" / "train" / "truck" / "0001.png").unlink()
    with pytest.raises(ValueError, match=r"got train/truck 1 of 2$"):
        load("cifar10-png", root)
    with pytest.raises(FileNotFoundError, match="cifar10-jpeg is not in .*cifar10-jpeg/train/automobile/"):
        load("cifar10-jpeg", root)
    with pytest.raises(ValueError, match="name must be one of cifar10-jpeg, cifar10-png, got 'cifar10'"):
        cifar10_folder("cifar10", root)


def test_pictures_that_do_not_open_or_fit_are_named(pictures):
    root = pictures("cifar10-png", ".png")
    path = root / "cifar10-png" / "test" / "truck" / "0000.png"
    Image.new("RGB", (31, 32)).save(path)
    with pytest.raises(ValueError, match="test/truck/0000.png must be 32x32 pixels, got 32x31"):
        load("cifar10-png", root)
    path.write_bytes(path.read_bytes()[:40])
    with pytest.raises(ValueError, match="test/truck/0000.png is damaged"):
        load("cifar10-png", root)


def test_cifar10_jpeg_where_it_lies():
    try:
        images = load("cifar10-jpeg")
    except FileNotFoundError as error:
        pytest.skip(f"needs the real pictures: {error}")
    assert images.x.shape == (12_000, 3, 32, 32)
    assert images.y[:10_000].bincount().tolist() == [5000, 5000] and images.y[10_000:].bincount().tolist() == [1000, 1000]
    assert images.x.float().mean() > 50 and len(images.x.flatten(1).unique(dim=0)) > 11_000
