"""The draws against their analytic forms, the masks on real architectures, and what experiments do to masked models."""
import copy
import io
import math
import pickle

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from sparse_irm.masks import (Masked, binary_mask, mask_entropy, noise, relaxed_mask, sparsify, straight_through,
                              temperature, top_mask)

TAUS = [1.0, 0.9, 0.5, 0.1, 0.03, 2.0]
PROBABILITIES = st.one_of(st.floats(0, 1, width=32), st.sampled_from([0.0, 1.0, 1e-30, 1e-7, 1 - 2 ** -24]))
UNIFORMS = st.one_of(st.floats(1e-6, 1 - 1e-6), st.sampled_from([1e-6, 0.5, 1 - 1e-6]))


def generator(seed=0):
    return torch.Generator().manual_seed(seed)


def slope(draw, s, u, *rest):
    s = s.clone().requires_grad_()
    return torch.autograd.grad(draw(s, u, *rest).sum(), s)[0]


def interior(n=400):
    return 0.02 + 0.96 * torch.rand(2, n, generator=generator(), dtype=torch.float64)


@pytest.mark.parametrize('tau', TAUS)
def test_relaxed_draw_is_the_gumbel_softmax(tau):
    s, u = interior()

    def gumbel(s, u):
        return torch.sigmoid((torch.logit(s) + torch.logit(u)) / tau)
    torch.testing.assert_close(relaxed_mask(s, u, tau), gumbel(s, u), rtol=1e-9, atol=1e-12)
    torch.testing.assert_close(slope(relaxed_mask, s, u, tau), slope(gumbel, s, u), rtol=1e-8, atol=1e-9)


@pytest.mark.parametrize('tau', [1.0, 0.5, 0.1])
def test_gradient_by_finite_differences(tau):
    s, u = interior(50)
    assert torch.autograd.gradcheck(lambda s: relaxed_mask(s, u, tau), s.requires_grad_())


@given(PROBABILITIES, UNIFORMS, st.sampled_from(TAUS))
def test_finite_in_float32_everywhere(s, u, tau):
    s, u = torch.tensor([s]), torch.tensor([u])
    m, g = relaxed_mask(s, u, tau), slope(relaxed_mask, s, u, tau)
    assert 0 <= m <= 1 and g.isfinite() and g >= 0
    if tau == 1:
        assert g > 0
        exact = u.double() * (1 - u.double()) / (s.double() * u.double() + (1 - s.double()) * (1 - u.double())) ** 2
        torch.testing.assert_close(g.double(), exact, rtol=1e-5, atol=0)


@pytest.mark.parametrize('tau', [*TAUS, 100.0])
def test_the_ends(tau):
    u = noise(torch.empty(1000), generator())
    zero, one = torch.zeros(1000), torch.ones(1000)
    assert (relaxed_mask(zero, u, tau) == 0).all() and (relaxed_mask(one, u, tau) == 1).all()
    at_zero, at_one = slope(relaxed_mask, zero, u, tau), slope(relaxed_mask, one, u, tau)
    assert at_zero.isfinite().all() and at_one.isfinite().all()
    if tau == 1:
        torch.testing.assert_close(at_zero, u / (1 - u), rtol=1e-5, atol=0)
        torch.testing.assert_close(at_one, (1 - u) / u, rtol=1e-5, atol=0)
    if tau <= 0.5:   # s^(1/tau - 1) vanishes at 0, and likewise at 1
        assert (at_zero == 0).all() and (at_one == 0).all()


def test_float32_slope_keeps_its_digits_at_low_temperature():
    s, u = torch.rand(2, 20_000, generator=generator()).clamp(1e-4, 1 - 1e-4)
    for tau in (1.0, 0.3, 0.03):
        low, high = slope(relaxed_mask, s, u, tau), slope(relaxed_mask, s.double(), u.double(), tau)
        seen = high > 1e-30
        torch.testing.assert_close(low.double()[seen], high[seen], rtol=2e-4, atol=0)


@pytest.mark.parametrize('tau', [1.0, 0.5, 0.1])
def test_mean_of_the_draw_is_its_integral(tau):
    n = 200_000
    midpoints = (torch.arange(n, dtype=torch.float64) + 0.5) / n
    for p in (0.05, 0.3, 0.5, 0.8, 0.99):
        integral = relaxed_mask(torch.full_like(midpoints, p), midpoints, tau).mean()
        if tau == 1 and p != 0.5:
            c = 2 * p - 1
            exact = p / c - p * (1 - p) / c ** 2 * math.log(p / (1 - p))
            assert math.isclose(integral, exact, abs_tol=1e-6)
        sampled = relaxed_mask(torch.full((n,), p), noise(torch.empty(n), generator()), tau)
        assert abs(sampled.double().mean() - integral) < 5 * sampled.std() / n ** 0.5 + 1e-6


@pytest.mark.parametrize('p', [0.0, 0.001, 0.3, 0.5, 0.97, 1.0])
def test_binary_draw_has_probability_s(p):
    n = 400_000
    m = binary_mask(torch.full((n,), p), noise(torch.empty(n), generator()))
    assert m.dtype == torch.float32 and set(m.unique().tolist()) <= {0.0, 1.0}
    assert abs(m.mean() - p) <= 5 * (p * (1 - p) / n) ** 0.5


def test_binary_draw_is_the_relaxed_one_rounded():
    s, u = interior(10_000)
    for tau in TAUS:
        assert torch.equal(binary_mask(s, u), (relaxed_mask(s, u, tau) > 0.5).double())


@pytest.mark.parametrize('tau', TAUS)
def test_straight_through_is_binary_forward_relaxed_backward(tau):
    s, u = (t.float() for t in interior(2000))
    assert torch.equal(straight_through(s, u, tau), binary_mask(s, u))
    assert torch.equal(slope(straight_through, s, u, tau), slope(relaxed_mask, s, u, tau))


def test_draws_work_under_function_transforms():
    s, u = (t.float() for t in torch.stack(interior(30).chunk(3, 1), 1))   # [3, 10] each
    one = torch.func.grad(lambda s, u: relaxed_mask(s, u).square().sum())
    torch.testing.assert_close(torch.func.vmap(one)(s, u), torch.stack([one(a, b) for a, b in zip(s, u)]))


def test_temperature_may_be_a_tensor():
    s, u = (t.float() for t in interior())
    s = torch.cat([s, torch.tensor([0.0, 1.0])])
    u = torch.cat([u, torch.tensor([0.2, 0.2])])
    for tau in TAUS:
        for f in (relaxed_mask, lambda *a: slope(relaxed_mask, *a)):
            torch.testing.assert_close(f(s, u, torch.tensor(tau)), f(s, u, tau), rtol=1e-4, atol=1e-6)


def test_second_derivative_is_refused_not_wrong():
    s, u = interior(5)
    g, = torch.autograd.grad(relaxed_mask(s.requires_grad_(), u).sum(), s, create_graph=True)
    with pytest.raises(RuntimeError):
        torch.autograd.grad(g.sum(), s)


@pytest.mark.parametrize('tau', [0, -1.0, math.nan, math.inf])
def test_refuses_a_temperature(tau):
    with pytest.raises(ValueError, match='temperature: got .*takes'):
        relaxed_mask(torch.rand(3), torch.rand(3), tau)


def test_refuses_noise_of_another_shape():
    for draw in relaxed_mask, binary_mask, straight_through:
        with pytest.raises(ValueError, match=r'u: got shape \(4,\), takes .*\(3,\)'):
            draw(torch.rand(3), torch.rand(4))
        with pytest.raises(ValueError, match=r'u: got shape \(1,\), takes .*\(3,\)'):
            draw(torch.rand(3), torch.rand(1))


def test_noise_is_inside_and_repeatable():
    u = noise(torch.empty(1_000_000), generator(3), eps=0.01)
    assert u.dtype == torch.float32 and u.min() >= 0.01 and u.max() <= 0.99
    assert torch.equal(u, noise(torch.empty(1_000_000), generator(3), eps=0.01))
    assert noise(torch.empty(2_000_000), generator(3), eps=6e-8).max() < 1
    for eps in (0, 1e-9, 0.5, -0.1, math.nan):
        with pytest.raises(ValueError, match='eps: got .*takes'):
            noise(torch.empty(3), eps=eps)


def test_temperature_of_the_published_code():
    for t in range(1501):
        assert math.isclose(temperature(t, 1500, 1.0, 0.03), 0.97 * (1 - t / 1500) + 0.03)
    assert {temperature(t, 10, 0.5, 0.5) for t in range(11)} == {0.5}


@pytest.mark.parametrize('wrong, name', [((11, 10), 'step'), ((-1, 10), 'step'), ((0, 0), 'step'),
                                         ((1, 10, 0.0), 'first'), ((1, 10, 1.0, -1), 'first'),
                                         ((1, 10, math.nan), 'first'), ((1, 10, math.inf), 'first')])
def test_temperature_refuses(wrong, name):
    with pytest.raises(ValueError, match=f'^{name}.*got .*takes'):
        temperature(*wrong)


def test_entropy():
    s = torch.rand(1000, generator=generator())
    direct = -(s * s.log2() + (1 - s) * (1 - s).log2()).mean()
    torch.testing.assert_close(mask_entropy(s), direct)
    assert mask_entropy(torch.tensor([0.0, 1.0])) == 0
    torch.testing.assert_close(mask_entropy(torch.full((3,), 0.5)), torch.tensor(1.0))


@given(st.lists(st.sampled_from([0.0, 0.25, 0.5, 0.75, 1.0]), min_size=1, max_size=30), st.data())
def test_top_mask_is_a_stable_sort(values, data):
    k = data.draw(st.integers(1, len(values)))
    best = sorted(range(len(values)), key=lambda i: (-values[i], i))[:k]
    assert top_mask(torch.tensor(values), k).nonzero().flatten().tolist() == sorted(best)


@given(st.lists(st.tuples(*[st.sampled_from([0.0, 0.25, 0.5, 1.0])] * 2), min_size=1, max_size=30), st.data())
def test_among_equals_the_larger_size_wins_and_then_the_first(pairs, data):
    k = data.draw(st.integers(1, len(pairs)))
    best = sorted(range(len(pairs)), key=lambda i: (-pairs[i][0], -pairs[i][1], i))[:k]
    s, size = torch.tensor(pairs).T
    assert top_mask(s, k, size).nonzero().flatten().tolist() == sorted(best)


@pytest.mark.parametrize('k', [0, -1, 4])
def test_top_mask_refuses(k):
    with pytest.raises(ValueError, match='k: got .*takes 1 <= k <= 3'):
        top_mask(torch.rand(3), k)
    with pytest.raises(ValueError, match=r'size: got shape \(2,\), takes .*\(3,\)'):
        top_mask(torch.rand(3), 2, torch.rand(2))


# Architectures


class Tied(nn.Module):
    """An encoder and a decoder that share a weight, next to nested layers."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Linear(6, 6)
        self.body = nn.Sequential(nn.Sequential(nn.Linear(6, 6), nn.Tanh()), nn.LayerNorm(6))
        self.again = nn.Linear(6, 6)
        self.again.weight = self.embed.weight
        self.head = nn.Linear(6, 1)

    def forward(self, x):
        return self.head(self.again(self.body(self.embed(x))))


def perceptron():
    return nn.Sequential(nn.Linear(6, 8), nn.ReLU(inplace=True), nn.Linear(8, 1)), torch.rand(5, 6)


def convolutional():
    return nn.Sequential(nn.Conv2d(2, 4, 3, bias=False), nn.BatchNorm2d(4), nn.ReLU(), nn.Conv2d(4, 4, 1), nn.Flatten(),
                         nn.Linear(64, 3)), torch.rand(5, 2, 6, 6)


def tied():
    return Tied(), torch.rand(5, 6)


@pytest.fixture(params=[perceptron, convolutional, tied], ids=lambda f: f.__name__)
def masked(request):
    with torch.random.fork_rng():
        torch.manual_seed(0)
        module, x = request.param()
    net = sparsify(module, 0.4)
    net.s.data.uniform_(generator=generator())
    return net, x


def copies(net):
    yield copy.deepcopy(net)
    yield pickle.loads(pickle.dumps(net))
    file = io.BytesIO()
    torch.save(net, file)
    yield torch.load(io.BytesIO(file.getvalue()), weights_only=False)
    fresh = sparsify(copy.deepcopy(net.module), net.keep)
    with torch.no_grad():
        for p in fresh.parameters():
            p.zero_()
    fresh.load_state_dict(net.state_dict())
    yield fresh


def test_copies_are_equal_and_apart(masked):
    net, x = masked
    net.eval()
    for twin in map(torch.nn.Module.eval, copies(net)):
        assert isinstance(twin, Masked) and twin.names == net.names and twin.keep == net.keep
        assert torch.equal(twin(x), net(x))
        with torch.no_grad():
            twin.s.fill_(2.0)
        assert net.s.max() <= 1


def test_harden_is_plain_with_exact_zeros_and_the_same_outputs(masked):
    net, x = masked
    net.eval()
    for m in (None, net.mask('sampled', generator())):
        plain = net.harden(m)
        assert type(plain) is type(net.module) and not any(isinstance(part, Masked) for part in plain.modules())
        assert torch.equal(plain(x), net(x, m))
        off = (net.mask('thresholded') if m is None else m) == 0
        weights = torch.cat([plain.get_parameter(name).flatten() for name in net.names])
        assert (weights[off] == 0).all() and (weights[~off] != 0).all()
    kept = net.s.numel() - sum((plain.get_parameter(name) == 0).sum() for name in net.names)
    assert kept == m.sum()
    assert all((net.module.get_parameter(name) != 0).all() for name in net.names), 'the dense weights were changed'


def test_three_kinds_of_mask(masked):
    net, _ = masked
    assert torch.equal(net.mask('expected'), net.s.detach())
    top = net.mask('thresholded')
    assert top.sum() == round(0.4 * net.s.numel()) and net.s[top == 1].min() >= net.s[top == 0].max()
    draws = torch.stack([net.mask('sampled', generator(seed)) for seed in range(300)])
    assert torch.equal(draws[0], net.mask('sampled', generator(0)))
    assert ((draws.mean(0) - net.s).abs() < 0.2).all()
    assert not any(net.mask(kind).requires_grad for kind in ('expected', 'thresholded', 'sampled'))
    with pytest.raises(ValueError, match="kind: got 'best', takes"):
        net.mask('best')


def test_a_network_at_its_start_keeps_its_largest_weights_in_every_layer(masked):
    net, x = masked
    with torch.no_grad():
        net.s.fill_(1)
    sizes = torch.cat([net.module.get_parameter(name).detach().flatten() for name in net.names]).abs()
    for keep, k in (None, round(0.4 * len(sizes))), (0.75, round(0.75 * len(sizes))):
        assert torch.equal(net.mask('thresholded', keep=keep).bool(), sizes >= sizes.topk(k).values[-1])
    assert all((w != 0).any() for w in net.weights(net.mask('thresholded')).values()) and net.eval()(x).std() > 0


def test_gradient_reaches_weights_and_mask(masked):
    net, x = masked
    u = noise(net.s, generator())
    net(x, relaxed_mask(net.s, u)).square().sum().backward()
    assert net.s.grad.isfinite().all() and (net.s.grad != 0).any()
    assert all(p.grad.isfinite().all() for p in net.parameters())
    # d loss / d s = d loss / d m * slope, and the weight's gradient carries the factor m: w dL/dw = m dL/dm
    m = relaxed_mask(net.s, u).detach().requires_grad_()
    weights = [net.module.get_parameter(name) for name in net.names]
    for p in weights:
        p.grad = None
    loss = net.train()(x, m).square().sum()
    got = torch.autograd.grad(loss, [m, *weights])
    torch.testing.assert_close(torch.cat([(w * g).flatten() for w, g in zip(weights, got[1:])]), m * got[0],
                               rtol=1e-3, atol=1e-5)


def test_ones_leave_the_network_alone(masked):
    net, x = masked
    net.eval()
    assert torch.equal(net(x, torch.ones_like(net.s)), net.module(x))


def test_batch_norm_statistics_move_in_train_mode_only():
    module, x = convolutional()
    net = sparsify(module)
    before = module[1].running_mean.clone()
    net.eval()(x)
    assert torch.equal(module[1].running_mean, before)
    net.train()(x)
    assert not torch.equal(module[1].running_mean, before) and module[1].num_batches_tracked == 1


def test_shared_weight_is_masked_once():
    net = sparsify(tied()[0])
    assert net.names == ('embed.weight', 'body.0.0.weight', 'head.weight') and net.s.numel() == 36 + 36 + 6
    plain = net.harden(torch.zeros_like(net.s))
    assert plain.again.weight is plain.embed.weight and (plain.again.weight == 0).all()
    assert (plain.body[1].weight == 1).all(), 'a norm was masked'
    x = torch.rand(3, 6)
    torch.testing.assert_close(net(x, torch.zeros_like(net.s)), net.module.head.bias.expand(3, 1))


def test_skip_keeps_submodules_dense():
    assert sparsify(tied()[0], skip=['head', 'body']).names == ('embed.weight',)
    assert sparsify(tied()[0], skip=('again',)).names == ('body.0.0.weight', 'head.weight')   # shared with embed
    assert sparsify(convolutional()[0], types=(nn.Conv2d,)).names == ('0.weight', '3.weight')
    assert sparsify(nn.Linear(3, 2)).names == ('weight',)


def test_half_precision_autocast():
    module, x = perceptron()
    net = sparsify(module)
    with torch.autocast('cpu', torch.bfloat16):
        out = net(x, relaxed_mask(net.s, noise(net.s, generator())))
    assert out.dtype == torch.bfloat16
    out.float().sum().backward()
    assert net.s.grad.dtype == torch.float32 and net.s.grad.isfinite().all()
    assert sparsify(perceptron()[0].bfloat16())(x.bfloat16()).dtype == torch.bfloat16


def test_one_function_of_weights_mask_and_batch():
    module, x = perceptron()
    net = sparsify(module)
    params = {name: p.detach() for name, p in net.named_parameters()}
    u = torch.stack([noise(net.s, generator(seed)) for seed in range(3)])

    def loss(params, u):
        m = relaxed_mask(params['s'], u)
        return torch.func.functional_call(net, params, (x, m)).square().mean()
    batched = torch.func.vmap(torch.func.grad(loss), in_dims=(None, 0))(params, u)
    for i in range(3):
        net.zero_grad()
        net(x, relaxed_mask(net.s, u[i])).square().mean().backward()
        torch.testing.assert_close(batched['s'][i], net.s.grad)
        torch.testing.assert_close(batched['module.0.weight'][i], module[0].weight.grad)


def test_asks_an_accelerator_nothing():
    net = sparsify(perceptron()[0]).to('meta')   # meta tensors hold no numbers: reading one raises
    m = relaxed_mask(net.s, noise(net.s), torch.empty((), device='meta'))
    net(torch.empty(5, 6, device='meta'), m).sum().backward()
    assert net.s.grad.shape == net.s.shape
    for kind in ('sampled', 'thresholded', 'expected'):
        assert net.mask(kind).shape == net.s.shape


@pytest.mark.parametrize('keep', [0, -0.1, 1.0001, math.nan])
def test_refuses_keep(keep):
    with pytest.raises(ValueError, match='keep: got .*takes 0 < keep <= 1'):
        sparsify(nn.Linear(3, 2), keep)


@pytest.mark.parametrize('skip', [('hed',), ('',), ('body.9',)])
def test_refuses_an_unknown_name(skip):
    with pytest.raises(ValueError, match='skip: got .*takes names of submodules: embed, body, '):
        sparsify(tied()[0], skip=skip)


def test_refuses_what_it_cannot_mask():
    with pytest.raises(TypeError, match='skip: got the string'):
        sparsify(tied()[0], skip='head')
    with pytest.raises(ValueError, match='module: got ReLU without a weight to mask, takes'):
        sparsify(nn.ReLU())
    with pytest.raises(ValueError, match='module: got Sequential without a weight to mask'):
        sparsify(nn.Sequential(nn.Linear(3, 2)), skip=['0'])
    with pytest.raises(ValueError, match='module: got one that is masked already'):
        sparsify(sparsify(nn.Linear(3, 2)))
    for types in nn.Linear, 'Linear', ['Linear'], [nn.Linear(3, 2)]:
        with pytest.raises(TypeError, match='types: got .*, takes a sequence of classes'):
            sparsify(nn.Linear(3, 2), types=types)
    for names, told in ([], 'none'), (['weight', 'wieght'], "'wieght'"):
        with pytest.raises(ValueError, match=f'names: got {told}, takes at least one of the parameters: weight, bias'):
            Masked(nn.Linear(3, 2), names, 0.5)
    with pytest.raises(ValueError, match=r'm: got shape \(5,\), takes \(6,\)'):
        sparsify(nn.Linear(3, 2))(torch.rand(1, 3), torch.ones(5))
