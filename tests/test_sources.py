import struct
from pathlib import Path
from urllib.error import URLError

import numpy as np
import pytest
import torch
import torchvision

from sparse_irm import sources
from sparse_irm.sources import IDX_FILES, Images, check_idx, data_root, digits, load, mnist


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
    with pytest.raises(ValueError, match="name must be one of mnist, fashion-mnist, digits, got"):
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
