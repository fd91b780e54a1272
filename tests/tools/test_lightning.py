"""PyTorch Lightning: a fit by `ZeroStrategy` has the bits of the fit by DDP. On two ranks, as a launcher started them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from torch import nn

import ranks
from trainers import LIMIT, run_example, same_at_all_stages
from zeroshard.errors import CheckpointError, StateError, UserError
from zeroshard.integrations.jobs import parts_of

lightning = pytest.importorskip("lightning")
pytestmark = pytest.mark.trainers

STAGES = (0, 1, 2, 3)


class Module(lightning.LightningModule):
    """Calls itself in its steps, as most do; notes what it sees."""

    def __init__(self, *, meta=False, alike=False):
        """alike: what it computes does not depend on the number of ranks."""
        super().__init__()
        torch.manual_seed(2)
        self.alike, self.seen = alike, []
        self.net = None if meta else self.build()

    def build(self):
        drop = nn.Dropout(0.0 if self.alike else 0.1)
        return nn.Sequential(nn.Linear(8, 32), nn.GELU(), drop, nn.Linear(32, 300), nn.Linear(300, 1))

    def configure_model(self):
        if self.net is None:
            with torch.device("meta"):
                self.net = self.build()

    def forward(self, x):
        return self.net(x)

    def training_step(self, batch, number):
        loss = self(batch).square().mean()
        self.log("loss", loss)
        self.seen.append(loss.item())
        return loss

    def validation_step(self, batch, number):
        self.log("val", self(batch).square().mean(), sync_dist=True)

    test_step = validation_step

    def predict_step(self, batch, number):
        return self(batch)

    def on_validation_epoch_end(self):
        self.seen.append(self.trainer.callback_metrics["val"].item())

    def configure_optimizers(self):
        optimizer = torch.optim.AdamW(self.parameters(), lr=1e-2)
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)]


def loader():
    rows = torch.randn(24, 8, generator=torch.Generator().manual_seed(4))
    return torch.utils.data.DataLoader(rows, batch_size=2, shuffle=True)


def trainer(stage, folder, epochs=2, **options):
    import zeroshard.integrations.lightning  # noqa: F401  # it registers the names

    torch.manual_seed(7)
    return lightning.Trainer(
        accelerator="cpu", devices=ranks.world(), strategy="ddp" if stage is None else f"zeroshard_stage_{stage}",
        max_epochs=epochs, default_root_dir=folder, logger=False, enable_progress_bar=False, enable_model_summary=False,
        enable_checkpointing=False, **options,
    )  # fmt: skip


def weights(module):
    zero = getattr(module, "_zeroshard_zero", None)
    if zero is None:
        return {name: tensor.tolist() for name, tensor in module.state_dict().items()}
    with zero.gathered():
        return {name: tensor.tolist() for name, tensor in module.state_dict().items()}


def runs(stages, folder, options):
    found = []
    for stage in stages:
        made, module = trainer(stage, folder, **options), Module()
        made.fit(module, loader(), loader())
        after = made.validate(module, loader(), verbose=False)
        predicted = torch.cat(made.predict(module, loader())).tolist()
        rates = [group["lr"] for group in made.optimizers[0].param_groups] if made.optimizers else None
        found.append((module.seen, weights(module), after, predicted, rates))
    return found


OPTIONS = {
    "plain": {},
    "accumulation": {"accumulate_grad_batches": 4, "val_check_interval": 3},
    "bf16": {
        "precision": "bf16-mixed",
        "accumulate_grad_batches": 2,
        "gradient_clip_val": 0.05,
        "gradient_clip_algorithm": "value",
    },
}


@pytest.mark.parametrize("name", OPTIONS)
def test_the_bits_are_those_of_ddp(name, tmp_path):
    """Losses, validation in and after training, predictions and final weights: equal at stages 0-3."""
    for plain, *sharded in ranks.run(2, runs, (None, *STAGES), tmp_path, OPTIONS[name], group="env", timeout=LIMIT):
        assert len(plain[0]) >= 14
        for found in sharded:
            assert found[:4] == plain[:4]


@pytest.mark.parametrize("precision", ["bf16-true", "64-true"])
def test_a_module_in_another_precision_has_the_same_bits_at_every_stage(precision, tmp_path):
    """In fp64 those of DDP. Of 16-bit weights fp32 masters are kept, which DDP does without: those of no DDP."""
    for plain, *sharded in ranks.run(
        2, runs, (None, 0, 1, 3), tmp_path, {"precision": precision}, group="env", timeout=LIMIT
    ):
        assert all(found == sharded[0] for found in sharded)
        assert (sharded[0][:4] == plain[:4]) == (precision == "64-true")


def clipped(stages, folder):
    found = []
    for stage in stages:
        made, module = trainer(stage, folder, gradient_clip_val=0.01), Module()
        made.fit(module, loader())
        found.append((module.seen, weights(module)))
    return found


def test_clipping_by_norm_is_alike_at_all_stages(tmp_path):
    """By exact norms, of the whole model: so not to the last bit that of DDP."""
    for plain, *sharded in ranks.run(2, clipped, (None, *STAGES), tmp_path, group="env", timeout=LIMIT):
        assert all(found == sharded[0] for found in sharded)
        assert sharded[0][0] == pytest.approx(plain[0], rel=1e-4)


def goes_on(folder, stage, epochs, saves, resumes, **options):
    made, module = trainer(stage, folder, epochs, use_distributed_sampler=False, **options), Module(alike=True)
    batches = loader().dataset.split(2)[ranks.rank() :: ranks.world()]
    made.fit(
        module,
        torch.utils.data.DataLoader(batches, batch_size=None),
        ckpt_path=str(folder / "half.ckpt") if resumes else None,
    )
    if saves:
        made.save_checkpoint(folder / "half.ckpt")
        made.save_checkpoint(folder / "weights.ckpt", weights_only=True)
    return module.seen, made.optimizers[0].param_groups[0]["lr"], weights(module)


def test_a_fit_goes_on_from_a_checkpoint(tmp_path):
    """Saved on two ranks at stage 3: on two ranks at stage 1, and on one that accumulates two micro-batches, the second
    epoch has the bits of the fit that never stopped. Weights alone are a file that `load_from_checkpoint` reads."""
    whole = ranks.run(2, goes_on, tmp_path, 2, 2, False, False, group="env", timeout=LIMIT)
    first = ranks.run(2, goes_on, tmp_path, 3, 1, True, False, group="env", timeout=LIMIT)
    assert sorted(path.name for path in (tmp_path / "half.ckpt").iterdir()) == ["lightning.ckpt", "zeroshard"]
    again = ranks.run(2, goes_on, tmp_path, 1, 2, False, True, group="env", timeout=LIMIT)
    assert [a[0] + b[0] for a, b in zip(first, again, strict=True)] == [each[0] for each in whole]
    assert [each[1:] for each in again] == [each[1:] for each in whole]
    alone = ranks.run(1, goes_on, tmp_path, 0, 2, False, True, accumulate_grad_batches=2, group="env", timeout=LIMIT)[0]
    assert alone[0][::2] == again[0][0] and alone[0][1::2] == again[1][0]
    assert alone[1:] == whole[0][1:]
    read = Module.load_from_checkpoint(tmp_path / "weights.ckpt")
    assert {name: tensor.tolist() for name, tensor in read.state_dict().items()} == first[0][2]


def other_ways(folder):
    """A module on meta; evaluation of one that is whole, and of one that is on meta, from a checkpoint."""
    made, module = trainer(3, folder, 1), Module(meta=True)
    made.fit(module, loader())
    made.save_checkpoint(folder / "a.ckpt")
    told = [made.validate(module, loader(), verbose=False)]
    for meta in (False, True):
        torch.manual_seed(99)
        again = Module(meta=meta)
        found = trainer(2, folder).test(again, loader(), ckpt_path=str(folder / "a.ckpt"), verbose=False)
        told.append(found)
        told.append(weights(again) == weights(module))
    refused = []
    for call in (
        lambda: made.fit(module, loader()),
        lambda: trainer(3, folder, 2).fit(Module(), loader(), ckpt_path=str(folder / "plain.ckpt")),
    ):
        try:
            call()
        except (StateError, CheckpointError) as error:
            refused.append(str(error))
    return told, refused


def test_meta_evaluation_and_refusals(tmp_path):
    plain = ranks.run(1, plain_checkpoint, tmp_path, group="env", timeout=LIMIT)
    assert plain == [None]
    for told, refused in ranks.run(2, other_ways, tmp_path, group="env", timeout=LIMIT):
        assert (
            told[2] and told[4]
        )  # weights have the same bits; where they lie in memory, a processor may round otherwise
        for found in (told[1], told[3]):
            assert [each["val"] for each in found] == pytest.approx([each["val"] for each in told[0]], rel=1e-6)
        assert "sharded by an earlier fit" in refused[0]
        assert "plain.ckpt" in refused[1] and "load_from_checkpoint" in refused[1]


def plain_checkpoint(folder):
    made = trainer(None, folder, 1)
    made.fit(Module(), loader())
    made.save_checkpoint(folder / "plain.ckpt")


def fabric_runs(stages, folder, resumed):
    """A loop of Fabric's that accumulates two micro-batches; `resumed` from half of it."""
    import zeroshard.integrations.fabric  # noqa: F401  # it registers the names

    found = []
    for stage in stages:
        torch.manual_seed(7)
        kind = "ddp" if stage is None else f"zeroshard_stage_{stage}"
        fabric = lightning.Fabric(accelerator="cpu", devices=ranks.world(), strategy=kind, precision="bf16-mixed")
        fabric.launch()
        net = Module(alike=True).net
        model, optimizer = fabric.setup(net, torch.optim.AdamW(net.parameters(), lr=1e-2))
        state = {"model": model, "optimizer": optimizer, "at": 0, "losses": []}
        if resumed:
            fabric.load(folder / "half", state)
        batches = loader().dataset.split(2)[ranks.rank() :: ranks.world()]
        losses = []
        while state["at"] < len(batches):
            at = state["at"]
            with fabric.no_backward_sync(model, enabled=at % 2 == 0):
                loss = model(batches[at]).square().mean()
                fabric.backward(loss)
            losses.append(loss.item())
            if at % 2:
                fabric.clip_gradients(model, optimizer, clip_val=0.01)
                optimizer.step()
                optimizer.zero_grad()
            state["at"] += 1
            if stage == 3 and state["at"] == 2:
                fabric.save(folder / "half", state)
        found.append((losses, weights(net)))
    return found


def test_fabric_has_the_bits_of_ddp_and_resumes(tmp_path):
    """At stages 0-3 with accumulation, clipping by value and bf16; from the half that stage 3 saved, at stages 1 and 3."""
    both = ranks.run(2, fabric_runs, (None, *STAGES), tmp_path, False, group="env", timeout=LIMIT)
    again = ranks.run(2, fabric_runs, (1, 3), tmp_path, True, group="env", timeout=LIMIT)
    for (plain, *sharded), later in zip(both, again, strict=True):
        assert all(found == plain for found in sharded)
        assert all(found == (plain[0][2:], plain[1]) for found in later)


def fabric_goes_on(stages, folder, resumed):
    """Six steps of two micro-batches, which two ranks share; clipped by norm. Stage 3 saves half of it on two ranks."""
    import zeroshard.integrations.fabric  # noqa: F401  # it registers the names

    found = []
    for stage in stages:
        torch.manual_seed(7)
        world = ranks.world()
        fabric = lightning.Fabric(accelerator="cpu", devices=world, strategy=f"zeroshard_stage_{stage}")
        fabric.launch()
        net = Module(alike=True).net
        model, optimizer = fabric.setup(net, torch.optim.AdamW(net.parameters(), lr=1e-2))
        state = {"model": model, "optimizer": optimizer, "step": 0}
        if resumed:
            fabric.load(folder / "third", state)
        batches, norms = loader().dataset.split(2), []
        for step in range(state["step"], 6):
            own = batches[2 * step : 2 * step + 2][ranks.rank() :: world]
            for at, batch in enumerate(own):
                with fabric.no_backward_sync(model, enabled=at + 1 < len(own)):
                    fabric.backward(model(batch).square().mean() / len(own))
            norms.append(fabric.clip_gradients(model, optimizer, max_norm=0.01).item())
            optimizer.step()
            optimizer.zero_grad()
            state["step"] = step + 1
            if step == 2 and stage == 3 and not resumed:
                fabric.save(folder / "third", state)
        found.append((norms, weights(net)))
    return found


def test_fabric_resumes_on_other_ranks_and_clips_by_norm(tmp_path):
    """At every stage the same norms and weights; so has what goes on from stage 3's half on one rank or on two."""
    first, *others = ranks.run(2, fabric_goes_on, STAGES, tmp_path, False, group="env", timeout=LIMIT)[0]
    assert all(found == first for found in others) and min(first[0]) > 0.01
    for world, stages in ((2, (1,)), (1, (0, 3))):
        for found in ranks.run(world, fabric_goes_on, stages, tmp_path, True, group="env", timeout=LIMIT)[0]:
            assert found == (first[0][3:], first[1]), world


def test_fabric_refuses_what_would_not_be_averaged():
    from zeroshard.integrations.fabric import ZeroFabricStrategy

    fabric = lightning.Fabric(accelerator="cpu", devices=1, strategy=ZeroFabricStrategy(stage=3))
    fabric.launch()
    model = fabric.setup(nn.Linear(3, 1))
    with pytest.raises(StateError, match=r"(?s)module Linear.*fabric\.setup\(model, optimizer\)"):
        fabric.backward(model(torch.ones(1, 3)).sum())
    with pytest.raises(UserError, match=r"fabric\.setup\(model, optimizer\)"):
        fabric.setup_optimizers(torch.optim.SGD(model.parameters()))


def test_the_example_is_short_and_runs(tmp_path):
    run_example("lightning_fit", tmp_path)


def test_fabrics_example_prints_the_same_at_stages_1_to_3(tmp_path):
    same_at_all_stages("fabric_loop", tmp_path)


JOB = """
import sys
sys.path[:0] = {tests!r}
import torch
from test_lightning import Module

def job():
    rows = torch.randn(16, 8, generator=torch.Generator().manual_seed(1))
    return Module(), torch.utils.data.DataLoader(rows, batch_size=4, shuffle=True)
"""


def test_verify_takes_a_lightning_module(tmp_path):
    """Its own step, optimizer and loader, at every stage: equal bits, dropout too."""
    (tmp_path / "train.py").write_text(JOB.format(tests=[str(each) for each in Path(__file__).parents[:2]]))
    words = ["verify", f"{tmp_path}/train.py:job", "--ranks", 2, "--stage", "0,3", "--bucket-mib", 24, "--steps", 2]
    done = ranks.command(*words, "--json", timeout=LIMIT)
    told = json.loads(done.stdout.splitlines()[-1])
    assert done.returncode == 0 and told["equal"] and len(told["results"]) == 4
    assert not any("no parameter changed" in note for note in told["notes"])


def test_the_parts_of_a_lightning_module_are_its_own():
    class Streamed(torch.utils.data.IterableDataset):
        def __iter__(self):
            return iter(torch.arange(24.0).view(3, 8))

    module = Module()
    module.scale = nn.Parameter(torch.ones(1))  # of the root: there only inside its forward, where it is sharded
    module.training_step = lambda batch, number: {"loss": (module(batch) * module.scale).sum()}
    parts = parts_of((module, torch.utils.data.DataLoader(Streamed(), batch_size=1)))
    batch = parts["batch"](0, 0)
    assert batch.shape == (1, 8) and not (batch - batch[0, 0] - torch.arange(8.0)).any()
    module.eval()
    assert torch.equal(parts["loss"](module, batch), module(batch).sum()) and "forward" not in vars(module)
    module.configure_optimizers = lambda: [torch.optim.SGD(module.net.parameters()), torch.optim.SGD([module.scale])]
    with pytest.raises(UserError, match="has one optimizer"):
        parts_of((module, []))
