"""aten's operations on simulated devices give the CPU's values, whether the stream is idle or busy."""

from __future__ import annotations

import pytest

from runtime import RUNTIME
from simulated_devices.testing import Jobs

# `twice` runs a function on the CPU and on the device and compares; on the device once with an idle stream,
# and once behind a gate, where the shapes come from Meta kernels and the work is done in stream order.
TWICE = (
    RUNTIME
    + """
import copy, contextlib
from torch import nn
import torch.nn.functional as F
def flat(value):
    if isinstance(value, torch.Tensor): return [value.detach().cpu()]
    if isinstance(value, (list, tuple)): return [t for v in value for t in flat(v)]
    if isinstance(value, dict): return [t for v in value.values() for t in flat(v)]
    return []
def twice(make, function, exact=True, behind=True):
    def once(device, gate=None):
        torch.manual_seed(0); things = make()
        things = [t.to(device) if hasattr(t, "to") else t for t in things]
        if device == "cuda" and gate: torch.cuda.synchronize(); stand = Gate(c_void_p(torch.cuda.current_stream().cuda_stream)); result = function(*things); stand.open(); return flat(result)
        return flat(function(*things))
    want = once("cpu")
    for gate in ([False, True] if behind else [False]):
        got = once("cuda", gate)
        assert len(got) == len(want) > 0
        for g, w in zip(got, want):
            assert g.dtype == w.dtype and g.shape == w.shape, (g.dtype, w.dtype, g.shape, w.shape)
            if exact: assert torch.equal(torch.nan_to_num(g), torch.nan_to_num(w)), (gate, (g.double() - w.double()).abs().max())
            else: torch.testing.assert_close(g, w, rtol=1e-4, atol=1e-5)
def gradients(model, *inputs, cast=contextlib.nullcontext):
    device = inputs[0].device.type
    with cast(device): out = model(*inputs); loss = out.float().pow(2).mean()
    loss.backward()
    return [out, loss, *[p.grad for p in model.parameters()]]
"""
)


def test_a_resnet_block(jobs: Jobs) -> None:
    """Convolutions, batch norm and a residual, forward and backward."""
    jobs.run(
        1,
        TWICE
        + """
class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b, self.s = nn.Conv2d(4, 8, 3, 2, 1, bias=False), nn.Conv2d(8, 8, 3, 1, 1), nn.Conv2d(4, 8, 1, 2)
        self.n, self.m = nn.BatchNorm2d(8), nn.BatchNorm2d(8)
    def forward(self, x): return F.relu(self.m(self.b(F.relu(self.n(self.a(x))))) + self.s(x))
twice(lambda: [Block(), torch.randn(2, 4, 16, 16)], lambda model, x: gradients(model, x) + [model.n.running_mean, model.n.num_batches_tracked], exact=False)
twice(lambda: [nn.Sequential(nn.Conv2d(3, 4, 3), nn.MaxPool2d(2), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4, 3)), torch.randn(2, 3, 9, 9)], gradients, exact=False)
twice(lambda: [nn.Sequential(nn.ConvTranspose2d(3, 4, 3), nn.GroupNorm(2, 4), nn.SiLU(), nn.Upsample(scale_factor=2)), torch.randn(2, 3, 9, 9).contiguous(memory_format=torch.channels_last)], gradients, exact=False)
""",
    )


def test_a_transformer_layer(jobs: Jobs) -> None:
    """Attention, layer norm and feed-forward, forward and backward, with a mask and causal."""
    jobs.run(
        1,
        TWICE
        + """
from torch.nn.attention import sdpa_kernel, SDPBackend
def run(model, x):
    with sdpa_kernel(SDPBackend.MATH): return gradients(model, x)
twice(lambda: [nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0, batch_first=True), torch.randn(2, 5, 16)], run, exact=False)
twice(lambda: [nn.TransformerEncoderLayer(16, 2, 32, batch_first=True).eval(), torch.randn(2, 5, 16)], lambda m, x: m(x).detach(), exact=False)
def attend(q, k, v): return F.scaled_dot_product_attention(q, k, v, is_causal=True)
twice(lambda: [torch.randn(2, 2, 5, 8) for _ in range(3)], attend, exact=False)
twice(lambda: [nn.Embedding(10, 4), torch.randint(10, (3, 5))], gradients)
""",
    )


@pytest.mark.parametrize("options", ["", "fused=True", "foreach=False", "amsgrad=True"])
def test_adamw(jobs: Jobs, options: str) -> None:
    """Five steps of AdamW in all its implementations."""
    jobs.run(
        1,
        TWICE
        + f"""
def train(model, x):
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, {options})
    for _ in range(5): optimizer.zero_grad(); model(x).pow(2).mean().backward(); nn.utils.clip_grad_norm_(model.parameters(), 0.1); optimizer.step()
    return [list(model.parameters()), optimizer.state_dict()["state"][0]["exp_avg_sq"]]
twice(lambda: [nn.Sequential(nn.Linear(4, 8), nn.GELU(), nn.Linear(8, 2)), torch.randn(3, 4)], train, exact=False, behind=False)
""",
    )


def test_autocast_and_scaling(jobs: Jobs) -> None:
    """Mixed precision in bfloat16 and float16 with a gradient scaler."""
    jobs.run(
        1,
        TWICE
        + """
model = lambda: [nn.Sequential(nn.Linear(8, 16), nn.LayerNorm(16), nn.ReLU(), nn.Linear(16, 2)), torch.randn(4, 8)]
for dtype in (torch.bfloat16, torch.float16):
    def run(m, x):
        with torch.autocast(x.device.type, dtype): out = m(x); assert out.dtype == dtype
        out.float().sum().backward(); return [out, [p.grad for p in m.parameters()]]
    # The casts of the two devices' autocast differ in where they are made, so the last bits may.
    torch.manual_seed(0); m, x = model(); n, y = copy.deepcopy(m).cuda(), x.cuda()
    for a, b in zip(flat(run(m, x)), flat(run(n, y))): torch.testing.assert_close(b, a, rtol=2e-2, atol=2e-2)
m, x = (t.cuda() for t in model()); optimizer, scaler = torch.optim.SGD(m.parameters(), 0.1), torch.amp.GradScaler("cuda", init_scale=2.0**16)
before = m[0].weight.detach().clone()
with torch.autocast("cuda", torch.float16): loss = m(x).float().mean()
scaler.scale(loss).backward(); scaler.step(optimizer); scaler.update(); assert not torch.equal(before, m[0].weight) and scaler.get_scale() == 2.0**16
before = m[0].weight.detach().clone(); optimizer.zero_grad(); scaler.scale(m(x).mean() * float("inf")).backward(); scaler.step(optimizer); scaler.update()
assert torch.equal(before, m[0].weight) and scaler.get_scale() == 2.0**15
""",
    )


def test_softmax_of_halves_into_floats(jobs: Jobs) -> None:
    """Under autocast, softmax and cross entropy take halves and give floats; gradients are halves again."""
    jobs.run(
        1,
        TWICE
        + """
def run(x, function):
    x = x.to(dtype).detach().requires_grad_()
    with torch.autocast(x.device.type, dtype): out = function(x)
    out.pow(2).sum().backward(); assert out.dtype == torch.float32 and x.grad.dtype == dtype
    return [out, x.grad]
for dtype in (torch.float16, torch.bfloat16):
    for function in (lambda x: F.softmax(x, 1, dtype=torch.float32), lambda x: F.log_softmax(x, 1, dtype=torch.float32)):
        twice(lambda: [torch.randn(4, 6), function], run, exact=False)
""",
    )


def test_sync_batch_norm(jobs: Jobs) -> None:
    """Ranks with unequal shares of a batch get the values, gradients and statistics of the whole on the CPU."""
    jobs.run(
        2,
        """
        import copy
        from torch import nn
        init(); torch.manual_seed(0); data = torch.randn(5, 3, 4, 4); mine = slice(0, 2) if rank == 0 else slice(2, 5)
        for affine, momentum in ((True, 0.1), (False, None)):
            alone = nn.BatchNorm2d(3, affine=affine, momentum=momentum)
            if affine: nn.init.uniform_(alone.weight); nn.init.uniform_(alone.bias)
            norm = nn.SyncBatchNorm.convert_sync_batchnorm(copy.deepcopy(alone)).cuda()
            for _ in range(2):
                whole, part = data.clone().requires_grad_(), data[mine].cuda().requires_grad_()
                want, got = alone(whole), norm(part)
                want.pow(3).sum().backward(); got.pow(3).sum().backward()
                torch.testing.assert_close(got.cpu(), want[mine], rtol=1e-4, atol=1e-5)
                torch.testing.assert_close(part.grad.cpu(), whole.grad[mine], rtol=1e-3, atol=1e-4)
            for name, value in norm.named_buffers(): torch.testing.assert_close(value.cpu(), getattr(alone, name), rtol=1e-4, atol=1e-5)
            for p, q in zip(norm.parameters(), alone.parameters()):
                dist.all_reduce(p.grad); torch.testing.assert_close(p.grad.cpu(), q.grad, rtol=1e-3, atol=1e-4)
        half = nn.SyncBatchNorm(3).cuda()(data[mine].cuda().half()); assert half.dtype == torch.float16
        torch.testing.assert_close(half.float().cpu(), nn.BatchNorm2d(3)(data)[mine], rtol=1e-2, atol=1e-2)
        dist.destroy_process_group()
        """,
    )


def test_many_operations(jobs: Jobs) -> None:
    """Indexing, sorting, reductions, scans, products, linear algebra, transforms, views, and out= arguments."""
    jobs.run(
        1,
        TWICE
        + """
a = lambda: [torch.randn(6, 5)]
b = lambda: [torch.randn(6, 5), torch.randn(6, 5)]
for f in (lambda x: x.sort(1), lambda x: x.topk(3), lambda x: x.cumsum(0), lambda x: x.std(1), lambda x: x.median(),
          lambda x: x[:, ::2].t().contiguous(), lambda x: x.argmax(1), lambda x: x.softmax(1), lambda x: x.logsumexp(0),
          lambda x: x @ x.t(), lambda x: torch.linalg.svdvals(x), lambda x: torch.fft.rfft(x), lambda x: x.to(torch.bfloat16).float(),
          lambda x: torch.where(x > 0, x, 0), lambda x: x.clamp(0, 1), lambda x: x.flip(0).roll(1), lambda x: F.pad(x, (1, 1)), lambda x: x.tril(),
          lambda x: x.expand(2, 6, 5).clone(), lambda x: torch.var_mean(x, 0), lambda x: torch.einsum("ij,kj->ik", x, x), lambda x: x.view(5, 6).permute(1, 0) + 1,
          lambda x: torch.cat([x, x * 2]).chunk(2), lambda x: torch.stack([x, x]).sum((0, 1)), lambda x: x.half() * 2, lambda x: x.int() // 2, lambda x: x.double().exp(),
          lambda x: F.one_hot(x.argmax(1), 5), lambda x: F.cross_entropy(x, x.argmax(1)), lambda x: torch.complex(x, x).conj() * 2, lambda x: x.norm(), lambda x: x.kthvalue(2)):
    twice(a, f)
for f in (lambda x: x.unique(), lambda x: x.nonzero(), lambda x: x[x > 0], lambda x: torch.linalg.inv(x[:5]), lambda x: torch.histc(x), lambda x: x[[1, 2], [0, 3]]):
    twice(a, f, behind=False)                  # a device waits, too: shapes or errors depend on data, or data comes from the host
for f in (lambda x, y: torch.add(x, y, out=torch.empty_like(x)), lambda x, y: torch.add(x, y, out=x.new_empty(0)), lambda x, y: x.index_add_(0, torch.ones(2, dtype=torch.long, device=x.device), y[:2]),
          lambda x, y: x.scatter_add_(1, torch.zeros_like(x, dtype=torch.long), y), lambda x, y: x.masked_fill_(y > 0, 7), lambda x, y: torch.maximum(x, y), lambda x, y: x.copy_(y.t().reshape(6, 5)),
          lambda x, y: torch._foreach_add([x, y], 1), lambda x, y: torch._foreach_mul_([x, y], 2) or [x, y], lambda x, y: x[1:].add_(y[1:]) , lambda x, y: torch.sort(x, out=(y, torch.empty(6, 5, dtype=torch.long, device=x.device)))):
    twice(b, f)
assert torch.equal(torch.arange(5, device="cuda").cpu(), torch.arange(5)) and torch.equal(torch.eye(3, device="cuda").cpu(), torch.eye(3))
assert torch.linspace(0, 1, 5, device="cuda").tolist() == [0, 0.25, 0.5, 0.75, 1] and torch.tensor([1.0], device="cuda").item() == 1
assert repr(torch.ones(2, device="cuda")) == "tensor([1., 1.], device='cuda:0')"
""",
    )


def test_recurrent_layers(jobs: Jobs) -> None:
    """LSTM and GRU, which have fused kernels on devices."""
    jobs.run(
        1,
        TWICE
        + """
for kind in (nn.LSTM, nn.GRU, nn.RNN):
    twice(lambda: [kind(4, 6, 2), torch.randn(5, 3, 4)], lambda m, x: (lambda out: [out, out.pow(2).mean().backward() or [p.grad for p in m.parameters()]])(m(x)[0]), exact=False, behind=False)
""",
    )


def test_random_numbers(jobs: Jobs) -> None:
    """Seeds and states of torch.cuda mean what they do on a device, and the CPU's are not touched."""
    jobs.run(
        1,
        """
        torch.manual_seed(1); cpu = torch.get_rng_state()
        a = torch.randn(5, device="cuda"); d = torch.nn.functional.dropout(torch.ones(100, device="cuda"), 0.5); p = torch.randperm(9, device="cuda")
        assert torch.equal(torch.get_rng_state(), cpu)
        torch.cuda.manual_seed(1); assert torch.equal(a, torch.randn(5, device="cuda")); assert torch.equal(d, torch.nn.functional.dropout(torch.ones(100, device="cuda"), 0.5))
        assert sorted(p.tolist()) == list(range(9)) and set(d.tolist()) == {0.0, 2.0}
        state = torch.cuda.get_rng_state(); b = torch.rand(5, device="cuda"); assert not torch.equal(b, torch.rand(5, device="cuda"))
        torch.cuda.set_rng_state(state); assert torch.equal(b, torch.rand(5, device="cuda"))
        g = torch.Generator("cuda").manual_seed(7); c = torch.rand(5, device="cuda", generator=g); assert torch.equal(c, torch.rand(5, device="cuda", generator=torch.Generator("cuda").manual_seed(7)))
        x = torch.ones(4, requires_grad=True, device="cuda")
        from torch.utils.checkpoint import checkpoint
        checkpoint(lambda y: torch.nn.functional.dropout(y, 0.5), x, use_reentrant=False).sum().backward()
        """,
    )


def test_ddp_and_fsdp(jobs: Jobs) -> None:
    """DDP and FSDP2 train as one process with the whole batch does."""
    jobs.run(
        2,
        """
        import copy
        from torch import nn
        from torch.distributed.fsdp import fully_shard
        from torch.nn.parallel import DistributedDataParallel
        init(); torch.manual_seed(0)
        alone = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 4)); data = torch.randn(8, 6)
        models = {"ddp": DistributedDataParallel(copy.deepcopy(alone).cuda(), device_ids=[rank]), "fsdp": copy.deepcopy(alone).cuda()}
        fully_shard(models["fsdp"][0]); fully_shard(models["fsdp"])
        def train(model, x):
            optimizer = torch.optim.AdamW(model.parameters(), 0.01)
            for _ in range(4): optimizer.zero_grad(); model(x).pow(2).mean().backward(); optimizer.step()
        train(alone, data)
        for name, model in models.items():
            train(model, data[rank * 4: rank * 4 + 4].cuda())
            for got, want in zip(model.parameters(), alone.parameters()):
                got = got.full_tensor() if hasattr(got, "full_tensor") else got
                torch.testing.assert_close(got.detach().cpu(), want.detach(), rtol=1e-3, atol=1e-4)
        dist.destroy_process_group()
        """,
    )
