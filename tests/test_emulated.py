"""The emulated accelerator itself, and the engine on it: the bits of plain PyTorch in whatever order kernels run."""

from __future__ import annotations

import threading
import time
from itertools import product

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

import emulated
import models
import norms
import reference
import zeroshard
from zeroshard import Layout, Precision

STAGES = (0, 1, 2, 3)
GPT = {"hidden": 12, "layers": 2}
DTYPES = {"fp32": None, "bf16": torch.bfloat16}


def optimizer(params):
    return torch.optim.AdamW(params, lr=1e-2, fused=True)


def on(device):
    """Micro-batches of the model on a device."""

    def batches(step, index):
        return tuple(each.to(device) for each in models.batch("gpt", step, index))

    return batches


def loss(model, batch):
    return models.loss("gpt", model, batch)


def plain(device, dtype, world=1):
    """Losses, norms and weights of plain PyTorch."""
    model = models.build("gpt", **GPT).to(device)
    settings = {"world": world, "steps": 2, "backwards": 2, "clip": 0.5}
    if dtype is None:
        history = reference.accumulate(model, optimizer(model.parameters()), on(device), loss, norm=norm, **settings)
    else:
        history, _ = reference.accumulate_with_masters(
            model, optimizer, on(device), loss, dtype=dtype, norm=norm, **settings
        )
    return history, reference.weights(model)


def norm(gradients, order):
    return norms.total([each.cpu() for each in gradients], order).to(gradients[0].device)


def sharded(device, dtype, stage, recompute, rank=0, world=1):
    model = models.build("gpt", **GPT).to(device)
    adam = optimizer(model.parameters())
    zero = zeroshard.shard(
        model,
        adam,
        stage=stage,
        precision=Precision(param_dtype=dtype),
        layout=Layout(bucket_mib=0.01, recompute=recompute),
    )
    history = reference.loop(model, adam, on(device), loss, rank, world, 2, steps=2, clip=0.5)
    with zero.gathered():
        return history, reference.weights(model)


def assert_same(got, want):
    """Losses, norms and weights."""
    assert got[0].losses == want[0].losses
    assert [each.item() for each in got[0].norms] == [each.item() for each in want[0].norms]
    reference.assert_same(got[1], want[1])


def redrawn(seed):
    """From now on kernels run in another order."""
    from emulated.device import device
    from emulated.streams import Order

    device().synchronize()
    device().machine.order = Order(seed)


def equal_on_one_rank(dtype, seeds, every):
    """Each training in an order of its own; every: all stages with recomputation and without."""
    with sdpa_kernel(SDPBackend.MATH):  # as every device without a fused attention of its own takes
        want = plain("cpu", DTYPES[dtype])
    for seed in seeds:
        redrawn(seed)
        assert_same(plain("emu", DTYPES[dtype]), want)
        for stage, recompute in product(STAGES, (False, True)):
            if every or recompute == (stage % 2 == seed % 2):
                redrawn(8 * seed + 2 * stage + recompute)
                assert_same(sharded("emu", DTYPES[dtype], stage, recompute), want)


ORDERS = [
    pytest.param(range(1), False, id="an-order"),
    pytest.param(range(1, 8), True, id="7-orders", marks=pytest.mark.full),
    pytest.param(range(8, 40), True, id="32-orders", marks=pytest.mark.slow),
]


@pytest.mark.heavy
@pytest.mark.parametrize(("seeds", "every"), ORDERS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_every_stage_on_late_kernels_has_the_bits_of_plain_torch(dtype, seeds, every):
    """On one rank: kernels run late, in drawn orders, and memory that was freed is poisoned. Also with recomputation."""
    emulated.run(1, equal_on_one_rank, dtype, seeds, every, timeout=280)


def late():
    """What the host does while nothing has run."""
    from emulated.device import device

    queue = device().machine.default
    with emulated.counted() as counts:
        x = torch.arange(6.0, device="emu")
        y = (x * 2).view(2, 3).sum(0)
        assert (queue.through, queue.issued) == (0, 4)  # the last: what was doubled is freed
        assert y.tolist() == [6.0, 10.0, 14.0]
    assert [name for _, name in counts.launches] == ["arange", "mul", "sum", "copy"]
    assert dict(counts.drains) == {("test_emulated.py:late", "copy to the host"): 1}
    assert counts.by_site(counts.allocations) == {"test_emulated.py:late": 3}
    return str(counts)


def test_kernels_are_late_and_counted_by_the_line_that_asks():
    (told,) = emulated.run(1, late)
    assert "launches 4\n             4  test_emulated.py:late" in told


def after_a_wait():
    """How many kernels have run, of those that somebody waited for, and of all, long after the wait."""
    from emulated.device import device

    x = torch.ones(4, device="emu")
    waited = torch.emu.Event()
    waited.record()
    for _ in range(40):
        x = x + 1
    waited.synchronize()
    time.sleep(0.1)
    queue = device().machine.default
    return queue.through, queue.issued


def test_what_nobody_waits_for_has_not_run_after_a_wait():
    """Else a wait that is missing behind another one would be found by nothing."""
    ((through, issued),) = emulated.run(1, after_a_wait)
    assert through == 1 and issued > 40


def finalised_in_a_kernel():
    """Python may run a finaliser in any thread, that of the device among them: what it launches there waits for nobody."""
    from emulated.device import device
    from emulated.streams import Item, Order

    machine = device().machine
    machine.order = Order(0)
    machine.order.early = 1.0  # each launch of the host waits until an item has run
    side, ran = torch.emu.Stream("side"), []
    for _ in range(20):
        machine.launch(side.queue, Item("finalises", lambda: torch.emu.current_stream().wait_stream(side)))
        machine.launch(side.queue, Item("after it", lambda: ran.append(True)))
    torch.emu.synchronize()
    return len(ran)


def test_what_a_finaliser_launches_on_the_devices_thread_waits_for_nobody():
    assert emulated.run(1, finalised_in_a_kernel) == [20]


def poisoned():
    from emulated.device import device

    x = torch.ones(4, device="emu")
    memory = device().memory.place(x).block.memory
    assert memory.view(torch.float32).isnan().all()  # new, and not yet filled
    torch.emu.synchronize()
    assert memory.view(torch.float32).tolist() == [1.0] * 4
    y = x + 1
    del x
    assert memory.view(torch.float32).tolist() == [1.0] * 4  # for the sum, which is late
    assert y.tolist() == [2.0] * 4
    torch.emu.synchronize()
    return memory.view(torch.float32).isnan().all().item()


def test_memory_is_poisoned_when_it_is_new_and_once_its_stream_has_freed_it():
    assert emulated.run(1, poisoned) == [True]


def strangers():
    x = torch.ones(4, device="emu")
    with pytest.raises(RuntimeError, match=r"expected all tensors to be on the same device, .*: the argument 'other'"):
        x + torch.ones(4)
    with pytest.raises(TypeError, match="can't convert emu:0 device type tensor to numpy"):
        x.numpy()
    assert (x + torch.tensor(2.0)).tolist() == [3.0] * 4  # a number in a tensor
    drawn = torch.rand(4, device="emu")
    torch.emu.set_rng_state(torch.emu.get_rng_state())
    state = torch.emu.get_rng_state()
    first = torch.nn.functional.dropout(drawn, 0.5)
    torch.emu.set_rng_state(state)
    assert torch.equal(torch.nn.functional.dropout(drawn, 0.5), first)
    assert x[drawn >= 0].tolist() == [1.0] * 4


def test_programs_meet_the_rules_of_a_device():
    emulated.run(1, strangers)


def raised_in_backward():
    """By a hook, a function and a leaf's hook, on the thread of autograd's for the device."""

    class Raises(torch.autograd.Function):
        @staticmethod
        def forward(context, x):
            return x * 1

        @staticmethod
        def backward(context, gradient):
            raise KeyError("a function")

    def fail(what):
        def hook(_):
            raise KeyError(what)

        return hook

    found = []
    for at in range(3):
        x = torch.ones(3, device="emu", requires_grad=True)
        y = Raises.apply(x) if at == 1 else x * 2
        if at == 0:
            y.register_hook(fail("a hook"))
        if at == 2:
            x.register_post_accumulate_grad_hook(fail("a leaf's hook"))
        with pytest.raises(KeyError) as caught:
            y.sum().backward()
        found.append(caught.value.args[0])
    return found


def test_what_hooks_raise_in_backward_comes_to_the_program():
    assert emulated.run(1, raised_in_backward) == [["a hook", "a function", "a leaf's hook"]]


def test_devices_that_send_each_other_more_than_a_socket_holds_both_go_on(tmp_path):
    """Each holds its lock as it sends, and takes under its lock what has come: a socket holds some ten datagrams."""
    from emulated.streams import Machine, Order
    from emulated.wire import Wire

    many, came = 2000, [threading.Semaphore(0), threading.Semaphore(0)]
    ends = [Wire(Machine(Order(0), 8), str(tmp_path)) for _ in came]

    def take(end, its):
        def taken(_: bytes) -> None:
            with end.machine.lock:
                its.release()

        return taken

    def send(end, to):
        for _ in range(many // 100):
            with end.machine.lock:
                for _ in range(100):
                    end.send(to.address, "part", payload=b"1")

    for end, its in zip(ends, came, strict=True):
        end.taken["part"] = take(end, its)
    senders = [threading.Thread(target=send, args=pair, daemon=True) for pair in (ends, ends[::-1])]
    for sender in senders:
        sender.start()
    for its in came:
        assert all(its.acquire(timeout=30) for _ in range(many))
