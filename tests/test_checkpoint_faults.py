"""What disks and machines do to a save: no checkpoint is lost, none is half there, and the next save tidies up.

Single-rank jobs need no process group, so a warm worker forks a job that is to die from an engine it has built.
"""

import contextlib
import errno
import functools
import io
import itertools
import os
import random
import resource
import shutil
import signal
import subprocess
import sys
import threading
import time
import traceback

import pytest
import torch
import xxhash

import zeroshard
from test_checkpoint import build, step
from zeroshard.arithmetic.digests import raw
from zeroshard.checkpoint import files
from zeroshard.checkpoint import staging as workplace
from zeroshard.checkpoint.content import model_state, options, persistent, pieces, values
from zeroshard.comm import agreement
from zeroshard.errors import CheckpointError, PeerError
from zeroshard.integrations.export import Weights
from zeroshard.rng import rng_states


def bits(zero):
    """A digest of all that a load may change on this rank."""
    engine = model_state(zero._engine)
    told = [
        list(values(engine)),
        [options(engine, binding) for binding in engine.bindings],
        rng_states(zero._engine.group.device),
        zero.seed,
    ]
    found = xxhash.xxh3_128(repr(told).encode())
    held = [(repr((*piece[:4], piece.grain)), piece.tensor) for piece in pieces(engine)]
    held += [(repr(name), tensor) for name, tensor in persistent(engine.model)]
    for place, tensor in sorted(held, key=lambda each: each[0]):
        found.update(repr((place, tensor.dtype, tensor.shape)).encode())
        found.update(raw(tensor.detach().contiguous()))
    return found.hexdigest()


def after_steps(steps, **options):
    model, optimizer, zero = build("mlp", 3, **options)
    for number in range(steps):
        step("mlp", model, optimizer, number, total=zero.world_size)
    return model, optimizer, zero


def names(folder):
    return sorted(path.name for path in folder.iterdir())


# ----------------------------------------------------------------------------------------------------- killed anywhere

NOT_FILES = {"fspath", "getpid", "get_inheritable", "cpu_count", "urandom"}


def at_call(number, act, events=("c_call", "c_return")):
    """Do `act` at the number-th call into the system from now: just before and just after every one of them counts."""
    seen = itertools.count()

    def profile(frame, event, arg):
        if event not in events or arg.__name__ in NOT_FILES:
            return
        system = "_io" in (arg.__module__, type(arg.__self__).__module__) or arg.__module__ == "posix"
        if system and next(seen) == number:
            act()

    sys.setprofile(profile)


def die(how=signal.SIGKILL):
    os.kill(os.getpid(), how)


def forked(act):
    """How a copy of this process ended that did `act`: its exit code, or minus the signal."""
    state = random.getstate()  # Python seeds anew in a child
    child = os.fork()
    if not child:
        try:
            random.setstate(state)
            agreement.refuse_forked = lambda process, rank: None  # the copy of an only rank stands in for it
            act()
            os._exit(0)
        except BaseException:
            sys.setprofile(None)
            traceback.print_exc()
            os._exit(1)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def dies_everywhere(folder, over, stride, how=signal.SIGKILL):
    _, _, before = after_steps(1)
    _, _, now = after_steps(2)
    _, _, reader = after_steps(0)
    found = {}
    before.save(folder / "old" / "a", extra={"which": "before"})
    now.save(folder / "new" / "a", extra={"which": "now"})
    for path, which in ((folder / "old" / "a", "before"), (folder / "new" / "a", "now")):
        reader.load(path)
        found[which] = bits(reader)
    assert found["before"] != found["now"]
    seen = {"before": 0, "now": 0, None: 0}
    for number in itertools.count(0, stride):
        parent = folder / f"{number}"
        if over:
            shutil.copytree(folder / "old", parent)
        else:
            parent.mkdir()

        def save(number=number, parent=parent):
            at_call(number, functools.partial(die, how))
            now.save(parent / "a", extra={"which": "now"})
            sys.setprofile(None)

        code = forked(save)
        if (parent / "a").exists():
            which = reader.load(parent / "a").extra["which"]
            assert bits(reader) == found[which], number
        else:
            which = None
        seen[which] += 1
        assert which == "now" or over == (which == "before"), number
        if code == 0:
            assert which == "now" and names(parent) == ["a"]
            return seen, sum(seen.values()) - 1
        assert code == -how, code
        left = set(names(parent)) - {"a"}
        assert len(left) <= (how == signal.SIGKILL), left
        now.save(parent / "b")  # another name: what a dead save has left goes all the same
        assert names(parent) == (["a", "b"] if which else ["b"]), number
        reader.load(parent / "b")
        now.save(parent / "a", extra={"which": "now"})
        assert reader.load(parent / "a").extra == {"which": "now"} and bits(reader) == found["now"]
        shutil.rmtree(parent)
    raise AssertionError("unreachable")


def killed_everywhere(ranks, folder, over, stride, how=signal.SIGKILL):
    ((seen, killed),) = ranks.run(1, dies_everywhere, folder, over, stride, how, group=False, timeout=600)
    assert seen["now"] >= 1 and seen["before" if over else None] >= 1
    return killed


@pytest.mark.row(37)
@pytest.mark.parametrize("over", [False, True], ids=["fresh", "over"])
def test_a_save_killed_anywhere_leaves_the_one_before(ranks, tmp_path, over):
    assert killed_everywhere(ranks, tmp_path, over, 5) >= 9


@pytest.mark.row(37)
@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("over", [False, True], ids=["fresh", "over"])
def test_a_save_killed_at_every_call_leaves_the_one_before(ranks, tmp_path, over):
    killed = killed_everywhere(ranks, tmp_path, over, 1)
    print(f"killed at {killed} places")
    assert killed >= 50


@pytest.mark.row(60)
@pytest.mark.parametrize("how", [signal.SIGTERM, signal.SIGHUP], ids=lambda how: how.name)
@pytest.mark.parametrize("over", [False, True], ids=["fresh", "over"])
def test_a_save_that_a_signal_ends_anywhere_leaves_nothing_half_written(ranks, tmp_path, over, how):
    assert killed_everywhere(ranks, tmp_path, over, 7, how) >= 7


def ended_behind(parent):
    """A save stands still behind the training when a child forked from there is ended, and then this process."""
    _, _, zero = after_steps(1)

    def ended():
        began = threading.Event()
        zeroshard.checkpoint.saving.write_tensors = lambda *_: (began.set(), time.sleep(60))
        zero.save(parent / "a", asynchronous=True)
        assert began.wait(20) and len(names(parent)) == 1
        child = os.fork()
        if not child:
            die(signal.SIGTERM)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGTERM
        assert len(names(parent)) == 1  # not the child's to remove
        die(signal.SIGTERM)

    return forked(ended), names(parent)


@pytest.mark.row(60)
def test_a_signal_in_a_save_behind_the_training_leaves_nothing_half_written(ranks, tmp_path):
    assert ranks.run(1, ended_behind, tmp_path, group=False) == [(-signal.SIGTERM, [])]


@pytest.mark.row(60)
@pytest.mark.parametrize("over", [False, True], ids=["fresh", "over"])
@pytest.mark.parametrize("moment", ["write_manifest", "publish"])
def test_what_another_thread_still_saves_is_not_published_without_its_files(tmp_path, monkeypatch, moment, over):
    """The end comes to the main thread, or to the one that waits for it, while the saver is before its last rename."""
    _, _, zero = after_steps(1)
    if over:
        zero.save(tmp_path / "a", extra={"which": "before"})
    then = getattr(zeroshard.checkpoint.saving, moment)
    monkeypatch.setattr(zeroshard.checkpoint.saving, moment, lambda *args: (workplace.abandon(), then(*args)))
    saving = zero.save(tmp_path / "a", asynchronous=True)
    with pytest.raises(CheckpointError, match="was not saved"):
        saving.wait()
    assert names(tmp_path) == ["a"] * over
    assert not over or zero.load(tmp_path / "a").extra == {"which": "before"}


@pytest.mark.row(60)
@pytest.mark.parametrize("over", [False, True], ids=["fresh", "over"])
def test_an_end_between_the_rename_and_the_disk_leaves_the_new_one(tmp_path, monkeypatch, over):
    _, _, zero = after_steps(1)
    if over:
        zero.save(tmp_path / "a", extra={"which": "before"})
    sync, seen = files.sync, []

    def ends(folder):
        if folder == tmp_path:
            seen.append(names(tmp_path))
            workplace.abandon()
        sync(folder)

    monkeypatch.setattr(files, "sync", ends)
    zero.save(tmp_path / "a", extra={"which": "now"}, asynchronous=True).wait()
    assert len(seen) == 1 and len(seen[0]) == 1 + over and "a" in seen[0]
    assert names(tmp_path) == ["a"] and zero.load(tmp_path / "a").extra == {"which": "now"}


def failing(*_):
    raise OSError("no")


def interrupted(*_):
    raise KeyboardInterrupt


def restored(folder):
    """What ends a process outside its saves is again what it was; and what the user has set up stays."""
    _, _, zero = after_steps(1)
    told = []
    signal.signal(signal.SIGHUP, lambda *_: told.append(signal.SIGHUP))
    try:
        zero.save(folder / "a")
        old = zero.save(folder / "b", asynchronous=True)
        new = zero.save(folder / "d", asynchronous=True)
        old.wait()  # does not speak for the one that is being written, if that still is
        new.wait()
        with pytest.MonkeyPatch.context() as patched:
            patched.setattr(files.os, "rename", failing)
            with pytest.raises(OSError, match="no"):
                files.remove(folder / "d")
        with pytest.raises(KeyboardInterrupt), pytest.MonkeyPatch.context() as patched:
            patched.setattr(Weights, "write", interrupted)
            zero.export(folder / "c")
        assert names(folder) == ["a", "b", "d"]
        os.kill(os.getpid(), signal.SIGHUP)
        return signal.getsignal(signal.SIGTERM) is signal.SIG_DFL, told
    finally:
        signal.signal(signal.SIGHUP, signal.SIG_DFL)


def test_a_save_leaves_signals_as_they_were(ranks, tmp_path):
    assert ranks.run(1, restored, tmp_path, group=False) == [(True, [signal.SIGHUP])]


def dies_on(path, victim, number):
    """The victim's save dies; the other rank hears of it."""
    _, _, zero = after_steps(2)
    if zero.rank == victim:
        at_call(number, die)
    try:
        zero.save(path, extra={"which": "now"})
    except (PeerError, CheckpointError):
        return "told"
    return "saved"


def saves_first(path):
    after_steps(1)[2].save(path, extra={"which": "before"})


def loads_one_of_both(path):
    """Which of the two is at `path`: all of its bits."""
    _, _, zero = after_steps(0)
    which = zero.load(path).extra["which"]
    assert bits(zero) == bits(after_steps({"before": 1, "now": 2}[which])[2])
    zero.save(path, extra={"which": which})
    return which, names(path.parent)


def killed_of_two(ranks, folder, victim, number):
    path = folder / "a"
    ranks.run(2, saves_first, path)
    outcomes = ranks.run(2, dies_on, path, victim, number, expect_errors=True)
    assert outcomes[victim].type == "Died" and outcomes[1 - victim] in ("told", "saved"), outcomes
    told = ranks.run(2, loads_one_of_both, path)
    assert told[0] == told[1] and told[0][1] == ["a"]
    assert told[0][0] == "now" or outcomes[1 - victim] == "told"
    return told[0][0]


@pytest.mark.row(37)
def test_one_of_two_ranks_killed_in_a_save(ranks, tmp_path):
    assert killed_of_two(ranks, tmp_path, 1, 9) == "before"


def dies_behind(path):
    """Rank 1 ends while both write behind the training: what rank 0 is told, and what is left."""
    _, _, zero = after_steps(1)
    zero.save(path, extra={"which": "before"})
    write_tensors = zeroshard.checkpoint.saving.write_tensors
    if zero.rank == 1:
        zeroshard.checkpoint.saving.write_tensors = lambda *_: die()
    saving = zero.save(path, asynchronous=True)
    try:
        saving.wait()
    except PeerError as error:
        return f"{error}", names(path.parent)
    finally:
        zeroshard.checkpoint.saving.write_tensors = write_tensors


@pytest.mark.row(37)
def test_a_rank_killed_behind_the_training_leaves_nothing_half_written(ranks, tmp_path):
    """The survivor need not end for what it had written to go: it is told, and cleans up."""
    first, second = ranks.run(2, dies_behind, tmp_path / "a", expect_errors=True)
    assert second.type == "Died" and "rank 1 is gone" in first[0] and first[1] == ["a"]
    assert ranks.run(2, loads_one_of_both, tmp_path / "a") == [("before", ["a"])] * 2


@pytest.mark.row(37)
@pytest.mark.slow
@pytest.mark.timeout(600)
def test_one_of_two_ranks_killed_at_many_calls(ranks, tmp_path):
    seen = {}
    for victim, points in ((1, range(0, 20, 3)), (0, range(0, 66, 8))):
        for number in points:
            folder = tmp_path / f"{victim}-{number}"
            folder.mkdir()
            which = killed_of_two(ranks, folder, victim, number)
            seen[victim, which] = seen.get((victim, which), 0) + 1
    print(seen)
    assert seen[1, "before"] == 7 and seen[0, "before"] + seen[0, "now"] == 9


def leftover(parent, name, *, machine=None, process=None, started=None, age=0.0):
    mine = workplace.owner().split("-")
    folder = parent / f".{name}.saving-{machine or mine[0]}-{process or mine[1]}-{started or mine[2]}-01234567"
    folder.mkdir()
    (folder / "rank00000.safetensors").write_bytes(b"x")
    for path in (folder / "rank00000.safetensors", folder):
        os.utime(path, (time.time() - age,) * 2)
    return folder


@pytest.mark.row(37)
def test_only_dead_saves_leftovers_are_removed(tmp_path):
    """Dead: of a process of this machine that has ended; or of another machine, and not written to for a day."""
    _, _, zero = after_steps(0)
    kept = [
        workplace.temporary(leftover(tmp_path, "a")),  # this very process could be saving behind the training
        leftover(tmp_path, "a", process=os.getppid(), started=workplace._started(os.getppid())),
        leftover(tmp_path, "a", machine="0" * 16, process=1),
        leftover(tmp_path, "b", machine="0" * 16, process=2, age=workplace.ABANDONED - 100),
    ]
    other = tmp_path / ".a.saving-by-hand"
    other.mkdir()
    gone = [
        leftover(tmp_path, "a", started=1),  # the number has gone to another process since
        leftover(tmp_path, "other", process=1 << 30),
        leftover(tmp_path, "a", machine="1" * 16, age=workplace.ABANDONED + 100),
        leftover(tmp_path, "b"),  # of this very process, which an interrupt kept from being removed
    ]
    zero.save(tmp_path / "a")
    assert names(tmp_path) == sorted([*(path.name for path in kept), other.name, "a"])
    assert not any(path.exists() for path in gone)
    workplace.discard(kept[0])


def test_an_older_checkpoint_whose_removal_is_interrupted_goes_with_the_next_save(monkeypatch, tmp_path):
    """It stayed under its temporary name until the process had ended and another one saved."""
    _, _, zero = after_steps(0)
    zero.save(tmp_path / "a")

    def interrupted(*_, **__):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(workplace.shutil, "rmtree", interrupted)
        zero.save(tmp_path / "b", keep=1)
    assert len(names(tmp_path)) == 2 and "b" in names(tmp_path)
    zero.save(tmp_path / "c", keep=1)
    assert names(tmp_path) == ["c"]


@pytest.mark.row(47)
def test_what_is_no_checkpoint_is_not_replaced(tmp_path):
    """Saving into a folder of other things would remove them."""
    _, _, zero = after_steps(0)
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "thesis.tex").write_text("years")
    with pytest.raises(CheckpointError, match="would remove what zeroshard did not write"):
        zero.save(tmp_path / "run")
    zero.save(tmp_path / "run" / "a")
    with pytest.raises(CheckpointError, match=r"'a', 'thesis.tex'"):
        zero.save(tmp_path / "run")
    (tmp_path / "file").write_text("a file")
    with pytest.raises(CheckpointError, match="not saved"):
        zero.save(tmp_path / "file")
    assert names(tmp_path / "run") == ["a", "thesis.tex"] and names(tmp_path) == ["file", "run"]


@pytest.mark.row(72)
@pytest.mark.parametrize("when", ["before", "meanwhile", "last moment"])
def test_what_a_user_put_into_a_checkpoint_stays(tmp_path, monkeypatch, when):
    """keep= leaves that checkpoint whole and says so; a save over it is refused."""
    _, _, zero = after_steps(0)
    old, notes = tmp_path / "a", tmp_path / "a" / "notes.txt"
    for name in "ab":
        zero.save(tmp_path / name)
    if when == "before":
        notes.write_text("years")
    elif when == "meanwhile":
        write = files.write_manifest
        monkeypatch.setattr(
            "zeroshard.checkpoint.saving.write_manifest", lambda *a: (notes.write_text("years"), write(*a))
        )
    else:
        rename, exchange = os.rename, files._exchange

        def late(call, one, other):
            notes.exists() or notes.write_text("years")
            call(one, other)

        monkeypatch.setattr("zeroshard.checkpoint.files._exchange", lambda one, other: late(exchange, one, other))
        monkeypatch.setattr("os.rename", lambda one, other: late(rename, one, other))
    with pytest.warns(UserWarning, match=r"leaves the older checkpoint .*/a: it holds \['notes.txt'\]"):
        zero.save(tmp_path / "c", keep=1)
    assert names(tmp_path) == ["a", "c"] and notes.read_text() == "years"
    notes.unlink()
    if when == "before":
        notes.write_text("years")
    with pytest.raises(CheckpointError, match=r"would remove what zeroshard did not write[^$]*notes.txt"):
        zero.save(old)
    assert names(tmp_path) == ["a", "c"] and notes.read_text() == "years"
    monkeypatch.undo()
    zero.load(old)


@pytest.mark.row(72)
def test_a_folder_or_link_that_has_a_checkpoints_file_name_stays(tmp_path):
    _, _, zero = after_steps(0)
    (tmp_path / "a" / "rank00001.safetensors").mkdir(parents=True)
    (tmp_path / "b").mkdir()
    (tmp_path / "b" / "rank00001.safetensors").symlink_to(tmp_path)
    for name in "ab":
        with pytest.raises(CheckpointError, match="would remove what zeroshard did not write"):
            zero.save(tmp_path / name)
        assert names(tmp_path / name) == ["rank00001.safetensors"]


# ------------------------------------------------------------------------------------------------- errors of the disk


def fails_everywhere(folder, over, code, stride):
    """Every call into the system fails once, in a save each; then it succeeds."""
    _, _, before = after_steps(1)
    _, _, now = after_steps(2)
    _, _, reader = after_steps(0)
    path, failed, hidden = folder / "a", 0, 0
    mine = bits(now)
    for number in itertools.count(0, stride):
        shutil.rmtree(path, ignore_errors=True)
        if over:
            before.save(path, extra={"which": "before"})
        fault = OSError(code, os.strerror(code), "it")

        def fail(fault=fault):
            raise fault

        at_call(number, fail, ["c_call"])
        problem = None
        try:
            now.save(path, extra={"which": "now"})
        except CheckpointError as error:
            problem = f"{error}"
        ended = problem is None and sys.getprofile() is not None  # nothing failed: a save has fewer calls
        sys.setprofile(None)
        assert problem is None or (os.strerror(code) in problem and "not saved" in problem)
        which = "now" if problem is None else "before" if over else None
        failed, hidden = failed + (problem is not None), hidden + (problem is None and not ended)
        assert bits(now) == mine
        if which is None:
            assert not path.exists(), number
        else:
            assert reader.load(path).extra == {"which": which}, number
        for left in set(names(folder)) - {"a"}:  # its removal is what failed: the next process removes it
            assert which != "now" or over, left
            shutil.rmtree(folder / left)
        if ended:
            return failed, hidden
    raise AssertionError("unreachable")


@pytest.mark.row(39)
@pytest.mark.parametrize("over", [False, True], ids=["fresh", "over"])
def test_any_call_that_fails_publishes_nothing(ranks, tmp_path, over):
    """Opens, writes, fsyncs (of file, folder and what holds it), renames, closes: EIO from each in turn."""
    ((failed, _),) = ranks.run(1, fails_everywhere, tmp_path, over, errno.EIO, 3, group=False)
    assert failed >= 6


@pytest.mark.row(39)
@pytest.mark.slow
@pytest.mark.parametrize("code", [errno.EIO, errno.ENOSPC, errno.EROFS, errno.EACCES, errno.EINVAL])
@pytest.mark.parametrize("over", [False, True], ids=["fresh", "over"])
def test_each_call_that_fails_publishes_nothing(ranks, tmp_path, over, code):
    ((failed, hidden),) = ranks.run(1, fails_everywhere, tmp_path, over, code, 1, group=False, timeout=170)
    print(f"{failed} failures told, {hidden} of no consequence")
    assert failed >= 20


def meets_a_limit(path, victim, limit):
    """A file of the victim's may not grow beyond `limit` bytes."""
    model, optimizer, zero = after_steps(1)
    zero.save(path, extra={"which": "before"})
    step("mlp", model, optimizer, 1, total=2)
    mine = bits(zero)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    if zero.rank == victim:
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limits[1]))
    try:
        with pytest.raises(CheckpointError) as error:
            zero.save(path)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert bits(zero) == mine and names(path.parent) == ["a"]
    step("mlp", model, optimizer, 2, total=2)
    assert zero.load(path).extra == {"which": "before"}
    return f"{error.value}"


@pytest.mark.row(38)
@pytest.mark.parametrize("victim", [0, 1])
def test_a_rank_that_runs_out_of_space_fails_all(ranks, tmp_path, victim):
    """The same error on both, with the file and what it needs; nothing is left of it and the training goes on."""
    first, second = ranks.run(2, meets_a_limit, tmp_path / "a", victim, 1000)
    assert first == second
    assert f"rank {victim}: File too large" in first and f"rank{victim:05d}.safetensors" in first
    assert "bytes to write" in first


@contextlib.contextmanager
def mounted(folder, *arguments):
    folder.mkdir(exist_ok=True)
    done = subprocess.run(["mount", *arguments, folder], capture_output=True, text=True, check=False)
    if done.returncode:
        pytest.skip(f"cannot mount here: {done.stderr.strip()}")
    try:
        yield
    finally:
        subprocess.run(["umount", folder], check=True)


def meets_a_full_disk(path):
    model, optimizer, zero = build("gpt", 3)
    step("gpt", model, optimizer, 0, total=2)
    zero.save(path, extra={"n": 1})
    ballast = torch.zeros(150_000 if zero.rank == 0 else 0)  # bytes: 4 each
    mine = bits(zero)
    with pytest.raises(
        CheckpointError, match=r"rank 0: No space left on device \([\d,]+ bytes to write\): .*rank00000"
    ):
        zero.save(path, extra={"ballast": ballast})
    assert bits(zero) == mine and names(path.parent) == ["a"]
    return zero.load(path).extra == {"n": 1}


@pytest.mark.row(38)
def test_a_full_disk(ranks, tmp_path):
    with mounted(tmp_path / "small", "-t", "tmpfs", "-o", "size=600k", "tmpfs"):
        assert ranks.run(2, meets_a_full_disk, tmp_path / "small" / "a") == [True, True]


def meets_a_lock(path, message):
    _, _, zero = after_steps(1)
    with pytest.raises(CheckpointError, match=message):
        zero.save(path)
    return f"{zero.load(path).extra}"


@pytest.mark.row(39)
def test_a_read_only_folder(ranks, tmp_path):
    ranks.run(2, saves_first, tmp_path / "d" / "a")
    with mounted(tmp_path / "d", "--bind", "-o", "ro", tmp_path / "d"):
        told = ranks.run(2, meets_a_lock, tmp_path / "d" / "a", "rank 0: Read-only file system")
    assert told == ["{'which': 'before'}"] * 2 and names(tmp_path / "d") == ["a"]


@pytest.mark.row(39)
def test_a_file_system_that_cannot_exchange(tmp_path, monkeypatch):
    """As on some network file systems: saving over a checkpoint is refused there, and to another name works."""
    _, _, zero = after_steps(1)
    zero.save(tmp_path / "a", extra={"n": 1})

    def refuse(one, other):
        raise OSError(errno.EINVAL, "Invalid argument", f"{other}")

    monkeypatch.setattr(files, "_exchange", refuse)
    with pytest.raises(CheckpointError, match="Invalid argument"):
        zero.save(tmp_path / "a", extra={"n": 2})
    assert zero.load(tmp_path / "a").extra == {"n": 1} and names(tmp_path) == ["a"]
    zero.save(tmp_path / "b", extra={"n": 2})
    assert names(tmp_path) == ["a", "b"]


@pytest.mark.row(39)
def test_a_parent_that_is_a_file(tmp_path):
    _, _, zero = after_steps(0)
    (tmp_path / "file").write_text("")
    with pytest.raises(CheckpointError, match="Not a directory|File exists"):
        zero.save(tmp_path / "file" / "a")
    zero.save(tmp_path / "not" / "yet" / "there")
    zero.load(tmp_path / "not" / "yet" / "there")


class Lying(io.FileIO):
    """Says that it wrote, and did not."""

    def write(self, data):
        self.seek(len(memoryview(data).cast("B")), os.SEEK_CUR)
        return len(memoryview(data).cast("B"))


@pytest.mark.row(42)
@pytest.mark.parametrize("lost", ["rank00000.safetensors", "manifest.json"])
def test_a_lost_write_that_reports_success(tmp_path, monkeypatch, lost):
    _, _, zero = after_steps(1)
    if lost == "manifest.json":
        monkeypatch.setattr(files, "open", lambda path, mode, **_: io.TextIOWrapper(Lying(path, mode)), raising=False)
    else:
        monkeypatch.setattr(files.os, "pwrite", lambda descriptor, data, at: len(data))
    zero.save(tmp_path / "a")
    monkeypatch.undo()
    mine = bits(zero)
    with pytest.raises(CheckpointError, match=rf"{lost}"):
        zero.load(tmp_path / "a")
    assert bits(zero) == mine


# ---------------------------------------------------------------------------------------------------- at the same time


def saves_and_reads(path, rounds):
    """Ranks 0 and 1 are two jobs that save to one place, so often and until rank 2, who reads there, has seen two."""
    import ranks

    rank = ranks.rank()
    model, _, zero = after_steps(1)
    enough = path.parent / "enough"
    if rank < 2:
        for number in itertools.count():
            if number >= rounds and enough.exists():
                break
            mark = 1000.0 * (rank + 1) + number
            with zero.gathered(), torch.no_grad():
                for param in model.parameters():
                    param.fill_(mark)
            zero.save(path, extra={"mark": mark})
        (path.parent / f"done-{rank}").touch()
        return None
    seen = []
    while not all((path.parent / f"done-{other}").exists() for other in range(2)):
        if path.exists():
            mark = zero.load(path).extra["mark"]
            with zero.gathered():
                assert all((param == mark).all() for param in model.parameters()), mark
            seen.append(mark)
            if len(set(seen)) > 1:
                enough.touch()
    return seen


def at_once(ranks, folder, rounds):
    *_, seen = ranks.run(3, saves_and_reads, folder / "a", rounds, group=False, timeout=500)
    assert names(folder) == ["a", "done-0", "done-1", "enough"]
    return seen


@pytest.mark.row(47)
def test_two_savers_and_a_reader(ranks, tmp_path):
    assert at_once(ranks, tmp_path, 20)


@pytest.mark.row(47)
@pytest.mark.slow
@pytest.mark.timeout(600)
def test_two_savers_and_a_reader_for_200_rounds(ranks, tmp_path):
    seen = at_once(ranks, tmp_path, 200)
    print(f"{len(seen)} loads of {len(set(seen))} different checkpoints")
    assert {int(mark) // 1000 for mark in seen} == {1, 2}
