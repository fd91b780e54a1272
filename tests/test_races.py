"""The race detector of the emulated accelerator: it finds planted mistakes, names both sides, and is silent of their twins.

Each program is one of tensors, streams and collectives, with `right` and without: what orders two uses is in it, or not.
"""

from __future__ import annotations

import math
import re

import pytest
import torch
import torch.distributed as dist

import emulated
import ranks
import verbs
from zeroshard.tiers.tier import pages

N = 64


def numbers():
    return torch.arange(float(N), device="emu")


def side():
    return torch.emu.Stream("side"), torch.emu.current_stream()


def read_before_the_write(right):
    """A result of another stream is used without waiting for it."""
    stream, main = side()
    x = numbers()
    stream.wait_stream(main)
    with torch.emu.stream(stream):
        y = x.mul(2)
    if right:
        main.wait_stream(stream)
    found = y.add(1).sum()
    if right:
        y.record_stream(main)
    return found


def write_while_another_reads(right):
    """What another stream still reads is written to."""
    stream, main = side()
    x, y = numbers(), torch.empty(N, device="emu")
    stream.wait_stream(main)
    with torch.emu.stream(stream):
        torch.mul(x, 2, out=y)
    if right:
        main.wait_stream(stream)
    x.fill_(7)
    main.wait_stream(stream)
    return y.sum()


def two_writers(right):
    """Two streams write the same bytes."""
    stream, main = side()
    x = numbers()
    if right:
        stream.wait_stream(main)
    with torch.emu.stream(stream):
        x[: N // 2].fill_(1)
    if right:
        x[N // 2 :].fill_(2)  # the bytes beside them
        main.wait_stream(stream)
    else:
        x[N // 4 :].fill_(2)
        main.wait_stream(stream)
    return x.sum()


def event_recorded_too_early(right):
    """The event that is waited for was recorded before the kernel that it is to cover."""
    stream, main = side()
    x, y = numbers(), torch.empty(N, device="emu")
    event = torch.emu.Event()
    stream.wait_stream(main)
    with torch.emu.stream(stream):
        if not right:
            event.record()
        torch.mul(x, 2, out=y)
        if right:
            event.record()
    event.wait()
    return y.add(1).sum()


def wait_on_the_wrong_stream(right):
    """A stream waits, and another one uses what it waited for."""
    stream, main = side()
    other = torch.emu.Stream("other")
    x, y = numbers(), torch.empty(N, device="emu")
    stream.wait_stream(main)
    with torch.emu.stream(stream):
        torch.mul(x, 2, out=y)
    other.wait_stream(stream)
    if right:
        main.wait_stream(other)  # what one has waited for is passed on
    return y.add(1).sum()


def number_asked_of_another_stream(right):
    """The host asks, by its own stream, for a number that another one writes."""
    stream, main = side()
    x = numbers()
    stream.wait_stream(main)
    with torch.emu.stream(stream):
        x.fill_(3)
    if right:
        stream.synchronize()
    return x[5].item()


def freed_while_in_use(right):
    """The last reference goes, in the stream that the memory is from, while another stream reads it."""
    stream, main = side()
    x, y = numbers(), torch.empty(N, device="emu")
    stream.wait_stream(main)
    with torch.emu.stream(stream):
        torch.mul(x, 2, out=y)
    if right:
        x.record_stream(stream)
    del x
    numbers().add_(1)  # which may lie there
    main.wait_stream(stream)
    return y.sum()


def used_after_its_end(right):
    """A view that owns nothing outlives the memory that it looks at."""
    x = numbers()
    storage = x.untyped_storage()
    alias = torch._C._construct_storage_from_data_pointer(storage.data_ptr(), x.device, storage.nbytes())
    view = torch.empty(0, device="emu").set_(alias, 0, (N,), (1,))
    kept = x if right else None
    del x, storage
    found = view.sum()
    del kept
    return found


def memory_of_another_stream(right):
    """Memory is taken from one stream and first used in another: its last tenant may still be in use."""
    stream, main = side()
    numbers().add_(1)
    x = torch.empty(N, device="emu")
    if right:
        stream.wait_stream(main)
    with torch.emu.stream(stream):
        x.fill_(1)
    main.wait_stream(stream)
    return x.sum()


def gathered_before_its_wait(right):
    """A gather's result is read before the wait for it."""
    own, whole = numbers() + ranks.rank(), torch.empty(2 * N, device="emu")
    work = verbs.all_gather_single(whole, own, async_op=True)
    if right:
        work.wait()
    found = whole.sum()
    work.wait()
    return found


def message_written_while_it_is_sent(right):
    """A message's memory is written to for the next one, before it is sent."""
    send, receive = numbers(), torch.empty(N, device="emu")
    work = dist.all_to_all_single(receive, send, async_op=True)
    if right:
        work.wait()
    send.fill_(0)
    work.wait()
    return receive.sum()


def waited_for_in_another_stream(right):
    """The wait for a collective is a wait of the stream that was current then, and no other's."""
    stream, main = side()
    x = numbers()
    work = dist.all_reduce(x, async_op=True)
    with torch.emu.stream(stream):
        work.wait()
    if right:
        main.wait_stream(stream)
    return x.add(1).sum()


def neighbours_in_one_buffer(right):
    """Two communicators write into one buffer, and one writes a few bytes too far."""
    other = dist.new_group(backend="emuccl")
    flat = torch.zeros(2 * N, device="emu")
    first = dist.broadcast(flat[: N if right else N + 1], 0, async_op=True)
    second = dist.broadcast(flat[N:], 1, group=other, async_op=True)
    first.wait()
    second.wait()
    return flat.sum()


def a_stream_of_the_wrong_device(right):
    """A side stream waits for what another device's current stream was given, which is nothing."""
    x, stream = numbers(), torch.emu.Stream("side", device=0)
    with torch.emu.device(0 if right else 1):
        stream.wait_stream(torch.emu.current_stream())
    with torch.emu.stream(stream):
        y = x.mul(2)
    torch.emu.current_stream().wait_stream(stream)
    found = y.sum()
    y.record_stream(torch.emu.current_stream())
    return found


def pinned():
    return pages(4 * N, torch.device("emu"))[: 4 * N].view(torch.float32)


def host_reads_too_early(right):
    """The host reads pinned memory that a copy from the device has yet to fill."""
    x, memory = numbers(), pinned()
    memory.copy_(x, non_blocking=True)
    if right:
        torch.emu.current_stream().synchronize()
    found = memory.sum()
    torch.emu.synchronize()
    return found


def host_writes_too_early(right):
    """The host changes pinned memory that a copy to the device has yet to read."""
    x, memory = torch.empty(N, device="emu"), pinned()
    x.copy_(memory.fill_(1), non_blocking=True)
    found = memory.sum()  # reading is allowed
    if right:
        torch.emu.current_stream().synchronize()
    memory.fill_(1)  # also if no number changes
    torch.emu.synchronize()
    return found + x.sum()


def host_waits_for_the_copy_before(right):
    """The host waits for a copy into pinned memory, and not for the one after it."""
    x, memory, event = numbers(), pinned(), torch.emu.Event()
    memory.copy_(x, non_blocking=True)
    if not right:
        event.record()
    memory.copy_(x.add(1), non_blocking=True)
    if right:
        event.record()
    event.synchronize()
    found = memory.sum()
    torch.emu.synchronize()
    return found


def copied_on_before_it_has_come(right):
    """One stream copies to pinned memory, and another one from there, without a wait between them."""
    stream, main = side()
    x, y, memory = numbers(), torch.empty(N, device="emu"), pinned()
    memory.copy_(x, non_blocking=True)
    stream.wait_stream(main) if right else stream.wait_event(torch.emu.Event())
    with torch.emu.stream(stream):
        y.copy_(memory, non_blocking=True)
    main.wait_stream(stream)
    found = y.sum()
    torch.emu.synchronize()
    return found


ALONE = {
    host_reads_too_early: ("the host touches pinned memory that a copy writes", "the copy, launched at"),
    host_writes_too_early: ("the host touches pinned memory that a copy reads", "touched at"),
    host_waits_for_the_copy_before: ("the host touches pinned memory that a copy writes", "instead: let the host"),
    copied_on_before_it_has_come: ("copy in stream 'side' reads", "copy in stream 'default' writes"),
    a_stream_of_the_wrong_device: ("mul in stream 'side' reads", "arange in stream 'default' writes"),
    read_before_the_write: ("add in stream 'default' reads", "mul in stream 'side' writes"),
    write_while_another_reads: ("fill_ in stream 'default' writes", "mul in stream 'side' reads"),
    two_writers: ("fill_ in stream 'side' writes", "arange in stream 'default' writes"),
    event_recorded_too_early: ("add in stream 'default' reads", "mul in stream 'side' writes"),
    wait_on_the_wrong_stream: ("add in stream 'default' reads", "mul in stream 'side' writes"),
    number_asked_of_another_stream: ("item in stream 'default' reads", "fill_ in stream 'side' writes"),
    freed_while_in_use: ("memory is freed while stream 'side' uses it: mul", "freed, in stream 'default'"),
    used_after_its_end: ("use after free: a tensor of (64,) elements", "lies in memory that was freed at"),
    memory_of_another_stream: ("fill_ in stream 'side' writes", "the allocation in stream 'default' uses"),
}
TOGETHER = {
    gathered_before_its_wait: ("sum in stream 'default' reads", "all_gather_single in stream 'emuccl 0' writes"),
    message_written_while_it_is_sent: (
        "fill_ in stream 'default' writes",
        "all_to_all_single in stream 'emuccl 0' reads",
    ),
    waited_for_in_another_stream: ("add in stream 'default' reads", "allreduce in stream 'emuccl 0' writes"),
    neighbours_in_one_buffer: ("bytes 256 to 260 of a block of 512", "what broadcast in stream 'emuccl 0' "),
}


def planted(programs):
    """What each says of the mistake. Its twin says nothing, and answers the same in whatever order kernels run."""
    from emulated.device import device
    from emulated.streams import Order

    found = []
    torch.emu.set_device(0)
    for program in programs:
        answers = set()
        for seed in range(6):
            torch.emu.synchronize()
            device().machine.order = Order(seed)
            answers.add(float(program(True)))
        torch.emu.synchronize()
        assert len(answers) == 1 and all(map(math.isfinite, answers)), program.__name__
        found.append("")
    for at, program in enumerate(programs):
        try:
            program(False)
            device().settle()
        except RuntimeError as error:
            found[at] = f"{type(error).__name__}: {error}"
            torch.emu.synchronize()  # while its tensors live: their ends are no second mistake
    return found


@pytest.mark.parametrize(("world", "programs"), [(1, ALONE), (2, TOGETHER)], ids=["streams", "collectives"])
def test_planted_mistakes_are_named_with_both_sides_and_their_twins_are_not(world, programs):
    for told in emulated.run(world, planted, [*programs], elsewhere=world == 1):
        for (program, sides), message in zip(programs.items(), told, strict=True):
            assert all(each in message for each in sides), f"{program.__name__}: {message!r}"
            lines = {int(line) for line in re.findall(rf"test_races\.py:(\d+) {program.__name__}", message)}
            assert len(lines) >= 2, f"{program.__name__}: {message}"  # one for each side
