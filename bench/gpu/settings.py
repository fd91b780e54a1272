"""Step: what else a user switches on: formats, a scaler, other optimizers, checkpoints, compiled blocks, a mesh.

Each is compared with plain torch on the same device; of a mesh every stage with stage 0.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import zeroshard
from zeroshard import Comm, Layout, Offload, Precision
from zeroshard.cli import reference
from zeroshard.layout.stage import STAGES
from zeroshard.reference import total_norm

from ..model import loss_of
from . import training
from .place import ranks
from .record import Record, Wrong, each
from .training import CLIP

STEPS = 3
SCALE = 2.0**20  # gradients of logits overflow in fp16
BF16 = torch.bfloat16


def run(record: Record) -> None:
    place = record.place
    stages = STAGES if place.kind == "cuda" else (1, 3)  # a rehearsal takes one of each kind
    for stage in stages:
        record.ranks(f"2 ranks, stage {stage}", 2, settings, stage)
        if place.kind == "cuda":
            record.ranks(f"2 ranks, stage {stage}", 2, compiled, stage, timeout=600.0)
        else:
            record.skip(f"2 ranks, stage {stage}: compiled blocks", f"nothing is compiled for {place.kind}")
    for tier in ("device", "cpu"):
        with tempfile.TemporaryDirectory() as folder:
            record.ranks(f"2 ranks save, {tier}", 2, saved, tier, folder, stages)
            for world in (1, 2):
                record.ranks(f"{world} of them load what 2 saved, {tier}", world, loaded, tier, folder, stages)
    if place.count < 4:
        record.skip("4 ranks, a mesh", "it takes 4 devices")
    else:
        for name, body in {"experts": experts, "tensor parallel": tensor_parallel}.items():
            record.ranks(f"2 x 2 ranks, {name} as stage 0", 4, body, stages)


# --- beside plain torch ---------------------------------------------------------------------------------------------


def settings(kind: str, stage: int) -> dict[str, str]:
    linear = {f"{name}.weight" for name, each in training.build("meta").named_modules() if isinstance(each, nn.Linear)}
    eight, split = Precision(param_dtype=BF16, fp8=True), Precision(param_dtype=BF16, split_master=True)

    def in_8_bits(name: str, master: Tensor) -> Tensor:
        return reference.in_8_bits(master) if name in linear else master

    same = partial(_same, kind, stage)
    autocast = partial(same, "fp32", both={"loss": partial(_autocast, kind)})
    return each(
        {
            "parameters in 8 bits": partial(same, rounds={"rounded": in_8_bits}, precision=eight),
            "gradients in 8 bits": partial(same, rounds={"sent": reference.in_codes}, comm=Comm(reduce="int8")),
            "split masters": partial(same, precision=split),
            "the optimizer in backward": partial(same, both={"clip": None}, optimizer_in_backward=True),
            "several optimizers, Muon among them": partial(same, "fp32", both={"make": _muon_and_adam}),
            **({} if kind == "emu" else {"autocast": autocast}),  # torch knows none for a device in Python
            "steps passed over": partial(_skipped, kind, stage),
            "fp16 with a scaler": partial(_scaled, kind, stage),
        }
    )


def compiled(kind: str, stage: int) -> dict[str, str]:
    """Blocks, by the default compiler, in plain torch too: fused kernels have numbers of their own."""
    torch._dynamo.reset()
    return each({"compiled blocks": partial(_same, kind, stage, both={"prepare": _compile})})


def _compile(model: nn.Module) -> None:
    for block in model.blocks:  # type: ignore[union-attr]
        block.compile()


def _same(
    kind: str,
    stage: int,
    dtype: str = "bf16",
    *,
    both: Mapping[str, Any] = MappingProxyType({}),
    rounds: Mapping[str, Any] = MappingProxyType({}),
    **options: Any,
) -> None:
    """Wrong unless a run at `stage` has the losses, norms and weights of one process. rounds: see `training.plain`."""
    got = training.sharded(kind, dtype, stage, steps=STEPS, **both, **options)
    training.compare(got, training.plain(kind, dtype, ranks.world(), steps=STEPS, **both, **rounds))


def _muon_and_adam(params: Any) -> list[torch.optim.Optimizer]:
    params = list(params)
    matrices = [each for each in params if each.ndim == 2]
    others = [each for each in params if each.ndim != 2]
    return [torch.optim.Muon(matrices, lr=1e-2), training.adam(others)]


def _autocast(kind: str, model: nn.Module, tokens_BT: Tensor) -> Tensor:
    with torch.autocast(kind, BF16):
        return loss_of(model, tokens_BT)


def _skipped(kind: str, stage: int) -> None:
    """The last rank's second step has infinite gradients: as if no rank had taken it."""
    calls = 0

    def spoilt(model: nn.Module, tokens_BT: Tensor) -> Tensor:
        nonlocal calls
        calls += 1
        loss = loss_of(model, tokens_BT)
        return loss * float("inf") if calls == 2 and ranks.rank() == ranks.world() - 1 else loss

    skips = Precision(param_dtype=BF16, nonfinite="skip")
    got = training.sharded(kind, "bf16", stage, steps=STEPS, loss=spoilt, clip=None, precision=skips)
    model, batch = training.build(kind), training.batches(kind)
    reference.accumulate_with_masters(
        model, training.adam, lambda step, index: batch(2 * step, index), loss_of, ranks.world(), steps=2
    )
    training.same_weights(got.weights, training.weights(model))


def _scaled(kind: str, stage: int) -> None:
    """At a scale that is too large at first: losses, scales and weights of a loop by hand, which has powers of two."""
    model, optimizer, zero = training.shard(kind, "fp32", stage, precision=Precision(param_dtype=torch.float16))
    scaler = torch.amp.GradScaler(kind, init_scale=SCALE, growth_interval=2)
    batch, got = training.batches(kind), []
    for step in range(2 * STEPS):
        loss = loss_of(model, batch(step, zero.rank))
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        got.append((loss.item(), scaler.get_scale()))
    want, theirs = _scaled_by_hand(kind, zero.world_size)
    if got != (want := [(losses[zero.rank], scale) for losses, scale in want]):
        raise Wrong(f"losses and scales {got} instead of {want}")
    if all(scale >= SCALE for _, scale in got):
        raise Wrong(f"no step was passed over: {got}")
    with zero.gathered():
        training.same_weights(training.weights(model), theirs)


def _scaled_by_hand(kind: str, world: int) -> tuple[list[tuple[list[float], float]], dict[str, Tensor]]:
    model, batch, scale, taken, told = training.build(kind), training.batches(kind), SCALE, 0, []
    params = list(model.parameters())
    masters = [each.detach().clone().requires_grad_() for each in params]
    optimizer = training.adam(masters)
    for param in params:
        param.data = param.data.half()
    for step in range(2 * STEPS):
        losses = []
        for index in range(world):
            loss = loss_of(model, batch(step, index))
            losses.append(loss.item())
            (loss * scale).backward()
            for param, master in zip(params, masters, strict=True):
                assert param.grad is not None
                own = param.grad.float()
                master.grad = own if index == 0 or master.grad is None else master.grad + own
                param.grad = None
        gradients = [each.grad for each in masters if each.grad is not None]
        for gradient in gradients:
            gradient.div_(world).mul_(1 / scale)
        if all(bool(gradient.isfinite().all()) for gradient in gradients):
            reference.clip_(gradients, CLIP, total_norm)
            optimizer.step()
            for param, master in zip(params, masters, strict=True):
                param.data.copy_(master)
            taken += 1
            scale *= 2 if taken % 2 == 0 else 1
        else:
            scale, taken = scale / 2, 0
        told.append((losses, scale))
        optimizer.zero_grad()
    return told, training.weights(model)


# --- checkpoints ----------------------------------------------------------------------------------------------------


def _in(tier: str) -> Offload:
    return Offload(optimizer="cpu", gradients="cpu") if tier == "cpu" else Offload()


def saved(kind: str, tier: str, folder: str, stages: tuple[int, ...]) -> dict[str, str]:
    """Two steps, a checkpoint, and a third step, whose weights stay beside it."""

    def save(stage: int) -> None:
        model, optimizer, zero = training.shard(kind, "bf16", stage, offload=_in(tier))
        _go_on(kind, model, optimizer, zero, 0, 2)
        zero.save(Path(folder, str(stage)), asynchronous=True).wait()
        _go_on(kind, model, optimizer, zero, 2, 1)
        with zero.gathered():
            if zero.rank == 0:
                torch.save(training.weights(model), Path(folder, f"{stage}.weights"))

    return each({f"stage {stage}": partial(save, stage) for stage in stages})


def loaded(kind: str, tier: str, folder: str, stages: tuple[int, ...]) -> dict[str, str]:
    """Into every other stage; then the third step, with the bits of the run that went on."""

    def load(stage: int, into: int) -> None:
        model, optimizer, zero = training.shard(kind, "bf16", into, offload=_in(tier))
        zero.load(Path(folder, str(stage)))
        _go_on(kind, model, optimizer, zero, 2, 1)
        want = torch.load(Path(folder, f"{stage}.weights"), weights_only=True)
        with zero.gathered():
            training.same_weights(training.weights(model), want)

    pairs = [(stage, into) for stage in stages for into in stages if stage != into]
    return each({f"stage {stage} into {into}": partial(load, stage, into) for stage, into in pairs})


def _go_on(kind: str, model: nn.Module, optimizer: Any, zero: Any, first: int, steps: int) -> None:
    """With two micro-batches a step, however many ranks there are."""
    reference.loop(
        model, optimizer, training.batches(kind), loss_of, zero.rank, zero.world_size, 2 // zero.world_size,
        steps=steps, first_step=first, clip=CLIP, average=True,
    )  # fmt: skip


# --- a mesh ---------------------------------------------------------------------------------------------------------

WIDTH, EXPERTS = 16, 4


class Experts(nn.Module):
    """Each rank of an expert axis has some rows of one tensor."""

    def __init__(self, first: int, local: int) -> None:
        super().__init__()
        self.first, self.local = first, local
        self.router = nn.Linear(WIDTH, EXPERTS)
        self.experts = nn.Module()
        self.experts.weight = nn.Parameter(torch.randn(EXPERTS, WIDTH, WIDTH)[first : first + local].clone() / 4)

    def forward(self, x_BD: Tensor) -> Tensor:
        share = self.router(x_BD).softmax(-1)[:, self.first : self.first + self.local]
        return x_BD + torch.einsum("be,bd,edf->bf", share, x_BD, self.experts.weight)


def experts(kind: str, stages: tuple[int, ...]) -> dict[str, str]:
    mesh = init_device_mesh(kind, (2, 2), mesh_dim_names=("edp", "ep"))

    def build() -> nn.Module:
        local = EXPERTS // 2
        return nn.Sequential(*(Experts(mesh.get_local_rank("ep") * local, local) for _ in range(2)))

    return _as_stage_0(
        kind, stages, build, ranks.rank(), comm=Comm(group=mesh), layout=Layout(along={"*.experts.*": "edp"})
    )


def tensor_parallel(kind: str, stages: tuple[int, ...]) -> dict[str, str]:
    mesh = init_device_mesh(kind, (2, 2), mesh_dim_names=("dp", "tp"))

    def build() -> nn.Module:
        blocks = [nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH)) for _ in range(2)]
        plan = {"0": ColwiseParallel(), "2": RowwiseParallel()}
        return nn.Sequential(*(parallelize_module(block.to(kind), mesh["tp"], plan) for block in blocks))

    return _as_stage_0(kind, stages, build, mesh.get_local_rank("dp"), comm=Comm(group=mesh["dp"]))


def _as_stage_0(
    kind: str, stages: tuple[int, ...], build: Callable[[], nn.Module], index: int, **options: Any
) -> dict[str, str]:
    """index: of this rank's micro-batch, which the ranks along a tensor axis share."""

    def train(stage: int) -> tuple[list[float], list[Tensor]]:
        torch.manual_seed(0)
        model = build().to(kind)
        optimizer = training.adam(model.parameters())
        zero, losses = zeroshard.shard(model, optimizer, stage=stage, **options), []
        for step in range(STEPS):
            generator = torch.Generator().manual_seed(100 * step + index)
            loss = model(torch.randn(8, WIDTH, generator=generator).to(kind)).square().mean()
            loss.backward()
            losses += [loss.item(), float(torch.nn.utils.clip_grad_norm_(model.parameters(), 0.05))]
            optimizer.step()
            optimizer.zero_grad()
        with zero.gathered():
            whole = [getattr(param, "_local_tensor", param).detach().clone() for param in model.parameters()]
        return losses, whole

    want, weights = train(0)

    def same(stage: int) -> None:
        losses, found = train(stage)
        if losses != want:
            raise Wrong(f"losses and norms {losses} instead of {want}")
        if not all(map(torch.equal, found, weights)):
            raise Wrong("weights are others")

    return each({f"stage {stage}": partial(same, stage) for stage in stages if stage})
