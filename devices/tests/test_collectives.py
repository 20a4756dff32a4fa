"""NCCL's collectives by torch's ProcessGroupNCCL: numbers, types, reductions, sizes, groups."""

from __future__ import annotations

import pytest

from simulated_devices.testing import Jobs


@pytest.mark.parametrize("size", [2, 3])
def test_every_collective(jobs: Jobs, size: int) -> None:
    """Each collective of torch.distributed gives the numbers that its documentation defines."""
    jobs.run(
        size,
        """
        init()
        n, total = world, sum(range(world))
        x = cuda([float(rank), 1.0]); dist.all_reduce(x); same(x, [total, n])
        x = cuda([float(rank)]); dist.broadcast(x, 1); same(x, [1])
        x = cuda([float(rank)]); dist.reduce(x, 1); same(x, [total if rank == 1 else rank])
        out = cuda([0.0] * 2 * n); dist.all_gather_into_tensor(out, cuda([float(rank), 9.0])); same(out, [v for r in range(n) for v in (r, 9)])
        outs = [cuda([0.0]) for _ in range(n)]; dist.all_gather(outs, cuda([float(rank)])); same(torch.cat(outs), list(range(n)))
        out = cuda([0.0]); dist.reduce_scatter_tensor(out, cuda([float(r) for r in range(n)])); same(out, [rank * n])
        out = cuda([0.0]); dist.reduce_scatter(out, [cuda([float(r)]) for r in range(n)]); same(out, [rank * n])
        out = cuda([0.0] * n); dist.all_to_all_single(out, cuda([float(10 * rank + r) for r in range(n)])); same(out, [10 * r + rank for r in range(n)])
        outs = [cuda([0.0]) for _ in range(n)]
        dist.all_to_all(outs, [cuda([float(10 * rank + r)]) for r in range(n)]); same(torch.cat(outs), [10 * r + rank for r in range(n)])
        outs = [cuda([0.0]) for _ in range(n)] if rank == 0 else None
        dist.gather(cuda([float(rank)]), outs, 0)
        if rank == 0: same(torch.cat(outs), list(range(n)))
        out = cuda([0.0]); dist.scatter(out, [cuda([float(r)]) for r in range(n)] if rank == 0 else None, 0); same(out, [rank])
        dist.barrier()
        objects = [None] * n; dist.all_gather_object(objects, {"rank": rank}); assert [o["rank"] for o in objects] == list(range(n))
        dist.destroy_process_group()
        """,
    )


def test_types_and_reductions(jobs: Jobs) -> None:
    """All data types and reductions give what the CPU computes from the same values."""
    jobs.run(
        3,
        """
        init()
        types = [torch.int8, torch.uint8, torch.int32, torch.int64, torch.float16, torch.bfloat16, torch.float32, torch.float64]
        small = [torch.float8_e4m3fn, torch.float8_e5m2]
        values = [[1, 2, 3, 0], [4, 5, 1, 2], [2, 1, 6, 1]]
        of = lambda dtype: [torch.tensor(v, dtype=torch.float32).to(dtype) for v in values]
        results = {"SUM": [7, 8, 10, 3], "PRODUCT": [8, 10, 18, 0], "MIN": [1, 1, 1, 0], "MAX": [4, 5, 6, 2]}
        for dtype in types + small:
            for name, want in results.items():
                x = of(dtype)[rank].cuda()
                dist.all_reduce(x, op=getattr(dist.ReduceOp, name))
                got = x.cpu().to(torch.float32)
                expected = torch.tensor(want, dtype=torch.float32).to(dtype).to(torch.float32)
                assert torch.equal(got, expected), (dtype, name, got, expected)
        for dtype in types:
            x = of(dtype)[rank].cuda(); dist.all_reduce(x, op=dist.ReduceOp.AVG)
            exact = torch.stack(of(torch.float64)).mean(0)
            want = exact.to(dtype) if dtype.is_floating_point else exact.floor().to(dtype)
            assert torch.allclose(x.cpu().double(), want.double(), rtol=1e-2), (dtype, x, want)
        for factor in (2.0, torch.tensor([2.0], device="cuda")):
            x = cuda([1.0 * rank, 1.0]); dist.all_reduce(x, op=dist._make_nccl_premul_sum(factor)); same(x, [6, 6])
        x = torch.tensor([rank + 1j], dtype=torch.complex64, device="cuda"); dist.all_reduce(x); same(x, [3 + 3j])
        x = torch.tensor([rank == 0, False], device="cuda"); dist.all_reduce(x, op=dist.ReduceOp.MAX); same(x, [True, False])
        """,
    )


def test_rounding_of_small_floats(jobs: Jobs) -> None:
    """Sums are rounded to the nearest even number, overflow and NaN are kept, as torch's casts do it."""
    jobs.run(
        2,
        """
        init()
        for dtype in (torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2):
            bits = 16 if dtype.itemsize == 2 else 8
            codes = torch.arange(2 ** bits, dtype=torch.int32)
            mine = codes.to(torch.int16 if bits == 16 else torch.uint8).view(dtype)
            other = mine.roll(37)
            x = (mine if rank == 0 else other).cuda()
            dist.all_reduce(x)
            want = (mine.float() + other.float()).to(dtype).float()
            got = x.cpu().float()
            if dtype == torch.float8_e4m3fn:
                finite = (mine.float() + other.float()).abs() <= 448
                got, want = got[finite], want[finite]
            assert torch.equal(torch.nan_to_num(got, nan=1234.0), torch.nan_to_num(want, nan=1234.0)), dtype
        """,
    )


def test_large_and_odd_sizes(jobs: Jobs) -> None:
    """Sizes that are no multiple of anything, and ones of many chunks, in place and not."""
    jobs.run(
        3,
        """
        init()
        for size in (1, 7, 1000, 8193, 32769, 131073, 1_000_003):
            base = torch.arange(size, dtype=torch.int64)
            x = (base + rank).cuda(); dist.all_reduce(x); same(x, base * 3 + 3)
            out = torch.empty(size, dtype=torch.int64, device="cuda")
            dist.reduce_scatter_tensor(out, torch.cat([base + 10 * r + rank for r in range(3)]).cuda()); same(out, base * 3 + 30 * rank + 3)
            outs = torch.empty(3 * size, dtype=torch.int64, device="cuda")
            dist.all_gather_into_tensor(outs, (base + rank).cuda()); same(outs, torch.cat([base + r for r in range(3)]))
            x = (base + rank).cuda(); dist.broadcast(x, 2); same(x, base + 2)
            x = (base + rank).cuda(); dist.reduce(x, 0)
            if rank == 0: same(x, base * 3 + 3)
        """,
    )


def test_messages(jobs: Jobs) -> None:
    """send, recv, batches, messages to all, and messages larger than what is buffered."""
    jobs.run(
        3,
        """
        init()
        left, right = (rank - 1) % world, (rank + 1) % world
        for size in (1, 100_000, 1_000_001):
            out = torch.full((size,), float(rank), device="cuda"); into = torch.zeros(size, device="cuda")
            works = dist.batch_isend_irecv([dist.P2POp(dist.isend, out, right), dist.P2POp(dist.irecv, into, left)])
            for work in works: work.wait()
            assert (into.cpu() == left).all()
        if rank == 0:
            for step in range(5): dist.send(cuda([float(step)]), 1)
        if rank == 1:
            for step in range(5):
                x = cuda([-1.0]); dist.recv(x, 0); same(x, [step])
        splits = [[1, 2, 3], [3, 1, 2], [0, 4, 1]]
        into = torch.zeros(sum(row[rank] for row in splits), device="cuda")
        dist.all_to_all_single(into, torch.full((sum(splits[rank]),), float(rank), device="cuda"), [row[rank] for row in splits], splits[rank])
        same(into, [r for r in range(3) for _ in range(splits[r][rank])])
        """,
    )


def test_small_send_needs_no_recv(jobs: Jobs) -> None:
    """NCCL buffers small messages: a send completes on the device before its receive is even issued."""
    jobs.run(
        2,
        """
        init()
        store = dist.distributed_c10d._get_default_store()
        x = torch.zeros(1000, device="cuda")
        if rank == 0:
            dist.send(x + 5, 1)
            torch.cuda.synchronize()
            store.set("sent", "yes")
        else:
            # The two-rank communicator is made at the first message, so rank 1 must make it, too.
            dist.recv(x, 0) if False else None
            threading.Thread(target=lambda: None).start()
        if rank == 1:
            warm = dist.irecv(x, 0)
            store.wait(["sent"])
            warm.wait(); same(x[:1], [5])
        # Now it exists, and the second receive comes only after the send has ended.
        if rank == 0:
            dist.send(x + 6, 1); torch.cuda.synchronize(); store.set("sent again", "yes")
        else:
            store.wait(["sent again"]); dist.recv(x, 0); same(x[:1], [6])
        """,
    )


def test_ranks_need_not_leave_together(jobs: Jobs) -> None:
    """The root of a broadcast and the givers of a reduce do not wait for the others."""
    jobs.run(
        2,
        """
        init()
        store = dist.distributed_c10d._get_default_store()
        x = torch.ones(1000, device="cuda"); dist.all_reduce(x); torch.cuda.synchronize()
        if rank == 0:
            dist.broadcast(x, 0); torch.cuda.synchronize(); store.set("root has left", "yes")
        else:
            store.wait(["root has left"]); dist.broadcast(x, 0); torch.cuda.synchronize()
        if rank == 1:
            dist.reduce(x, 0); torch.cuda.synchronize(); store.set("giver has left", "yes")
        else:
            store.wait(["giver has left"]); dist.reduce(x, 0); torch.cuda.synchronize()
        """,
    )


def test_no_operation_takes_no_time(jobs: Jobs) -> None:
    """Between an event before a small operation and one after it lie two microseconds at least.

    A root's part of a broadcast is over as soon as its bytes are in the ring, here in less than one.
    """
    jobs.run(
        2,
        """
        init()
        x = torch.ones(2, device="cuda"); dist.broadcast(x, 0)
        pairs = [[torch.cuda.Event(enable_timing=True) for _ in range(2)] for _ in range(200)]
        for before, after in pairs:
            before.record(); dist.broadcast(x, 0); after.record()
        torch.cuda.synchronize()
        shortest = min(before.elapsed_time(after) for before, after in pairs)
        assert shortest >= 0.002, shortest
        """,
    )


def test_groups_and_coalescing(jobs: Jobs) -> None:
    """Subgroups, groups of one, and several collectives in one NCCL group."""
    jobs.run(
        3,
        """
        init()
        pair = dist.new_group([0, 2]); alone = dist.new_group([rank], use_local_synchronization=True)
        if rank != 1:
            x = cuda([float(rank)]); dist.all_reduce(x, group=pair); same(x, [2])
        x = cuda([float(rank)]); dist.all_reduce(x, group=alone); same(x, [rank])
        a, b = cuda([1.0]), cuda([2.0])
        with dist._coalescing_manager(device=torch.device("cuda", rank), async_ops=True) as manager:
            dist.all_reduce(a); dist.all_reduce(b)
        manager.wait(); same(a, [3]); same(b, [6])
        ins = [cuda([float(rank + i)]) for i in range(4)]; outs = [torch.zeros(3, device="cuda") for _ in range(4)]
        with dist._coalescing_manager(device=torch.device("cuda", rank), async_ops=True) as manager:
            for i, o in zip(ins, outs): dist.all_gather_into_tensor(o, i)
        manager.wait()
        for i, o in enumerate(outs): same(o, [i, i + 1, i + 2])
        """,
    )


def test_split_from_a_bound_device(jobs: Jobs) -> None:
    """With device_id, the communicator is made at once and new groups are split from it."""
    jobs.run(
        4,
        """
        torch.cuda.set_device(rank)
        init(device_id=torch.device("cuda", rank))
        halves = [dist.new_group([0, 1]), dist.new_group([3, 2])]
        mine = halves[rank // 2]
        x = cuda([float(rank)]); dist.all_reduce(x, group=mine); same(x, [1 if rank < 2 else 5])
        options = dist.ProcessGroupNCCL.Options()
        sub = dist.split_group(split_ranks=[[0, 2], [1, 3]])
        x = cuda([float(rank)]); dist.all_reduce(x, group=sub); same(x, [2 if rank % 2 == 0 else 4])
        dist.destroy_process_group()
        """,
    )
