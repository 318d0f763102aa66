"""The perceptron: its sizes, its seed, and what it refuses."""
import pytest
import torch

from sparse_irm.models import MLP


@pytest.mark.parametrize('n_classes, k', [(2, 1), (3, 3), (10, 10)])
def test_one_logit_for_two_classes_and_features_below_the_last_layer(n_classes, k):
    net, x = MLP(12, 5, n_classes), torch.randn(7, 3, 2, 2, generator=torch.Generator().manual_seed(0))
    assert net(x).shape == (7, k) and net.features(x).shape == (7, 5)
    assert [tuple(p.shape) for p in net.parameters()] == [(5, 12), (5,), (5, 5), (5,), (k, 5), (k,)]


def test_a_seed_names_the_weights():
    one, again, other = (MLP(4, 3, seed=seed) for seed in (1, 1, 2))
    assert all(torch.equal(a, b) for a, b in zip(one.parameters(), again.parameters()))
    assert not torch.equal(one[1].weight, other[1].weight)


@pytest.mark.parametrize('wrong, least', [
    (dict(in_features=0), 1), (dict(in_features=True), 1), (dict(width=True), 1), (dict(width=2.0), 1),
    (dict(n_classes=1), 2), (dict(n_classes='2'), 2), (dict(seed='a'), 0), (dict(seed=-1), 0), (dict(seed=2 ** 63), 0),
])
def test_wrong_numbers_are_told(wrong, least):
    [(name, value)] = wrong.items()
    with pytest.raises(ValueError, match=f'{name}: got {value!r}, takes a whole number of at least {least}'):
        MLP(**dict(in_features=4, width=3) | wrong)
